// This file owns the proof that sharding changes nothing: every pool trains to
// the same bits as whole parameters on every rank.

package fsdp

import (
	"errors"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/comm"
)

// differ is the first place where two runs differ, or -1.
func differ(a, b []float32) int {
	if len(a) != len(b) {
		return min(len(a), len(b))
	}
	for i := range a {
		if math.Float32bits(a[i]) != math.Float32bits(b[i]) {
			return i
		}
	}
	return -1
}

var kinds = []struct {
	kind     bucket.Kind
	fallback bucket.Fallback
}{
	{bucket.Dynamic, 0}, {bucket.Rotary, bucket.Persistent}, {bucket.Fixed, bucket.Persistent}, {bucket.Fixed, bucket.DynamicMemory},
	{bucket.Max, bucket.Persistent}, {bucket.Max, bucket.DynamicMemory}, {bucket.Arena, 0}, {bucket.Trace, 0},
}

// SPEC S2.1, S2.2, S2.4, S2.5, S2.6 and S2.7: with every pool, parameters,
// weights and gradients are bit for bit those of no sharding.
func TestSameBitsAsNoSharding(t *testing.T) {
	layouts := []struct{ ranks, ep int }{{1, 1}, {2, 1}, {2, 2}, {4, 2}}
	types := [][3]bucket.Type{{BF16, BF16, FP32}, {BF16, FP32, FP32}, {FP32, FP32, FP32}, {BF16, BF16, BF16}, {BF16, FP32, BF16}}
	few := map[string]int{"dense": 2, "moe": 2, "hybrid": len(types)}
	runs, turn := 0, 0
	for _, name := range []string{"dense", "moe", "hybrid"} {
		for _, l := range layouts {
			for _, x := range types[:few[name]] {
				c := setup{
					model: name, ranks: l.ranks, ep: l.ep, param: x[0], gradComm: x[1], mainGrads: x[2],
					microbatches: 2, steps: 2, plain: true,
				}
				want, err := c.train(cpuDevice, comm.Run, loop)
				if err != nil {
					t.Fatal(c, err)
				}
				c.plain = false
				turn++
				for i, k := range kinds {
					if testing.Short() && (i+turn)%4 != 0 {
						continue
					}
					c.kind, c.fallback = k.kind, k.fallback
					// With each model, each kind meets each depth.
					c.prefetch, c.behind = (i+turn)%4, (i+turn/4)%3
					if runs++; c.kind == bucket.Max {
						c.prefetch, c.behind = max(1, c.prefetch), max(1, c.behind)
					}
					got, err := c.train(cpuDevice, comm.Run, loop)
					if err != nil {
						t.Fatal(c, err)
					}
					for r := range got {
						if at := differ(got[r], want[r]); at >= 0 {
							t.Fatalf("%v: number %d on rank %d is %v, want %v", c, at, r, got[r][at], want[r][at])
						}
					}
				}
			}
		}
	}
	t.Logf("%d runs with the bits of no sharding", runs)
}

// lossOf is the loss of the present parameters.
func lossOf(r *rank) (float32, error) {
	r.compute.Fill(r.loss.All(), 0)
	r.e.begin(Key{Phase: Evaluate, Microbatches: 1})
	if err := errors.Join(r.forward(), r.e.end()); err != nil {
		return 0, err
	}
	raw := make([]byte, 4)
	err := r.compute.Download(raw, r.loss.All())
	return decode(raw, 0, FP32), err
}

// The layers' gradients are real ones: the loss changes by as much as they say.
func TestGradientsAreReal(t *testing.T) {
	c := setup{model: "hybrid", ranks: 1, ep: 1, param: FP32, gradComm: FP32, mainGrads: FP32, kind: bucket.Arena, prefetch: 1, behind: 1, microbatches: 1}
	checked := 0
	_, err := c.train(cpuDevice, comm.Run, func(w *world) error {
		r := w.ranks[0]
		if err := r.initialise(); err != nil {
			return err
		}
		r.feed(0)
		r.e.begin(r.key())
		if err := errors.Join(r.forward(), r.backward(), r.e.end()); err != nil {
			return err
		}
		for u, unit := range r.units {
			for i, p := range unit.Params {
				grads, err := r.e.read(u, i, Grads)
				if err != nil {
					return err
				}
				values, err := r.e.read(u, i, Weights)
				if err != nil {
					return err
				}
				for _, at := range []int64{0, p.Elements() / 2, p.Elements() - 1} {
					const by = 1.0 / 256
					was := values[at]
					var loss [2]float32
					for side := range loss {
						values[at] = was + float32(2*side-1)*by
						if err := r.e.load(u, i, values); err != nil {
							return err
						}
						if loss[side], err = lossOf(r); err != nil {
							return err
						}
					}
					values[at] = was
					if err := r.e.load(u, i, values); err != nil {
						return err
					}
					slope := float64(loss[1]-loss[0]) / (2 * by)
					if math.Abs(slope-float64(grads[at])) > 2e-3+0.02*math.Abs(slope) {
						t.Errorf("%s, %s[%d]: the gradient is %v and the loss changes by %v", unit.Name, p.Name, at, grads[at], slope)
					}
					if math.Abs(slope) > 1e-3 {
						checked++
					}
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if t.Logf("%d gradients were not about zero", checked); checked < 20 {
		t.Error("too few to mean anything")
	}
}
