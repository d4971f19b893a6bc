// This file owns RMS norms: their launches and their twins. normhopper.go has their kernels for
// Hopper.

package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

var (
	normKernels      = newWays("stowage_nn_rmsnorm", normImage, normTwin)
	normGradKernels  = newWays("stowage_nn_rmsnorm_grad", normImage, normGradTwin)
	normWeightKernel = device.Kernel{Name: "stowage_nn_rmsnorm_grad_weight", Image: normImage, Go: normWeightTwin}
)

// Norm is an RMS norm. Each run of W.Cols columns of a row of X is normalised separately
// and multiplied by W, a single row. X.Cols is a multiple of W.Cols, so heads of queries
// and keys can be normalised one by one. Y may be X.
type Norm struct {
	Y, X, W Matrix
	Epsilon float32
}

// RMSNorm issues a norm: y = x / sqrt(mean(x²) + epsilon) * w.
func RMSNorm(s device.Stream, n Norm) { s.Launch(normLaunch(n)) }

// normLaunch returns the launch of a norm. Its arguments:
//
//	0..2  Y, X, W
//	3     X.Rows | X.Cols << 32
//	4     pitch of Y | pitch of X << 32
//	5     W.Cols | bits of Epsilon << 32
//	6     types: bit 0 Y, 1 X, 2 W; set for bf16
func normLaunch(n Norm) device.Launch {
	checkNorm(n.X, n.W)
	n.Y.shape("what a norm writes", n.X.Rows, n.X.Cols)
	k := normKernels.of(n.Y, n.X, n.W)
	if n.W.Cols > rowThreads*normKeep*8 {
		k = &normKernels.any
	}
	l := device.NewLaunch(k, runsOf(n.X.Rows*(n.X.Cols/n.W.Cols), normLines(n.W.Cols)), rowThreads)
	passMatrix(&l, "what a norm writes", n.Y, device.Write)
	passMatrix(&l, "what a norm reads", n.X, device.Read)
	passMatrix(&l, "the weight of a norm", n.W, device.Read)
	l.Arg(packPair(n.X.Rows, n.X.Cols))
	l.Arg(packPair(n.Y.pitch(), n.X.pitch()))
	l.Arg(uint64(n.W.Cols) | bits(n.Epsilon)<<32)
	l.Arg(typeBits(n.Y, n.X, n.W))
	return l
}

// normLines returns how many norms a block computes at once.
func normLines(cols int) int {
	size := 4 // threads of a norm
	for size < rowThreads && size*normKeep*8 < cols {
		size *= 2
	}
	return rowThreads / size
}

func checkNorm(x, w Matrix) {
	if w.Rows != 1 || w.Cols <= 0 || x.Cols%w.Cols != 0 {
		panic(fmt.Sprintf("nn: a norm: expected a weight of one row that divides the %d columns, got %d x %d", x.Cols, w.Rows, w.Cols))
	}
}

// inverseRMS returns 1/sqrt(mean(x²) + epsilon).
func inverseRMS(x []float32, epsilon float32) float32 {
	return 1 / float32(math.Sqrt(float64(vec.SumSquares(x)/float32(len(x))+epsilon)))
}

func normTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[3])
	yp, xp := unpackPair(a[4])
	width, epsilon := int(uint32(a[5])), math.Float32frombits(uint32(a[5]>>32))
	y, x, wm := stripOf(a[0], yp, a[6], 0), stripOf(a[1], xp, a[6], 1), stripOf(a[2], width, a[6], 2)
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(3*width, func(room []float32) {
			w := wm.get(0, 0, width, room)
			for row := from; row < to; row++ {
				for col := 0; col < cols; col += width {
					in := x.get(row, col, width, room[width:])
					out := y.into(row, col, width, room[2*width:])
					vec.MulScale(out, in, w, inverseRMS(in, epsilon))
					y.put(row, col, out)
				}
			}
		})
	})
}

// NormGrad is the backward pass of a norm. It writes the gradient to DX, plus Plus if that
// has memory, and adds to DW, which is one row like W. DX may be DY or Plus.
type NormGrad struct {
	DX, DW  Matrix
	X, W    Matrix
	DY      Matrix
	Epsilon float32
	Plus    Matrix
	Scratch device.Range // NormScratch bytes
}

// normKeep is how many vectors of a row a thread keeps, and normGradKeep how many of each
// operand in the backward pass, which has normAhead bytes of shared memory for those of the next norms.
const (
	normKeep     = 4
	normGradKeep = 2
	normAhead    = 2 * 2 * 16 * normGradKeep
)

// normParts is the most partial sums of DW. A part has at least normLeast rows or so, because the
// sum of a short part costs as much as a row. It has groups of normGroup rows, and parts take
// turns with them: blocks that walk over their parts side by side keep their accesses close
// together. Each sum is written to Scratch, and a second launch adds them up in order.
const (
	normParts = 128
	normLeast = 8
	normGroup = 4
)

// normGradThreads fill a multiprocessor better than rowThreads, because there are no more
// blocks than parts.
const normGradThreads = 512

// normShare is the bytes of shared memory for the sums that a thread of a kernel for all formats
// has for DW.
const normShare = 4 * 32

// normSumThreads add up the partial sums of 32 columns.
const normSumThreads = 512

// normCount returns the number of parts.
func normCount(rows int) int { return min(normParts, runsOf(rows, normLeast)) }

// NormScratch returns the size of the scratch memory of the backward pass. cols are the
// columns of the weight.
func NormScratch(rows, cols int) memory.Bytes { return memory.Bytes(4 * cols * normCount(rows)) }

// RMSNormGrad issues the backward pass of a norm.
func RMSNormGrad(s device.Stream, n NormGrad) {
	s.Launch(normGradLaunch(n))
	s.Launch(normWeightLaunch(n))
}

// normGradLaunch returns the launch that sets DX and writes the partial sums of DW. Its
// arguments:
//
//	0..5  DX, X, W, DY, Plus or zero, Scratch: fp32 [parts][W.Cols]
//	6     X.Rows | X.Cols << 32
//	7     pitch of DX | pitch of X << 32
//	8     pitch of DY | pitch of Plus << 32
//	9     W.Cols | bits of Epsilon << 32
//	10    types: bit 0 DX, 1 X, 2 W, 3 DY, 4 Plus; set for bf16
//	11    parts
func normGradLaunch(n NormGrad) device.Launch {
	checkNorm(n.X, n.W)
	n.DX.shape("the gradient that a norm writes", n.X.Rows, n.X.Cols)
	n.DY.shape("the gradient that a norm reads", n.X.Rows, n.X.Cols)
	parts := normCount(n.X.Rows)
	k, shared := normGradKernels.of(n.DX, n.X, n.W, n.DY, n.Plus), normAhead
	if k == &normGradKernels.any || n.W.Cols > normGradThreads*normGradKeep*8 {
		k, shared = &normGradKernels.any, normShare
	}
	l := device.NewLaunch(k, parts, normGradThreads)
	l.Shared = uint32(shared * normGradThreads)
	passMatrix(&l, "the gradient that a norm writes", n.DX, device.Write)
	passMatrix(&l, "what a norm reads", n.X, device.Read)
	passMatrix(&l, "the weight of a norm", n.W, device.Read)
	passMatrix(&l, "the gradient that a norm reads", n.DY, device.Read)
	if n.Plus.Buf != nil {
		n.Plus.shape("what a norm's gradient is added to", n.X.Rows, n.X.Cols)
	}
	passMaybe(&l, "what a norm's gradient is added to", n.Plus, device.Read)
	passRun(&l, "a norm's scratch", n.Scratch, parts*n.W.Cols, 4, device.Write, false)
	l.Arg(packPair(n.X.Rows, n.X.Cols))
	l.Arg(packPair(n.DX.pitch(), n.X.pitch()))
	l.Arg(packPair(n.DY.pitch(), n.Plus.pitch()))
	l.Arg(uint64(n.W.Cols) | bits(n.Epsilon)<<32)
	l.Arg(typeBits(n.DX, n.X, n.W, n.DY, n.Plus))
	l.Arg(uint64(parts))
	n.tune(&l)
	return l
}

func normGradTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[6])
	dxp, xp := unpackPair(a[7])
	dyp, pp := unpackPair(a[8])
	width := int(uint32(a[9]))
	g := normGrad{
		dx: stripOf(a[0], dxp, a[10], 0), x: stripOf(a[1], xp, a[10], 1), dy: stripOf(a[3], dyp, a[10], 3), plus: stripOf(a[4], pp, a[10], 4),
		cols: cols, epsilon: math.Float32frombits(uint32(a[9] >> 32)),
	}
	wm, parts := stripOf(a[2], width, a[10], 2), int(a[11])
	parallel.For(parts, max(1, runRows(cols)*parts/max(1, rows)), func(from, to int) {
		withRoom(6*width, func(room []float32) {
			w := wm.get(0, 0, width, room)
			for p := from; p < to; p++ {
				dw := device.Slice[float32](a[5]+4*uint64(p*width), width)
				clear(dw)
				for group := p * normGroup; group < rows; group += parts * normGroup {
					for row := group; row < min(group+normGroup, rows); row++ {
						g.row(row, w, dw, room[width:])
					}
				}
			}
		})
	})
}

// normGrad is a launch of the backward pass as the twin sees it.
type normGrad struct {
	dx, x, dy, plus strip
	cols            int
	epsilon         float32
}

// row does one row. With r the inverse RMS over n columns the gradient is
//
//	dx = dy w r - x r³/n sum(dy w x)
func (g *normGrad) row(row int, w, dw, room []float32) {
	n := len(w)
	for col := 0; col < g.cols; col += n {
		x, dy := g.x.get(row, col, n, room), g.dy.get(row, col, n, room[n:])
		r := inverseRMS(x, g.epsilon)
		c := r * r * r * vec.Dot3(dy, w, x) / float32(n)
		vec.AddMul(dw, dy, x, r)
		dx := g.dx.into(row, col, n, room[2*n:])
		if g.plus.addr == 0 {
			vec.NormGrad(dx, dy, w, x, r, c)
		} else {
			// DX may be Plus, so the sum comes last.
			own := room[3*n : 4*n]
			vec.NormGrad(own, dy, w, x, r, c)
			vec.Add(dx, own, g.plus.get(row, col, n, room[4*n:]))
		}
		g.dx.put(row, col, dx)
	}
}

// normWeightLaunch returns the launch that adds the partial sums, in order, to DW. Its
// arguments:
//
//	0..1  DW, Scratch
//	2     parts | W.Cols << 32
//	3     types: bit 0 DW; set for bf16
func normWeightLaunch(n NormGrad) device.Launch {
	n.DW.shape("the gradient of a norm's weight", 1, n.W.Cols)
	parts := normCount(n.X.Rows)
	l := device.NewLaunch(&normWeightKernel, runsOf(n.W.Cols, 32), normSumThreads)
	passMatrix(&l, "the gradient of a norm's weight", n.DW, device.Write)
	passRun(&l, "a norm's scratch", n.Scratch, parts*n.W.Cols, 4, device.Read, false)
	l.Arg(packPair(parts, n.W.Cols))
	l.Arg(typeBits(n.DW))
	n.tuneSum(&l)
	return l
}

func normWeightTwin(l *device.Launch) {
	a := l.Args()
	parts, cols := unpackPair(a[2])
	dw := stripOf(a[0], cols, a[3], 0)
	withRoom(cols, func(room []float32) {
		sum := dw.get(0, 0, cols, room)
		for p := range parts {
			vec.Add(sum, sum, device.Slice[float32](a[1]+4*uint64(p*cols), cols))
		}
		dw.put(0, 0, sum)
	})
}
