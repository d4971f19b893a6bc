// This file owns the tests of the pipeline under the race checker: no schedule changes a
// bit, and every wait is needed.

package fsdp

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
)

// program returns a training run for the checker, one rank at a time. Its results must
// equal the given ones.
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
		return same(got, want)
	}
}

// reference returns the results of the run without sharding.
func (c setup) reference(t *testing.T) [][]float32 {
	t.Helper()
	c.plain = true
	want, err := c.train(cpuDevice, comm.Run, trainAndCollect)
	if err != nil {
		t.Fatal(err)
	}
	return want
}

// SPEC S2.1, S6.2: under every schedule of the streams of all ranks, the checker finds
// nothing and the bits are the same. Each setup has another seed, and five of them cover
// every kind.
func TestPipelineUnderAnySchedule(t *testing.T) {
	t.Parallel()
	for i, c := range sweep(1) {
		if testing.Short() && i%6 != 0 {
			continue
		}
		o := check.Options{Schedule: &check.Schedule{Seed: uint64(i + 1)}}
		if err := check.Explore(o, 1, c.program(c.reference(t), trainAndCollect)); err != nil {
			t.Fatal(c, ": ", err)
		}
	}
}

// busyLoop runs steps in which every wait matters: between steps, the optimiser's stream
// writes parameters and reads gradients. The host waits for nothing until all ranks have
// issued everything, because it would add an order that the streams lack.
func busyLoop(r *rank) error {
	if err := r.initialise(); err != nil {
		return err
	}
	e := r.e.(*sharded)
	for step := range r.c.steps {
		r.feed(step)
		if step == 0 {
			for _, s := range e.p.Shards() { // as the optimiser does before later steps
				r.launch(&momentum, "wrw", ranges{e.m.Slice(0, 0), s.Grads, e.m.Slice(0, 0)}, typeFlag(r.c.mainGrads), 0)
			}
			e.p.Cast(r.compute)
		}
		if err := r.step(); err != nil {
			return err
		}
	}
	return nil
}

// touched is a communicator whose caller rewrites the memory that a call reads right
// before and right after the call. The pipeline does not rewrite it: the shards that it
// gathers stay the same from the beginning of a step to its end, so the first and the
// last wait of a step for other ranks' shards imply the rest.
type touched struct{ comm.Comm }

var rewrite = device.Kernel{Name: "rewrite", Go: func(*device.Launch) {}}

func touch(s device.Stream, r device.Range) {
	l := device.NewLaunch(&rewrite, 1, 1)
	l.Write(r)
	s.Launch(l)
}

func (c touched) AllGather(s device.Stream, dst, src device.Range) {
	touch(s, src)
	c.Comm.AllGather(s, dst, src)
	touch(s, src)
}

func (c touched) ReduceScatter(s device.Stream, dst, src device.Range, t comm.Type, op comm.Op) {
	touch(s, src)
	c.Comm.ReduceScatter(s, dst, src, t, op)
	touch(s, src)
}

// SPEC S6.2: the checker notices if any one wait of the pipeline is dropped. It notices
// the waits of collectives between ranks if the memory that they read is rewritten around
// them.
func TestEveryWaitIsNeeded(t *testing.T) {
	t.Parallel()
	for _, c := range []setup{
		{model: "small", ranks: 1, ep: 1, prefetch: 1, behind: 1},
		{model: "hybrid", ranks: 1, ep: 1, prefetch: 2, behind: 1},
		{model: "small", ranks: 2, ep: 1, prefetch: 1, behind: 1},
		{model: "small", ranks: 2, ep: 1, prefetch: 1, behind: 1, touched: true},
	} {
		c.param, c.gradComm, c.mainGrads, c.steps, c.microbatches = BF16, BF16, FP32, 2, 1
		want := c.reference(t)
		for _, k := range kinds {
			c.kind, c.fallback = k.kind, k.fallback
			first := c.model == "small" && c.ranks == 1
			if testing.Short() && !(first && c.kind == bucket.Arena) || !first && c.kind != bucket.Arena {
				continue
			}
			edges, err := check.DropEach(check.Waits, 0, c.program(want, func(w *world) error { return w.each(busyLoop) }))
			if err != nil {
				t.Fatal(c, ": ", err)
			}
			theirs := 0 // the collectives'
			for _, missed := range edges.Uncaught {
				if strings.Contains(missed, ` on stream "gather" at comm/`) || strings.Contains(missed, ` on stream "reduce" at comm/`) {
					theirs++
				}
			}
			t.Logf("%v, touched %v: %d of %d waits are missed, and %d others order ranks by memory that stays as it is", c, c.touched, edges.Caught, edges.Total, theirs)
			if len(edges.Uncaught) > theirs || theirs > 0 && (c.ranks == 1 || c.touched) || edges.Total == 0 {
				t.Error(edges)
			}
		}
	}
}
