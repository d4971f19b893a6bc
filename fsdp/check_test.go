// This file owns the pipeline under the race checker: no schedule changes a bit,
// and every wait is needed.

package fsdp

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/comm"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
)

// program is a training run for the checker, one rank at a time, whose results
// must be the given ones.
func (c setup) program(want [][]float32, body func(w *world) error) check.Program {
	return func(ck *check.Checker) error {
		got, err := c.train(func() (device.Device, error) {
			d, err := cpuDevice()
			if err != nil {
				return nil, err
			}
			return ck.Wrap(d), nil
		}, comm.Lockstep, body)
		if err != nil {
			return err
		}
		for r := range got {
			if at := differ(got[r], want[r]); at >= 0 {
				return fmt.Errorf("number %d on rank %d is %v, want %v", at, r, got[r][at], want[r][at])
			}
		}
		return nil
	}
}

// reference is what the run without sharding gives.
func (c setup) reference(t *testing.T) [][]float32 {
	t.Helper()
	c.plain = true
	want, err := c.train(cpuDevice, comm.Run, loop)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// SPEC S2.1, S6.2: under every schedule of the streams of all ranks, the checker
// finds nothing and the bits are the same.
func TestPipelineUnderAnySchedule(t *testing.T) {
	turn := 0
	for _, c := range []setup{
		{model: "dense", ranks: 1, ep: 1, microbatches: 2}, {model: "hybrid", ranks: 1, ep: 1, microbatches: 2},
		{model: "moe", ranks: 2, ep: 2, microbatches: 2}, {model: "hybrid", ranks: 4, ep: 2, microbatches: 1},
	} {
		c.param, c.gradComm, c.mainGrads, c.steps = BF16, BF16, FP32, 2
		seeds := 5 // which is one of each manner
		if testing.Short() || c.ranks == 4 {
			seeds = 2
		}
		want := c.reference(t)
		for i, k := range kinds {
			if testing.Short() && i%3 != turn%3 {
				turn++
				continue
			}
			c.kind, c.fallback = k.kind, k.fallback
			c.prefetch, c.behind = turn%4, turn%3
			if turn++; c.kind == bucket.Max {
				c.prefetch, c.behind = max(1, c.prefetch), max(1, c.behind)
			}
			if err := check.Explore(check.Options{}, seeds, c.program(want, loop)); err != nil {
				t.Fatal(c, err)
			}
		}
	}
}

// busy is a loop whose work leans on every wait: between steps the optimiser's
// stream writes parameters and reads gradients.
func busy(r *rank) error {
	if err := r.initialise(); err != nil {
		return err
	}
	e := r.e.(*sharded)
	for step := range r.c.steps {
		r.feed(step)
		if step == 0 {
			for _, s := range e.p.Shards() { // as the optimiser does before later steps
				r.work(&momentum, "wrw", ranges{e.m.Slice(0, 0), s.Grads, e.m.Slice(0, 0)}, flag(r.c.mainGrads), 0)
			}
			e.p.Cast(r.compute)
		}
		if err := r.step(); err != nil {
			return err
		}
	}
	return r.compute.Sync()
}

// SPEC S6.2: without any one of its waits the pipeline is caught. With several
// ranks, some waits of the collectives are implied by others; those are not the
// pipeline's.
func TestEveryWaitIsNeeded(t *testing.T) {
	for _, c := range []setup{
		{model: "small", ranks: 1, ep: 1, prefetch: 1, behind: 1},
		{model: "hybrid", ranks: 1, ep: 1, prefetch: 2, behind: 1},
		{model: "small", ranks: 2, ep: 1, prefetch: 1, behind: 1},
	} {
		c.param, c.gradComm, c.mainGrads, c.steps, c.microbatches = BF16, BF16, FP32, 2, 1
		want := c.reference(t)
		for _, k := range kinds {
			if c.kind, c.fallback = k.kind, k.fallback; c.kind != bucket.Arena && (c.model != "small" || c.ranks > 1 || testing.Short()) {
				continue
			}
			edges, err := check.EveryEdge(0, c.program(want, func(w *world) error { return w.each(busy) }))
			if err != nil {
				t.Fatal(c, err)
			}
			ours, total := 0, edges.Caught
			for _, missed := range edges.Uncaught {
				if !strings.Contains(missed, " at comm/") {
					ours++
					total++
					t.Log("nobody misses ", missed)
				}
			}
			t.Logf("%v: caught %d of %d, beside %d of the collectives that others imply", c, edges.Caught, total, len(edges.Uncaught)-ours)
			if ours > 0 || edges.Total == 0 {
				t.Error("a wait that nobody misses")
			}
		}
	}
}
