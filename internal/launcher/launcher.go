// Package launcher finds out what started this process: which rank it is, of how many,
// where it is on its machine, and who leads. It reads variables of the environment and
// talks to nobody.
//
// This file owns the place of a process and the order in which launchers are asked.
// environment.go reads the variables of each launcher, nodelist.go Slurm's list of hosts,
// gpu.go chooses the GPU of a rank, ranks.go writes lists of ranks.
package launcher

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"strconv"
)

// Launcher says what started a process.
type Launcher int

// These launchers are known.
const (
	Variables       Launcher = iota // RANK and WORLD_SIZE, set by hand, by a script or by an operator
	Torchrun                        // torchrun
	OpenMPI                         // mpirun of Open MPI
	PMI                             // mpirun of MPICH, or anything else that speaks PMI
	Slurm                           // srun
	LeaderWorkerSet                 // LeaderWorkerSet of Kubernetes
	Job                             // an indexed Job or a JobSet of Kubernetes
)

// String returns the name that users know.
func (l Launcher) String() string {
	return [...]string{"RANK and WORLD_SIZE", "torchrun", "Open MPI", "MPICH (PMI)", "Slurm", "LeaderWorkerSet", "indexed Job"}[l]
}

// Who returns the name as a sentence has it that says what the launcher does.
func (l Launcher) Who() string {
	if l == Variables {
		return "the launcher (" + l.String() + ")"
	}
	return l.String()
}

// Place is where a process is among those that were started with it.
type Place struct {
	Launcher   Launcher
	Rank, Size int // 0 <= Rank < Size

	// LocalRank and LocalSize count the ranks of the same machine. They are valid if
	// LocalKnown is set. Otherwise only the ranks together can find them, by comparing
	// hosts.
	LocalRank, LocalSize int
	LocalKnown           bool

	Host    string // the name of this machine
	Leader  string // the host of rank 0, or "" if the launcher does not say
	Port    int    // a port of the leader that is free for the job, or 0 if nobody names one
	Job     string // the launcher's name of the job, alike on all ranks, or ""
	Restart int    // how often the launcher has started the job again

	// AgentStore says that torchrun's agent listens on Leader and Port with a store of
	// keys and values.
	AgentStore bool

	// MPI says that an MPI library finds its peers through the launcher: Open MPI's if
	// it is OpenMPI, one that speaks PMI if it is PMI. It is valid if HasMPI is set.
	MPI    Launcher
	HasMPI bool
}

// Find returns the place of this process, or nil if it was started alone. An error says
// which variables are missing or contradict each other. getenv is os.Getenv, or a function
// like it.
func Find(getenv func(string) string) (*Place, error) {
	port, err := environment(getenv).port("STOWAGE_PORT")
	if err != nil {
		return nil, err
	}
	p, err := find(environment(getenv))
	if p == nil || err != nil {
		return nil, err
	}
	// The user's port counts, also before the store of torchrun's agent.
	if port != 0 {
		p.Port, p.AgentStore = port, false
	}
	if p.Host, err = os.Hostname(); err != nil {
		return nil, fmt.Errorf("the name of this machine is not known: %w", err)
	}
	return p, nil
}

// find asks the launchers in order. The first one that says everything counts, because
// launchers start each other: srun starts torchrun, and sbatch starts mpirun.
func find(env environment) (*Place, error) {
	var half error
	var found *Place
	for _, ask := range []func(environment) (*Place, error){torchrun, openMPI, pmi, slurm, leaderWorkerSet, indexedJob} {
		p, err := ask(env)
		switch {
		case err != nil:
			half = cmp.Or(half, err)
		case p != nil && found == nil:
			found = p
		case p == nil || found.Launcher == Torchrun: // torchrun knows all, whoever started it
		case found.Rank == p.Rank && found.Size == p.Size:
			found.adopt(p)
		case p.Launcher == OpenMPI || p.Launcher == PMI:
			return nil, fmt.Errorf("%s says that this is rank %d of %d, but %s says rank %d of %d; unset the variables of the one that did not start this process",
				found.Launcher.Who(), found.Rank, found.Size, p.Launcher.Who(), p.Rank, p.Size)
		}
	}
	if found == nil {
		return nil, half
	}
	return found, nil
}

// adopt takes what is missing from another launcher that agrees on the rank.
func (p *Place) adopt(other *Place) {
	if !p.LocalKnown && other.LocalKnown {
		p.LocalRank, p.LocalSize, p.LocalKnown = other.LocalRank, other.LocalSize, true
	}
	if !p.HasMPI && other.HasMPI {
		p.MPI, p.HasMPI = other.MPI, true
	}
	if p.Leader == "" {
		p.Leader, p.Port = other.Leader, other.Port
	}
	if p.Job == "" {
		p.Job = other.Job
	}
}

// Ports that are derived from the name of a job lie below those that systems hand out.
const (
	firstPort = 15000
	ports     = 15000
)

// Address returns where the leader listens for its job: at the port that the user
// (STOWAGE_PORT) or the launcher names, and otherwise at one that follows from the name of
// the job.
func (p *Place) Address() (string, error) {
	if p.Leader == "" {
		return "", fmt.Errorf("%s does not say which host leads; set MASTER_ADDR to the host of rank 0", p.Launcher.Who())
	}
	port := p.Port
	if port == 0 {
		h := fnv.New32a()
		fmt.Fprintf(h, "%s/%d", p.Job, p.Restart)
		port = firstPort + int(h.Sum32()%ports)
	}
	return net.JoinHostPort(p.Leader, strconv.Itoa(port)), nil
}

// String returns "rank 3 of 8 on gpu-17".
func (p *Place) String() string {
	return fmt.Sprintf("rank %d of %d on %s", p.Rank, p.Size, p.Host)
}

// StartsMPI reports whether an MPI library finds its peers through the launcher. library is
// [OpenMPI], or [PMI] for MPICH and its relatives. If it is false, a library that
// speaks PMI can be served by ourselves. An error says that the library cannot be started
// here, and how it can.
func (p *Place) StartsMPI(library Launcher) (bool, error) {
	switch {
	case p.HasMPI && p.MPI == library:
		return true, nil
	case p.HasMPI && library == PMI:
		return false, fmt.Errorf("mpirun of Open MPI started this process, but the MPI library is MPICH; start with mpirun of MPICH (mpirun.mpich), or load Open MPI")
	case p.HasMPI:
		return false, fmt.Errorf("mpirun of MPICH started this process, but the MPI library is Open MPI; start with mpirun of Open MPI (mpirun.openmpi), or load MPICH")
	case library == OpenMPI:
		return false, fmt.Errorf("%s alone cannot start Open MPI; start with mpirun or with srun --mpi=pmix, or install MPICH", p.Launcher.Who())
	}
	return false, nil
}
