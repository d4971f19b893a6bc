// Package nccl calls NVIDIA's library of collectives, NCCL 2.18 or later, which is found at
// run time, without cgo.
//
// Communicators are non-blocking: a call may still be in progress when it returns, and
// [Library.Poll] says when it is over. One thread may use a communicator at a time, and
// everything between GroupStart and GroupEnd must happen on one locked thread.
//
// This file owns the library and its calls, find.go where it is found.
package nccl

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Comm is a communicator's handle.
type Comm uintptr

// ID names a communicator that is being made. One rank makes it, and all have it.
type ID [128]byte

// Type is a number format (ncclDataType_t).
type Type int32

const (
	Bytes    Type = 1
	Float32  Type = 7
	BFloat16 Type = 9
)

// Op is how a reduction combines numbers (ncclRedOp_t).
type Op int32

const (
	Sum  Op = 0
	Max  Op = 2
	Mean Op = 4
)

// Results of a call (ncclResult_t).
const (
	success    = 0
	inProgress = 7
)

// Oldest is the oldest version that works: before it, non-blocking communicators could not
// be set up like this. Versions are written as 21800 for 2.18.0.
const Oldest = 21800

// Library is an opened library.
type Library struct {
	Name    string // of the file that was opened
	Version int    // 22809 is 2.28.9

	procs map[string]uintptr
	init  func(comm *Comm, size int32, id byValue, rank int32, config *config) int32

	mu    sync.Mutex
	cells []*Comm // where communicators are written; the library may do so after Init
}

// byValue is an ID as it is passed: not by its address, as an array would be.
type byValue struct{ id ID }

// config is what every version since 2.18 understands (ncclConfig_t).
type config struct {
	size       uint64
	magic      uint32
	version    uint32
	blocking   int32
	clusters   int32
	minCTAs    int32
	maxCTAs    int32
	netName    uintptr
	splitShare int32
	_          int32
}

const unset = math.MinInt32

// functions are those that the library must have.
var functions = []string{
	"ncclGetUniqueId", "ncclGetErrorString", "ncclGetLastError", "ncclCommInitRankConfig", "ncclCommGetAsyncError",
	"ncclCommFinalize", "ncclCommDestroy", "ncclCommAbort", "ncclGroupStart", "ncclGroupEnd",
	"ncclSend", "ncclRecv", "ncclAllGather", "ncclReduceScatter", "ncclAllReduce", "ncclBroadcast",
}

// newer are functions that the library may have: since 2.19.
var newer = []string{"ncclCommRegister", "ncclCommDeregister"}

// graphRegister is the variable by which NCCL registers the memory that captured calls use.
const graphRegister = "NCCL_GRAPH_REGISTER"

// RegisterNoGraphs sets a variable of the process, unless it is set, so that NCCL registers no
// memory by itself in captures: it takes memory that was mapped in several chunks for one, and GPUs
// then access what is not there. Call it before Open.
func RegisterNoGraphs() error {
	if _, set := os.LookupEnv(graphRegister); set {
		return nil
	}
	return os.Setenv(graphRegister, "0")
}

// Open opens the first library that is there.
func Open(getenv func(string) string) (*Library, error) { return open(Names(getenv)) }

func open(names []string) (*Library, error) {
	runtime.LockOSThread() // the loader keeps the reason of a failure by thread
	defer runtime.UnlockOSThread()
	var first error
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_LOCAL)
		if err != nil {
			if first == nil || !missing(err) {
				first = err
			}
			continue
		}
		return load(name, h)
	}
	return nil, fmt.Errorf("nccl: no NCCL library was found (%v); install libnccl2 (`pip install nvidia-nccl-cu12` will do), or set %s to a library", first, Variable)
}

// missing reports whether a library is not there, and not that it cannot be opened.
func missing(err error) bool { return strings.Contains(err.Error(), "cannot open shared object file") }

func load(name string, h uintptr) (*Library, error) {
	l := &Library{Name: name, procs: map[string]uintptr{}}
	at, err := purego.Dlsym(h, "ncclGetVersion")
	if err != nil {
		return nil, fmt.Errorf("nccl: %s has no function ncclGetVersion; set %s to libnccl.so.2", name, Variable)
	}
	version := new(int32)
	_, _, _ = purego.SyscallN(at, pointer(version))
	if l.Version = int(*version); l.Version < Oldest {
		return nil, fmt.Errorf("nccl: %s is version %s; install %s or later (`pip install nvidia-nccl-cu12` will do), or set %s to another library", name, Words(l.Version), Words(Oldest), Variable)
	}
	for _, f := range functions {
		if l.procs[f], err = purego.Dlsym(h, f); err != nil {
			return nil, fmt.Errorf("nccl: %s has no function %s; install NCCL %s or later", name, f, Words(Oldest))
		}
	}
	for _, f := range newer {
		l.procs[f], _ = purego.Dlsym(h, f)
	}
	purego.RegisterFunc(&l.init, l.procs["ncclCommInitRankConfig"])
	return l, nil
}

// Words returns a version as people write it.
func Words(version int) string {
	if version < 10000 { // before 2.9
		return fmt.Sprintf("%d.%d.%d", version/1000, version/100%10, version%100)
	}
	return fmt.Sprintf("%d.%d.%d", version/10000, version/100%100, version%100)
}

// call calls a function. A call in progress is no error.
func (l *Library) call(name string, args ...uintptr) error {
	r, _, _ := purego.SyscallN(l.procs[name], args...)
	return l.check(name, 0, int32(r))
}

// check returns the error of a result.
func (l *Library) check(name string, c Comm, result int32) error {
	if result == success || result == inProgress {
		return nil
	}
	text := l.text("ncclGetErrorString", uintptr(result))
	if last := l.text("ncclGetLastError", uintptr(c)); last != "" {
		text += " (" + last + ")"
	}
	return errors.New("nccl: " + name + ": " + text)
}

// escape makes the compiler put variables on the heap. A stack may move during a call.
var escape atomic.Pointer[int32]

// pointer returns the address of a variable, which it keeps on the heap.
func pointer[T any](p *T) uintptr {
	escape.Store((*int32)(unsafe.Pointer(p)))
	return uintptr(unsafe.Pointer(p))
}

// text returns a line that the library says.
func (l *Library) text(name string, arg uintptr) string {
	at, _, _ := purego.SyscallN(l.procs[name], arg)
	if at == 0 {
		return ""
	}
	b := unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&at))), 1024)
	n := 0
	for n < len(b) && b[n] != 0 { // the text may end at a page's end
		n++
	}
	return string(bytes.Join(bytes.Fields(slices.Clone(b[:n])), []byte(" ")))
}

// NewID returns the name of a new communicator.
func (l *Library) NewID() (ID, error) {
	id := new(ID)
	err := l.call("ncclGetUniqueId", pointer(id))
	return *id, err
}

// Init begins to make this rank's end of a communicator on the device that is current. It
// is there when Poll says so.
func (l *Library) Init(size int, id ID, rank int) (Comm, error) {
	cell := new(Comm)
	l.mu.Lock()
	l.cells = append(l.cells, cell)
	l.mu.Unlock()
	c := &config{magic: 0xcafebeef, version: Oldest, blocking: 0, netName: 0, clusters: unset, minCTAs: unset, maxCTAs: unset, splitShare: unset}
	c.size = uint64(unsafe.Sizeof(*c))
	err := l.check("ncclCommInitRankConfig", 0, l.init(cell, int32(size), byValue{id}, int32(rank), c))
	return *cell, err
}

// Poll reports whether the last call of a communicator is over, and the error that it has
// met since.
func (l *Library) Poll(c Comm) (done bool, err error) {
	state := new(int32)
	if err := l.call("ncclCommGetAsyncError", uintptr(c), pointer(state)); err != nil {
		return false, err
	}
	return *state == success, l.check("a communicator", c, *state)
}

// Finalize begins to end a communicator after its calls. Poll says when it can be destroyed.
func (l *Library) Finalize(c Comm) error { return l.call("ncclCommFinalize", uintptr(c)) }

// Destroy frees a communicator.
func (l *Library) Destroy(c Comm) error { return l.call("ncclCommDestroy", uintptr(c)) }

// Abort ends a communicator at once, with the calls that the device waits in, and frees it.
func (l *Library) Abort(c Comm) error { return l.call("ncclCommAbort", uintptr(c)) }

// Register tells a communicator of memory that many calls use, so that links may reach it
// without a copy. The memory must have been mapped as one piece. The handle is zero if there is nothing
// to deregister: the library is too old, or registers nothing.
func (l *Library) Register(c Comm, addr uintptr, n int) (handle uintptr, err error) {
	if l.procs[newer[0]] == 0 || l.procs[newer[1]] == 0 {
		return 0, nil
	}
	h := new(uintptr)
	err = l.call(newer[0], uintptr(c), addr, uintptr(n), pointer(h))
	return *h, err
}

// Deregister ends a registration. No call may be using the memory.
func (l *Library) Deregister(c Comm, handle uintptr) error {
	return l.call(newer[1], uintptr(c), handle)
}

// GroupStart begins calls that go on together.
func (l *Library) GroupStart() error { return l.call("ncclGroupStart") }

// GroupEnd ends the list that GroupStart began.
func (l *Library) GroupEnd() error { return l.call("ncclGroupEnd") }

// Send sends bytes to a rank.
func (l *Library) Send(c Comm, addr uintptr, n, to int, stream uintptr) error {
	return l.call("ncclSend", addr, uintptr(n), uintptr(Bytes), uintptr(to), uintptr(c), stream)
}

// Recv receives bytes from a rank.
func (l *Library) Recv(c Comm, addr uintptr, n, from int, stream uintptr) error {
	return l.call("ncclRecv", addr, uintptr(n), uintptr(Bytes), uintptr(from), uintptr(c), stream)
}

// AllGather gathers n bytes of each rank.
func (l *Library) AllGather(c Comm, dst, src uintptr, n int, stream uintptr) error {
	return l.call("ncclAllGather", src, dst, uintptr(n), uintptr(Bytes), uintptr(c), stream)
}

// ReduceScatter combines numbers and gives n of them to each rank.
func (l *Library) ReduceScatter(c Comm, dst, src uintptr, n int, t Type, op Op, stream uintptr) error {
	return l.call("ncclReduceScatter", src, dst, uintptr(n), uintptr(t), uintptr(op), uintptr(c), stream)
}

// AllReduce combines n numbers of each rank.
func (l *Library) AllReduce(c Comm, dst, src uintptr, n int, t Type, op Op, stream uintptr) error {
	return l.call("ncclAllReduce", src, dst, uintptr(n), uintptr(t), uintptr(op), uintptr(c), stream)
}

// Broadcast copies the root's bytes to the same place of all ranks.
func (l *Library) Broadcast(c Comm, addr uintptr, n, root int, stream uintptr) error {
	return l.call("ncclBroadcast", addr, addr, uintptr(n), uintptr(Bytes), uintptr(root), uintptr(c), stream)
}
