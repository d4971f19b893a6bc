package launcher

import (
	"strings"
	"testing"
)

// vars returns a getenv for "A=1 B=2".
func vars(list string) func(string) string {
	m := map[string]string{}
	for field := range strings.FieldsSeq(list) {
		k, v, _ := strings.Cut(field, "=")
		m[k] = v
	}
	return func(name string) string { return m[name] }
}

// Variables as real launchers set them: torchrun of PyTorch 1.13 and 2.6, Open MPI 4.1,
// hydra of MPICH 4.0, Slurm 22.05.
const (
	srunVars   = "SLURM_JOB_ID=17 SLURM_STEP_ID=0 SLURM_STEPID=0 SLURM_PROCID=3 SLURM_NTASKS=5 SLURM_STEP_NUM_TASKS=5 SLURM_LOCALID=0 SLURM_NODEID=1 SLURM_NODELIST=gpu[07-08] SLURM_JOB_NODELIST=gpu[07-08] SLURM_STEP_NODELIST=gpu[07-08] SLURM_STEP_TASKS_PER_NODE=3,2 SLURM_TASKS_PER_NODE=3,2"
	batchVars  = "SLURM_JOB_ID=17 SLURM_PROCID=0 SLURM_NTASKS=4 SLURM_LOCALID=0 SLURM_NODEID=0 SLURM_JOB_NODELIST=gpu[07-08] SLURM_TASKS_PER_NODE=2(x2)"
	sallocVars = "SLURM_JOB_ID=17 SLURM_NTASKS=4 SLURM_JOB_NODELIST=gpu[07-08] SLURM_TASKS_PER_NODE=2(x2)"
	torchVars  = "RANK=5 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=4 MASTER_ADDR=head MASTER_PORT=29500 TORCHELASTIC_RUN_ID=abc TORCHELASTIC_RESTART_COUNT=2 TORCHELASTIC_USE_AGENT_STORE=True"
	ompiVars   = "OMPI_COMM_WORLD_RANK=1 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=1 OMPI_COMM_WORLD_LOCAL_SIZE=2 PMIX_NAMESPACE=7"
	pmiVars    = "PMI_RANK=2 PMI_SIZE=4 PMI_FD=8 MPI_LOCALRANKID=0 MPI_LOCALNRANKS=2"
)

// A process knows its rank, the number of ranks, its place on the machine and the
// leader.
func TestFind(t *testing.T) {
	for _, c := range []struct {
		name, env string
		want      *Place
	}{
		{"alone", "HOME=x", nil},
		{"batch script", batchVars, nil},
		{"salloc", sallocVars, nil},
		{"interactive step", batchVars + " SLURM_STEP_ID=4294967290", nil},
		{"first special step", batchVars + " SLURM_STEP_ID=4294967280", nil},
		{"last step", strings.ReplaceAll(srunVars, "SLURM_STEP_ID=0", "SLURM_STEP_ID=4294967279"), &Place{Launcher: Slurm, Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "gpu07", Job: "17.4294967279"}},
		{"Job of runs that stand alone", "JOB_COMPLETION_INDEX=3", nil},
		{"torchrun", torchVars, &Place{Launcher: Torchrun, Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, LocalKnown: true, Leader: "head", Port: 29500, Job: "abc", Restart: 2, AgentStore: true}},
		{"torchrun with the user's port", torchVars + " STOWAGE_PORT=77", &Place{Launcher: Torchrun, Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, LocalKnown: true, Leader: "head", Port: 77, Job: "abc", Restart: 2}},
		{"torchrun below srun", torchVars + " " + srunVars, &Place{Launcher: Torchrun, Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, LocalKnown: true, Leader: "head", Port: 29500, Job: "abc", Restart: 2, AgentStore: true}},
		{"torchrun below mpirun", torchVars + " " + ompiVars, &Place{Launcher: Torchrun, Rank: 5, Size: 8, LocalRank: 1, LocalSize: 4, LocalKnown: true, Leader: "head", Port: 29500, Job: "abc", Restart: 2, AgentStore: true}},
		{"by hand", "RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=4000", &Place{Rank: 1, Size: 2, Leader: "::1", Port: 4000}},
		{"by hand below mpirun", "RANK=1 WORLD_SIZE=4 " + ompiVars, &Place{Rank: 1, Size: 4, LocalRank: 1, LocalSize: 2, LocalKnown: true, Job: "7", MPI: OpenMPI, HasMPI: true}},
		{"PET", "PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=1 PET_MASTER_ADDR=m PET_MASTER_PORT=29400", &Place{Rank: 1, Size: 2, LocalSize: 1, LocalKnown: true, Leader: "m", Port: 29400}},
		{"Open MPI", ompiVars, &Place{Launcher: OpenMPI, Rank: 1, Size: 4, LocalRank: 1, LocalSize: 2, LocalKnown: true, Job: "7", MPI: OpenMPI, HasMPI: true}},
		{"Open MPI below sbatch", ompiVars + " " + srunVars, &Place{Launcher: OpenMPI, Rank: 1, Size: 4, LocalRank: 1, LocalSize: 2, LocalKnown: true, Job: "7", MPI: OpenMPI, HasMPI: true}},
		{"half set by hand below mpirun", ompiVars + " WORLD_SIZE=9", &Place{Launcher: OpenMPI, Rank: 1, Size: 4, LocalRank: 1, LocalSize: 2, LocalKnown: true, Job: "7", MPI: OpenMPI, HasMPI: true}},
		{"Open MPI whose srun names a leader", "OMPI_COMM_WORLD_RANK=3 OMPI_COMM_WORLD_SIZE=5 " + srunVars + " SLURM_STEP_ID=1 RANK=3 WORLD_SIZE=5 MASTER_ADDR=ib7 MASTER_PORT=99", &Place{Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "ib7", Port: 99, Job: "17.1", MPI: OpenMPI, HasMPI: true}},
		{"hydra", pmiVars, &Place{Launcher: PMI, Rank: 2, Size: 4, LocalSize: 2, LocalKnown: true, MPI: PMI, HasMPI: true}},
		{"srun", srunVars, &Place{Launcher: Slurm, Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "gpu07", Job: "17.0"}},
		{"srun with a leader", srunVars + " MASTER_ADDR=ib7 MASTER_PORT=99", &Place{Launcher: Slurm, Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "ib7", Port: 99, Job: "17.0"}},
		{"srun --mpi=pmi2", srunVars + " PMI_RANK=3 PMI_SIZE=5 PMI_JOBID=17.0", &Place{Launcher: PMI, Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "gpu07", Job: "17.0", MPI: PMI, HasMPI: true}},
		{"srun --mpi=pmix", srunVars + " PMIX_RANK=3 PMIX_NAMESPACE=slurm.pmix.17.0", &Place{Launcher: Slurm, Rank: 3, Size: 5, LocalSize: 2, LocalKnown: true, Leader: "gpu07", Job: "17.0", MPI: OpenMPI, HasMPI: true}},
		{"LeaderWorkerSet", "LWS_LEADER_ADDRESS=a-0.a LWS_GROUP_SIZE=4 LWS_WORKER_INDEX=3", &Place{Launcher: LeaderWorkerSet, Rank: 3, Size: 4, LocalSize: 1, LocalKnown: true, Leader: "a-0.a", Job: "a-0.a"}},
		{"indexed Job", "JOB_COMPLETION_INDEX=1 WORLD_SIZE=4 MASTER_ADDR=j-0.j", &Place{Launcher: Job, Rank: 1, Size: 4, LocalSize: 1, LocalKnown: true, Leader: "j-0.j", Job: "j-0.j"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := Find(vars(c.env))
			if err != nil {
				t.Fatal(err)
			}
			if got == nil || c.want == nil {
				if got != nil || c.want != nil {
					t.Fatalf("got %+v, want %+v", got, c.want)
				}
				return
			}
			if got.Host == "" {
				t.Error("the host has no name")
			}
			if got.Host = ""; *got != *c.want {
				t.Errorf("got  %+v\nwant %+v", *got, *c.want)
			}
		})
	}
}

func TestFindRefuses(t *testing.T) {
	for env, want := range map[string]string{
		"RANK=1":                                                "RANK is set, but WORLD_SIZE is not",
		"WORLD_SIZE=4":                                          "WORLD_SIZE is set, but RANK is not",
		"RANK=4 WORLD_SIZE=4":                                   "RANK is 4, but WORLD_SIZE is 4",
		"RANK=x WORLD_SIZE=4":                                   "expected RANK to be a number such as 3, got \"x\"",
		"RANK=-1 WORLD_SIZE=4":                                  "expected RANK to be a number",
		"RANK=0 WORLD_SIZE=4 MASTER_PORT=1":                     "MASTER_PORT is set, but MASTER_ADDR is not",
		"RANK=0 WORLD_SIZE=4 MASTER_PORT=70000":                 "expected MASTER_PORT to be a port",
		"RANK=0 WORLD_SIZE=4 MASTER_PORT=zz":                    "expected MASTER_PORT to be a port from 1 to 65535, got \"zz\"; correct it, or unset it",
		"RANK=0 WORLD_SIZE=4 " + ompiVars:                       "the launcher (RANK and WORLD_SIZE) says that this is rank 0 of 4, but Open MPI says rank 1 of 4",
		pmiVars + " " + ompiVars:                                "Open MPI says that this is rank 1 of 4, but MPICH (PMI) says rank 2 of 4",
		torchVars + " STOWAGE_PORT=0":                           "expected STOWAGE_PORT to be a port",
		"PMI_RANK=2":                                            "PMI_RANK is set, but PMI_SIZE is not",
		"JOB_COMPLETION_INDEX=1 WORLD_SIZE=4":                   "set WORLD_SIZE to its completions and MASTER_ADDR to the host of index 0",
		"JOB_COMPLETION_INDEX=1 MASTER_ADDR=h":                  "set WORLD_SIZE to its completions",
		"LWS_GROUP_SIZE=2 LWS_WORKER_INDEX=0":                   "LWS_LEADER_ADDRESS is not",
		srunVars + " SLURM_STEP_NODELIST=gpu[":                  "expected a list of hosts",
		srunVars + " SLURM_STEP_TASKS_PER_NODE=5":               "expected the tasks of node 1",
		srunVars + " SLURM_LOCALID=2":                           "contradicts rank 3 of 5",
		"PET_NNODES=2 PET_NODE_RANK=1 PET_NPROC_PER_NODE=8":     "torchrun --no-python",
		"RANK=0 WORLD_SIZE=2 TORCHELASTIC_USE_AGENT_STORE=True": "TORCHELASTIC_USE_AGENT_STORE is True",
		"RANK=0 WORLD_SIZE=2 LOCAL_RANK=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost": "contradicts rank 0 of 2",
		"RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 MASTER_ADDR=localhost": "contradicts rank 0 of 2",
		"RANK=1 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE=3 MASTER_ADDR=localhost": "contradicts rank 1 of 2",
	} {
		p, err := Find(vars(env))
		if err == nil {
			t.Errorf("%s: got %+v, want an error with %q", env, p, want)
		} else if !strings.Contains(err.Error(), want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: got %q, want %q in one sentence", env, err, want)
		}
	}
}

// What one launcher does not say is taken from another that agrees on the rank, as a whole.
func TestAdopt(t *testing.T) {
	all := Place{Rank: 1, Size: 4, LocalRank: 1, LocalSize: 2, LocalKnown: true, Leader: "a", Port: 7, Job: "j", MPI: PMI, HasMPI: true}
	p := Place{Rank: 1, Size: 4}
	if p.adopt(&all); p != all {
		t.Errorf("nothing becomes %+v", p)
	}
	other := Place{Rank: 1, Size: 4, LocalSize: 1, LocalKnown: true, Leader: "b", Job: "k", MPI: OpenMPI, HasMPI: true}
	if p = other; true {
		p.adopt(&all)
	}
	if p != other {
		t.Errorf("%+v becomes %+v", other, p)
	}
}

func TestAddress(t *testing.T) {
	address := func(env string) string {
		t.Helper()
		p, err := Find(vars(env))
		if err != nil {
			t.Fatal(err)
		}
		a, err := p.Address()
		if err != nil {
			t.Fatal(err)
		}
		return a
	}
	if got := address(torchVars); got != "head:29500" {
		t.Error(got)
	}
	if got := address(torchVars + " STOWAGE_PORT=77"); got != "head:77" {
		t.Error(got)
	}
	if got := address("RANK=1 WORLD_SIZE=2 MASTER_ADDR=::1 MASTER_PORT=4000"); got != "[::1]:4000" {
		t.Error(got)
	}
	// The port follows from the job alone: all ranks find it, and another job another one.
	other := strings.Replace(srunVars, "SLURM_PROCID=3", "SLURM_PROCID=4", 1)
	other = strings.Replace(other, "SLURM_LOCALID=0", "SLURM_LOCALID=1", 1)
	if a, b := address(srunVars), address(other); a != b || !strings.HasPrefix(a, "gpu07:") {
		t.Errorf("%s and %s", a, b)
	}
	if a, b := address(srunVars), address(strings.ReplaceAll(srunVars, "SLURM_JOB_ID=17", "SLURM_JOB_ID=18")); a == b {
		t.Errorf("jobs 17 and 18 share %s", a)
	}
	p, err := Find(vars(ompiVars))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.Address(); err == nil || !strings.Contains(err.Error(), "set MASTER_ADDR") {
		t.Error(err)
	}
}

// A rank takes its own GPU.
func TestGPU(t *testing.T) {
	for _, c := range []struct {
		place   Place
		env     string
		visible int
		want    int
		refused string
	}{
		{Place{LocalRank: 0, LocalSize: 2, LocalKnown: true}, "", 2, 0, ""},
		{Place{LocalRank: 1, LocalSize: 2, LocalKnown: true}, "CUDA_VISIBLE_DEVICES=4,6", 2, 1, ""},
		{Place{LocalRank: 3, LocalSize: 4, LocalKnown: true}, "CUDA_VISIBLE_DEVICES=3", 1, 0, ""},
		{Place{}, "CUDA_VISIBLE_DEVICES=GPU-1234", 1, 0, ""},
		{Place{Rank: 7, LocalRank: 1, LocalSize: 2, LocalKnown: true, Host: "h"}, "", 1, 0, "rank 7 is number 1 of 2 on h, which shows 1; start at most one rank for each GPU"},
		{Place{Rank: 7, LocalRank: 1, LocalSize: 2, LocalKnown: true, Host: "h"}, "CUDA_VISIBLE_DEVICES=0,9", 1, 0, "rank 7 is number 1 of 2 on h, which shows 1"}, // for all ranks; the machine has no 9
		{Place{Host: "h"}, "", 4, 0, "set LOCAL_RANK"},
	} {
		got, err := c.place.GPU(vars(c.env), c.visible)
		if c.refused != "" {
			if err == nil || !strings.Contains(err.Error(), c.refused) {
				t.Errorf("%+v: got %v, want %q", c, err, c.refused)
			}
		} else if err != nil || got != c.want {
			t.Errorf("%+v: got %d, %v", c, got, err)
		}
	}
}

func TestStartsMPI(t *testing.T) {
	for _, c := range []struct {
		place   Place
		by      Launcher
		native  bool
		refused string
	}{
		{Place{HasMPI: true, MPI: OpenMPI}, OpenMPI, true, ""},
		{Place{HasMPI: true, MPI: PMI}, PMI, true, ""},
		{Place{HasMPI: true, MPI: OpenMPI}, PMI, false, "start with mpirun of MPICH"},
		{Place{HasMPI: true, MPI: PMI}, OpenMPI, false, "start with mpirun of Open MPI"},
		{Place{Launcher: Torchrun}, PMI, false, ""},
		{Place{Launcher: Torchrun}, OpenMPI, false, "torchrun alone cannot start Open MPI; start with mpirun or with srun --mpi=pmix, or install MPICH"},
	} {
		native, err := c.place.StartsMPI(c.by)
		if native != c.native || (err == nil) != (c.refused == "") || err != nil && !strings.Contains(err.Error(), c.refused) {
			t.Errorf("%+v: got %t, %v", c, native, err)
		}
	}
}
