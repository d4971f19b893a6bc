// This file owns what differs between libraries: the size and values of handles, and the
// layout of a status.

package mpi

import "github.com/ebitengine/purego"

// abi is the binary interface of a library.
type abi struct {
	handle       int     // the size of a handle: MPICH's are ints
	bytes        uintptr // MPI_BYTE
	errorsReturn uintptr // MPI_ERRORS_RETURN
	serialized   int32   // MPI_THREAD_SERIALIZED
	anySource    int32
	status       int   // the size of a status
	statusError  int   // where its error is
	inStatus     int32 // MPI_ERR_IN_STATUS
}

// abiOf returns the binary interface of an open library, and its world.
func abiOf(lib uintptr) (abi, Comm) {
	symbol := func(name string) uintptr {
		a, err := purego.Dlsym(lib, name)
		if err != nil {
			return 0
		}
		return a
	}
	if f := symbol("MPI_Abi_get_version"); f != 0 {
		major, minor := new(int32), new(int32)
		if r, _, _ := purego.SyscallN(f, pointer(major), pointer(minor)); r == 0 && *major > 0 {
			return abi{handle: 8, bytes: 0x247, errorsReturn: 0x142, serialized: 2048, anySource: -1, status: 32, statusError: 8, inStatus: 19}, 0x101
		}
	}
	if world := symbol("ompi_mpi_comm_world"); world != 0 {
		return abi{
			handle: 8, bytes: symbol("ompi_mpi_byte"), errorsReturn: symbol("ompi_mpi_errors_return"),
			serialized: 2, anySource: -1, status: 24, statusError: 8, inStatus: 18,
		}, Comm(world)
	}
	return abi{handle: 4, bytes: 0x4c00010d, errorsReturn: 0x54000001, serialized: 2, anySource: -2, status: 20, statusError: 16, inStatus: 17}, 0x44000000
}
