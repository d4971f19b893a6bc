// This file owns the variables of each launcher.

package launcher

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// environment reads variables. A variable that is empty counts as not set.
type environment func(string) string

// first returns the value of the first variable that is set.
func (env environment) first(names ...string) string {
	for _, n := range names {
		if v := env(n); v != "" {
			return v
		}
	}
	return ""
}

// number reads a variable that counts something. It returns false if it is not set.
func (env environment) number(name string) (int, bool, error) {
	v := env(name)
	if v == "" {
		return 0, false, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 0 || n > math.MaxInt32 {
		return 0, false, fmt.Errorf("expected %s to be a number such as 3, got %q; correct it, or unset it if no launcher set it", name, v)
	}
	return n, true, nil
}

// world reads a rank and a size. It returns nil if neither is set.
func (env environment) world(l Launcher, rank, size string) (*Place, error) {
	r, hasRank, err := env.number(rank)
	if err != nil {
		return nil, err
	}
	n, hasSize, err := env.number(size)
	switch {
	case err != nil:
		return nil, err
	case !hasRank && !hasSize:
		return nil, nil
	case !hasRank:
		return nil, fmt.Errorf("%s is set, but %s is not; set both if a launcher started this process, or unset both", size, rank)
	case !hasSize:
		return nil, fmt.Errorf("%s is set, but %s is not; set both if a launcher started this process, or unset both", rank, size)
	case r >= n:
		return nil, fmt.Errorf("%s is %d, but %s is %d; ranks are numbered from 0 to %s - 1", rank, r, size, n, size)
	}
	return &Place{Launcher: l, Rank: r, Size: n}, nil
}

// local reads the place on the machine, if both variables are set.
func (env environment) local(p *Place, rank, size string) error {
	r, hasRank, err := env.number(rank)
	if err != nil {
		return err
	}
	n, hasSize, err := env.number(size)
	if err != nil {
		return err
	}
	if !hasRank || !hasSize {
		return nil
	}
	if r >= n || n > p.Size || r > p.Rank {
		return fmt.Errorf("%s is %d and %s is %d, which contradicts rank %d of %d; unset those that the launcher did not set", rank, r, size, n, p.Rank, p.Size)
	}
	p.LocalRank, p.LocalSize, p.LocalKnown = r, n, true
	return nil
}

// port reads a port.
func (env environment) port(name string) (int, error) {
	v := env(name)
	if v == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < 1 || n > math.MaxUint16 {
		return 0, fmt.Errorf("expected %s to be a port from 1 to 65535, got %q; correct it, or unset it if no launcher set it", name, v)
	}
	return n, nil
}

// torchrun reads what torchrun sets, what scripts and operators set in its place, and what
// operators set for a torchrun that was left out (PET_*).
func torchrun(env environment) (*Place, error) {
	if env("RANK") == "" && env("JOB_COMPLETION_INDEX") != "" {
		return nil, nil // WORLD_SIZE belongs to the Job
	}
	if env("RANK") == "" && env("PET_NODE_RANK") != "" {
		return torchrunLeftOut(env)
	}
	p, err := env.world(Variables, "RANK", "WORLD_SIZE")
	if p == nil || err != nil {
		return nil, err
	}
	if env("TORCHELASTIC_RUN_ID") != "" {
		p.Launcher, p.Job = Torchrun, env("TORCHELASTIC_RUN_ID")
	}
	p.AgentStore = strings.EqualFold(env("TORCHELASTIC_USE_AGENT_STORE"), "true")
	if p.Restart, _, err = env.number("TORCHELASTIC_RESTART_COUNT"); err != nil {
		return nil, err
	}
	if err := env.local(p, "LOCAL_RANK", "LOCAL_WORLD_SIZE"); err != nil {
		return nil, err
	}
	return env.master(p, "MASTER_ADDR", "MASTER_PORT")
}

// torchrunLeftOut reads what operators of Kubernetes set for torchrun. One process a pod
// needs no torchrun.
func torchrunLeftOut(env environment) (*Place, error) {
	if n := env.first("PET_NPROC_PER_NODE", "PET_NPROC-PER-NODE"); n != "" && n != "1" {
		return nil, fmt.Errorf("PET_NPROC_PER_NODE is %s, so torchrun must start the processes; start stowage with torchrun --no-python", n)
	}
	p, err := env.world(Variables, "PET_NODE_RANK", "PET_NNODES")
	if p == nil || err != nil {
		return nil, err
	}
	p.LocalSize, p.LocalKnown = 1, true
	return env.master(p, "PET_MASTER_ADDR", "PET_MASTER_PORT")
}

// master reads the leader's address.
func (env environment) master(p *Place, addr, port string) (*Place, error) {
	var err error
	if p.Port, err = env.port(port); err != nil {
		return nil, err
	}
	p.Leader = env(addr)
	if p.Leader == "" && p.Port != 0 {
		return nil, fmt.Errorf("%s is set, but %s is not; set it to the host of rank 0", port, addr)
	}
	if p.AgentStore && (p.Leader == "" || p.Port == 0) {
		return nil, fmt.Errorf("TORCHELASTIC_USE_AGENT_STORE is True, but %s or %s is not set; set both as torchrun does, or unset it", addr, port)
	}
	return p, nil
}

// openMPI reads what Open MPI's mpirun sets, also as the MPI Operator starts it.
func openMPI(env environment) (*Place, error) {
	p, err := env.world(OpenMPI, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
	if p == nil || err != nil {
		return nil, err
	}
	p.MPI, p.HasMPI = OpenMPI, true
	p.Job = env.first("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
	if err := env.local(p, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"); err != nil {
		return nil, err
	}
	return env.master(p, "MASTER_ADDR", "MASTER_PORT")
}

// pmi reads what MPICH's mpirun (hydra) sets, and Slurm with --mpi=pmi2.
func pmi(env environment) (*Place, error) {
	p, err := env.world(PMI, "PMI_RANK", "PMI_SIZE")
	if p == nil || err != nil {
		return nil, err
	}
	p.MPI, p.HasMPI = PMI, true
	p.Job = env("PMI_JOBID")
	if err := env.local(p, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"); err != nil {
		return nil, err
	}
	return env.master(p, "MASTER_ADDR", "MASTER_PORT")
}

// Slurm numbers the steps that are no user's srun from here: the batch script, the
// interactive shell of salloc, the external step.
const slurmSpecialSteps = 0xfffffff0

// slurm reads what srun sets. Slurm sets SLURM_PROCID=0 and SLURM_NTASKS in a batch script
// too, and salloc sets SLURM_NTASKS in its shell. What runs there was started alone: only a
// step of srun has a number.
func slurm(env environment) (*Place, error) {
	step, err := strconv.ParseUint(env.first("SLURM_STEP_ID", "SLURM_STEPID"), 10, 32)
	if err != nil || step >= slurmSpecialSteps {
		return nil, nil
	}
	size := "SLURM_STEP_NUM_TASKS"
	if env(size) == "" {
		size = "SLURM_NTASKS"
	}
	p, err := env.world(Slurm, "SLURM_PROCID", size)
	if p == nil || err != nil {
		return nil, err
	}
	p.Job = env.first("SLURM_JOB_ID", "SLURM_JOBID") + "." + strconv.FormatUint(step, 10)
	if env("PMIX_RANK") != "" { // srun --mpi=pmix
		p.MPI, p.HasMPI = OpenMPI, true
	}
	if p.Restart, _, err = env.number("SLURM_RESTART_COUNT"); err != nil {
		return nil, err
	}
	if err := slurmLocal(env, p); err != nil {
		return nil, err
	}
	// MASTER_ADDR is what batch scripts set if the first host is not right.
	if p, err = env.master(p, "MASTER_ADDR", "MASTER_PORT"); p == nil || p.Leader != "" || err != nil {
		return p, err
	}
	list := env.first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
	if list == "" {
		return nil, fmt.Errorf("SLURM_PROCID is set, but SLURM_JOB_NODELIST is not; set MASTER_ADDR to the host of rank 0")
	}
	p.Leader, err = firstHost(list)
	return p, err
}

// slurmLocal reads the place on the machine: SLURM_LOCALID, and the entry of this node in
// SLURM_STEP_TASKS_PER_NODE.
func slurmLocal(env environment, p *Place) error {
	rank, known, err := env.number("SLURM_LOCALID")
	if err != nil || !known {
		return err
	}
	node, known, err := env.number("SLURM_NODEID")
	if err != nil || !known {
		return err
	}
	list := env.first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
	if list == "" {
		return nil
	}
	size, err := tasksOfNode(list, node)
	if err != nil {
		return err
	}
	if rank >= size || size > p.Size {
		return fmt.Errorf("SLURM_LOCALID is %d of %d on this node, which contradicts rank %d of %d; unset SLURM_* variables that srun did not set", rank, size, p.Rank, p.Size)
	}
	p.LocalRank, p.LocalSize, p.LocalKnown = rank, size, true
	return nil
}

// leaderWorkerSet reads what LeaderWorkerSet sets. A pod is one process.
func leaderWorkerSet(env environment) (*Place, error) {
	if env("LWS_LEADER_ADDRESS") == "" && env("LWS_GROUP_SIZE") == "" {
		return nil, nil
	}
	p, err := env.world(LeaderWorkerSet, "LWS_WORKER_INDEX", "LWS_GROUP_SIZE")
	if err != nil || p == nil {
		return nil, err
	}
	if p.Leader = env("LWS_LEADER_ADDRESS"); p.Leader == "" {
		return nil, fmt.Errorf("LWS_GROUP_SIZE is set, but LWS_LEADER_ADDRESS is not; LeaderWorkerSet sets both")
	}
	p.Job, p.LocalSize, p.LocalKnown = p.Leader, 1, true
	return p, nil
}

// indexedJob reads the index of a pod. Kubernetes tells a pod neither how many there are nor
// who leads, so the manifest must. Without both, the pods of a Job run alone.
func indexedJob(env environment) (*Place, error) {
	if env("RANK") != "" || env("JOB_COMPLETION_INDEX") == "" || env("WORLD_SIZE") == "" && env("MASTER_ADDR") == "" {
		return nil, nil
	}
	if env("WORLD_SIZE") == "" || env("MASTER_ADDR") == "" {
		return nil, fmt.Errorf("JOB_COMPLETION_INDEX is set, but only one of WORLD_SIZE and MASTER_ADDR; in the manifest of the Job, set WORLD_SIZE to its completions and MASTER_ADDR to the host of index 0")
	}
	p, err := env.world(Job, "JOB_COMPLETION_INDEX", "WORLD_SIZE")
	if err != nil {
		return nil, err
	}
	p.LocalSize, p.LocalKnown = 1, true
	p.Job = env("MASTER_ADDR")
	return env.master(p, "MASTER_ADDR", "MASTER_PORT")
}
