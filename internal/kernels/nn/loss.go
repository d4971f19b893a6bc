// This file owns the loss: its launches and their twins. losshopper.go has its kernels for
// Hopper.

package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

var (
	totalKernel = device.Kernel{Name: "stowage_nn_total", Image: lossImage, Go: totalTwin}
	lossKernels = newWays("stowage_nn_cross_entropy", lossImage, lossTwin) // wide: aligned fp32 logits
)

// Loss is the cross entropy of each row of Logits with its target. The gradient times
// Scale is written to Grad, unless that is the zero Matrix. Grad may be Logits, or
// Logits.Half. A row with the target None has the loss and the gradient zero.
type Loss struct {
	Logits  Matrix
	Targets device.Range // uint32
	Losses  device.Range // fp32, one a row: set
	Grad    Matrix
	Scale   float32
}

// Half returns a matrix of bf16 in the memory of one of fp32: a row of it is the second half
// of a row.
func (m Matrix) Half() Matrix {
	off := 2 * memory.Bytes(m.Cols)
	return Matrix{Range: m.Range.Slice(off, m.Range.Len-off), Type: kernels.BF16, Rows: m.Rows, Cols: m.Cols, Pitch: 2 * m.pitch()}
}

// CrossEntropy issues a loss.
func CrossEntropy(s device.Stream, l Loss) { s.Launch(lossLaunch(l)) }

// lossLaunch returns the launch of a loss. Its arguments:
//
//	0..3  Logits, Targets, Losses, Grad or zero
//	4     Logits.Rows | Logits.Cols << 32
//	5     pitch of Logits | pitch of Grad << 32
//	6     types: bit 0 Logits, 1 Grad; set for bf16 | bits of Scale << 32
func lossLaunch(e Loss) device.Launch {
	k := &lossKernels.any
	if e.Logits.Type == kernels.F32 && e.Logits.aligned(4) && (e.Grad.Buf == nil || e.Grad.aligned(4)) {
		k = &lossKernels.wide
	}
	l := device.NewLaunch(k, min(e.Logits.Rows, lossBlocks), rowThreads)
	passMatrix(&l, "logits", e.Logits, device.Read)
	passRun(&l, "targets", e.Targets, e.Logits.Rows, 4, device.Read, false)
	passRun(&l, "losses", e.Losses, e.Logits.Rows, 4, device.Write, false)
	if e.Grad.Buf != nil {
		e.Grad.shape("the gradient of logits", e.Logits.Rows, e.Logits.Cols)
	}
	passMaybe(&l, "the gradient of logits", e.Grad, device.Write)
	l.Arg(packPair(e.Logits.Rows, e.Logits.Cols))
	l.Arg(packPair(e.Logits.pitch(), e.Grad.pitch()))
	l.Arg(typeBits(e.Logits, e.Grad) | bits(e.Scale)<<32)
	e.tune(&l)
	return l
}

// lossBlocks is the most blocks. Of fewer rows at a time, L2 keeps more between the two times
// that they are read. An H200 has 132 multiprocessors.
const lossBlocks = 264

// Total adds Factor times the sum of X (fp32) to the fp32 at Sum.
type Total struct {
	Sum, X device.Range
	Factor float32
}

// AddUp issues a total.
func AddUp(s device.Stream, t Total) { s.Launch(totalLaunch(t)) }

// totalLaunch returns the launch of a total, one block on a GPU. Its arguments:
//
//	0..1  Sum, X
//	2     numbers of X
//	3     bits of Factor
func totalLaunch(t Total) device.Launch {
	n := int(t.X.Len / 4)
	l := device.NewLaunch(&totalKernel, 1, rowThreads)
	passRun(&l, "a total", t.Sum, 1, 4, device.Write, false)
	passRun(&l, "what a total adds up", t.X, n, 4, device.Read, false)
	l.Arg(uint64(n))
	l.Arg(bits(t.Factor))
	return l
}

func lossTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[4])
	from, to := unpackPair(a[5])
	logits, grad, scale := stripOf(a[0], from, a[6], 0), stripOf(a[3], to, a[6], 1), math.Float32frombits(uint32(a[6]>>32))
	targets, losses := device.Slice[uint32](a[1], rows), device.Slice[float32](a[2], rows)
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(2*cols, func(room []float32) {
			for row := from; row < to; row++ {
				target := targets[row]
				if target != None && int(target) >= cols {
					panic(fmt.Sprintf("nn: a target of %d among %d logits", target, cols))
				}
				x, out := logits.get(row, 0, cols, room), room[cols:]
				if grad.addr != 0 {
					out = grad.into(row, 0, cols, out)
				}
				loss, sum := lossRow(out, x, target)
				losses[row] = loss
				if grad.addr == 0 {
					continue
				}
				if target != None {
					vec.Scale(out, out, scale/sum)
					out[target] -= scale
				}
				grad.put(row, 0, out)
			}
		})
	})
}

// lossRow gives the loss, puts exponentials into out, which may be x, and gives their
// sum; without a target it puts zeros. The largest logit m comes off first, so that no
// exponential is above one and one is one:
//
//	loss = log(sum e^(x-m)) - (x_target - m)
func lossRow(out, x []float32, target uint32) (loss, sum float32) {
	if target == None {
		clear(out)
		return 0, 0
	}
	m := vec.Max(x)
	above := m - x[target]
	sum = vec.ExpSum(out, x, m)
	return float32(math.Log(float64(sum))) + above, sum
}

func totalTwin(l *device.Launch) {
	a := l.Args()
	x := device.Slice[float32](a[1], int(a[2]))
	device.Slice[float32](a[0], 1)[0] += float32(math.Float32frombits(uint32(a[3])) * vec.Sum(x))
}
