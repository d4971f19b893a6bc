// This file owns the tests of captures: a step of all ranks as one graph, replayed.

package fsdp

import (
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
)

// capture makes one graph of a step of all ranks. An event joins the other ranks' streams
// to that of rank 0, and one event each joins them back.
func (w *world) capture(step func(r *rank) error) (g device.Graph, err error) {
	first := w.ranks[0].compute
	var events []device.Event
	defer func() {
		for _, e := range events {
			err = errors.Join(err, e.Close())
		}
	}()
	for _, d := range w.devs {
		e, err := d.NewEvent(0)
		if err != nil {
			return nil, err
		}
		events = append(events, e)
	}
	first.BeginCapture()
	first.Record(events[0])
	for _, r := range w.ranks[1:] {
		r.compute.Wait(events[0])
	}
	err = w.each(step)
	for i, r := range w.ranks[1:] {
		r.compute.Record(events[i+1])
		first.Wait(events[i+1])
	}
	g, failed := first.EndCapture()
	return g, errors.Join(err, failed)
}

// sync waits for all ranks, because a replay on rank 0's stream must come after the work
// of the others, and the other way round.
func (w *world) sync() (err error) {
	for _, d := range w.devs {
		err = errors.Join(err, d.Sync())
	}
	return err
}

// replayed trains eagerly, by replay, and eagerly again. If early is set, the captured
// step is the one that records its order.
func replayed(early bool) func(w *world) error {
	return func(w *world) error {
		if err := w.each((*rank).initialise); err != nil {
			return err
		}
		for _, d := range w.devs {
			d.Freeze()
		}
		eager := func(r *rank) error {
			r.feed(0)
			return r.step()
		}
		if !early {
			if err := w.each(eager); err != nil {
				return err
			}
		}
		if err := w.sync(); err != nil {
			return err
		}
		g, err := w.capture((*rank).step)
		if err != nil {
			return err
		}
		first := 1
		if early {
			first = 0
		}
		for step := first; step < w.c.steps-1; step++ {
			for _, r := range w.ranks {
				r.feed(step)
			}
			err = errors.Join(err, w.sync())
			w.ranks[0].compute.Replay(g)
			err = errors.Join(err, w.sync())
		}
		if err := errors.Join(err, g.Close()); err != nil {
			return err
		}
		return w.each(func(r *rank) error {
			r.feed(w.c.steps - 1)
			return errors.Join(r.step(), r.compute.Sync())
		})
	}
}

// SPEC S2.1, S6.2: the step of all ranks, captured as one graph with the optimiser, gives
// the same bits, alone and under seeded schedules.
func TestCapturedStep(t *testing.T) {
	t.Parallel()
	for _, c := range []setup{
		{model: "dense", ranks: 1, ep: 1}, {model: "hybrid", ranks: 2, ep: 1}, {model: "hybrid", ranks: 4, ep: 2},
	} {
		c.param, c.gradComm, c.mainGrads, c.microbatches, c.steps, c.prefetch, c.behind = BF16, BF16, FP32, 2, 4, 1, 1
		want := c.reference(t)
		for _, c.kind = range bucket.PoolKinds[1:] {
			if testing.Short() && c.kind != bucket.Max {
				continue
			}
			for _, early := range []bool{false, true} {
				for _, p := range []struct {
					name  string
					drive driver
				}{{"at once", comm.Run}, {"one at a time", comm.Lockstep}} {
					got, err := c.train(cpuDevice, p.drive, replayed(early))
					if err != nil {
						t.Fatal(c, p.name, err)
					}
					if err := same(got, want); err != nil {
						t.Fatal(c, ", ", p.name, ": ", err)
					}
				}
			}
			if c.ranks < 4 {
				if err := check.Explore(check.Options{}, 2, c.program(want, replayed(false))); err != nil {
					t.Fatal(c, err)
				}
			}
		}
	}
}

// Dynamic memory cannot be captured, and the end of the capture returns an error.
func TestDynamicCannotBeCaptured(t *testing.T) {
	c := setup{model: "dense", ranks: 1, ep: 1, param: BF16, gradComm: BF16, mainGrads: FP32, microbatches: 1, kind: bucket.Dynamic, prefetch: 1}
	_, err := c.train(cpuDevice, comm.Run, func(w *world) error {
		r := w.ranks[0]
		r.feed(0)
		if err := errors.Join(r.step(), w.sync()); err != nil {
			return err
		}
		g, err := w.capture((*rank).step)
		var refused *device.CaptureError
		if g != nil || !errors.As(err, &refused) {
			t.Errorf("graph %v, error %v", g, err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
