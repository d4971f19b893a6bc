// This file owns what a kernel launch carries: the kernel, its arguments and
// the bytes it declares.

package device

import "fmt"

// Mode says what an operation does with the bytes it declares.
type Mode uint8

const (
	Read Mode = iota + 1
	// Write stands for any access that is not only a read.
	Write
	// Atomic is memory that kernels order among themselves by atomic
	// operations, such as the free list of a page pool and the pages it hands
	// out. Atomic accesses do not conflict with each other; they conflict with
	// plain reads and writes like any write.
	Atomic
)

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

// Conflicts tells whether two accesses to the same byte need an order.
func (m Mode) Conflicts(other Mode) bool {
	return m != other || m == Write
}

// Access is a declaration: these bytes are used in this way.
type Access struct {
	Rect
	Mode Mode
}

// Reads declares that a range is read.
func Reads(r Range) Access { return Access{Rect{r, r.Len, 1}, Read} }

// Writes declares that a range is written.
func Writes(r Range) Access { return Access{Rect{r, r.Len, 1}, Write} }

// Atomics declares that a range is used through atomic operations.
func Atomics(r Range) Access { return Access{Rect{r, r.Len, 1}, Atomic} }

// Kernel is one function in the form each kind of device runs. Kernels are
// package variables: devices cache what they load under the pointer.
type Kernel struct {
	// Name is the entry point in Image.
	Name string
	// Image holds the device code for GPUs.
	Image *Image
	// Go does the same work on the CPU device, the whole grid in one call.
	Go func(l *Launch)
}

// Image is one compiled source file, in every variant that is shipped. Devices
// choose the best variant that the hardware can run.
type Image struct {
	Name     string // the source file, for messages
	Variants []Variant
}

// Variant is PTX for one architecture. PTX for a plain architecture runs on
// every later one; PTX that uses architecture-specific instructions ("sm_90a")
// runs on exactly that one.
type Variant struct {
	Major, Minor int
	Exact        bool
	PTX          string
}

// Slot labels a launch during capture so that Graph.Update can find it. Slots
// are the caller's numbers; zero is no label, and a label is used once a graph.
type Slot uint32

// Launch is one launch of a kernel. It is passed by value and holds its
// arguments and declarations inline, so that launching allocates nothing.
type Launch struct {
	Kernel *Kernel
	Grid   [3]uint32 // blocks
	Block  [3]uint32 // threads of a block
	Shared uint32    // bytes of dynamic shared memory
	Slot   Slot

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

// The largest shapes that every device can run; GPUs of all our architectures
// have these limits.
const (
	maxGridX   = 1<<31 - 1
	maxGridYZ  = 1<<16 - 1
	maxThreads = 1024 // of a block
)

// NewLaunch begins a launch of a one-dimensional grid. Arg, Read, Write and
// Atomic complete it.
func NewLaunch(k *Kernel, blocks, threads int) Launch {
	if blocks < 0 || blocks > maxGridX || threads < 0 || threads > maxThreads {
		panic(fmt.Sprintf("device: a launch of %d blocks of %d threads; at most %d blocks of %d can be", blocks, threads, maxGridX, maxThreads))
	}
	return Launch{
		Kernel: k,
		Grid:   [3]uint32{uint32(blocks), 1, 1},
		Block:  [3]uint32{uint32(threads), 1, 1},
	}
}

// Arg appends a scalar argument. All parameters of our kernels are eight bytes
// wide; a narrower one reads the low bytes.
func (l *Launch) Arg(v uint64) {
	if l.Kernel == nil {
		panic("device: an argument for a launch without a kernel")
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

// Atomic appends a range as a pointer argument and declares atomic use.
func (l *Launch) Atomic(r Range) { l.pointer(Atomics(r)) }

func (l *Launch) pointer(a Access) {
	l.Arg(uint64(a.Addr()))
	l.Declare(a)
}

// Declare adds bytes that the kernel reaches without an argument of their own,
// through a table for instance. Beyond a few it allocates: a launch that is
// made again and again declares a slice prepared beforehand with DeclareAll.
func (l *Launch) Declare(a Access) {
	if l.naccess < maxAccess {
		l.access[l.naccess] = a
		l.naccess++
		return
	}
	l.more = append(l.more[:len(l.more):len(l.more)], a)
}

// DeclareAll declares a prepared slice; the launch keeps it, so that it must
// not change afterwards.
func (l *Launch) DeclareAll(as []Access) {
	if l.more != nil {
		for _, a := range as {
			l.Declare(a)
		}
		return
	}
	l.more = as
}

// Args are the arguments in order; kernels written in Go read them.
func (l *Launch) Args() []uint64 { return l.args[:l.nargs] }

// Accesses calls yield for every declaration.
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

// Check panics unless the shape can be launched and every range that the launch
// declares may be used now. Devices call it when the launch is issued.
func (l *Launch) Check() {
	if l.Kernel == nil {
		panic("device: a launch without a kernel")
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
		panic(fmt.Sprintf("device: kernel %s with grid %v and block %v has no threads; leave an empty launch out", l.Kernel.Name, g, b))
	case g[0] > maxGridX || g[1] > maxGridYZ || g[2] > maxGridYZ:
		panic(fmt.Sprintf("device: kernel %s with grid %v; at most [%d %d %d] blocks can be launched", l.Kernel.Name, g, maxGridX, maxGridYZ, maxGridYZ))
	// Each dimension first: the product of three large ones would wrap round.
	case b[0] > maxThreads || b[1] > maxThreads || b[2] > maxThreads || b[0]*b[1]*b[2] > maxThreads:
		panic(fmt.Sprintf("device: kernel %s with block %v; a block has at most %d threads", l.Kernel.Name, b, maxThreads))
	}
}

// CheckAccess panics on a declaration whose buffer is dead or too small.
func CheckAccess(a Access) {
	if a.Mode < Read || a.Mode > Atomic {
		panic("device: an access without a mode")
	}
	a.check()
}

// CheckCopy panics unless the copy may be issued: live ranges of equal length
// that do not overlap.
func CheckCopy(dst, src Range) {
	dst.check()
	src.check()
	if dst.Len != src.Len {
		panic(fmt.Sprintf("device: copy of %s to %s: lengths differ", src, dst))
	}
	if dst.Len > 0 && dst.Addr() < src.Addr()+uintptr(src.Len) && src.Addr() < dst.Addr()+uintptr(dst.Len) {
		panic(fmt.Sprintf("device: copy of %s to %s: they overlap", src, dst))
	}
}

// CheckCopy2D is CheckCopy for rectangles. Rectangles of one buffer may
// interleave, as columns of a matrix do, so rows are compared one by one only
// where the extents overlap.
func CheckCopy2D(dst, src Rect) {
	dst.check()
	src.check()
	if dst.Len != src.Len || dst.Rows != src.Rows {
		panic(fmt.Sprintf("device: 2-D copy of %d rows of %d bytes to %d rows of %d bytes", src.Rows, src.Len, dst.Rows, dst.Len))
	}
	if rectsOverlap(dst, src) {
		panic(fmt.Sprintf("device: 2-D copy of %s to %s: the rectangles overlap", src.Range, dst.Range))
	}
}

// rectsOverlap tells whether two rectangles share a byte. It walks both in order
// of address, like a merge; addresses tell, because a buffer may be another
// one's memory, imported.
func rectsOverlap(a, b Rect) bool {
	if a.Len == 0 {
		return false
	}
	n := uintptr(a.Len)
	for i, j := 0, 0; i < a.Rows && j < b.Rows; {
		x, y := a.Row(i).Addr(), b.Row(j).Addr()
		switch {
		case x+n <= y:
			i++
		case y+n <= x:
			j++
		default:
			return true
		}
	}
	return false
}
