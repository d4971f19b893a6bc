// This file owns steps as transactions: overflow, rerun, growth, errors.

package stash

import (
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

var interleaved = schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 4}

// tight is a store that begins with the given pages of 4 KiB.
func tight(device_, host, maxDevice, maxHost schedule.Pages) ManagerConfig {
	return ManagerConfig{Store: Config{
		Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{device_, host}, Max: [Tiers]schedule.Pages{maxDevice, maxHost},
	}}
}

// SPEC S1.6, S1.7, SPEC S3.3: a step that overflows is rerun and gives exactly the result
// of one that had room; the pool grows to what the step needed, once.
func TestOverflowIsRerunExactly(t *testing.T) {
	for name, c := range map[string]ManagerConfig{
		"device tier grows":     tight(3, 0, 256, 0),
		"spills, no rerun":      tight(3, 200, 3, 200),
		"host tier grows":       tight(3, 2, 3, 256),
		"nothing to begin with": tight(0, 0, 256, 0),
		"both tiers grow":       tight(1, 0, 20, 256),
	} {
		t.Run(name, func(t *testing.T) {
			l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 2, sets: 2, maxRows: 100})
			l.protect()
			if err := l.run(6, rand.New(rand.NewPCG(3, 4)), 100); err != nil {
				t.Fatal(err)
			}
			st := l.m.Stats()
			spills := name == "spills, no rerun"
			if (st.Reruns == 0) != spills || st.Steps != 6 {
				t.Errorf("stats %+v", st)
			}
			if c.Store.Max[Device] < 10 && st.Spilled == 0 {
				t.Error("nothing was spilled")
			}
			spare := 1.05
			if c.Store.Max[Host] > 0 { // host pages cost less than reruns
				spare = 1.25
			}
			if have := l.m.store.Pages(Device) + l.m.store.Pages(Host); !spills && float64(have) > spare*float64(st.Demand)+2 {
				t.Errorf("the tiers grew to %d pages where %d were needed", have, st.Demand)
			}
		})
	}
}

// noted is a state that notes when it is saved and restored.
type noted struct {
	name string
	to   *[]string
}

func (n noted) Save(device.Stream)    { *n.to = append(*n.to, "save "+n.name) }
func (n noted) Restore(device.Stream) { *n.to = append(*n.to, "restore "+n.name) }

// States are saved in the order in which they were registered, and restored in the reverse
// order: one that changes what an earlier one saved is undone first.
func TestOrderOfStates(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: tight(0, 0, 256, 0), pipeline: interleaved, layers: 2, sets: 2, maxRows: 100})
	l.protect()
	var got []string
	for _, name := range []string{"a", "b", "c"} {
		l.m.Protect(noted{name, &got})
	}
	if err := l.run(1, rand.New(rand.NewPCG(3, 4)), 100); err != nil || l.m.Stats().Reruns != 1 {
		t.Fatal(err, l.m.Stats())
	}
	if want := []string{"save a", "save b", "save c", "restore c", "restore b", "restore a"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// SPEC S1.6: overflow at the first or the last microbatch, on one of four ranks;
// all ranks rerun, and all give the exact result.
func TestOneRankOverflows(t *testing.T) {
	const ranks = 4
	for _, where := range []string{"first", "last"} {
		t.Run(where, func(t *testing.T) {
			reduce := &barrier{n: ranks}
			reduce.cond.L = &reduce.mu
			loops := make([]*loop, ranks)
			for r := range loops {
				dev, err := cpu.Open(cpu.Options{Ordinal: r})
				if err != nil {
					t.Fatal(err)
				}
				c := tight(60, 0, 256, 0)
				c.Rank, c.Reduce = r, reduce.all
				loops[r] = loopOn(t, dev, loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 2, sets: 2, maxRows: 3000})
				loops[r].protect()
			}
			var wait sync.WaitGroup
			for r, l := range loops {
				wait.Go(func() {
					if err := oneOverflow(l, r == 2, where == "last"); err != nil {
						t.Errorf("rank %d: %v", r, err)
					}
				})
			}
			wait.Wait()
			for r, l := range loops {
				if st := l.m.Stats(); st.Reruns != 1 || st.Steps != 3 || (st.Growths > 0) != (r == 2) {
					t.Errorf("rank %d: %+v", r, st)
				}
			}
		})
	}
}

// oneOverflow trains three steps; in the second, one microbatch of the bad rank
// receives more than its store holds.
func oneOverflow(l *loop, bad, last bool) error {
	grads := make([]uint64, l.grads.Size()/8)
	if err := l.zero(); err != nil {
		return err
	}
	for step := range 3 {
		rows := make([]Rows, len(l.place))
		for g, i := range l.place {
			rows[i] = Rows(10 + i)
			at := 0
			if last {
				at = interleaved.Microbatches - 1
			}
			if bad && step == 1 && g.Microbatch == at {
				rows[i] = 1000
			}
		}
		l.route(rows)
		if err := l.m.Step(memory.Key{}, l.body); err != nil {
			return err
		}
		grads = l.want(grads)
		if err := l.compare(grads); err != nil {
			return fmt.Errorf("step %d: %w", step, err)
		}
	}
	return nil
}

// barrier reduces verdicts over the ranks of one process.
type barrier struct {
	mu   sync.Mutex
	cond sync.Cond
	n    int
	here int
	turn int
	sum  Outcome
	last Outcome
}

func (b *barrier) all(v Outcome) (Outcome, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.sum = b.sum.Worse(v)
	turn := b.turn
	if b.here++; b.here == b.n {
		b.last, b.sum, b.here = b.sum, Outcome{}, 0
		b.turn++
		b.cond.Broadcast()
	}
	for b.turn == turn {
		b.cond.Wait()
	}
	return b.last, nil
}

// SPEC S1.6: rows beyond the receive buffer are rerun with larger buffers;
// beyond the limit they are an error that names the workspace.
func TestOverCapacityIsRerunExactly(t *testing.T) {
	c := loopConfig{ManagerConfig: roomy(Auto), pipeline: interleaved, layers: 2, sets: 2, maxRows: 20, limit: 100}
	l := loopOn(t, openCPU(t), c)
	l.protect()
	if err := l.run(4, rand.New(rand.NewPCG(5, 6)), 100); err != nil {
		t.Fatal(err)
	}
	if st := l.m.Stats(); st.Reruns == 0 || l.m.Generation() != st.Reruns {
		t.Errorf("stats %+v, generation %d", st, l.m.Generation())
	}
	c.limit = 0
	l = loopOn(t, openCPU(t), c)
	l.protect()
	err := l.run(4, rand.New(rand.NewPCG(5, 6)), 100)
	var of *Overflow
	if !errors.As(err, &of) || !strings.Contains(err.Error(), `workspace "experts"`) || !strings.Contains(err.Error(), "raise the limit") {
		t.Errorf("error: %v", err)
	}
}

// SPEC S1.6: what cannot be given is an error with rank, group, asked and
// available, never a wrong number.
func TestOverflowThatCannotBeMended(t *testing.T) {
	c := tight(4, 2, 4, 2)
	c.Rank = 3
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 2, sets: 2, maxRows: 100})
	l.protect()
	err := l.run(1, rand.New(rand.NewPCG(7, 8)), 100)
	var of *Overflow
	if !errors.As(err, &of) || of.Rank != 3 {
		t.Fatalf("error: %v", err)
	}
	for _, want := range []string{"rank 3", "expert_fc1", "asked for", "were free", "device tier 4 of at most 4, host tier 2 of at most 2", "raise"} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not say %q: %v", want, err)
		}
	}
}

// SPEC S1.6: a graph that was captured inside of a transaction, and finds in a later
// replay that a buffer is too small, is captured again with larger ones.
func TestReplayOverCapacity(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: roomy(Auto), pipeline: interleaved, layers: 2, sets: 2, maxRows: 20, limit: 100})
	l.protect()
	key := memory.Key{Microbatches: len(l.passes)}
	grads := make([]uint64, l.grads.Size()/8)
	if err := l.zero(); err != nil {
		t.Fatal(err)
	}
	var graph device.Graph
	captured := 0
	for i, rows := range []Rows{10, 15, 90, 30} {
		all := make([]Rows, len(l.place))
		for j := range all {
			all[j] = rows - Rows(j%3)
		}
		l.route(all)
		gen := -1
		err := l.m.Transact(key, func(int) error {
			if i == 0 { // eagerly, so that records are there
				l.m.Begin(key)
				defer l.m.Finish()
				return l.body(0)
			}
			if graph == nil || gen >= 0 && gen != l.m.Generation() {
				l.compute.BeginCapture()
				l.m.Begin(key)
				err := l.body(0)
				l.m.Finish()
				g, failed := l.compute.EndCapture()
				if err := errors.Join(err, failed); err != nil {
					return err
				}
				if graph != nil {
					err = graph.Close()
				}
				if graph = g; err != nil {
					return err
				}
				captured++
			}
			gen = l.m.Generation()
			l.compute.Replay(graph)
			return nil
		})
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		grads = l.want(grads)
		if err := l.compare(grads); err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
	}
	if st := l.m.Stats(); st.Reruns != 1 || st.Steps != 4 || captured != 2 {
		t.Errorf("%d captures, %+v", captured, st)
	}
	if err := graph.Close(); err != nil {
		t.Error(err)
	}
}

// Needs has the pages that each group took when it was stashed last. A step in which a
// group has no rows leaves its number as it is.
func TestNeedsOfGroups(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: roomy(Auto), pipeline: interleaved, layers: 2, sets: 2, maxRows: 3000})
	l.protect()
	if err := l.zero(); err != nil {
		t.Fatal(err)
	}
	want := map[memory.GroupID]schedule.Pages{}
	for _, none := range []int{-1, 0} {
		rows := make([]Rows, len(l.place))
		for g, i := range l.place {
			if i == none {
				continue
			}
			rows[i] = Rows(100 * (i + 1))
			want[g] = l.w.layout.Pages(l.m.store.cfg.Page, rows[i])
		}
		l.route(rows)
		if err := l.m.Step(memory.Key{}, l.body); err != nil {
			t.Fatal(err)
		}
		if got := l.m.Needs(); !maps.Equal(got, want) {
			t.Errorf("needs %v, want %v", got, want)
		}
	}
}

// A step that its caller gives up is over when Step returns, whatever it had issued: the
// caller may free what it used. The other ranks are told why.
func TestStepGivenUpIsOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wrong := errors.New("bad batch")
		for name, step := range map[string]func(m *Manager, body func(int) error) error{
			"finished": func(m *Manager, body func(int) error) error { return m.Step(memory.Key{}, body) },
			"not finished": func(m *Manager, body func(int) error) error {
				return m.Transact(memory.Key{}, func(int) error { m.Begin(memory.Key{}); return body(0) })
			},
			"not begun": func(m *Manager, body func(int) error) error { return m.Transact(memory.Key{}, body) },
		} {
			var told []Outcome
			c := roomy(Auto)
			c.Rank, c.Reduce = 5, func(v Outcome) (Outcome, error) { told = append(told, v); return v, nil }
			dev, err := cpu.Open(cpu.Options{})
			if err != nil {
				t.Fatal(err)
			}
			l, err := newLoop(t, dev, loopConfig{ManagerConfig: c, pipeline: interleaved, layers: 1, sets: 1, maxRows: 10})
			if err != nil {
				t.Fatal(err)
			}
			over := false
			err = step(l.m, func(int) error {
				l.compute.Host(func() { time.Sleep(time.Hour); over = true }, device.Reads(l.grads.All()))
				return wrong
			})
			if !errors.Is(err, wrong) || !over {
				t.Errorf("%s: error %v; its work is over: %v", name, err, over)
			}
			if len(told) != 1 || told[0] != (Outcome{Failed: true, Final: true, Rank: 5, Why: "bad batch"}) {
				t.Errorf("%s: the other ranks were told %+v", name, told)
			}
			if err := errors.Join(l.close(), dev.Close()); err != nil {
				t.Error(name, err)
			}
		}
	})
}

// SPEC S1.5: other microbatch counts, evaluation in between and an order that
// changes without notice are no failures, and leave other plans alone.
func TestChangedSchedules(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: roomy(Auto), pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 2}, layers: 3, sets: 3, maxRows: 50})
	l.protect()
	rng := rand.New(rand.NewPCG(9, 10))
	if err := l.run(3, rng, 50); err != nil {
		t.Fatal(err)
	}
	plan := l.m.plans[memory.Key{Microbatches: len(l.passes)}]
	if !plan.Stack {
		t.Fatal("PP 1 is not a stack")
	}
	// Evaluation: forward passes only.
	if err := l.m.Step(memory.Key{Phase: memory.Evaluate}, func(int) error {
		for g := range l.place {
			l.forward(g).Drop()
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if l.m.plans[memory.Key{Microbatches: len(l.passes)}] != plan || len(l.m.plans) != 1 {
		t.Error("evaluation changed a plan")
	}
	// The same key, but both forward passes come first, then the backward
	// passes in the same order: no stack any more.
	ps := l.passes
	l.passes = []schedule.Pass{ps[0], ps[2], ps[1], ps[3]}
	if err := l.run(3, rng, 50); err != nil {
		t.Fatal(err)
	}
	st := l.m.Stats()
	if st.Departures == 0 || st.Reruns != 1 {
		t.Errorf("stats %+v, want departures and one rerun", st)
	}
	if p := l.m.plans[memory.Key{Microbatches: len(l.passes)}]; p.Stack {
		t.Error("the new plan is a stack")
	}
}

// A step captured whole, with reset, stashes and restores inside, replays with
// no host work and gives the exact result, also after pools have grown.
func TestCapturedStep(t *testing.T) {
	for _, mode := range []Mode{Auto, PagesOnly} {
		c := tight(4, 0, 512, 0)
		c.Mode = mode
		l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: c, pipeline: schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 3}, layers: 3, sets: 2, maxRows: 450})
		l.protect()
		if err := l.run(2, rand.New(rand.NewPCG(1, 1)), 20); err != nil {
			t.Fatal(err)
		}
		l.compute.BeginCapture()
		l.m.Begin(memory.Key{Microbatches: len(l.passes)})
		_ = l.body(0)
		l.m.Finish()
		g, err := l.compute.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		grads := make([]uint64, l.grads.Size()/8)
		if err := l.zero(); err != nil {
			t.Fatal(err)
		}
		pages := l.m.store.Pages(Device)
		for step := range 5 {
			rows := make([]Rows, len(l.place))
			for i := range rows {
				rows[i] = Rows(10 * (i + 1) * (step + 1))
			}
			l.route(rows)
			before := l.dev.Counters()
			if err := l.m.Transact(memory.Key{Microbatches: len(l.passes)}, func(int) error { l.compute.Replay(g); return nil }); err != nil {
				t.Fatal(err)
			}
			if after := l.dev.Counters(); after.Launches != before.Launches {
				t.Errorf("a replayed step launched %d kernels from the host", after.Launches-before.Launches)
			}
			grads = l.want(grads)
			if err := l.compare(grads); err != nil {
				t.Fatalf("step %d: %v", step, err)
			}
		}
		if st := l.m.Stats(); st.Reruns == 0 || l.m.store.Pages(Device) <= pages {
			t.Errorf("the pool did not grow under the graph: %+v", st)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

// SPEC S1.6: steps that overflow one after the other are each rerun, and exact.
func TestOverflowTwiceInARow(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: tight(2, 0, 4096, 0), pipeline: interleaved, layers: 2, sets: 2, maxRows: 2000})
	l.protect()
	rng := rand.New(rand.NewPCG(1, 1))
	for i, most := range []Rows{60, 400, 2000} {
		if err := l.run(1, rng, most); err != nil {
			t.Fatal(err)
		}
		if st := l.m.Stats(); st.Reruns != i+1 {
			t.Errorf("up to %d rows: %d reruns, want %d", most, st.Reruns, i+1)
		}
	}
}

// SPEC S1.6: a rerun that overflows again, here because it asks for more than the
// step it repeats, is an error.
func TestSecondFailure(t *testing.T) {
	l := loopOn(t, openCPU(t), loopConfig{ManagerConfig: tight(2, 0, 4096, 0), pipeline: interleaved, layers: 2, sets: 2, maxRows: 2000})
	l.protect()
	err := l.m.Step(memory.Key{}, func(attempt int) error {
		rows := make([]Rows, len(l.place))
		for i := range rows {
			rows[i] = Rows(100 + 1900*attempt)
		}
		l.route(rows)
		return l.body(attempt)
	})
	var of *Overflow
	if !errors.As(err, &of) || !strings.Contains(err.Error(), "the rerun of a step failed as well: expert_fc1") {
		t.Errorf("error: %v", err)
	}
}
