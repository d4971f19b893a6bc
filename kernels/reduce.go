// This file owns the reduction kernel's side of the host: the types of numbers,
// the launches, and conversions, which are reductions of one source. reducetwin.go
// has the same work in Go.

package kernels

import (
	_ "embed"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
)

//go:embed reduce_sm80.ptx
var reducePTX string

var (
	reduceImage = image("reduce.cu", reducePTX)
	// reduceKernels are by the type of the sources, then of the destination.
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

// Number is a format of numbers.
type Number uint8

const (
	F32 Number = iota
	BF16
)

// Size is the bytes of a number.
func (n Number) Size() device.Bytes {
	switch n {
	case F32:
		return 4
	case BF16:
		return 2
	}
	panic(fmt.Sprintf("kernels: %d is no format of numbers", n))
}

// ReduceOp is how a reduction combines numbers.
type ReduceOp uint8

const (
	Sum ReduceOp = iota
	// Mean is the sum, divided at the end.
	Mean
	// Max is the largest, or a NaN if there is one.
	Max
)

// MaxReduceSources is the most sources of one launch: a launch has 16 arguments,
// of which four say the rest.
const MaxReduceSources = 12

// Reduction combines runs of numbers element by element: in fp32, in the order
// Acc and then the sources, rounded once at the end to nearest even. A NaN comes out as
// the one with all bits set but the sign. Any alignment of whole numbers will do;
// vectors of 16 bytes are used where all runs come to a boundary of 16 bytes at
// the same element. Dst may be the same range as Acc or a source of its size.
type Reduction struct {
	Op     ReduceOp
	To     Number // the format of Dst
	From   Number // the format of the sources
	Dst    device.Range
	Acc    device.Range // fp32 that comes before the sources, or no memory
	Divide int          // what Mean divides by; zero stands for the sources
	// Rest is what ReduceRest gives for the sources. It saves a launch that is
	// made again and again an allocation, if there are more than a few.
	Rest []device.Access
}

const reduceThreads = 128

// ReduceInline sources are declared in the launch itself, which holds eight
// declarations: theirs, Dst's and Acc's.
const ReduceInline = 6

// ReduceRest declares the sources that are too many for a launch to hold.
func ReduceRest(srcs ...device.Range) (rest []device.Access) {
	for i := ReduceInline; i < len(srcs); i++ {
		rest = append(rest, device.Reads(srcs[i]))
	}
	return rest
}

// ReduceLaunch is the launch of a reduction of 1 to MaxReduceSources sources. They
// are apart from the rest, so that a caller's list need not be on the heap.
func ReduceLaunch(r Reduction, srcs ...device.Range) device.Launch {
	if len(srcs) == 0 || len(srcs) > MaxReduceSources || r.Op > Max || r.Divide < 0 || r.Rest != nil && len(r.Rest) != len(srcs)-ReduceInline {
		panic(fmt.Sprintf("kernels: a reduction of %d runs by operation %d, divided by %d; it takes 1 to %d runs", len(srcs), r.Op, r.Divide, MaxReduceSources))
	}
	to, from := r.To.Size(), r.From.Size()
	n := r.Dst.Len / to
	mustAlign("what a reduction writes", r.Dst, to)
	mustBe("what a reduction writes", r.Dst, n*to)
	for _, s := range srcs {
		mustAlign("a source of a reduction", s, from)
		mustBe("a source of a reduction", s, n*from)
	}
	// A thread's step is a vector of 16 bytes of the narrower type.
	blocks := blocksFor(n, reduceThreads*(16/min(to, from)), r.Dst)
	for _, s := range srcs {
		if s.Buf.Kind() == device.Host {
			blocks = min(blocks, linkBlocks)
		}
	}
	l := device.NewLaunch(&reduceKernels[r.From][r.To], blocks, reduceThreads)
	l.Write(r.Dst)
	if r.Acc.Buf == nil {
		l.Arg(0)
	} else {
		mustAlign("what a reduction adds to", r.Acc, 4)
		mustBe("what a reduction adds to", r.Acc, n*4)
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

// Reduce issues [ReduceLaunch]. A reduction of nothing issues nothing.
func Reduce(s device.Stream, r Reduction, srcs ...device.Range) {
	if l := ReduceLaunch(r, srcs...); r.Dst.Len > 0 {
		s.Launch(l)
	}
}

// ConvertLaunch gives the numbers of src in another format, or in the same.
func ConvertLaunch(dst device.Range, to Number, src device.Range, from Number) device.Launch {
	return ReduceLaunch(Reduction{To: to, From: from, Dst: dst}, src)
}

// Convert issues [ConvertLaunch], unless there is nothing to convert.
func Convert(s device.Stream, dst device.Range, to Number, src device.Range, from Number) {
	Reduce(s, Reduction{To: to, From: from, Dst: dst}, src)
}

// mustBe panics unless a range is exactly n bytes long.
func mustBe(what string, r device.Range, n device.Bytes) {
	if r.Len != n {
		panic(fmt.Sprintf("kernels: %s, %s, should be %d bytes long", what, r, n))
	}
}
