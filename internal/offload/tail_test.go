// This file owns the tests of the copies that scopes cause: that they are graphs, and
// when they begin.

package offload

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S4.1: copies out begin in the middle of a scope, each where what it reads is
// complete; those of a delayed scope wait for its end. At every replay.
func TestCopiesBeginInsideScopes(t *testing.T) {
	later := memory.GroupID{Name: "mlp", Layer: 1}
	for _, options := range [][]ScopeOption{nil, {Delay}} {
		r := newRig(t, openCPU(t), Config{})
		gate := make(chan struct{})
		forward := func(g memory.GroupID) {
			s := r.alloc(5000)
			r.compute.Fill(s.Range(), 7)
			r.save(g, flat(s))
			s.Free()
		}
		var scope *Scope
		for step := range 3 {
			r.m.Begin(leaves(someGroup, later))
			var err error
			if step == 0 {
				scope, err = r.m.Capture(func() error {
					forward(someGroup)
					r.compute.Host(func() { <-gate })
					forward(later)
					return nil
				}, options...)
			} else {
				err = scope.Replay()
			}
			r.ok(err)
			first, last := scope.copies[residency.Out].events[0], scope.copies[residency.Out].events[1]
			done := first.Done()
			for tries := 0; !done && (options == nil || tries < 20); tries++ { // while the graph is held in its middle
				time.Sleep(time.Millisecond)
				done = first.Done()
			}
			if done != (options == nil) || last.Done() {
				t.Errorf("options %v, step %d: the copies out are done in the middle of the graph: %v, %v", options, step, done, last.Done())
			}
			gate <- struct{}{}
			for _, g := range []memory.GroupID{later, someGroup} {
				r.ok(r.m.Load(g))
				r.m.Release(g)
			}
			r.ok(r.m.End())
			r.ok(r.compute.Sync())
			if r.m.Last().OutBytes != 10000 {
				t.Errorf("step %d: %+v", step, r.m.Last())
			}
		}
		r.ok(scope.Close())
		r.close()
	}
}

// SPEC S4.1: a copy in ahead of need waits for the copy out of the scope whose bytes
// it gets, and one before it that needs none of them does not.
func TestCopiesInBeginInsideScopes(t *testing.T) {
	x, y := memory.GroupID{Name: "x"}, memory.GroupID{Name: "y"}
	s := &schedule.Schedule{}
	for _, g := range []memory.GroupID{x, y, someGroup} {
		s.Save(g)
	}
	for _, g := range []memory.GroupID{x, y, someGroup} {
		s.Load(g)
	}
	plan := leaves(x, y, someGroup)
	plan.Schedule, plan.Prefetch = s, [][]memory.GroupID{2: {x, y}}
	r := newRig(t, openCPU(t), Config{Device: 4096})
	gate := make(chan struct{})
	forward := func(g memory.GroupID, n memory.Bytes, work func()) {
		s := r.alloc(n)
		work()
		r.compute.Fill(s.Range(), 7)
		r.save(g, flat(s))
		s.Free()
	}
	var scope *Scope
	for step := range 3 {
		r.m.Begin(plan)
		forward(x, 1024, func() {})
		forward(y, 3072, func() {}) // then both are away, and the scope takes the first 3072 bytes
		var err error
		if step > 0 {
			err = scope.Replay()
		} else {
			scope, err = r.m.Capture(func() error {
				forward(someGroup, 3072, func() { r.compute.Host(func() { <-gate }) })
				return nil
			})
		}
		r.ok(err)
		first, second := scope.copies[residency.In].events[0], scope.copies[residency.In].events[1]
		for !first.Done() {
			time.Sleep(time.Millisecond)
		}
		if second.Done() {
			t.Errorf("step %d: both copies in are done in the middle of the graph", step)
		}
		gate <- struct{}{}
		for _, g := range []memory.GroupID{x, y, someGroup} {
			r.ok(r.m.Load(g))
			r.m.Release(g)
		}
		r.ok(r.m.End())
	}
	r.ok(r.compute.Sync())
	r.ok(scope.Close())
	r.close()
}

// SPEC S4.1: what a scope makes the copy streams do is captured with it: at a replay
// the host issues one graph a stream, whatever the number of storages, and nothing
// else but waits.
func TestCopiesOfScopesAreGraphs(t *testing.T) {
	const n = 9
	for _, options := range [][]ScopeOption{nil, {Delay}} {
		r := newRig(t, openCPU(t), Config{})
		before := memory.GroupID{Name: "mlp"}
		plan := leaves(someGroup, before)
		s := &schedule.Schedule{}
		s.Save(before)
		s.Save(someGroup)
		s.Load(someGroup)
		s.Load(before)
		plan.Schedule, plan.Prefetch = s, [][]memory.GroupID{1: {before}}
		var scope *Scope
		for step := range 3 {
			r.m.Begin(plan)
			a := r.alloc(3000)
			r.compute.Fill(a.Range(), 1)
			r.save(before, flat(a))
			a.Free()
			from := r.dev.Counters()
			var err error
			if step > 0 {
				err = scope.Replay()
			} else {
				scope, err = r.m.Capture(func() error {
					var ts []Tensor
					for range n {
						ts = append(ts, flat(r.alloc(1000)))
						r.compute.Fill(ts[len(ts)-1].Storage.Range(), 2)
					}
					r.save(someGroup, ts...)
					for _, x := range ts {
						x.Storage.Free()
					}
					return nil
				}, options...)
			}
			r.ok(err)
			to := r.dev.Counters()
			if to.Copies != from.Copies || to.Launches != from.Launches || to.Replays != from.Replays+3 {
				t.Errorf("step %d: %d copies and %d launches outside of graphs, %d replays", step, to.Copies-from.Copies, to.Launches-from.Launches, to.Replays-from.Replays)
			}
			for _, g := range []memory.GroupID{someGroup, before} {
				r.ok(r.m.Load(g))
				r.m.Release(g)
			}
			r.ok(r.m.End())
			if c := r.m.Last(); c.Out != n+1 || c.In != n+1 || c.Late != n {
				t.Errorf("step %d: %+v", step, c)
			}
		}
		scope.copies[residency.Out].moves[0].dst.Off++ // a replay never moves anything else
		r.m.Begin(plan)
		a := r.alloc(3000)
		r.save(before, flat(a))
		a.Free()
		func() {
			defer func() {
				if !strings.Contains(fmt.Sprint(recover()), "is replayed to move") {
					t.Error("a scope moved something else")
				}
			}()
			_ = scope.Replay()
		}()
		r.ok(r.m.End())
		r.ok(scope.Close())
		r.close()
	}
}
