// This file owns the tests of steps: what is predicted happens, budgets hold, and
// departures and evaluation disturb nothing.

package offload

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// nobody does nothing.
type nobody struct{ marks residency.Mark }

func (n *nobody) Record(residency.Lane) residency.Mark { n.marks++; return n.marks }
func (*nobody) After(residency.Lane, residency.Mark)   {}
func (*nobody) Out(*residency.Storage)                 {}
func (*nobody) In(*residency.Storage)                  {}
func (*nobody) ReturnMemory(*residency.Storage)        {}
func (*nobody) ProvideMemory(*residency.Storage)       {}

// predict runs a tape without a device, under a budget.
func (l *loop) predict(tape *residency.Tape, dev memory.Bytes) (*residency.Machine, error) {
	m := residency.New(residency.Config{
		Device: memory.Bytes(int64(dev)), Host: memory.Bytes(int64(l.m.limit[memory.Host])), Align: device.Align,
		Window: l.Window, Cap: l.Cap, Least: memory.Bytes(int64(l.Least)),
	}, &nobody{}, l.plan)
	return m, tape.Run(m, func(residency.Op) {})
}

// SPEC S4.1, S5.1: what a tape predicts is what happens, to the byte and the copy.
func TestPrediction(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for name, c := range checked {
			dev := open(t)
			err := onLoop(dev, c, 4, func(l *loop) error {
				m, err := l.predict(l.m.Tape(), l.m.limit[memory.Device])
				if err != nil {
					return err
				}
				got := []int64{int64(l.m.machine.Device().Peak()), int64(l.m.machine.Device().Top()), int64(l.m.machine.Host().Peak()), int64(l.m.machine.Host().Top())}
				want := []int64{int64(m.Device().Peak()), int64(m.Device().Top()), int64(m.Host().Peak()), int64(m.Host().Top())}
				if !slices.Equal(got, want) || m.Counts() != l.m.machine.Counts() {
					return fmt.Errorf("heaps %v, predicted %v; counts %+v, predicted %+v", got, want, l.m.machine.Counts(), m.Counts())
				}
				m.Check()
				d, h := l.m.Memory()
				if most := l.m.Stats(); d < most.Extent || h < most.Host || c.Device > 0 && d > c.Device {
					return fmt.Errorf("%v and %v are held, %v and %v were used", d, h, most.Extent, most.Host)
				}
				if evicts := c.Device > 0; evicts != (l.m.Stats().Evicted > 0) {
					return fmt.Errorf("%d evictions", l.m.Stats().Evicted)
				}
				return nil
			})
			if err = errors.Join(err, dev.Close()); err != nil {
				t.Error(name, err)
			}
		}
	})
}

// SPEC S4.1: the memory that is saved is within 5 % of the bytes that leave, by the
// device's own ledger, also in graphs.
func TestMemorySaved(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		const layers, leave = 120, 108
		for _, h := range []how{eager, whole, scopes, delayed} {
			var held [2]memory.Bytes
			var moved int64
			for i, f := range []func(int) bool{nil, func(i int) bool { return i < leave }} {
				dev := open(t)
				l, err := newLoop(dev, loopConfig{
					pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}, layers: layers, how: h, leave: f, ahead: 2, uniform: true,
				})
				if err == nil {
					l.plan = l.planned(dryOrder(l))
					err = l.train(3, rand.New(rand.NewPCG(1, 1)))
				}
				held[i], _ = l.m.Memory()
				moved = int64(l.m.last.OutBytes)
				for _, o := range dev.Memory().Owners {
					if o.Owner == trace.HeapOwner(memory.Device) && o.Peak != held[i] {
						t.Errorf("%v: the ledger has %v, the manager %v", h, o.Peak, held[i])
					}
				}
				if err = errors.Join(err, l.close(), dev.Close()); err != nil {
					t.Fatal(h, err)
				}
			}
			saved := int64(held[0] - held[1])
			t.Logf("%v: %d bytes without, %d with, %d saved of %d that left", h, held[0], held[1], saved, moved)
			if off := saved - moved; moved < leave*1024 || max(off, -off)*20 > moved {
				t.Errorf("%v: %d bytes left and %d were saved", h, moved, saved)
			}
		}
	})
}

// dryOrder is the schedule of a loop's passes.
func dryOrder(l *loop) *schedule.Schedule {
	s := &schedule.Schedule{}
	for _, p := range l.passes {
		for i := range l.layers {
			if p.Backward {
				s.Load(l.group(p, l.layers-1-i))
			} else {
				s.Save(l.group(p, i))
			}
		}
	}
	return s
}

// SPEC S4.1, S5.2: under the least budget that the tape says will do, the step gives
// the exact result; under any less the error says who has no room for what.
func TestTightestBudget(t *testing.T) {
	for _, p := range pipelines {
		for _, f := range []func(int) bool{all, every3, nil} {
			c := loopConfig{pipeline: p.Pipeline, rank: p.rank, layers: p.layers, leave: f, ahead: 2, Config: Config{Rank: 7}}
			least := memory.Bytes(0)
			dev := openCPU(t)
			err := onLoop(dev, c, 2, func(l *loop) error {
				for least = l.m.Last().Extent; ; least -= device.Align {
					if _, err := l.predict(l.m.Tape(), least-device.Align); err != nil {
						return nil
					}
				}
			})
			if err = errors.Join(err, dev.Close()); err != nil {
				t.Fatal(p.name, err)
			}
			c.Device = least
			tight := func(dev device.Device) error {
				l, err := newLoop(dev, c)
				if err == nil {
					l.plan = l.planned(dryOrder(l))
					err = l.train(2, rand.New(rand.NewPCG(1, 1)))
				}
				if err == nil && l.m.Last().Extent != least {
					err = fmt.Errorf("%v were used of %v", l.m.Last().Extent, least)
				}
				return errors.Join(err, l.close())
			}
			if err := check.Explore(check.Options{}, 3, check.On(cpuDevice, tight)); err != nil {
				t.Error(p.name, err)
			}
			c.Device -= device.Align
			dev = openCPU(t)
			err = tight(dev)
			var full *residency.Full
			var mine *Error
			if !errors.As(err, &full) || !errors.As(err, &mine) || mine.Rank != 7 || full.Limit != c.Device {
				t.Errorf("%s: a budget of %v below the least gives %v", p.name, device.Align, err)
			}
			if err := dev.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// A device with less memory than the budget: what there is becomes the limit, and
// storages leave instead; with far less, the error names the memory that ran out.
func TestMemoryRunsOut(t *testing.T) {
	p := pipelines[0]
	for _, x := range []struct {
		room memory.Bytes
		ok   bool
	}{{64 * memory.MiB, true}, {8 * memory.KiB, true}, {2 * memory.KiB, false}} {
		c := loopConfig{pipeline: p.Pipeline, layers: p.layers, leave: every3, ahead: 1}
		n := memory.Bytes(cell * (2*p.layers + 2))
		dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{3*n + cell + x.room, memory.MiB}})
		if err != nil {
			t.Fatal(err)
		}
		evicted := 0
		err = onLoop(dev, c, 3, func(l *loop) error {
			evicted = l.m.Stats().Evicted
			if d, _ := l.m.Limits(); x.room < memory.MiB && d > x.room {
				t.Errorf("the limit is %v and there are %v", d, x.room)
			}
			return nil
		})
		var oom *device.OutOfMemory
		var full *residency.Full
		if x.ok != (err == nil) || !x.ok && !(errors.As(err, &oom) && errors.As(err, &full)) || x.ok && (evicted > 0) != (x.room < memory.MiB) {
			t.Errorf("%v of room: %d evictions, error %v", x.room, evicted, err)
		}
		if full != nil && (full.Run < 0 || full.Run > full.Limit-full.Live || full.Asked <= full.Run) {
			t.Errorf("%v of room: %+v", x.room, full)
		}
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	}
}

// SPEC S4.1: a step that departs from its plan is exact, and the next one that does
// not follows it again; evaluation in between disturbs nothing.
func TestDepartures(t *testing.T) {
	for _, h := range []how{eager, scopes} {
		p := pipelines[0]
		c := loopConfig{pipeline: p.Pipeline, layers: p.layers, leave: all, ahead: 2, how: h}
		program := func(dev device.Device) error {
			l, err := newLoop(dev, c)
			if err != nil {
				return errors.Join(err, l.close())
			}
			rng := rand.New(rand.NewPCG(1, 1))
			err = l.train(3, rng)
			tape, moved, late := l.m.Tape(), l.moved, l.m.Last().Late
			if l.m.Last().Departed {
				err = errors.Join(err, fmt.Errorf("a planned step: %+v", l.m.Last()))
			}
			passes := l.passes
			l.passes = slices.Clone(passes) // the other microbatch first, both ways
			for i := range l.passes {
				l.passes[i].Microbatch = 1 - l.passes[i].Microbatch
			}
			l.feed(rng)
			err = errors.Join(err, l.one(), l.compare())
			if !l.m.Last().Departed || l.m.Last().Late <= late {
				err = errors.Join(err, fmt.Errorf("a step in another order: %+v", l.m.Last()))
			}
			if h == scopes && l.moved == moved {
				err = errors.Join(err, errors.New("scopes were replayed in another order"))
			}
			l.passes = passes
			err = errors.Join(err, l.evaluate())
			l.feed(rng)
			err = errors.Join(err, l.one(), l.compare())
			if got := l.m.Tape(); !slices.EqualFunc(got.Ops, tape.Ops, sameOp) || l.m.Last().Departed || l.m.Last().Late != late {
				err = errors.Join(err, fmt.Errorf("the plan was not followed again: %+v", l.m.Last()))
			}
			return errors.Join(err, l.close())
		}
		if err := check.Explore(check.Options{}, 5, check.On(cpuDevice, program)); err != nil {
			t.Error(h, err)
		}
	}
}

func sameOp(a, b residency.Op) bool {
	return a.Kind == b.Kind && a.ID == b.ID && a.Bytes == b.Bytes && a.Group == b.Group && slices.Equal(a.Items, b.Items)
}

// evaluate runs a step without saves.
func (l *loop) evaluate() error {
	l.m.Begin(nil)
	for range 3 {
		s, err := l.m.Alloc(3000)
		if err != nil {
			return err
		}
		l.compute.Fill(s.Range(), 1)
		s.Free()
	}
	err := l.m.End()
	if n := l.m.Last(); n.Out+n.In > 0 || n.Device != 3072 {
		err = errors.Join(err, fmt.Errorf("evaluation: %+v", n))
	}
	return err
}

// lines collects a trace.
type lines []trace.Event

func (l *lines) Emit(e trace.Event) { *l = append(*l, e) }

// SPEC S4.1: small storages never leave, and figures and trace agree on everything.
func TestLeastAndFigures(t *testing.T) {
	for _, p := range pipelines {
		for _, least := range []memory.Bytes{0, 1000, 1 << 20} {
			var tr lines
			c := loopConfig{
				pipeline: p.Pipeline, rank: p.rank, layers: p.layers, leave: all, ahead: 1,
				Config: Config{Least: least, Trace: &tr, Rank: 3},
			}
			if least == 0 {
				c.Device = p.tight
			}
			dev := openCPU(t)
			err := onLoop(dev, c, 2, func(l *loop) error {
				evicted, late := 0, int64(0)
				var moved, out, back memory.Bytes
				groups := 0
				for _, n := range l.m.Last().Names {
					moved += n.Moved
					groups += n.Groups
				}
				for _, e := range tr {
					switch e.Kind {
					case trace.Offload:
						if e.Step == 2 {
							out += memory.Bytes(e.Bytes)
						}
						if memory.Bytes(e.Bytes) < least {
							return fmt.Errorf("%d bytes left", e.Bytes)
						}
					case trace.Reload:
						if e.Step == 2 {
							back += memory.Bytes(e.Bytes)
						}
					case trace.Evict:
						evicted++
					case trace.Late:
						late += e.Bytes
					}
					if e.Rank != 3 || e.Step < 1 || e.Step > 2 {
						return fmt.Errorf("event %+v", e)
					}
				}
				st := l.m.Last()
				if all := l.m.Stats(); evicted != all.Evicted || (evicted > 0) != (least == 0) || (late > 0) != (all.Late > 0) {
					return fmt.Errorf("%d evictions and %d late bytes traced, %+v", evicted, late, all)
				}
				if moved != out || out != st.OutBytes || back != st.InBytes || groups != len(l.place) || (out == 0) != (least > 2000) {
					return fmt.Errorf("%v moved, %v and %v traced, %+v", moved, out, back, st)
				}
				if end := tr[len(tr)-1]; end.Kind != trace.End || end.InUse != [2]int64{} || end.Bytes != int64(st.Device) || end.Offset != int64(st.Host) {
					return fmt.Errorf("the last event is %+v", end)
				}
				return nil
			})
			if err = errors.Join(err, dev.Close()); err != nil {
				t.Error(p.name, least, err)
			}
		}
	}
}
