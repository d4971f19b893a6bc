// This file owns the twins of activations.

package nn

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

// liveRows calls f for runs of the live rows, from several threads. All rows are live, or
// those in the segments at addr if there are any. No row is in two segments.
func liveRows(addr uint64, experts, rows, grain int, f func(from, to int)) {
	if experts == 0 {
		parallel.For(rows, grain, f)
		return
	}
	segments := device.Slice[uint32](addr, 2*experts)
	live := 0
	for e := range experts {
		first, n := int(segments[2*e]), int(segments[2*e+1])
		if n > 0 && first+n > rows {
			panic(fmt.Sprintf("nn: segment %d is rows %d to %d of a matrix that has %d", e, first, first+n, rows))
		}
		live += n
	}
	parallel.For(live, grain, func(from, to int) {
		at := 0 // live rows before the segment
		for e := range experts {
			first, n := int(segments[2*e]), int(segments[2*e+1])
			if a, b := max(from, at), min(to, at+n); a < b {
				f(first+a-at, first+b-at)
			}
			at += n
		}
	})
}

// rowWeight returns the weight of a row, or one if there are no weights.
func rowWeight(addr uint64, row int) float32 {
	if addr == 0 {
		return 1
	}
	return device.Slice[float32](addr+4*uint64(row), 1)[0]
}

func swigluTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[4])
	yp, xp := unpackPair(a[5])
	y, x := stripOf(a[0], yp, a[7], 0), stripOf(a[1], xp, a[7], 1)
	liveRows(a[3], int(a[6]), rows, runRows(2*cols), func(from, to int) {
		withRoom(3*cols, func(room []float32) {
			for row := from; row < to; row++ {
				in := x.get(row, 0, 2*cols, room)
				out := y.into(row, 0, cols, room[2*cols:])
				vec.SwiGLU(out, in[:cols], in[cols:], rowWeight(a[2], row))
				y.put(row, 0, out)
			}
		})
	})
}

func swigluGradTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[7])
	dxp, xp := unpackPair(a[8])
	dyp, yp := unpackPair(a[9])
	dx, x := stripOf(a[0], dxp, a[11], 0), stripOf(a[1], xp, a[11], 1)
	dy, y := stripOf(a[2], dyp, a[11], 2), stripOf(a[3], yp, a[11], 3)
	if y.addr == 0 {
		y.typ = kernels.BF16 // so that the result stays in the room
	}
	liveRows(a[6], int(a[10]), rows, runRows(2*cols), func(from, to int) {
		withRoom(6*cols, func(room []float32) {
			for row := from; row < to; row++ {
				in, d := x.get(row, 0, 2*cols, room), dy.get(row, 0, cols, room[2*cols:])
				din, out := dx.into(row, 0, 2*cols, room[3*cols:]), y.into(row, 0, cols, room[5*cols:])
				dw := vec.SwiGLUGrad(din[:cols], din[cols:], out, in[:cols], in[cols:], d, rowWeight(a[4], row))
				dx.put(row, 0, din)
				if y.addr != 0 {
					y.put(row, 0, out)
				}
				if a[5] != 0 {
					device.Slice[float32](a[5]+4*uint64(row), 1)[0] = dw
				}
			}
		})
	})
}

func addTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[3])
	yp, ap := unpackPair(a[4])
	y, x, z := stripOf(a[0], yp, a[6], 0), stripOf(a[1], ap, a[6], 1), stripOf(a[2], int(a[5]), a[6], 2)
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(3*cols, func(room []float32) {
			for row := from; row < to; row++ {
				sum := y.into(row, 0, cols, room)
				vec.Add(sum, x.get(row, 0, cols, room[cols:]), z.get(row, 0, cols, room[2*cols:]))
				y.put(row, 0, sum)
			}
		})
	})
}

// openGate returns the sigmoid of a row's logit.
func openGate(logit strip, row int) float32 {
	var s [1]float32
	vec.Sigmoid(s[:], logit.get(row, 0, 1, nil))
	return s[0]
}

func gateRowsTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[3])
	yp, xp := unpackPair(a[4])
	y, x, logit := stripOf(a[0], yp, a[6], 0), stripOf(a[1], xp, a[6], 1), strip{addr: a[2], pitch: int(a[5])}
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(2*cols, func(room []float32) {
			for row := from; row < to; row++ {
				out := y.into(row, 0, cols, room)
				vec.Scale(out, x.get(row, 0, cols, room[cols:]), openGate(logit, row))
				y.put(row, 0, out)
			}
		})
	})
}

func gateRowsGradTwin(l *device.Launch) {
	a := l.Args()
	rows, cols := unpackPair(a[5])
	dxp, dlp := unpackPair(a[6])
	dyp, xp := unpackPair(a[7])
	dx, dy, x := stripOf(a[0], dxp, a[9], 0), stripOf(a[2], dyp, a[9], 1), stripOf(a[3], xp, a[9], 2)
	dlogit, logit := strip{addr: a[1], pitch: dlp}, strip{addr: a[4], pitch: int(a[8])}
	parallel.For(rows, runRows(cols), func(from, to int) {
		withRoom(3*cols, func(room []float32) {
			for row := from; row < to; row++ {
				d, s := dy.get(row, 0, cols, room), openGate(logit, row)
				dlogit.into(row, 0, 1, nil)[0] = vec.Dot(d, x.get(row, 0, cols, room[cols:])) * (s * (1 - s))
				out := dx.into(row, 0, cols, room[2*cols:])
				vec.Scale(out, d, s)
				dx.put(row, 0, out)
			}
		})
	})
}
