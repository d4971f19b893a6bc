// This file owns the tests of moving columns for latent attention.

package nn

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Spread and gather are a linear map and its transpose: <spread(x), y> is <x, gather(y)>.
// Integers make both exact. Spreading is compared column by column, so both are right if
// this holds.
func TestLatentColumns(t *testing.T) {
	dev := attentionDevice(t)
	rapid.Check(t, func(rt *rapid.T) {
		size := func(name string, most int) int { return rapid.IntRange(1, most).Draw(rt, name) }
		rows, heads, nope, rope, value := size("rows", 150), size("heads", 4), size("nope", 20), size("rope", 20), size("value", 20)
		typ := rapid.SampledFrom([]kernels.Number{kernels.F32, kernels.BF16}).Draw(rt, "type")
		x := newAttentionLab(t, dev, attentionCase{batch: 1, seq: 1, heads: 1, kvHeads: 1, keyDim: 1, valueDim: 1})
		defer x.close()
		keys, values, latent := heads*(nope+rope), heads*value, heads*(nope+value)
		matrix := func(cols int) Matrix {
			m := NewMatrix(x.alloc(typ.Size()*memory.Bytes(rows*(cols+2))), typ, rows, cols+2)
			x.all = append(x.all, m)
			return m.Columns(1, cols)
		}
		draw := func(n int) []float64 {
			f := make([]float64, n)
			for i := range f {
				f[i] = float64(rapid.IntRange(-9, 9).Draw(rt, "x"))
			}
			return f
		}
		// One row is drawn, and the others are shifted copies of it.
		repeat := func(m Matrix) []float64 {
			one, all := draw(m.Cols), []float64(nil)
			for r := range rows {
				for c := range m.Cols {
					all = append(all, one[(c+r)%m.Cols])
				}
			}
			x.put(m, all)
			return all
		}
		packed := matrix(keys + values)
		l := Latent{K: packed.Columns(0, keys), V: packed.Columns(keys, values), KV: matrix(latent), Shared: matrix(rope), Heads: heads, Nope: nope}
		kv, shared := repeat(l.KV), repeat(l.Shared)
		SpreadLatent(x.stream, l)
		k, v := x.get(l.K), x.get(l.V)
		for r := range rows {
			for h := range heads {
				for i := range nope + rope {
					want := shared[r*rope+max(i-nope, 0)]
					if i < nope {
						want = kv[r*latent+h*(nope+value)+i]
					}
					if got := k[r*keys+h*(nope+rope)+i]; got != want {
						t.Fatalf("row %d, head %d: number %d of the key is %g, want %g", r, h, i, got, want)
					}
				}
				for i := range value {
					if got, want := v[r*values+h*value+i], kv[r*latent+h*(nope+value)+nope+i]; got != want {
						t.Fatalf("row %d, head %d: number %d of the value is %g, want %g", r, h, i, got, want)
					}
				}
			}
		}
		dk, dv := repeat(l.K), repeat(l.V)
		GatherLatent(x.stream, l)
		dot := func(a, b []float64) (sum float64) {
			for i := range a {
				sum += a[i] * b[i]
			}
			return sum
		}
		up := dot(k, dk) + dot(v, dv)
		if down := dot(kv, x.get(l.KV)) + dot(shared, x.get(l.Shared)); math.Abs(up-down) > 0 {
			t.Fatalf("%g forward and %g backward", up, down)
		}
		x.untouched()
	})
}

func TestLatentRefuses(t *testing.T) {
	x := newAttentionLab(t, attentionDevice(t), attentionCase{batch: 1, seq: 4, heads: 1, kvHeads: 1, keyDim: 4, valueDim: 2})
	defer x.close()
	// A row has 4 columns and another has 2: keys of 2 + 2 numbers and values of 2.
	l := Latent{K: x.Q, V: x.V, KV: x.K, Shared: x.V, Heads: 1, Nope: 2}
	l.launch(&spreadKernel, device.Write, device.Read)
	for name, spoil := range map[string]func(l *Latent){
		"no heads":    func(l *Latent) { l.Heads = 0 },
		"other heads": func(l *Latent) { l.Heads = 2 },
		"other rows":  func(l *Latent) { l.V = l.V.Part(0, 3) },
		"mixed types": func(l *Latent) { l.Shared.Type = kernels.BF16 },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("the launch was made")
				}
			}()
			l := l
			spoil(&l)
			l.launch(&spreadKernel, device.Write, device.Read)
		})
	}
}

// latentTrial returns the kind of trial for one direction.
func latentTrial(issue func(device.Stream, Latent)) kind {
	return func(x *trial) func(device.Stream) {
		t, rows, heads := x.number(), x.atMost(9, 400), 1+x.IntN(5)
		nope, rope, value := 1+x.IntN(40), 1+x.IntN(40), 1+x.IntN(40)
		packed := x.matrix(t, rows, heads*(nope+rope+value))
		l := Latent{
			K: packed.Columns(0, heads*(nope+rope)), V: packed.Columns(heads*(nope+rope), heads*value),
			KV: x.matrix(t, rows, heads*(nope+value)), Shared: x.matrix(t, rows, rope), Heads: heads, Nope: nope,
		}
		return func(s device.Stream) { issue(s, l) }
	}
}
