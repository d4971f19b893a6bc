// This file owns the tests of borrowed memory whose copies are under way: it is let go
// when the host sees that they are over, when there is no room, or when it is drained.

package offload

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// told is a device that says of work that it is over when it is told to, and not when it
// happens to be: the host sees the same in every run.
type told struct {
	device.Device
	over func() bool
	asks int
}

type toldStream struct{ device.Stream }

type toldEvent struct {
	device.Event
	dev *told
}

func (d *told) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	return &toldStream{s}, nil
}

func (d *told) NewEvent(f device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(f)
	if err != nil {
		return nil, err
	}
	return &toldEvent{e, d}, nil
}

func (s *toldStream) Record(e device.Event) { s.Stream.Record(e.(*toldEvent).Event) }
func (s *toldStream) Wait(e device.Event)   { s.Stream.Wait(e.(*toldEvent).Event) }

func (e *toldEvent) Done() bool {
	e.dev.asks++
	over := e.dev.over()
	for over && !e.Event.Done() {
		runtime.Gosched()
	}
	return over
}

// What the host sees of copies: nothing, the end of each at once, or some.
func never() func() bool  { return func() bool { return false } }
func always() func() bool { return func() bool { return true } }

func some(seed uint64) func() func() bool {
	return func() func() bool {
		rng := rand.New(rand.NewPCG(seed, 5))
		return func() bool { return rng.IntN(2) == 0 }
	}
}

// lending is a program for the checker. Without sees the host sees what there is.
func lending(plan *residency.Plan, steps int, sees, drain func() func() bool) check.Program {
	return check.On(cpuDevice, func(dev device.Device) error {
		if sees != nil {
			dev = &told{Device: dev, over: sees()}
		}
		l, err := newBorrowLoop(dev)
		if err == nil {
			l.plan, l.drain = plan, drain()
			err = l.train(steps, rand.New(rand.NewPCG(1, 1)), l.step)
		}
		return errors.Join(err, l.close())
	})
}

// SPEC S6.4, S6.2: under any schedule, whatever the host sees of it and whenever it
// drains, what is loaded is what was saved, and the loop may use all memory that it was
// told of, at once. Without any one of its waits the manager is caught.
func TestLentUnderAnySchedule(t *testing.T) {
	seeds := 10
	if testing.Short() || raceEnabled {
		seeds = 2
	}
	for name, plan := range lentPlans {
		t.Run(name, func(t *testing.T) {
			for _, drain := range []func() func() bool{never, always, some(1)} {
				if err := check.Explore(check.Options{}, seeds, lending(plan, 3, nil, drain)); err != nil {
					t.Fatal(err)
				}
			}
			waits := map[string]int{}
			for how, x := range map[string]struct{ sees, drain func() func() bool }{
				"nothing is seen": {never, never},
				"all is seen":     {always, never},
				"some is seen":    {some(2), some(3)},
				"all is drained":  {never, always},
			} {
				edges, err := check.DropEach(check.Waits, 0, lending(plan, 2, x.sees, x.drain))
				if err != nil {
					t.Fatal(err)
				}
				if waits[how] = edges.Total; edges.Caught != edges.Total || edges.Total == 0 && name != "none leave" {
					t.Errorf("%s: a wait that nobody misses: %v", how, edges)
				}
			}
			t.Log(waits)
		})
	}
}

// SPEC S6.4: on every device, eager and replayed; a step takes no device memory of the
// manager's, and if something leaves or there is a limit the loop's allocator needs less.
// What the host sees makes that less still, and never more.
func TestLentOnEveryDevice(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for name, plan := range lentPlans {
			t.Run(name, func(t *testing.T) {
				dev := open(t)
				l, err := newBorrowLoop(dev)
				if err != nil {
					t.Fatal(err)
				}
				l.plan = plan
				rng := rand.New(rand.NewPCG(1, 1))
				if err := l.train(3, rng, l.step); err != nil {
					t.Fatal(err)
				}
				eager, st := l.most, l.m.Last()
				if mine, _ := l.m.Memory(); mine != 0 {
					t.Errorf("%v are taken", mine)
				}
				for len(l.free) < 2*lentLayers { // which a capture could not allocate
					b, err := dev.Alloc(memory.Device, lentSize, "block")
					if err != nil {
						t.Fatal(err)
					}
					l.all, l.free = append(l.all, b), append(l.free, b)
				}
				l.compute.BeginCapture()
				failed := l.step()
				l.graph, err = l.compute.EndCapture()
				if err = errors.Join(err, failed); err != nil {
					t.Fatal(err)
				}
				leaves, over := plan.Offload[lentGroup(0)] || plan.Device > 0, 0
				if plan.Device > 0 {
					over = 1 // there is no room for what is there already, and then there is
				}
				if counted := int(l.m.Last().Device / memory.KiB); l.most != counted+over || leaves != (l.most < lentLayers+1) || leaves != (st.Out > 0) || eager > l.most {
					t.Errorf("%d blocks do for a step of %d tensors, and %d for a captured one, of which %d are counted; %+v", eager, lentLayers+1, l.most, counted, st.Counts)
				}
				if err := l.train(3, rng, func() error { l.compute.Replay(l.graph); return nil }); err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(l.close(), dev.Close()); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// SPEC S4.1, S6.4: a step that is captured asks nothing of the host, and is the one whose
// host sees nothing, whatever is over: replays meet other times.
func TestCapturedStepsDoNotPoll(t *testing.T) {
	asked, sooner := 0, 0
	for name, plan := range lentPlans {
		var eager, captured [2]Stats
		for k, sees := range []func() func() bool{never, always} {
			dev := &told{Device: openCPU(t), over: sees()}
			l, err := newBorrowLoop(dev)
			if err != nil {
				t.Fatal(err)
			}
			l.plan = plan
			rng := rand.New(rand.NewPCG(1, 1))
			if err := l.train(2, rng, l.step); err != nil {
				t.Fatal(err)
			}
			before := dev.asks
			eager[k], asked = l.m.Last(), asked+before
			l.compute.BeginCapture()
			failed := l.step()
			l.graph, err = l.compute.EndCapture()
			if captured[k] = l.m.Last(); dev.asks != before {
				t.Errorf("%s: the capture asks %d times", name, dev.asks-before)
			}
			replay := func() error { l.compute.Replay(l.graph); return nil }
			if err := errors.Join(err, failed, l.train(2, rng, replay), l.close(), dev.Close()); err != nil {
				t.Fatalf("%s: %v", name, err)
			}
		}
		if captured[0].Counts != captured[1].Counts || captured[0].Counts != eager[0].Counts || captured[0].Device != captured[1].Device || captured[0].Device != eager[0].Device {
			t.Errorf("%s: %+v and %+v are captured, %+v is eager", name, captured[0], captured[1], eager[0])
		}
		if a, b := eager[0], eager[1]; a.Out != b.Out || b.In < a.In || b.Device > a.Device {
			t.Errorf("%s: %+v where nothing is seen, %+v where all is", name, a, b)
		} else if b.In > a.In || b.Device < a.Device {
			sooner++
		}
	}
	if asked == 0 || sooner == 0 {
		t.Errorf("asked %d times, and %d plans differ for it", asked, sooner)
	}
}

// What the trace says of lent memory is what the machine counts: evictions and what came
// late, and nothing that was only waited for or was still there.
func TestLentTrace(t *testing.T) {
	var all residency.Counts
	for name, plan := range lentPlans {
		for _, sees := range []func() func() bool{never, always, some(1)} {
			dev := &told{Device: openCPU(t), over: sees()}
			l, err := newBorrowLoop(dev)
			if err != nil {
				t.Fatal(err)
			}
			var got residency.Counts
			var inUse, most int64
			var tr lines
			l.m.cfg.Trace = &tr
			l.plan = plan
			if err := errors.Join(l.train(1, rand.New(rand.NewPCG(1, 1)), l.step), l.close(), dev.Close()); err != nil {
				t.Fatal(err)
			}
			for _, e := range tr {
				switch e.Kind {
				case trace.Evict:
					got.Evicted++
				case trace.Late:
					got.Late++
				case trace.Offload:
					got.Out++
				case trace.Reload:
					got.In++
				case trace.Alloc, trace.Free:
					if e.Tier == memory.Device {
						inUse += map[trace.Kind]int64{trace.Alloc: e.Bytes, trace.Free: -e.Bytes}[e.Kind]
						most = max(most, inUse)
					}
				}
			}
			want := l.m.Last().Counts
			if got.Evicted != want.Evicted || got.Late != want.Late || got.Out != want.Out || got.In != want.In || inUse != 0 || most != int64(l.m.Last().Device) {
				t.Errorf("%s: the trace has %+v and %d of at most %d bytes, there were %+v and %v", name, got, inUse, most, want, l.m.Last().Device)
			}
			all.Evicted, all.Late = all.Evicted+want.Evicted, all.Late+want.Late
		}
	}
	if min(all.Evicted, all.Late) == 0 {
		t.Errorf("%+v", all)
	}
}
