// Package mpi calls an MPI library that is found at run time, without cgo. One binary
// works with Open MPI 4 and 5, with MPICH and what is compatible with it, and with any
// library that has the standard ABI.
//
// Calls must come one at a time. Finalize must come from the locked thread that called
// Start. Memory that pending requests use must stay where it is: device memory, or slices on
// Go's heap, whose collector does not move what it keeps.
//
// This file owns the library and its start, find.go which library is opened, abi.go what
// differs between them, requests.go pending sends and receives, shared.go shared memory, signals_linux.go the signals
// that libraries would take.
package mpi

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Comm is a communicator's handle.
type Comm uintptr

// Library is an opened and started MPI library.
type Library struct {
	Info

	abi   abi
	procs map[string]uintptr
}

// Info is what a library says of itself and of this process.
type Info struct {
	Name    string // of the file that was opened
	Version string // what the library says of itself
	Rank    int    // of this process in World
	Size    int
	World   Comm
}

// functions are those that every library must have.
var functions = []string{
	"MPI_Init_thread", "MPI_Finalize", "MPI_Get_library_version", "MPI_Error_string", "MPI_Error_class",
	"MPI_Comm_rank", "MPI_Comm_size", "MPI_Comm_dup", "MPI_Comm_free", "MPI_Comm_group", "MPI_Comm_create_group",
	"MPI_Comm_set_errhandler", "MPI_Group_incl", "MPI_Group_free",
	"MPI_Allgather", "MPI_Isend", "MPI_Irecv", "MPI_Testsome", "MPI_Cancel",
}

// Start opens the library that the launcher needs and starts it. The environment must have
// what the launcher set. MPI can be started once in a process. The caller has locked its
// thread.
func Start(getenv func(string) string) (*Library, error) {
	if err := KeepSignals(); err != nil {
		return nil, err
	}
	before := signalActions()
	defer func() {
		before.restore()
		delayAborts()
	}()
	names, size := candidates(getenv)
	l, err := open(names)
	if err != nil {
		return nil, err
	}
	provided := new(int32)
	err = l.call("MPI_Init_thread", 0, 0, uintptr(l.abi.serialized), pointer(provided))
	if err == nil && *provided < l.abi.serialized {
		err = fmt.Errorf("mpi: %s does not let a thread other than the first one call it; install a library with thread support", l.Name)
	}
	rank, n := new(int32), new(int32)
	for _, f := range []func() error{
		func() error { return l.call("MPI_Comm_set_errhandler", uintptr(l.World), l.abi.errorsReturn) },
		func() error { return l.call("MPI_Comm_rank", uintptr(l.World), pointer(rank)) },
		func() error { return l.call("MPI_Comm_size", uintptr(l.World), pointer(n)) },
	} {
		if err == nil {
			err = f()
		}
	}
	if err != nil {
		return nil, err
	}
	l.Rank, l.Size = int(*rank), int(*n)
	if size > 0 && l.Size != size {
		do := "start with that library's mpirun, or set STOWAGE_MPI to the library of this one"
		if strings.HasPrefix(l.Version, "Open MPI") {
			do = "start with mpirun of Open MPI or with srun --mpi=pmix, or install MPICH, which any launcher can start"
		}
		return nil, fmt.Errorf("mpi: the launcher started %d processes, but %s finds %d: it is the library of another MPI; %s", size, l.Name, l.Size, do)
	}
	return l, nil
}

// KeepSignals keeps MPI libraries from taking signals. Call it before one is loaded: UCX, which
// they load, would take those by which Go finds nil pointers, and SIGHUP for its debugger.
func KeepSignals() error {
	return errors.Join(os.Setenv("UCX_ERROR_SIGNALS", ""), os.Setenv("UCX_DEBUG_SIGNO", "0"))
}

// open loads the first library that is there, with all functions.
func open(names []string) (*Library, error) {
	var first error
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err != nil {
			if first == nil {
				first = err
			}
			continue
		}
		l := &Library{Info: Info{Name: name}, procs: map[string]uintptr{}}
		for _, f := range functions {
			if l.procs[f], err = purego.Dlsym(h, f); err != nil {
				return nil, fmt.Errorf("mpi: %s has no function %s; install Open MPI 4 or MPICH 3 or later", name, f)
			}
		}
		l.abi, l.World = abiOf(h)
		text, n := make([]byte, 8192), new(int32)
		if err := l.call("MPI_Get_library_version", pointer(&text[0]), pointer(n)); err != nil {
			return nil, err
		}
		line, _, _ := bytes.Cut(text[:*n], []byte("\n"))
		l.Version = string(line)
		return l, nil
	}
	return nil, fmt.Errorf("mpi: no MPI library was found (%v); install Open MPI (libopenmpi3 or libopenmpi40) or MPICH (libmpich12), or set STOWAGE_MPI to a library", first)
}

// escape makes the compiler put variables on the heap. A stack may move during a call.
var escape unsafe.Pointer

// pointer returns the address of a variable, which it keeps on the heap.
func pointer[T any](p *T) uintptr {
	atomic.StorePointer(&escape, unsafe.Pointer(p))
	return uintptr(unsafe.Pointer(p))
}

// call calls a function and returns its error.
func (l *Library) call(name string, args ...uintptr) error {
	r, _, _ := purego.SyscallN(l.procs[name], args...)
	return l.check(name, int32(r))
}

// check returns the error of a code.
func (l *Library) check(name string, code int32) error {
	if code == 0 {
		return nil
	}
	text, n := make([]byte, 1024), new(int32)
	_, _, _ = purego.SyscallN(l.procs["MPI_Error_string"], uintptr(code), pointer(&text[0]), pointer(n))
	runtime.KeepAlive(text)
	return fmt.Errorf("mpi: %s: %s", name, text[:min(max(*n, 0), int32(len(text)))])
}

// class returns the class of an error.
func (l *Library) class(code int32) int32 {
	c := new(int32)
	_, _, _ = purego.SyscallN(l.procs["MPI_Error_class"], uintptr(code), pointer(c))
	return *c
}

// Finalize ends MPI in this process. All processes must call it.
func (l *Library) Finalize() error { return l.call("MPI_Finalize") }

// Dup returns a copy of a communicator. All its processes must call it.
func (l *Library) Dup(c Comm) (Comm, error) {
	h := new(uintptr)
	if err := l.call("MPI_Comm_dup", uintptr(c), pointer(h)); err != nil {
		return 0, err
	}
	return l.prepare(h)
}

// prepare returns a new communicator, whose errors do not end the process.
func (l *Library) prepare(h *uintptr) (Comm, error) {
	return Comm(*h), l.call("MPI_Comm_set_errhandler", *h, l.abi.errorsReturn)
}

// Group returns a communicator of some processes of another, in the given order. Only
// those processes must call it, with the same tag.
func (l *Library) Group(c Comm, ranks []int, tag int) (Comm, error) {
	all, some, h := new(uintptr), new(uintptr), new(uintptr)
	list := make([]int32, len(ranks))
	for i, r := range ranks {
		list[i] = int32(r)
	}
	if err := l.call("MPI_Comm_group", uintptr(c), pointer(all)); err != nil {
		return 0, err
	}
	if err := l.call("MPI_Group_incl", *all, uintptr(len(list)), pointer(&list[0]), pointer(some)); err != nil {
		return 0, err
	}
	if err := l.call("MPI_Comm_create_group", uintptr(c), *some, uintptr(tag), pointer(h)); err != nil {
		return 0, err
	}
	for _, g := range []*uintptr{all, some} {
		if err := l.call("MPI_Group_free", pointer(g)); err != nil {
			return 0, err
		}
	}
	return l.prepare(h)
}

// Free ends a communicator. All its processes must call it.
func (l *Library) Free(c Comm) error {
	h := new(uintptr)
	*h = uintptr(c)
	return l.call("MPI_Comm_free", pointer(h))
}

// Gather passes a few bytes of every process, as many of each, to all.
func (l *Library) Gather(c Comm, mine []byte, size int) ([]byte, error) {
	all := make([]byte, size*len(mine))
	err := l.call("MPI_Allgather", pointer(&mine[0]), uintptr(len(mine)), l.abi.bytes, pointer(&all[0]), uintptr(len(mine)), l.abi.bytes, uintptr(c))
	return all, err
}
