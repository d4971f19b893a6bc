// This file owns rotary positions.

package nn

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
	"github.com/stowage-dev/stowage/memory"
)

var ropeKernels = newWays("stowage_nn_rope", ropeImage, ropeTwin)

// Rotation rotates, in each of Heads heads of each row of X, the pairs of columns (At+i,
// At+i+Width/2), i < Width/2, by the row's position, which is the row modulo Seq. A head
// begins every Head columns. Inverse rotates back, which is the backward pass.
type Rotation struct {
	X           Matrix
	Heads, Head int
	At, Width   int
	Seq         int
	Table       device.Range // RopeTable's numbers, fp32
	Inverse     bool
}

// RopeTable returns cosine and sine, alternating, for every position and pair of columns.
// Pair i at position p is rotated by the angle p theta^(-2i/width).
func RopeTable(seq, width int, theta float64) []float32 {
	t := make([]float32, 0, seq*width)
	for p := range seq {
		for i := range width / 2 {
			sin, cos := math.Sincos(float64(p) * math.Pow(theta, -2*float64(i)/float64(width)))
			t = append(t, float32(cos), float32(sin))
		}
	}
	return t
}

// Rope issues a rotation, in place.
func Rope(s device.Stream, r Rotation) { s.Launch(ropeLaunch(r)) }

// ropeLaunch returns the launch of a rotation. Its arguments:
//
//	0..1  X, Table
//	2     X.Rows | pitch of X << 32
//	3     Heads | Head << 32
//	4     At | Width << 32
//	5     Seq
//	6     bit 0: X is bf16; bit 1: Inverse
func ropeLaunch(r Rotation) device.Launch {
	if r.Heads <= 0 || r.Seq <= 0 || r.At < 0 || r.Width <= 0 || r.Width%2 != 0 || r.At+r.Width > r.Head || (r.Heads-1)*r.Head+r.At+r.Width > r.X.Cols {
		panic(fmt.Sprintf("nn: a rotation of columns %d to %d of %d heads of %d columns in rows of %d, over %d positions, is invalid; expected an even width and heads that fit into the row",
			r.At, r.At+r.Width, r.Heads, r.Head, r.X.Cols, r.Seq))
	}
	// A thread computes eight pairs of columns of four heads.
	k := ropeKernels.of(r.X)
	if (r.At|r.Head|r.Width/2)%8 != 0 || r.Table.Addr()%16 != 0 {
		k = &ropeKernels.any
	}
	l := device.NewLaunch(k, runsOf(r.X.Rows*runsOf(r.Heads, 4)*runsOf(r.Width/2, 8), rowThreads), rowThreads)
	l.InPlace = r.X.Type.Size() * memory.Bytes(r.X.Rows*r.X.Cols)
	passMatrix(&l, "what is rotated", r.X, device.Write)
	passRun(&l, "the table of a rotation", r.Table, r.Seq*r.Width, 4, device.Read, false)
	l.Arg(packPair(r.X.Rows, r.X.pitch()))
	l.Arg(packPair(r.Heads, r.Head))
	l.Arg(packPair(r.At, r.Width))
	l.Arg(uint64(r.Seq))
	how := typeBits(r.X)
	if r.Inverse {
		how |= 2
	}
	l.Arg(how)
	return l
}

func ropeTwin(l *device.Launch) {
	a := l.Args()
	rows, pitch := unpackPair(a[2])
	heads, head := unpackPair(a[3])
	at, width := unpackPair(a[4])
	seq, half := int(a[5]), width/2
	x, sign := stripOf(a[0], pitch, a[6], 0), float32(1)
	if a[6]&2 != 0 {
		sign = -1
	}
	table := device.Slice[float32](a[1], seq*width)
	parallel.For(rows, runRows(heads*width), func(from, to int) {
		withRoom(2*width, func(room []float32) {
			cos, sin := room[:half], room[half:width]
			for row := from; row < to; row++ {
				turns := table[row%seq*width:][:width]
				for i := range cos {
					cos[i], sin[i] = turns[2*i], sign*turns[2*i+1]
				}
				for h := range heads {
					v := x.get(row, h*head+at, width, room[width:])
					vec.Rotate(v[:half], v[half:], cos, sin)
					x.put(row, h*head+at, v)
				}
			}
		})
	})
}
