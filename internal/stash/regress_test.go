// This file owns what reviews proved wrong once: captures that stand alone, keys
// that meet in one store, ranks that fail apart.

package stash

import (
	"encoding/binary"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func plainLoop(mode Mode) loopConfig {
	return loopConfig{ManagerConfig: roomy(mode), pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, layers: 4, sets: 2, maxRows: 50}
}

// capture captures a step of the mover.
func (v *mover) capture(t *testing.T, k memory.Key) device.Graph {
	t.Helper()
	v.compute.BeginCapture()
	v.m.Begin(k)
	_ = v.body(0)
	v.m.Finish()
	g, err := v.compute.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	v.graphs = append(v.graphs, g)
	return g
}

func (v *mover) replay(k memory.Key, g device.Graph) func() error {
	return func() error {
		return v.m.Transact(k, func(int) error { v.compute.Replay(g); return nil })
	}
}

func (v *mover) eager(k memory.Key) func() error { return func() error { return v.m.Step(k, v.body) } }

// Graphs captured up front can be replayed in any order, with eager steps before
// and between: records are there whoever runs first, however late they are written.
func TestCapturesStandAlone(t *testing.T) {
	for _, order := range []string{"2e12", "e122", "12e1"} {
		program := check.On(cpuDevice, func(dev device.Device) error {
			v, err := newMover(dev, plainLoop(PagesOnly))
			if err != nil {
				return err
			}
			rng := rand.New(rand.NewPCG(1, 2))
			v.route(rng, 20)
			one, two := memory.Key{Microbatches: 1}, memory.Key{Microbatches: 2}
			first, second := v.capture(t, one), v.capture(t, two)
			steps := map[rune]func() error{'1': v.replay(one, first), '2': v.replay(two, second), 'e': v.eager(memory.Key{})}
			for _, which := range order {
				if err == nil {
					err = v.run(1, rng, 50, steps[which])
				}
			}
			return errors.Join(err, v.close())
		})
		if err := check.Explore(check.Options{}, 8, program); err != nil {
			t.Fatalf("%s: %v", order, err)
		}
	}
}

// A capture in which something had to be left out is never accepted: the order
// broke the stack, or there was no memory for a record. Captured again, the former
// works.
func TestIncompleteCaptureIsRefused(t *testing.T) {
	v := moverOn(t, openCPU(t), plainLoop(Auto))
	rng := rand.New(rand.NewPCG(1, 2))
	if err := v.run(2, rng, 50, v.eager(memory.Key{})); err != nil {
		t.Fatal(err)
	}
	ps := v.passes
	v.passes = []schedule.Pass{ps[0], ps[2], ps[1], ps[3]}
	g := v.capture(t, memory.Key{})
	if err := v.run(1, rng, 50, v.replay(memory.Key{}, g)); err == nil || !strings.Contains(err.Error(), "not completely") {
		t.Errorf("a capture that broke the stack was replayed: %v", err)
	}
	if err := v.run(2, rng, 50, v.replay(memory.Key{}, v.capture(t, memory.Key{}))); err != nil {
		t.Errorf("captured again: %v", err)
	}

	c := plainLoop(PagesOnly)
	c.Store.Records = 1024
	v = moverOn(t, openCPU(t), c)
	v.route(rng, 20)
	g = v.capture(t, memory.Key{})
	if err := v.run(1, rng, 50, v.replay(memory.Key{}, g)); err == nil {
		t.Error("a capture without records was replayed")
	}
}

// Inside of a transaction a broken capture is made again, because the generation
// says so.
func TestBrokenCaptureIsMadeAgain(t *testing.T) {
	v := moverOn(t, openCPU(t), plainLoop(Auto))
	rng := rand.New(rand.NewPCG(1, 2))
	if err := v.run(2, rng, 50, v.eager(memory.Key{})); err != nil {
		t.Fatal(err)
	}
	ps := v.passes
	v.passes = []schedule.Pass{ps[0], ps[2], ps[1], ps[3]}
	var g device.Graph
	generation := -1
	step := func() error {
		return v.m.Transact(memory.Key{}, func(int) error {
			if generation != v.m.Generation() {
				generation = v.m.Generation()
				g = v.capture(t, memory.Key{})
			}
			v.compute.Replay(g)
			return nil
		})
	}
	if err := v.run(3, rng, 50, step); err != nil {
		t.Error(err)
	}
}

// A key whose order broke the stack is known for it, whether the step was captured or issued:
// where a stack was asked for, the next step fails at once and is not run again.
func TestBrokenStackIsRememberedHoweverIssued(t *testing.T) {
	for name, breaks := range map[string]func(v *mover, k memory.Key){
		"captured": func(v *mover, k memory.Key) { v.capture(t, k) },
		"issued":   func(v *mover, k memory.Key) { _ = v.eager(k)() },
	} {
		v := moverOn(t, openCPU(t), plainLoop(BumpOnly))
		rng := rand.New(rand.NewPCG(1, 2))
		if err := v.run(2, rng, 50, v.eager(memory.Key{})); err != nil {
			t.Fatal(err)
		}
		ps := v.passes
		v.passes = []schedule.Pass{ps[0], ps[2], ps[1], ps[3]}
		breaks(v, memory.Key{})
		attempts := 0
		err := v.m.Step(memory.Key{}, func(attempt int) error { attempts++; return v.body(attempt) })
		if err == nil || !strings.Contains(err.Error(), "a stack was asked for") || attempts != 1 {
			t.Errorf("%s: %d attempts of a step whose order is known to break the stack: %v", name, attempts, err)
		}
	}
}

// Failures in the middle of a step leave a manager that works and can be closed.
func TestStepsThatAreGivenUp(t *testing.T) {
	wrong := errors.New("bad batch")
	for name, give := range map[string]func(v *mover){
		"the body fails": func(v *mover) {
			if err := v.m.Step(memory.Key{}, func(int) error { return wrong }); !errors.Is(err, wrong) {
				t.Errorf("error %v", err)
			}
		},
		"issue fails before Finish": func(v *mover) {
			if err := v.m.Transact(memory.Key{}, func(int) error { v.m.Begin(memory.Key{}); return wrong }); !errors.Is(err, wrong) {
				t.Errorf("error %v", err)
			}
		},
		"the body panics": func(v *mover) {
			defer func() { _ = recover() }()
			_ = v.m.Step(memory.Key{}, func(int) error { v.w.Forward(v.group(v.passes[0], 0)).Saved(); panic("model") })
		},
		"a capture is abandoned": func(v *mover) {
			v.compute.BeginCapture()
			v.m.Begin(memory.Key{})
			v.w.Forward(v.group(v.passes[0], 0)).Saved()
			v.m.Finish()
			if g, err := v.compute.EndCapture(); err == nil {
				_ = g.Close()
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := plainLoop(PagesOnly)
			c.ManagerConfig, c.maxRows = tight(2, 0, 4096, 0), 200
			v := moverOn(t, openCPU(t), c)
			rng := rand.New(rand.NewPCG(3, 4))
			if err := v.run(2, rng, 10, v.eager(memory.Key{})); err != nil {
				t.Fatal(err)
			}
			g := v.capture(t, memory.Key{})
			give(v)
			// The graph overflows, and the pool must grow to what it needs.
			if err := v.run(1, rng, 200, v.replay(memory.Key{}, g)); err != nil {
				t.Error(err)
			}
			if err := v.run(2, rng, 200, v.eager(memory.Key{})); err != nil {
				t.Error(err)
			}
		})
	}
	t.Run("a capture ends without Finish, then Close", func(t *testing.T) {
		v := moverOn(t, openCPU(t), plainLoop(PagesOnly))
		v.route(rand.New(rand.NewPCG(1, 2)), 10)
		v.compute.BeginCapture()
		v.m.Begin(memory.Key{})
		v.w.Forward(v.group(v.passes[0], 0)).Saved()
		if _, err := v.compute.EndCapture(); err == nil {
			t.Error("the capture was not joined and nobody said so")
		}
	})
}

// bench of its own: a manager with workspaces of one tensor.
type small struct {
	t       *testing.T
	dev     device.Device
	compute device.Stream
	m       *Manager
}

func newSmall(t *testing.T, dev device.Device, c ManagerConfig) *small {
	t.Helper()
	s, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewManager(dev, s, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(m.Close(), s.Close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return &small{t, dev, s, m}
}

func (r *small) space(name string, limit, rows Rows) *Workspace {
	r.t.Helper()
	w, err := r.m.NewWorkspace(name, 1, limit, Tensor{Name: "x", Row: 4096, MaxRows: rows})
	if err != nil {
		r.t.Fatal(err)
	}
	return w
}

// pass runs the groups forward and backward with so many rows each.
func (r *small) pass(w *Workspace, rows int, layers ...int) {
	for _, i := range layers {
		s := w.Forward(memory.GroupID{Name: "g", Layer: i})
		r.compute.Upload(s.Counts(), binary.LittleEndian.AppendUint64(nil, uint64(rows)))
		s.Saved()
	}
	for k := range layers {
		w.Backward(memory.GroupID{Name: "g", Layer: layers[len(layers)-1-k]}).Done()
	}
}

// Keys that use the same groups in different workspaces do not mix up what they
// need, and what a failed step asked for does not haunt later ones.
func TestKeysDoNotMix(t *testing.T) {
	r := newSmall(t, openCPU(t), tight(2, 0, 256, 0))
	a, b := r.space("a", 40, 10), r.space("b", 40, 10)
	step := func(w *Workspace, rows int, layers ...int) error {
		return r.m.Step(memory.Key{Shape: w.name}, func(int) error { r.pass(w, rows, layers...); return nil })
	}
	for i, err := range []error{step(a, 1, 1, 2), step(b, 1, 1, 2), step(a, 40, 1, 2)} {
		if err != nil {
			t.Errorf("step %d: %v", i, err)
		}
	}
	if err := step(b, 41, 3); err == nil || !strings.Contains(err.Error(), "its limit is 40") {
		t.Errorf("41 rows: %v", err)
	}
	if err := step(b, 20, 4); err != nil {
		t.Errorf("20 rows after a step that failed with 41: %v", err)
	}
}

// Rows that creep up move the sets now and then, not in every step, and cost no
// memory for records.
func TestRowsThatCreepUp(t *testing.T) {
	r := newSmall(t, openCPU(t), roomy(PagesOnly))
	a := r.space("a", 250, 10)
	for i := range 60 {
		if err := r.m.Step(memory.Key{}, func(int) error { r.pass(a, 10+i, 1, 2, 3, 4); return nil }); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	if n := len(r.m.store.records); n != 4 || r.m.Stats().Reruns > 20 {
		t.Errorf("%d records, %d reruns", n, r.m.Stats().Reruns)
	}
}

// Where device memory is short, the host tier takes the rest.
func TestHostTakesTheRest(t *testing.T) {
	dev, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{16 * memory.MiB, 64 * memory.MiB}})
	if err != nil {
		t.Fatal(err)
	}
	r := newSmall(t, dev, tight(2, 0, 1<<14, 1<<13))
	a := r.space("a", 0, 1500)
	if err := r.m.Step(memory.Key{}, func(int) error { r.pass(a, 700, 1, 2, 3, 4); return nil }); err != nil {
		t.Fatal(err)
	}
	if r.m.store.Pages(Host) == 0 || r.m.Stats().Reruns != 1 {
		t.Errorf("host tier of %d pages, %+v", r.m.store.Pages(Host), r.m.Stats())
	}
}

// A body that fails on one rank fails the step on all.
func TestBodyErrorReachesAllRanks(t *testing.T) {
	reduce := &barrier{n: 2}
	reduce.cond.L = &reduce.mu
	done := make(chan error, 2)
	for i := range 2 {
		dev, err := cpu.Open(cpu.Options{Ordinal: i})
		if err != nil {
			t.Fatal(err)
		}
		c := roomy(PagesOnly)
		c.Rank, c.Reduce = i, reduce.all
		r := newSmall(t, dev, c)
		w := r.space("a", 0, 10)
		go func() {
			done <- r.m.Step(memory.Key{}, func(int) error {
				r.pass(w, 5, 1)
				if i == 1 {
					return errors.New("bad batch")
				}
				return nil
			})
		}()
	}
	for range 2 {
		if err := <-done; err == nil || !strings.Contains(err.Error(), "bad batch") {
			t.Errorf("a rank returned %v", err)
		}
	}
}

// A capture that fails leaves records behind that it wrote and that only it would have
// waited for. The same step, issued again at once or later, waits for them too.
func TestRecordsOfAFailedCapture(t *testing.T) { // SPEC S4.1
	for _, inside := range []bool{false, true} {
		program := check.On(cpuDevice, func(dev device.Device) error {
			v, err := newMover(dev, plainLoop(PagesOnly))
			if err != nil {
				return err
			}
			capture := func() error {
				v.compute.BeginCapture()
				v.m.Begin(memory.Key{})
				_ = v.body(0)
				_ = v.compute.Sync() // cannot be captured
				v.m.Finish()
				if _, err := v.compute.EndCapture(); err == nil {
					return errors.New("a synchronisation was captured")
				}
				return nil
			}
			rng := rand.New(rand.NewPCG(1, 2))
			v.route(rng, 20)
			if !inside {
				err = capture()
			}
			err = errors.Join(err, v.run(1, rng, 50, func() error {
				return v.m.Transact(memory.Key{}, func(int) error {
					if inside {
						if err := capture(); err != nil {
							return err
						}
					}
					v.m.Begin(memory.Key{})
					defer v.m.Finish()
					return v.body(0)
				})
			}))
			return errors.Join(err, v.close())
		})
		if err := check.Explore(check.Options{}, 20, program); err != nil {
			t.Errorf("inside of a transaction: %t: %v", inside, err)
		}
	}
}
