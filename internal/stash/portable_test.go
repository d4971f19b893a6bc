// This file owns the manager's tests that run on every device: groups are copied
// in from prepared buffers and out to others, which needs no kernels of our own.

package stash

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// mover is a training loop of copies: the forward pass of a group copies its rows
// into a set, the backward pass copies the set to where the test looks.
type mover struct {
	dev       device.Device
	compute   device.Stream
	m         *Manager
	w         *Workspace
	passes    []schedule.Pass
	layers    int
	place     map[memory.GroupID]int
	from, to  *device.Buffer
	stride    memory.Bytes
	rows      []Rows
	bytes     [][]byte
	prepared  *Layout // the layout that from holds
	generated uint64
	graphs    []device.Graph // that were captured
}

// newMover returns what it has made so far also with an error, to be closed.
func newMover(dev device.Device, c loopConfig) (v *mover, err error) {
	v = &mover{dev: dev, layers: c.layers, place: map[memory.GroupID]int{}}
	if v.passes, err = c.pipeline.Passes(c.rank); err != nil {
		return v, err
	}
	for _, p := range v.passes {
		for i := range c.layers {
			if !p.Backward {
				v.place[v.group(p, i)] = len(v.place)
			}
		}
	}
	if v.compute, err = dev.NewStream("compute"); err != nil {
		return v, err
	}
	if v.m, err = NewManager(dev, v.compute, c.ManagerConfig); err != nil {
		return v, err
	}
	v.w, err = v.m.NewWorkspace("experts", c.sets, c.limit,
		Tensor{Name: "fc1_in", Row: 960, MaxRows: c.maxRows}, Tensor{Name: "fc1_out", Row: 40, MaxRows: c.maxRows},
		Tensor{Name: "probs", Row: 4, MaxRows: c.maxRows, Count: 1})
	if err != nil {
		return v, err
	}
	widest, err := NewLayout(v.w.layout.atLeast(c.limit)...)
	if err != nil {
		return v, err
	}
	v.stride = widest.Size
	for _, b := range []**device.Buffer{&v.from, &v.to} {
		if *b, err = dev.Alloc(memory.Device, v.stride*memory.Bytes(len(v.place)), "test"); err != nil {
			return v, err
		}
	}
	return v, nil
}

func (v *mover) close() (err error) {
	for _, g := range v.graphs {
		err = errors.Join(err, g.Close())
	}
	if v.m != nil {
		err = errors.Join(err, v.m.Close())
	}
	for _, b := range []*device.Buffer{v.from, v.to} {
		if b != nil {
			v.compute.Free(b)
		}
	}
	if v.compute != nil {
		err = errors.Join(err, v.compute.Close())
	}
	return err
}

func (v *mover) group(p schedule.Pass, layer int) memory.GroupID {
	return memory.GroupID{Name: "expert_fc1", Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
}

// prepare uploads what the forward passes will copy, for the present layout.
func (v *mover) prepare() {
	l := v.w.layout
	v.bytes = make([][]byte, len(v.place))
	for i := range v.bytes {
		v.bytes[i] = contents(l, v.generated+uint64(i), v.rows[2*i], v.rows[2*i+1])
		v.compute.Upload(v.from.Slice(memory.Bytes(i)*v.stride, l.Size), v.bytes[i])
	}
	v.compute.Fill(v.to.All(), 0xee)
	v.prepared = l
}

// body issues the step.
func (v *mover) body(int) error {
	if v.prepared != v.w.layout {
		v.prepare()
	}
	size := v.w.layout.Size
	for _, p := range v.passes {
		for i := range v.layers {
			if p.Backward {
				g := v.group(p, v.layers-1-i)
				s := v.w.Backward(g)
				v.compute.Copy(v.to.Slice(memory.Bytes(v.place[g])*v.stride, size), s.slot.mem)
				s.Done()
				continue
			}
			g := v.group(p, i)
			s := v.w.Forward(g)
			v.compute.Copy(s.slot.mem, v.from.Slice(memory.Bytes(v.place[g])*v.stride, size))
			s.Saved()
		}
	}
	return nil
}

// route draws the next step's rows.
func (v *mover) route(rng *rand.Rand, most Rows) {
	v.rows = make([]Rows, 2*len(v.place))
	for i := range v.rows {
		v.rows[i] = Rows(rng.Int64N(int64(most) + 1))
	}
	v.generated = rng.Uint64()
	v.prepare()
}

// compare tells whether every group came back as it was.
func (v *mover) compare() error {
	got := make([]byte, v.stride)
	for g, i := range v.place {
		raw := got[:v.w.layout.Size]
		if err := v.compute.Download(raw, v.to.Slice(memory.Bytes(i)*v.stride, memory.Bytes(len(raw)))); err != nil {
			return err
		}
		for k := range 2 {
			if n := binary.LittleEndian.Uint64(raw[8*k:]); n != uint64(v.rows[2*i+k]) {
				return fmt.Errorf("%v: %d rows came back of %d", g, n, v.rows[2*i+k])
			}
		}
		if err := same(v.w.layout, v.bytes[i], raw, v.rows[2*i], v.rows[2*i+1]); err != nil {
			return fmt.Errorf("%v: %w", g, err)
		}
	}
	return v.m.store.Check(v.compute)
}

// run trains a number of steps, and asserts that none reads device memory more
// than once or makes the host wait.
func (v *mover) run(steps int, rng *rand.Rand, most Rows, step func() error) error {
	for i := range steps {
		v.route(rng, most)
		before := v.dev.Counters()
		if err := step(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
		after := v.dev.Counters()
		if v.m.attempt == 0 && after.HostReads != before.HostReads+1 || after.HostSyncs != before.HostSyncs {
			return fmt.Errorf("step %d: the host read device memory %d times and waited %d times",
				i, after.HostReads-before.HostReads, after.HostSyncs-before.HostSyncs)
		}
		if err := v.compare(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

func moverOn(t *testing.T, dev device.Device, c loopConfig) *mover {
	t.Helper()
	v, err := newMover(dev, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(v.close(), dev.Close()); err != nil {
			t.Error(err)
		}
	})
	return v
}

// SPEC S1.2, S1.4, S1.5, S1.6: on every device, in every mode, with spills,
// growth, reruns and resized sets, what was saved comes back.
func TestManagerOnEveryDevice(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for name, p := range checkedPipelines {
			for _, mode := range []Mode{Auto, PagesOnly} {
				for kind, store := range map[string]ManagerConfig{
					"roomy": roomy(mode), "grows": tight(2, 0, 4096, 0), "spills": tight(20, 4096, 20, 4096), "host grows": tight(8, 1, 8, 4096),
				} {
					t.Run(fmt.Sprintf("%s, mode %d, %s", name, mode, kind), func(t *testing.T) {
						p.ManagerConfig, p.layers, p.sets, p.maxRows, p.limit = store, 2, 3, 30, 80
						p.Mode = mode
						if kind == "roomy" {
							p.Store.Max[Device], p.Store.Pages[Device] = 4096, 4096
						}
						v := moverOn(t, open(t), p)
						step := func() error { return v.m.Step(memory.Key{}, v.body) }
						if err := v.run(4, rand.New(rand.NewPCG(1, 2)), 80, step); err != nil {
							t.Fatal(err)
						}
					})
				}
			}
		}
	})
}

// A step captured whole replays on every device, also after its pool has grown,
// with evaluation in between; once sets have moved, it is refused.
func TestCapturedOnEveryDevice(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		for name, p := range checkedPipelines {
			t.Run(name, func(t *testing.T) {
				p.ManagerConfig, p.layers, p.sets, p.maxRows, p.limit = tight(2, 0, 4096, 0), 4, 2, 200, 300
				v := moverOn(t, open(t), p)
				rng := rand.New(rand.NewPCG(3, 4))
				if err := v.run(2, rng, 10, func() error { return v.m.Step(memory.Key{}, v.body) }); err != nil {
					t.Fatal(err)
				}
				v.compute.BeginCapture()
				v.m.Begin(memory.Key{})
				_ = v.body(0)
				v.m.Finish()
				g, err := v.compute.EndCapture()
				if err != nil {
					t.Fatal(err)
				}
				before := v.m.Stats().Reruns
				replay := func() error { return v.m.Transact(memory.Key{}, func(int) error { v.compute.Replay(g); return nil }) }
				if err := v.run(4, rng, 200, replay); err != nil {
					t.Fatal(err)
				}
				if v.m.Stats().Reruns == before {
					t.Error("no replay overflowed")
				}
				// Evaluation in between changes nothing.
				if err := v.m.Step(memory.Key{Phase: memory.Evaluate}, func(int) error { v.w.Forward(v.group(v.passes[0], 0)).Drop(); return nil }); err != nil {
					t.Fatal(err)
				}
				if err := v.run(1, rng, 200, replay); err != nil {
					t.Fatal(err)
				}
				// Sets that move make the graph stale, which must not pass for a
				// result, nor hurt what comes after.
				eager := func() error { return v.m.Step(memory.Key{}, v.body) }
				if err := v.run(1, rng, 300, eager); err != nil {
					t.Fatal(err)
				}
				if v.m.Generation() == 0 {
					t.Fatal("no set has moved")
				}
				if err := replay(); err == nil || !strings.Contains(err.Error(), "capture it again") {
					t.Errorf("a stale graph was replayed: %v", err)
				}
				if err := v.run(1, rng, 300, eager); err != nil {
					t.Fatal(err)
				}
				if err := g.Close(); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// A capture of groups that were never seen before works as well: records can be
// made while capturing.
func TestCapturedFirst(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		p := checkedPipelines["1f1b"]
		p.ManagerConfig, p.layers, p.sets, p.maxRows = tight(2, 0, 4096, 0), 2, 2, 200
		v := moverOn(t, open(t), p)
		rng := rand.New(rand.NewPCG(3, 4))
		v.route(rng, 10) // the first launch of a kernel must not come during a capture
		if err := v.m.Step(memory.Key{Microbatches: 1}, func(int) error {
			s := v.w.Forward(memory.GroupID{Name: "warm up"})
			s.Saved()
			v.w.Backward(memory.GroupID{Name: "warm up"}).Done()
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		v.compute.BeginCapture()
		v.m.Begin(memory.Key{})
		_ = v.body(0)
		v.m.Finish()
		g, err := v.compute.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		replay := func() error { return v.m.Transact(memory.Key{}, func(int) error { v.compute.Replay(g); return nil }) }
		if err := v.run(3, rng, 200, replay); err != nil {
			t.Fatal(err)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A group of tensors of five widths costs one launch each way.
func TestOneLaunchEachWay(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Pages: [Tiers]schedule.Pages{64, 0}, Max: [Tiers]schedule.Pages{64, 0}})
	var ts []Tensor
	for i, width := range []memory.Bytes{2, 64, 1000, 4096, 14336} {
		ts = append(ts, Tensor{Name: fmt.Sprint(i), Row: width, MaxRows: 9})
	}
	l := r.layout(ts...)
	rec, set := r.record(l), r.set(l)
	r.s.Upload(set, contents(l, 1, 9))
	before := r.dev.Counters()
	r.store.Stash(r.s, rec, set)
	r.store.Restore(r.s, rec, set)
	if got := r.dev.Counters().Launches - before.Launches; got != 2 {
		t.Errorf("stash and restore took %d launches", got)
	}
}
