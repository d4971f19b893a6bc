// This file owns the host side of the reduction kernel: number formats, launches, and
// conversions, which are reductions of one source. reducetwin.go has the twin.

package kernels

import (
	_ "embed"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed reduce_sm80.ptx
var reducePTX string

var (
	reduceImage = image("reduce.cu", reducePTX)
	// reduceKernels are indexed by the type of the sources, then of the destination.
	reduceKernels = [2][2]device.Kernel{
		F32: {
			F32:  {Name: "stowage_reduce_f32", Image: reduceImage, Go: reduceTwin(F32, F32)},
			BF16: {Name: "stowage_reduce_f32_bf16", Image: reduceImage, Go: reduceTwin(F32, BF16)},
		},
		BF16: {
			F32:  {Name: "stowage_reduce_bf16_f32", Image: reduceImage, Go: reduceTwin(BF16, F32)},
			BF16: {Name: "stowage_reduce_bf16", Image: reduceImage, Go: reduceTwin(BF16, BF16)},
		},
	}
)

// Number is a number format.
type Number uint8

const (
	F32 Number = iota
	BF16
)

// Size returns the bytes of one number. It panics if the format is unknown.
func (n Number) Size() memory.Bytes {
	switch n {
	case F32:
		return 4
	case BF16:
		return 2
	}
	panic(fmt.Sprintf("kernels: expected F32 or BF16, got number format %d", n))
}

// ReduceOp says how a reduction combines numbers.
type ReduceOp uint8

const (
	Sum ReduceOp = iota
	// Mean sums up and divides at the end.
	Mean
	// Max takes the largest number, or a NaN if there is one.
	Max
)

// MaxReduceSources is the most sources of one launch. A launch has 16 arguments, and four
// of them describe the rest.
const MaxReduceSources = 12

// Reduction combines runs of numbers element by element. It computes in fp32, first Acc
// and then the sources in order, and rounds once at the end, to nearest even. Every NaN
// becomes the NaN with all bits set except the sign. Runs may have any alignment of whole
// numbers; the kernel uses vectors of 16 bytes if all runs reach a boundary of 16 bytes
// at the same element. Dst may be the same range as Acc, or as a source of its size.
type Reduction struct {
	Op     ReduceOp
	To     Number // the format of Dst
	From   Number // the format of the sources
	Dst    device.Range
	Acc    device.Range // fp32 that comes before the sources, or the zero Range
	Divide int          // the divisor of Mean; zero means the number of sources
	// Rest may hold the result of ReduceRest for the sources. It saves an allocation
	// if a launch with more than ReduceInline sources is made repeatedly.
	Rest []device.Access
}

const reduceThreads = 128

// ReduceInline is the number of sources that a launch declares itself. A launch holds
// eight declarations: these, Dst and Acc.
const ReduceInline = 6

// ReduceRest returns the declarations of the sources beyond ReduceInline.
func ReduceRest(srcs ...device.Range) (rest []device.Access) {
	for i := ReduceInline; i < len(srcs); i++ {
		rest = append(rest, device.Reads(srcs[i]))
	}
	return rest
}

// ReduceLaunch returns the launch of a reduction of 1 to MaxReduceSources sources. The
// sources are variadic so that a caller's list need not be on the heap. ReduceLaunch
// panics if the number of sources, the operation, a length or an alignment is wrong.
func ReduceLaunch(r Reduction, srcs ...device.Range) device.Launch {
	if len(srcs) == 0 || len(srcs) > MaxReduceSources || r.Op > Max || r.Divide < 0 || r.Rest != nil && len(r.Rest) != len(srcs)-ReduceInline {
		panic(fmt.Sprintf("kernels: expected a reduction of 1 to %d sources by Sum, Mean or Max, got %d sources, operation %d, divisor %d and %d declarations in Rest", MaxReduceSources, len(srcs), r.Op, r.Divide, len(r.Rest)))
	}
	to, from := r.To.Size(), r.From.Size()
	n := r.Dst.Len / to
	mustAlign("the destination of a reduction", r.Dst, to)
	mustHaveLength("the destination of a reduction", r.Dst, n*to)
	for _, s := range srcs {
		mustAlign("a source of a reduction", s, from)
		mustHaveLength("a source of a reduction", s, n*from)
	}
	// A thread handles one vector of 16 bytes of the narrower type at a time.
	blocks := blocksFor(n, reduceThreads*(16/min(to, from)), r.Dst)
	for _, s := range srcs {
		if s.Buf.Kind() == memory.Host {
			blocks = min(blocks, linkBlocks)
		}
	}
	l := device.NewLaunch(&reduceKernels[r.From][r.To], blocks, reduceThreads)
	l.Write(r.Dst)
	if r.Acc.Buf == nil {
		l.Arg(0)
	} else {
		mustAlign("the accumulator of a reduction", r.Acc, 4)
		mustHaveLength("the accumulator of a reduction", r.Acc, n*4)
		l.Read(r.Acc)
	}
	l.Arg(uint64(n))
	l.Arg(reduceHow(r, len(srcs)))
	for i, s := range srcs {
		if i < ReduceInline {
			l.Read(s)
		} else {
			l.Arg(uint64(s.Addr()))
		}
	}
	for range MaxReduceSources - len(srcs) {
		l.Arg(0)
	}
	if r.Rest == nil {
		r.Rest = ReduceRest(srcs...)
	}
	l.DeclareAll(r.Rest)
	return l
}

// reduceHow packs the operation, the number of sources and the divisor.
func reduceHow(r Reduction, sources int) uint64 {
	over := r.Divide
	if over == 0 {
		over = sources
	}
	return uint64(r.Op) | uint64(sources)<<8 | uint64(math.Float32bits(float32(over)))<<32
}

// Reduce issues [ReduceLaunch]. It issues nothing if Dst is empty.
func Reduce(s device.Stream, r Reduction, srcs ...device.Range) {
	if l := ReduceLaunch(r, srcs...); r.Dst.Len > 0 {
		s.Launch(l)
	}
}

// ConvertLaunch returns a launch that writes the numbers of src to dst in another format,
// or in the same.
func ConvertLaunch(dst device.Range, to Number, src device.Range, from Number) device.Launch {
	return ReduceLaunch(Reduction{To: to, From: from, Dst: dst}, src)
}

// Convert issues [ConvertLaunch]. It issues nothing if src is empty.
func Convert(s device.Stream, dst device.Range, to Number, src device.Range, from Number) {
	Reduce(s, Reduction{To: to, From: from, Dst: dst}, src)
}

// mustHaveLength panics unless a range is exactly n bytes long.
func mustHaveLength(what string, r device.Range, n memory.Bytes) {
	if r.Len != n {
		panic(fmt.Sprintf("kernels: expected %d bytes for %s, got %s", n, what, r))
	}
}
