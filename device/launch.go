// This file owns what a kernel launch carries: the kernel, its arguments and
// the bytes it declares.

package device

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Mode says what an operation does with the bytes that it declares. Two operations that
// use the same byte need an order, unless both only read it or both use it atomically.
type Mode uint8

const (
	// Read declares that bytes are only read.
	Read Mode = iota + 1
	// Write declares any access that is not only a read.
	Write
	// Atomic declares memory that kernels order among themselves by atomic
	// operations, such as a free list and the pages that it hands out. Atomic
	// accesses need an order with plain reads and writes, but not with each other.
	Atomic
)

// String returns the mode in words.
func (m Mode) String() string {
	switch m {
	case Read:
		return "read"
	case Write:
		return "write"
	case Atomic:
		return "atomic access"
	}
	return fmt.Sprintf("Mode(%d)", uint8(m))
}

// Access declares that an operation uses some bytes in some way.
type Access struct {
	Rect
	Mode Mode
}

// Reads returns the declaration that a range is read.
func Reads(r Range) Access { return Access{Rect{r, r.Len, 1}, Read} }

// Writes returns the declaration that a range is written.
func Writes(r Range) Access { return Access{Rect{r, r.Len, 1}, Write} }

// Atomics returns the declaration that a range is used through atomic operations.
func Atomics(r Range) Access { return Access{Rect{r, r.Len, 1}, Atomic} }

// Kernel is one function in the forms that devices run. Make kernels package
// variables: devices cache the loaded code by the pointer.
type Kernel struct {
	// Name is the entry point in Image.
	Name string
	// Image holds the device code for GPUs.
	Image *Image
	// Go does the same work on the CPU device, for the whole grid in one call.
	Go func(l *Launch)
	// HostReads and HostWrites return the bytes of host memory that a launch is about to
	// read, and has written. The CPU device lets them take their time on its modelled
	// links. Nil means none.
	HostReads, HostWrites func(l *Launch) memory.Bytes
}

// Image is one compiled source file in all its variants. A device chooses the best
// variant that its hardware runs.
type Image struct {
	Name     string // the source file, for messages
	Variants []Variant
}

// Variant is PTX for one architecture. It runs on that architecture and on every later
// one, unless it uses instructions that only that one has, as "sm_90a" does.
type Variant struct {
	Major, Minor int  // compute capability
	Exact        bool // runs on this architecture only
	PTX          string
}

// Slot labels a launch in a capture, so that [Graph.Update] finds it. The caller chooses
// the numbers. Zero is no label, and a graph has each label once.
type Slot uint32

// Launch is one launch of a kernel: its shape, its arguments and the bytes that it
// declares. Make one with [NewLaunch]. A Launch is passed by value and holds up to 16
// arguments inline, so launching allocates nothing.
type Launch struct {
	Kernel *Kernel
	Grid   [3]uint32 // blocks
	Block  [3]uint32 // threads of a block
	Shared uint32    // bytes of dynamic shared memory
	Slot   Slot      // the label for Graph.Update, or zero
	Tuned  Tuned     // another kernel, for GPUs of one architecture
	// Steps do the same work one after the other. A GPU that Tuned is not for issues them
	// instead of Kernel, which has no image then; such a launch has no slot.
	Steps []Launch
	Flops float64 // operations that the work needs, for a profile; zero if memory bounds it
	// InPlace is how many of the bytes that are declared as written are read first, for a
	// profile.
	InPlace memory.Bytes

	nargs   uint8
	naccess uint8
	args    [maxArgs]uint64
	access  [maxAccess]Access
	more    []Access
}

const (
	maxArgs   = 16
	maxAccess = 8
)

// The largest shapes that every device can run: the limits of all GPUs that Stowage
// supports.
const (
	maxGridX   = 1<<31 - 1
	maxGridYZ  = 1<<16 - 1
	maxThreads = 1024 // of a block
)

// NewLaunch returns a launch of a one-dimensional grid without arguments. Add them with
// Arg, Read, Write and Atomic, in the order of the kernel's parameters. NewLaunch
// panics if no GPU could run the shape.
func NewLaunch(k *Kernel, blocks, threads int) Launch {
	if blocks < 0 || blocks > maxGridX || threads < 0 || threads > maxThreads {
		panic(fmt.Sprintf("device: a launch of %d blocks of %d threads; expected at most %d blocks of at most %d threads", blocks, threads, maxGridX, maxThreads))
	}
	return Launch{
		Kernel: k,
		Grid:   [3]uint32{uint32(blocks), 1, 1},
		Block:  [3]uint32{uint32(threads), 1, 1},
	}
}

// Arg appends a scalar argument. Every parameter of a kernel is eight bytes wide; a
// kernel may read only the low bytes. Arg panics if the launch has 16 arguments already.
func (l *Launch) Arg(v uint64) {
	if l.Kernel == nil {
		panic("device: an argument for a launch without a kernel; make the launch with NewLaunch")
	}
	if l.nargs == maxArgs {
		panic("device: kernel " + l.Kernel.Name + " has more than 16 arguments; pass a table in memory")
	}
	l.args[l.nargs] = v
	l.nargs++
}

// Read appends a range as a pointer argument and declares that it is read.
func (l *Launch) Read(r Range) { l.pointer(Reads(r)) }

// Write appends a range as a pointer argument and declares that it is written.
func (l *Launch) Write(r Range) { l.pointer(Writes(r)) }

// Atomic appends a range as a pointer argument and declares that it is used through
// atomic operations.
func (l *Launch) Atomic(r Range) { l.pointer(Atomics(r)) }

func (l *Launch) pointer(a Access) {
	l.Arg(uint64(a.Addr()))
	l.Declare(a)
}

// Declare declares bytes that the kernel reaches without an argument of their own, for
// example through a table of addresses. It allocates beyond eight declarations; use
// DeclareAll for a launch with many that is made again and again.
func (l *Launch) Declare(a Access) {
	if l.naccess < maxAccess {
		l.access[l.naccess] = a
		l.naccess++
		return
	}
	l.more = append(l.more[:len(l.more):len(l.more)], a)
}

// DeclareAll declares everything in a slice that was prepared before. The launch keeps
// the slice, so the caller must not change it afterwards.
func (l *Launch) DeclareAll(as []Access) {
	if l.more != nil {
		for _, a := range as {
			l.Declare(a)
		}
		return
	}
	l.more = as
}

// Args returns the arguments in order. Kernels that are written in Go read them.
func (l *Launch) Args() []uint64 { return l.args[:l.nargs] }

// Accesses ranges over the declarations.
func (l *Launch) Accesses(yield func(Access) bool) {
	for i := range l.naccess {
		if !yield(l.access[i]) {
			return
		}
	}
	for _, a := range l.more {
		if !yield(a) {
			return
		}
	}
}

// Check panics if no GPU could run the shape, or if a range that the launch declares
// may not be used now. Devices call it when the launch is issued.
func (l *Launch) Check() {
	if l.Kernel == nil {
		panic("device: a launch without a kernel; make it with NewLaunch")
	}
	l.checkShape()
	for i := range l.naccess {
		CheckAccess(l.access[i])
	}
	for i := range l.more {
		CheckAccess(l.more[i])
	}
}

func (l *Launch) checkShape() {
	g, b := l.Grid, l.Block
	switch {
	case g[0] == 0 || g[1] == 0 || g[2] == 0 || b[0] == 0 || b[1] == 0 || b[2] == 0:
		panic(fmt.Sprintf("device: kernel %s with grid %v and block %v has no threads; do not issue an empty launch", l.Kernel.Name, g, b))
	case g[0] > maxGridX || g[1] > maxGridYZ || g[2] > maxGridYZ:
		panic(fmt.Sprintf("device: kernel %s with grid %v; expected at most [%d %d %d] blocks", l.Kernel.Name, g, maxGridX, maxGridYZ, maxGridYZ))
	// Each dimension is checked first, because the product of three could overflow.
	case b[0] > maxThreads || b[1] > maxThreads || b[2] > maxThreads || b[0]*b[1]*b[2] > maxThreads:
		panic(fmt.Sprintf("device: kernel %s with block %v; expected at most %d threads in a block", l.Kernel.Name, b, maxThreads))
	}
}

// CheckAccess panics if the buffer of a declaration was freed or is too small. Devices
// call it when work is issued.
func CheckAccess(a Access) {
	if a.Mode < Read || a.Mode > Atomic {
		panic("device: an access without a mode; make it with Reads, Writes or Atomics")
	}
	a.check()
}
