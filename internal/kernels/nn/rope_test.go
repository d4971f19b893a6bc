package nn

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// rope64 rotates rows of cols numbers by the definition.
func rope64(x []float64, cols int, r Rotation, theta float64) []float64 {
	y := append([]float64(nil), x...)
	for row := range len(x) / cols {
		for h := range r.Heads {
			for i := range r.Width / 2 {
				angle := float64(row%r.Seq) / math.Pow(theta, 2*float64(i)/float64(r.Width))
				a := row*cols + h*r.Head + r.At + i
				b := a + r.Width/2
				y[a] = x[a]*math.Cos(angle) - x[b]*math.Sin(angle)
				y[b] = x[a]*math.Sin(angle) + x[b]*math.Cos(angle)
			}
		}
	}
	return y
}

// A rotation follows the definition and leaves other columns unchanged. The reverse
// rotation is its gradient.
func TestRope(t *testing.T) {
	y := newYard(t, 1<<18)
	rapid.Check(t, func(t *rapid.T) {
		begin(t, y)
		r := Rotation{Heads: rapid.IntRange(1, 3).Draw(t, "heads"), At: rapid.IntRange(0, 4).Draw(t, "at"), Width: 2 * rapid.IntRange(1, 20).Draw(t, "pairs"), Seq: rapid.IntRange(1, 5).Draw(t, "seq")}
		r.Head = r.At + r.Width + rapid.IntRange(0, 3).Draw(t, "rest")
		rows, cols := r.Seq*rapid.IntRange(1, 2).Draw(t, "sequences"), r.Heads*r.Head+rapid.IntRange(0, 2).Draw(t, "beyond")
		theta := rapid.SampledFrom([]float64{100, 10000}).Draw(t, "theta")
		kind := drawType(t, "type")
		r.Table = put(y, RopeTable(r.Seq, r.Width, theta))
		x := drawn(y, kind, rows*cols)
		r.X = placeMatrix(y, kind, cols, x)
		Rope(y, r)
		near(t, "rotated", r.X, rope64(x, cols, r, theta), 3e-7)
		dy := drawn(y, kind, rows*cols)
		back := r
		back.X, back.Inverse = placeMatrix(y, kind, cols, dy), true
		Rope(y, back)
		// Only the first row with a rotation is compared, to save time.
		row := min(1, rows-1)
		mine := x[row*cols : (row+1)*cols]
		want := slopes(mine, func() float64 {
			return inner(dy[row*cols:(row+1)*cols], rope64(x[:(row+1)*cols], cols, r, theta)[row*cols:])
		})
		near(t, "gradient", back.X.Part(row, 1), want, 1e-6)
	})
}

func TestRopeRefuses(t *testing.T) {
	y := newYard(t, 1<<14)
	good := Rotation{X: y.matrix(kernels.F32, 4, 32), Heads: 2, Head: 16, Width: 16, Seq: 4, Table: place[float32](y, 64)}
	Rope(y, good)
	for name, change := range map[string]func(r *Rotation){
		"an odd width":    func(r *Rotation) { r.Width = 15 },
		"too many heads":  func(r *Rotation) { r.Heads = 3 },
		"too wide a head": func(r *Rotation) { r.At = 2 },
		"a short table":   func(r *Rotation) { r.Seq = 5 },
	} {
		bad := good
		change(&bad)
		wantPanic(t, name, func() { Rope(y, bad) })
	}
}

// The kernel for vectors is taken if every pair of columns of every head lies in whole vectors.
func TestRopeInVectors(t *testing.T) {
	_, b := trialMemory(t)
	launch := func(number kernels.Number, heads, head, at, width, cols int, table memory.Bytes) *device.Kernel {
		l := ropeLaunch(Rotation{
			X:     Matrix{Range: b.Slice(0, 2*memory.Bytes(cols)*number.Size()), Type: number, Rows: 2, Cols: cols},
			Heads: heads, Head: head, At: at, Width: width, Seq: 2, Table: b.Slice(4096+table, memory.Bytes(8*width)),
		})
		return l.Kernel
	}
	for _, x := range []struct {
		number                       kernels.Number
		heads, head, at, width, cols int
		table                        memory.Bytes
		wide                         bool
	}{
		{kernels.BF16, 2, 16, 0, 16, 32, 0, true},
		{kernels.BF16, 2, 24, 8, 16, 48, 0, true},
		{kernels.F32, 2, 16, 0, 16, 32, 0, false},
		{kernels.BF16, 2, 20, 0, 16, 40, 0, false}, // the second head begins inside of a vector
		{kernels.BF16, 2, 24, 4, 16, 48, 0, false}, // so do the columns of a head
		{kernels.BF16, 2, 16, 0, 8, 32, 0, false},  // so do the second ones of the pairs
		{kernels.BF16, 2, 16, 0, 16, 36, 0, false}, // so does the second row
		{kernels.BF16, 2, 16, 0, 16, 32, 4, false}, // so does the table
	} {
		if k := launch(x.number, x.heads, x.head, x.at, x.width, x.cols, x.table); (k == &ropeKernels.wide) != x.wide {
			t.Errorf("%+v: %s", x, k.Name)
		}
	}
}
