// This file owns which library is opened: the one that can find the other processes, which
// is that of the launcher.

package mpi

import "strconv"

var (
	openMPI = []string{"libmpi.so.40", "libmpi.so"}
	mpich   = []string{"libmpich.so.12", "libmpi.so.12", "libmpich.so", "libmpi_abi.so.0"}
)

// Names returns the files that Start looks for: those of Open MPI, and those of MPICH and its
// relatives.
func Names() (open, relatives []string) { return openMPI, mpich }

// candidates returns the names of libraries, in the order in which they are tried, and the
// number of processes that the launcher says it started, or zero.
func candidates(getenv func(string) string) (names []string, size int) {
	number := func(names ...string) int {
		for _, name := range names {
			if n, err := strconv.Atoi(getenv(name)); err == nil {
				return n
			}
		}
		return 0
	}
	all := append(append([]string{}, openMPI...), mpich...)
	switch {
	case getenv("OMPI_COMM_WORLD_SIZE") != "":
		names, size = all, number("OMPI_COMM_WORLD_SIZE")
	case getenv("PMI_RANK") != "" || getenv("PMI_FD") != "":
		names, size = append(append([]string{}, mpich...), openMPI...), number("PMI_SIZE")
	case getenv("PMIX_RANK") != "": // srun with PMIx
		names, size = all, number("SLURM_NTASKS")
	default:
		names = all
	}
	if name := getenv("STOWAGE_MPI"); name != "" {
		names = []string{name}
	}
	return names, size
}
