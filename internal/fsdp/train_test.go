// This file owns the proof that sharding changes nothing: every pool trains to
// the same bits as whole parameters on every rank.

package fsdp

import (
	"errors"
	"fmt"
	"math"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// differ returns the first place where two runs differ, or -1.
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
	kind     bucket.PoolKind
	fallback bucket.Fallback
}{
	{bucket.Dynamic, 0}, {bucket.Rotary, bucket.Persistent}, {bucket.Fixed, bucket.Persistent}, {bucket.Fixed, bucket.DynamicMemory},
	{bucket.Max, bucket.Persistent}, {bucket.Max, bucket.DynamicMemory}, {bucket.Arena, 0}, {bucket.Recorded, 0},
}

// types has triples: the type of parameters, of communicated gradients, and of
// accumulated gradients.
var types = [][3]bucket.Type{{BF16, BF16, FP32}, {BF16, FP32, FP32}, {FP32, FP32, FP32}, {BF16, BF16, BF16}, {BF16, FP32, BF16}}

// sweep returns every model with every number of ranks and every pool. Types, depths and
// numbers of microbatches change from one to the next.
func sweep(microbatches int) (all []setup) {
	turn := 0
	for _, model := range []string{"dense", "moe", "hybrid"} {
		for _, l := range []struct{ ranks, ep int }{{1, 1}, {2, 1}, {2, 2}, {4, 2}} {
			for i, k := range kinds {
				x := types[(turn+i)%len(types)]
				c := setup{
					model: model, ranks: l.ranks, ep: l.ep, param: x[0], gradComm: x[1], mainGrads: x[2], kind: k.kind, fallback: k.fallback,
					prefetch: (turn + i) % 4, behind: (turn/4 + i) % 3, microbatches: microbatches, steps: 2,
				}
				if c.kind == bucket.Max {
					c.prefetch, c.behind = max(1, c.prefetch), max(1, c.behind)
				}
				all = append(all, c)
			}
			turn++
		}
	}
	return all
}

// same compares what all ranks read.
func same(got, want [][]float32) error {
	for r := range got {
		if at := differ(got[r], want[r]); at >= 0 {
			return fmt.Errorf("number %d on rank %d is %v, want %v", at, r, got[r][at], want[r][at])
		}
	}
	return nil
}

// SPEC S2.1, S2.2, S2.4, S2.5, S2.6 and S2.7: with every pool, parameters, weights and
// gradients have the same bits as without sharding.
func TestSameBitsAsNoSharding(t *testing.T) {
	t.Parallel()
	runs := 0
	for i, c := range sweep(2) {
		if testing.Short() && i%5 != 0 {
			continue
		}
		got, err := c.train(cpuDevice, comm.Run, trainAndCollect)
		if err == nil {
			err = same(got, c.reference(t))
		}
		if err != nil {
			t.Fatal(c, ": ", err)
		}
		runs++
	}
	t.Logf("%d runs with the bits of no sharding", runs)
}

// lossOf returns the loss of the current parameters.
func lossOf(r *rank) (float32, error) {
	r.compute.Fill(r.loss.All(), 0)
	r.e.begin(memory.Key{Phase: memory.Evaluate, Microbatches: 1})
	if err := errors.Join(r.forward(), r.e.end()); err != nil {
		return 0, err
	}
	loss, err := r.download(r.loss.All(), FP32)
	if err != nil {
		return 0, err
	}
	return loss[0], nil
}

// The gradients of the layers are right: the loss changes by as much as they say.
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
