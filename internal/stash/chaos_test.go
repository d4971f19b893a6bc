// This file owns the manager under orders that nobody plans: passes that overlap,
// several workspaces, schedules that change from step to step, misuse.

package stash

import (
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

const (
	chaosGroups = 10
	chaosRows   = 60
)

// chaos is a loop over two workspaces in which several passes may be open.
type chaos struct {
	*loop
	other *Workspace
	sets  int
}

// newChaos makes sets for the given rows, which may grow to chaosRows.
func newChaos(t testing.TB, dev device.Device, c ManagerConfig, sets int, rows Rows) (*chaos, error) {
	l := &loop{t: t, dev: dev, place: map[memory.GroupID]int{}, seed: 1}
	for i := range chaosGroups {
		l.place[chaosGroup(i)] = i
	}
	var err error
	if l.compute, err = dev.NewStream("compute"); err != nil {
		return nil, err
	}
	for _, b := range []**device.Buffer{&l.routing, &l.grads} {
		if *b, err = dev.Alloc(memory.Device, 8*chaosGroups, "test"); err != nil {
			return nil, err
		}
	}
	if l.m, err = NewManager(dev, l.compute, c); err != nil {
		return nil, err
	}
	x := &chaos{loop: l, sets: sets}
	tensors := []Tensor{{Name: "a", Row: loopRows[0], MaxRows: rows}, {Name: "b", Row: loopRows[1], MaxRows: rows}}
	if l.w, err = l.m.NewWorkspace("first", sets, chaosRows, tensors...); err != nil {
		return nil, err
	}
	x.other, err = l.m.NewWorkspace("second", sets, chaosRows, tensors...)
	l.m.Protect(x)
	return x, err
}

func chaosGroup(i int) memory.GroupID { return memory.GroupID{Name: "g", Layer: i} }

// Save and Restore: gradients are zero before a step.
func (c *chaos) Save(s device.Stream)    { s.Fill(c.grads.All(), 0) }
func (c *chaos) Restore(s device.Stream) { s.Fill(c.grads.All(), 0) }

func (c *chaos) home(g memory.GroupID) *Workspace {
	if g.Layer%3 == 2 {
		return c.other
	}
	return c.w
}

// step issues the groups' passes in an order that follows from the seed: any that
// the sets have room for.
func (c *chaos) step(seed uint64) func(int) error {
	return func(attempt int) error {
		if attempt > 1 && (attempt > 2 || !c.m.noStack[memory.Key{}]) {
			return fmt.Errorf("the step needs attempt %d", attempt)
		}
		rng := rand.New(rand.NewPCG(seed, 3))
		var todo, saved []memory.GroupID
		for i := range chaosGroups {
			todo = append(todo, chaosGroup(i))
		}
		var forward, backward []*Set
		room := func(w *Workspace) bool {
			n := 0
			for _, s := range append(append([]*Set(nil), forward...), backward...) {
				if s.slot.w == w {
					n++
				}
			}
			return n < c.sets
		}
		for len(todo)+len(saved)+len(forward)+len(backward) > 0 {
			switch rng.IntN(4) {
			case 0:
				if len(todo) > 0 && room(c.home(todo[0])) {
					forward = append(forward, c.fill(todo[0]))
					todo = todo[1:]
				}
			case 1:
				if len(forward) > 0 {
					s := pull(rng, &forward)
					saved = append(saved, s.Group())
					s.Saved()
				}
			case 2:
				if len(saved) > 0 && room(c.home(saved[len(saved)-1])) {
					g := saved[len(saved)-1]
					saved = saved[:len(saved)-1]
					backward = append(backward, c.fold(g))
				}
			case 3:
				if len(backward) > 0 {
					pull(rng, &backward).Done()
				}
			}
		}
		return nil
	}
}

func pull[T any](rng *rand.Rand, from *[]T) T {
	i := rng.IntN(len(*from))
	x := (*from)[i]
	*from = append((*from)[:i:i], (*from)[i+1:]...)
	return x
}

func (c *chaos) fill(g memory.GroupID) *Set {
	s := c.home(g).Forward(g)
	k := device.NewLaunch(&forwardKernel, 1, 1)
	k.Read(c.routing.All())
	k.Write(s.Counts())
	k.Write(s.Tensor(0))
	k.Write(s.Tensor(1))
	k.Arg(uint64(c.place[g]))
	k.Arg(c.seed)
	k.Arg(uint64(s.slot.w.layout.Tensors[0].MaxRows))
	c.compute.Launch(k)
	return s
}

func (c *chaos) fold(g memory.GroupID) *Set {
	s := c.home(g).Backward(g)
	k := device.NewLaunch(&backwardKernel, 1, 1)
	k.Read(s.Counts())
	k.Read(s.Tensor(0))
	k.Read(s.Tensor(1))
	k.Write(c.grads.Slice(memory.Bytes(8*c.place[g]), 8))
	k.Arg(uint64(s.slot.w.layout.Tensors[0].MaxRows))
	c.compute.Launch(k)
	return s
}

// train runs steps whose order changes now and then, and compares every gradient.
func (c *chaos) train(seed uint64) error {
	rng := rand.New(rand.NewPCG(seed, 77))
	for i := range 6 {
		rows := make([]Rows, chaosGroups)
		for j := range rows {
			rows[j] = Rows(rng.IntN(chaosRows + 1))
		}
		c.route(rows)
		c.seed = rng.Uint64()
		if err := c.m.Step(memory.Key{}, c.step(seed*10+uint64(rng.IntN(2)))); err != nil {
			return err
		}
		got, err := c.read()
		if err != nil {
			return err
		}
		for p := range rows {
			var want uint64
			for t, width := range loopRows {
				raw := make([]byte, int(rows[p])*int(width))
				for r := range int(rows[p]) {
					expertRow(c.seed, p, t, r, raw[r*int(width):(r+1)*int(width)])
				}
				want = fold(want, raw)
			}
			if got[p] != want {
				return fmt.Errorf("step %d: group %d differs", i, p)
			}
		}
		for _, st := range c.m.stores() {
			if err := st.Check(c.compute); err != nil {
				return fmt.Errorf("step %d: %w", i, err)
			}
		}
	}
	return nil
}

// drawChaos makes a loop whose settings are drawn.
func drawChaos(t testing.TB, dev device.Device, seed uint64, mode Mode) (*chaos, error) {
	cfg := tight(5, 3, 400, 400)
	cfg.Mode, cfg.Ahead = mode, 1+int(seed%4)
	draw, rows := rand.New(rand.NewPCG(seed, uint64(mode))), Rows(chaosRows)
	cfg.KeepAll = draw.IntN(2) == 0
	if draw.IntN(2) == 0 {
		rows = 20
	}
	if draw.IntN(2) == 0 {
		cfg.HostPages, cfg.HostMax = 3, 400
		cfg.Place = func(g memory.GroupID) int { return g.Layer % Tiers }
	}
	return newChaos(t, dev, cfg, 1+int(seed%4), rows)
}

// SPEC S1.5: whatever the order of passes, and however it changes, results are
// exact, nothing races and no page is lost. So it is for all settings: groups that
// stay in their sets, sets that are too small at first, rows in host pages.
func TestChaos(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 8
	}
	draws := []uint64{605, 797, 965} // their stacks break in steps that also lack pages or rows
	for seed := range seeds {
		draws = append(draws, seed)
	}
	for _, seed := range draws {
		for _, mode := range []Mode{Auto, PagesOnly} {
			p := check.On(cpuDevice, func(dev device.Device) error {
				c, err := drawChaos(t, dev, seed, mode)
				if err != nil {
					return err
				}
				return errors.Join(c.train(seed), c.close())
			})
			if err := check.Explore(check.Options{}, 1, p); err != nil {
				t.Fatalf("seed %d, mode %d: %v", seed, mode, err)
			}
		}
	}
}

// A stack that did not hold is not tried again under the same key.
func TestBrokenStackIsRemembered(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: roomy(Auto), pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, layers: 3, sets: 2, maxRows: 50})
	l.protect()
	rng := rand.New(rand.NewPCG(1, 2))
	if err := l.run(2, rng, 50); err != nil {
		t.Fatal(err)
	}
	ps := l.passes
	for range 4 { // a stack, then none, and so on
		l.passes = []schedule.Pass{ps[0], ps[2], ps[1], ps[3]}
		if err := l.run(1, rng, 50); err != nil {
			t.Fatal(err)
		}
		l.passes = ps
		if err := l.run(1, rng, 50); err != nil {
			t.Fatal(err)
		}
	}
	if n := l.m.Stats().Reruns; n != 1 {
		t.Errorf("%d steps were rerun", n)
	}
}

// SPEC S1.6: an attempt that breaks a stack does not show what its step needs, so the
// step may overflow once more. All ranks rerun it as often.
func TestBrokenStackWithTooFewPages(t *testing.T) {
	reduce := &barrier{n: 2}
	reduce.cond.L = &reduce.mu
	type end struct {
		stats Stats
		err   error
	}
	done := make(chan end, 2)
	for r := range 2 {
		dev, err := cpu.Open(cpu.Options{Ordinal: r})
		if err != nil {
			t.Fatal(err)
		}
		c := tight(4000, 0, 4000, 0)
		if r == 1 {
			c = tight(1, 0, 4000, 0)
		}
		c.Mode, c.Rank, c.Reduce = Auto, r, reduce.all
		l := loopOn(t, dev, loopConfig{ManagerConfig: c, pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, layers: 3, sets: 2, maxRows: 2000})
		l.protect()
		rng := rand.New(rand.NewPCG(1, 2))
		go func() {
			err := l.run(2, rng, 1)
			if r == 1 { // the other rank keeps its stack
				l.passes = []schedule.Pass{l.passes[0], l.passes[2], l.passes[1], l.passes[3]}
			}
			done <- end{l.m.Stats(), errors.Join(err, l.run(1, rng, 2000))}
			done <- end{l.m.Stats(), l.run(1, rng, 2000)}
		}()
	}
	for range 4 {
		if e := <-done; e.err != nil {
			t.Error(e.err)
		} else if e.stats.Steps > 2 && e.stats.Reruns < 2 {
			t.Errorf("%d reruns, want one for the stack and one for pages", e.stats.Reruns)
		}
	}
}

// A rank that cannot grow makes all ranks fail; none waits for it for ever.
func TestNoRankIsLeftWaiting(t *testing.T) {
	reduce := &barrier{n: 2}
	reduce.cond.L = &reduce.mu
	done := make(chan error, 2)
	for r := range 2 {
		dev, err := cpu.Open(cpu.Options{Ordinal: r})
		if err != nil {
			t.Fatal(err)
		}
		c := tight(60, 0, 256, 0)
		if r == 1 {
			c = tight(4, 0, 4, 0)
		}
		c.Rank, c.Reduce = r, reduce.all
		l := loopOn(t, dev, loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 2, sets: 2, maxRows: 100})
		l.protect()
		rows := make([]Rows, len(l.place))
		for i := range rows {
			rows[i] = 90
		}
		l.route(rows)
		go func() { done <- l.m.Step(memory.Key{}, l.body) }()
	}
	for range 2 {
		var of *Overflow
		if err := <-done; !errors.As(err, &of) || of.Rank != 1 {
			t.Errorf("a rank returned %v", err)
		}
	}
}

// Only the workspace that received too many rows gets larger sets, and evaluation
// sees them too.
func TestOverCapacityConcernsItsWorkspace(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewManager(dev, compute, roomy(Auto))
	if err != nil {
		t.Fatal(err)
	}
	small, err := m.NewWorkspace("small", 1, 100, Tensor{Name: "x", Row: 8, MaxRows: 20}, Tensor{Name: "y", Row: 8, MaxRows: 5, Count: 1})
	if err != nil {
		t.Fatal(err)
	}
	large, err := m.NewWorkspace("large", 1, 0, Tensor{Name: "z", Row: 8, MaxRows: 8})
	if err != nil {
		t.Fatal(err)
	}
	for i, phase := range []memory.Phase{memory.Train, memory.Evaluate} {
		rows := byte(40 * (i + 1))
		if err := m.Step(memory.Key{Phase: phase}, func(int) error {
			for j, w := range []*Workspace{small, large} {
				g := memory.GroupID{Name: "g", Layer: j}
				s := w.Forward(g)
				counts := []byte{rows, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0}
				if j == 1 {
					counts = []byte{8, 0, 0, 0, 0, 0, 0, 0}
				}
				compute.Upload(s.Counts(), counts)
				if phase == memory.Evaluate {
					s.Drop()
					continue
				}
				s.Saved()
				w.Backward(g).Done()
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if got := small.layout.Tensors; got[0].MaxRows != Rows(rows)+Rows(rows)/8 || got[1].MaxRows != 5 || large.layout.Tensors[0].MaxRows != 8 {
			t.Errorf("phase %d: room for %d, %d and %d rows", phase, got[0].MaxRows, got[1].MaxRows, large.layout.Tensors[0].MaxRows)
		}
		if n := m.Stats().Reruns; n != i+1 {
			t.Errorf("phase %d: %d reruns", phase, n)
		}
	}
	if err := errors.Join(m.Close(), compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// STYLE: programmers' errors panic with one sentence.
func TestMisusePanics(t *testing.T) {
	g, h := memory.GroupID{Name: "g"}, memory.GroupID{Name: "h"}
	for name, f := range map[string]func(m *Manager, a, b *Workspace){
		"Backward twice": func(_ *Manager, a, _ *Workspace) {
			a.Forward(g).Saved()
			a.Backward(g).Done()
			a.Backward(g)
		},
		"Backward of what was never saved": func(_ *Manager, a, _ *Workspace) { a.Backward(g) },
		"Backward in another workspace": func(_ *Manager, a, b *Workspace) {
			a.Forward(g).Saved()
			b.Backward(g)
		},
		"saved twice": func(_ *Manager, a, _ *Workspace) {
			s := a.Forward(g)
			s.Saved()
			s.Saved()
		},
		"a lease that has ended": func(_ *Manager, a, _ *Workspace) {
			s := a.Forward(g)
			s.Saved()
			a.Forward(h)
			s.Saved()
		},
		"the lease of the forward pass in the backward pass": func(_ *Manager, a, _ *Workspace) {
			a.Forward(g).Saved()
			s := a.Forward(h)
			s.Saved()
			a.Backward(h)
			s.Done()
		},
		"Done before Backward":     func(_ *Manager, a, _ *Workspace) { a.Forward(g).Done() },
		"a group saved twice":      func(_ *Manager, a, _ *Workspace) { a.Forward(g).Saved(); a.Forward(g).Saved() },
		"a step inside of a step":  func(m *Manager, _, _ *Workspace) { _ = m.Step(memory.Key{}, nil) },
		"more leases than sets":    func(_ *Manager, a, _ *Workspace) { a.Forward(g); a.Forward(h) },
		"a lease outside of steps": func(m *Manager, a, _ *Workspace) { m.Finish(); a.Forward(g) },
	} {
		t.Run(name, func(t *testing.T) {
			dev := openCPU(t)
			compute, err := dev.NewStream("compute")
			if err != nil {
				t.Fatal(err)
			}
			m, err := NewManager(dev, compute, roomy(Auto))
			if err != nil {
				t.Fatal(err)
			}
			var w [2]*Workspace
			for i := range w {
				if w[i], err = m.NewWorkspace("w", 1, 0, Tensor{Name: "x", Row: 8, MaxRows: 8}); err != nil {
					t.Fatal(err)
				}
			}
			m.Begin(memory.Key{})
			func() {
				defer func() {
					if p := fmt.Sprint(recover()); !strings.HasPrefix(p, "stash: ") && !strings.HasPrefix(p, "schedule: ") {
						t.Errorf("panic %q", p)
					}
				}()
				f(m, w[0], w[1])
			}()
			if err := errors.Join(m.Close(), compute.Close(), dev.Close()); err != nil {
				t.Error(err)
			}
		})
	}
}

// A body that fails in the middle of a step leaves the manager usable, and reruns,
// spills and growth are logged once each.
func TestErrorsAndLogs(t *testing.T) {
	var log strings.Builder
	var mu sync.Mutex
	c := tight(3, 2, 6, 4096)
	c.Log = slog.New(slog.NewTextHandler(lockedWriter{&mu, &log}, nil))
	v := moverOn(t, openCPU(t), loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 2, sets: 2, maxRows: 100})
	rng := rand.New(rand.NewPCG(1, 1))
	v.route(rng, 5)
	wrong := errors.New("the model failed")
	if err := v.m.Step(memory.Key{}, func(int) error {
		v.w.Forward(v.group(v.passes[0], 0)).Saved()
		v.w.Forward(v.group(v.passes[0], 1))
		return wrong
	}); !errors.Is(err, wrong) {
		t.Errorf("the step returned %v", err)
	}
	if err := v.run(4, rng, 100, func() error { return v.m.Step(memory.Key{}, v.body) }); err != nil {
		t.Fatal(err)
	}
	if st := v.m.Stats(); st.Reruns == 0 || st.Spilled == 0 || st.Growths < 2 {
		t.Fatalf("nothing to log: %+v", st)
	}
	for _, want := range []string{"a step is rerun; pools that begin larger avoid it", "pages spilled to host memory", "a tier grew; beginning with as much avoids reruns"} {
		if n := strings.Count(log.String(), want); n != 1 {
			t.Errorf("%q was logged %d times", want, n)
		}
	}
}

type lockedWriter struct {
	mu *sync.Mutex
	to *strings.Builder
}

func (w lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.to.Write(p)
}
