// This file owns the optimiser.

package nn

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

var (
	adamKernel    = device.Kernel{Name: "stowage_nn_adamw", Image: optimImage, Go: adamTwin}
	squaresKernel = device.Kernel{Name: "stowage_nn_squares", Image: optimImage, Go: squaresTwin}
)

// Hyper holds the settings that AdamW reads from device memory, so that a captured step
// uses new values. They occupy HyperBytes bytes, as Encode returns them.
type Hyper struct {
	LR, Beta1, Beta2, Epsilon float32
	Decay                     float32 // of weights, decoupled
	Correct1, Correct2        float32 // 1/(1-beta1^t), 1/(1-beta2^t)
	Clip                      float32 // the largest norm of all gradients together, or zero
}

// HyperBytes is the size of Hyper on the device.
const HyperBytes = memory.Bytes(32)

// Encode returns the fields in order, as fp32.
func (h Hyper) Encode() []byte {
	b := make([]byte, 0, HyperBytes)
	for _, f := range []float32{h.LR, h.Beta1, h.Beta2, h.Epsilon, h.Decay, h.Correct1, h.Correct2, h.Clip} {
		b = binary.LittleEndian.AppendUint32(b, math.Float32bits(f))
	}
	return b
}

// Adam is one update of a run of weights:
//
//	g *= min(1, Clip/sqrt(Norm)) if Clip is not zero
//	m = beta1 m + (1-beta1) g; v = beta2 v + (1-beta2) g²
//	w -= lr (m correct1 / (sqrt(v correct2) + epsilon) + decay w)
//
// If NoDecay is set, decay is zero. If Param has memory, it becomes w in ParamType.
type Adam struct {
	W, M, V   device.Range // fp32
	G         device.Range
	GType     kernels.Number
	Param     device.Range
	ParamType kernels.Number
	Hyper     device.Range
	Norm      device.Range // fp32: the square of the norm of all gradients; or no memory
	NoDecay   bool
}

// AdamW issues an update.
func AdamW(s device.Stream, a Adam) { s.Launch(adamLaunch(a)) }

// adamLaunch returns the launch of an update. Its arguments:
//
//	0..3  W, M, V, G
//	4..6  Param or zero, Hyper, Norm or zero
//	7     numbers
//	8     bit 0: G is bf16; bit 1: Param is bf16; bit 2: NoDecay
func adamLaunch(a Adam) device.Launch {
	n := int(a.W.Len / 4)
	if a.W.Len <= 0 || a.W.Len%4 != 0 {
		panic(fmt.Sprintf("nn: the weights of an update: expected aligned fp32 numbers, got %s", a.W))
	}
	l := device.NewLaunch(&adamKernel, (n+8*rowThreads-1)/(8*rowThreads), rowThreads)
	l.InPlace = 3 * a.W.Len
	passRun(&l, "the weights of an update", a.W, n, 4, device.Write, false)
	passRun(&l, "the first moments of an update", a.M, n, 4, device.Write, false)
	passRun(&l, "the second moments of an update", a.V, n, 4, device.Write, false)
	passRun(&l, "the gradients of an update", a.G, n, a.GType.Size(), device.Read, false)
	passRun(&l, "the parameters of an update", a.Param, n, a.ParamType.Size(), device.Write, true)
	passRun(&l, "the settings of an update", a.Hyper, int(HyperBytes/4), 4, device.Read, false)
	passRun(&l, "the norm of an update", a.Norm, 1, 4, device.Read, true)
	l.Arg(uint64(n))
	how := uint64(a.GType) | uint64(a.ParamType)<<1
	if a.NoDecay {
		how |= 4
	}
	l.Arg(how)
	return l
}

// optimRun is how many numbers a thread updates at a time.
const optimRun = 1 << 12

func adamTwin(l *device.Launch) {
	a := l.Args()
	h := adamStep(device.Slice[float32](a[5], int(HyperBytes/4)), a[6], a[8]&4 != 0)
	g, param := stripOf(a[3], 0, a[8], 0), stripOf(a[4], 0, a[8], 1)
	run := func(p uint64, from, to int) []float32 { return device.Slice[float32](p+4*uint64(from), to-from) }
	parallel.For(int(a[7]), optimRun, func(from, to int) {
		withRoom(optimRun, func(room []float32) {
			w := run(a[0], from, to)
			vec.AdamW(w, run(a[1], from, to), run(a[2], from, to), g.get(0, from, to-from, room), &h)
			switch {
			case param.addr == 0:
			case param.typ == kernels.F32:
				copy(param.into(0, from, to-from, nil), w)
			default:
				param.put(0, from, w)
			}
		})
	})
}

// adamStep reads the settings of an update from memory.
func adamStep(h []float32, norm uint64, noDecay bool) vec.Adam {
	s := vec.Adam{
		Factor: 1, LR: h[0], Beta1: h[1], Keep1: 1 - h[1], Beta2: h[2], Keep2: 1 - h[2], Epsilon: h[3],
		Decay: h[4], Correct1: h[5], Correct2: h[6],
	}
	if noDecay {
		s.Decay = 0
	}
	if clip := h[7]; clip != 0 && norm != 0 {
		n := device.Slice[float32](norm, 1)[0]
		if f := clip / float32(math.Sqrt(float64(n))); f < 1 {
			s.Factor = f
		}
	}
	return s
}

// Squares adds the sum of the squares of X to the fp32 at Sum. The order of the sum depends
// only on the length.
type Squares struct {
	Sum, X  device.Range
	Type    kernels.Number
	Scratch device.Range // SquaresScratch bytes
}

// Each run of squaresRun numbers is summed up separately. The sums are written to Scratch,
// and a second launch adds them up.
const squaresRun = 1 << 14

func squaresRuns(n int) int { return (n + squaresRun - 1) / squaresRun }

// SquaresScratch returns the size of the scratch memory for a sum of squares of n numbers.
func SquaresScratch(n int) memory.Bytes { return memory.Bytes(4 * squaresRuns(n)) }

// AddSquares issues a sum of squares.
func AddSquares(s device.Stream, q Squares) {
	s.Launch(squaresLaunch(q))
	n := int(q.X.Len / q.Type.Size())
	s.Launch(totalLaunch(Total{Sum: q.Sum, X: q.Scratch.Slice(0, SquaresScratch(n)), Factor: 1}))
}

// squaresLaunch returns the launch that writes the sums of squares of runs, one block a
// run on a GPU. Its arguments:
//
//	0..1  Scratch: fp32, one a run; X
//	2     numbers of X | numbers of a run << 48
//	3     types: bit 0 X; set for bf16
func squaresLaunch(q Squares) device.Launch {
	n := int(q.X.Len / q.Type.Size())
	l := device.NewLaunch(&squaresKernel, squaresRuns(n), rowThreads)
	passRun(&l, "the scratch of squares", q.Scratch, squaresRuns(n), 4, device.Write, false)
	passRun(&l, "what is squared", q.X, n, q.Type.Size(), device.Read, false)
	l.Arg(uint64(n) | squaresRun<<48)
	l.Arg(uint64(q.Type))
	return l
}

func squaresTwin(l *device.Launch) {
	a := l.Args()
	x, n := stripOf(a[1], 0, a[3], 0), int(a[2]&(1<<48-1))
	sums := device.Slice[float32](a[0], squaresRuns(n))
	parallel.For(n, squaresRun, func(from, to int) {
		withRoom(squaresRun, func(room []float32) {
			sums[from/squaresRun] = vec.SumSquares(x.get(0, from, to-from, room))
		})
	})
}
