// This file owns the planted bugs that involve graphs.

package check_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
)

var plantedInGraphs = []planted{
	{
		name: "graph replay racing an outside copy",
		work: func(w *world, right bool) {
			g := w.capture(func() { w.a.Launch(mix(w.x.All(), w.y.All())) })
			w.a.Replay(g)
			if right {
				w.order(w.a, w.out)
			}
			w.out.Copy(w.host.All(), w.x.All())
		},
		first: `kernel mix #1 on stream "a" in replay 1 on stream "a"`, second: `copy #1 on stream "copy-out"`,
		words: []string{`for an event recorded on stream "a" after it replayed the graph`},
	},
	{
		name: "outside copy racing the second replay",
		work: func(w *world, right bool) {
			g := w.capture(func() {
				w.order(w.a, w.b)
				w.b.Launch(mix(w.x.All(), w.y.All()))
				w.order(w.b, w.a)
			})
			w.a.Replay(g)
			w.order(w.a, w.out)
			w.out.Copy(w.host.All(), w.x.All())
			if right {
				w.order(w.out, w.a)
			}
			w.a.Replay(g)
		},
		first: `copy #1 on stream "copy-out"`, second: `kernel mix #1 on stream "b" in replay 2 on stream "a"`,
		words: []string{`stream "a" must wait, before`},
	},
	{
		name: "race between branches of a graph",
		work: func(w *world, right bool) {
			g := w.capture(func() {
				fork := w.event(0)
				if !right {
					w.a.Record(fork)
				}
				w.a.Launch(mix(w.x.All(), w.y.All()))
				if right {
					w.a.Record(fork)
				}
				w.b.Wait(fork)
				w.b.Copy(w.host.All(), w.x.All())
				w.order(w.b, w.a)
			})
			w.out.Replay(g)
		},
		first: `kernel mix #1 on stream "a" in replay 1 on stream "copy-out"`, second: `copy #1 on stream "b" in replay 1 on stream "copy-out"`,
		words: []string{`inside the graph, stream "b" must wait, before copy #1, for an event recorded on stream "a" after kernel mix #1`, "stale recording"},
	},
	{
		name: "two graphs on two streams",
		work: func(w *world, right bool) {
			g := w.capture(func() { w.a.Launch(mix(w.x.All(), w.y.All())) })
			h := w.capture(func() { w.a.Launch(mix(w.y.All(), w.x.All())) })
			w.a.Replay(g)
			if right {
				w.order(w.a, w.b)
			}
			w.b.Replay(h)
		},
		first: `kernel mix #1 on stream "a" in replay 1 on stream "a"`, second: `kernel mix #1 on stream "a" in replay 1 on stream "b"`,
	},
	{
		name: "external event recorded too early",
		work: func(w *world, right bool) {
			ready := w.event(device.External)
			g := w.capture(func() {
				w.a.Wait(ready)
				w.a.Launch(mix(w.x.All(), w.y.All()))
			})
			if !right {
				w.b.Record(ready)
			}
			w.b.Fill(w.y.All(), 1)
			if right {
				w.b.Record(ready)
			}
			w.a.Replay(g)
		},
		first: `fill #1 on stream "b"`, second: `kernel mix #1 on stream "a" in replay 1 on stream "a"`,
		words: []string{"stale recording"},
	},
	{
		name: "external event of the replay before",
		work: func(w *world, right bool) {
			left := w.event(device.External)
			g := w.capture(func() {
				w.a.Launch(mix(w.x.All(), w.y.All()))
				w.a.Record(left)
			})
			w.a.Replay(g)
			if !right {
				w.out.Wait(left)
			}
			w.a.Replay(g)
			if right {
				w.out.Wait(left)
			}
			w.out.Copy(w.host.All(), w.x.All())
		},
		first: `kernel mix #1 on stream "a" in replay 2 on stream "a"`, second: `copy #1 on stream "copy-out"`,
		words: []string{"took an earlier recording", "call Wait after Record"},
	},
	{
		name: "update moves a launch onto busy memory",
		work: func(w *world, right bool) {
			l := mix(w.x.Slice(0, 64), w.y.Slice(0, 64))
			l.Slot = 3
			g := w.capture(func() { w.a.Launch(l) })
			w.a.Replay(g)
			w.out.Copy(w.host.Slice(0, 64), w.x.Slice(64, 64))
			if right {
				w.order(w.out, w.a)
			}
			must(g.Update(3, mix(w.x.Slice(64, 64), w.y.Slice(0, 64))))
			w.a.Replay(g)
		},
		first: `copy #1 on stream "copy-out"`, second: `kernel mix #1 on stream "a" in replay 2 on stream "a"`,
	},
	{
		name: "freed under a replay",
		work: func(w *world, right bool) {
			g := w.capture(func() { w.a.Launch(mix(w.x.All(), w.y.All())) })
			w.a.Replay(g)
			if right {
				w.order(w.a, w.b)
			}
			w.b.Free(w.y)
		},
		first: `kernel mix #1 on stream "a" in replay 1 on stream "a"`, second: `free #1 on stream "b"`,
	},
}

// capture returns a graph captured on stream a.
func (w *world) capture(fn func()) device.Graph {
	w.a.BeginCapture()
	fn()
	g, err := w.a.EndCapture()
	must(err)
	return g
}

// A missing join is an error of EndCapture that names the stream and its work.
func TestPlantedMissingJoin(t *testing.T) {
	for _, s := range []*check.Schedule{nil, {Seed: 3}} {
		for _, right := range []bool{false, true} {
			_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
				w.a.BeginCapture()
				w.order(w.a, w.out)
				w.out.Copy(w.host.All(), w.x.All())
				if right {
					w.order(w.out, w.a)
				}
				_, err := w.a.EndCapture()
				var ce *device.CaptureError
				if right != (err == nil) || !right && !errors.As(err, &ce) {
					t.Fatalf("EndCapture, joined %v: %v", right, err)
				}
				if ce != nil && (!strings.Contains(ce.Why, `stream "copy-out"`) || !strings.Contains(ce.Why, "copy #1 at check/planted_graph_test.go")) {
					t.Errorf("the reason is %q", ce.Why)
				}
			}))
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// Replays of one graph never overlap, so two streams may replay it without an
// event; what comes behind a replay is behind the replays before it, too.
func TestReplaysOfOneGraphAreOrdered(t *testing.T) {
	for _, s := range schedules {
		_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
			w.b.Fill(w.x.All(), 0)
			w.b.Fill(w.y.All(), 2)
			must(w.b.Sync())
			g := w.capture(func() { w.a.Launch(mix(w.x.All(), w.y.All())) })
			w.a.Replay(g)
			w.b.Replay(g)
			w.b.Fill(w.y.All(), 3)
			got := make([]byte, 1)
			must(w.b.Download(got, w.x.Slice(3, 1)))
			// x = 31x + y + 7, twice from zero with y = 2: 9, then 288 = 256 + 32.
			if want := byte(32); got[0] != want {
				t.Errorf("under %+v: %d, want %d", s, got[0], want)
			}
		}))
		if err != nil {
			t.Errorf("under %+v: %v", s, err)
		}
	}
}
