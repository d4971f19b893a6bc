// This file owns what steps take, in bytes and in time: what was forecast is what
// happens.

package engine

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// SPEC S4.6, S5.1: saved memory is the bytes that are away when the step without
// offload is at its peak, to 5 %, eager and captured whole, by the machine's account
// and by the device's ledger.
func TestMemoryIsSaved(t *testing.T) {
	t.Parallel()
	for i, p := range pipelines {
		for _, set := range []memory.Scopes{0, whole} {
			c := on(i, Config{Scopes: set, Links: memory.Links{Out: 1e15, In: 1e15}})
			c.layers = 16
			before, kept := ledger(t, c)
			c.ByHand = change(hand("qkv_linear", "core_attn", "attn_proj", "expert_fc1"), func(h *policy.ByHand) { h.Margin = 1 })
			after, d := ledger(t, c)
			expected := away(kept, d)
			if got := before - after; expected == 0 || math.Abs(float64(got-expected)) > 0.05*float64(expected) {
				t.Errorf("%s, %v: %v became %v: %v saved, %v expected", p.name, set, before, after, got, expected)
			}
		}
	}
}

// ledger trains and is what the device handed out for activations, with what was
// recorded.
func ledger(t *testing.T, c loopConfig) (n memory.Bytes, d *learned) {
	must(t, c, func(l *loop, rng *rand.Rand) error {
		if err := l.train(4, rng); err != nil {
			return err
		}
		d = l.rt.keys[l.key()]
		for _, o := range l.dev.Memory().Owners {
			if o.Owner == trace.HeapOwner(memory.Device) {
				n = o.Peak
			}
		}
		if s := l.rt.Summary(l.key()); s.Extent > n || d.decision.Forecast.Extent > 0 && d.decision.Forecast.Extent != s.Extent {
			return fmt.Errorf("%v taken, the ledger has %v, forecast %v", s.Extent, n, d.decision.Forecast.Extent)
		}
		return nil
	})
	return n, d
}

// away is the bytes of storages that have left under the plan when the step that
// keeps everything has the most in use: those of leaving groups that no other group
// keeps.
func away(kept, with *learned) memory.Bytes {
	type state struct {
		bytes       int64
		owned       bool
		stay, leave int
	}
	var live, most, out, atMost int64
	sizes := map[int]*state{}
	saves := map[memory.GroupID][]residency.Item{}
	count := func(by int64, s *state) {
		if s.owned || s.stay+s.leave > 0 {
			live += by * s.bytes
		}
		if !s.owned && s.stay == 0 && s.leave > 0 {
			out += by * s.bytes
		}
	}
	change := func(id int, f func(s *state)) {
		count(-1, sizes[id])
		f(sizes[id])
		count(1, sizes[id])
	}
	for _, op := range kept.profile.Tape.Ops {
		switch op.Kind {
		case residency.OpTake:
			sizes[op.ID] = &state{bytes: round(int64(op.Bytes)), owned: true}
			count(1, sizes[op.ID])
		case residency.OpGive:
			change(op.ID, func(s *state) { s.owned = false })
		case residency.OpSave:
			saves[op.Group] = op.Items
			for _, it := range op.Items {
				change(it.ID, func(s *state) {
					if with.plan.Offload[op.Group] && !it.Stay {
						s.leave++
					} else {
						s.stay++
					}
				})
			}
		case residency.OpLoad: // and then to the end of the step
			for _, it := range saves[op.Group] {
				change(it.ID, func(s *state) {
					if with.plan.Offload[op.Group] && !it.Stay {
						s.leave--
						s.stay++
					}
				})
			}
		case residency.OpRelease:
			for _, it := range saves[op.Group] {
				change(it.ID, func(s *state) { s.stay-- })
			}
		}
		if live > most {
			most, atMost = live, out
		}
	}
	return memory.Bytes(atMost)
}

// timed trains on modelled links, and is how long a step takes after what is learned.
func timed(t *testing.T, c loopConfig, rate float64) (step time.Duration, d *policy.Decision) {
	t.Helper()
	c.Links, c.Effort = memory.Links{Out: rate, In: rate}, 1
	steps := 2 // the first is recorded
	if c.SavedLimit > 0 {
		steps++ // timed again
	}
	if c.SavedLimit > 0 && !c.NoRecompute {
		steps++ // recorded again
	}
	link := cpu.Link{BytesPerSecond: rate}
	steady(t, func() {
		dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Links: cpu.Links{Out: link, In: link}})
		if err != nil {
			t.Error(err)
			return
		}
		err = run(dev, c, func(l *loop, rng *rand.Rand) error {
			for range steps {
				l.feed(rng)
				if err := l.compute.Sync(); err != nil {
					return err
				}
				begin := time.Now()
				if err := l.step(l.key()); err != nil {
					return err
				}
				if err := l.compute.Sync(); err != nil {
					return err
				}
				step = time.Since(begin)
			}
			d = l.rt.Decision(l.key())
			return nil
		})
		if err := errors.Join(err, dev.Close()); err != nil {
			t.Error(err)
		}
	})
	if t.Failed() {
		t.FailNow()
	}
	return step, d
}

// point is a budget and links that a forecast is tried at.
type point struct {
	share memory.Bytes // of what the step takes, in hundredths
	rate  float64
	redo  bool // it may recompute
	hides bool // the copies hide
}

// SPEC S5.5, S6.1: over a grid of budgets, with links on which copies hide and on
// which they do not, the predicted step is within a fiftieth of the measured one, and
// hidden copies cost at most a twentieth; where everything fits, nothing is done.
func TestForecastTime(t *testing.T) {
	c := loopConfig{pipeline: pipelines[0].Pipeline, layers: 4, scale: 32, work: time.Millisecond, dry: true}
	c.pipeline.Microbatches = 1
	all := extent(t, on(0, Config{}).like(c))
	points := []point{{100, 20e6, false, false}, {45, 100e6, false, true}, {45, 20e6, true, false}, {70, 20e6, false, false}, {45, 20e6, false, false}}
	if testing.Short() {
		points = points[:3]
	}
	meant := time.Duration(0) // of a step that waits for nothing
	for i := range c.layers {
		meant += time.Duration(3*len(layerOf(i))) * c.work
	}
	if plain, _ := timed(t, c, 1e9); plain != meant {
		t.Errorf("without a plan the step took %v, and its work is %v", plain, meant)
	}
	for _, p := range points {
		b := c
		b.SavedLimit, b.NoRecompute = all*p.share/100/256*256, !p.redo
		took, d := timed(t, b, p.rate)
		near := math.Abs((took - d.Forecast.Step).Seconds()) <= 0.02*took.Seconds()
		cheap := !p.hides || took.Seconds() <= 1.05*meant.Seconds()
		what := fmt.Sprintf("%+v: the step took %v, forecast %v; its work is %v; %v moved", p, took, d.Forecast.Step, meant, d.Forecast.Counts.OutBytes)
		t.Log(what)
		if !near || !cheap || d.Nothing != (p.share == 100) {
			t.Errorf("%s; nothing to do is %v", what, d.Nothing)
		}
	}
}

// like is a loop with another's sizes.
func (c loopConfig) like(d loopConfig) loopConfig {
	d.Config = c.Config
	d.work = 0
	return d
}

// stalls is an observer of a device that makes it stand still behind some of its copies.
type stalls struct {
	copies atomic.Int64
	at     func(copy int64) bool
}

func (*stalls) MemoryChanged(memory.Kind, string, memory.Bytes, memory.Bytes) {}

func (s *stalls) WorkDone(w device.Work) {
	if w.Kind == device.Copied && s.at(s.copies.Add(1)) {
		time.Sleep(3 * time.Second)
	}
}

// Rates are those of the bytes without the latency, which is that of a small copy, but never more than half of a
// large one; both ways together carry twice the bytes.
func TestRatesOfLinks(t *testing.T) {
	us := func(n ...time.Duration) (took [4]time.Duration) {
		for i, x := range n {
			took[i] = x * time.Microsecond
		}
		return took
	}
	const n = 10_000_000
	for _, c := range []struct {
		took [4]time.Duration
		want memory.Links
	}{
		{us(10, 1010, 2010, 4010), memory.Links{Out: 1e10, In: 5e9, Both: 5e9, Latency: 10 * time.Microsecond}},
		{us(5000, 1000, 2000, 2500), memory.Links{Out: 2e10, In: 1e7 / 1500e-6, Both: 1e10, Latency: 500 * time.Microsecond}},
		{us(5000, 2000, 1000, 2500), memory.Links{Out: 1e7 / 1500e-6, In: 2e10, Both: 1e10, Latency: 500 * time.Microsecond}},
		{us(0, 1, 1, 0), memory.Links{Out: 1e13, In: 1e13, Both: 2e16}},
	} {
		got := linksOf(c.took, n)
		for _, x := range [][2]float64{{got.Out, c.want.Out}, {got.In, c.want.In}, {got.Both, c.want.Both}} {
			if !(math.Abs(x[0]/x[1]-1) < 1e-9) || got.Latency != c.want.Latency {
				t.Errorf("%v: %+v, want %+v", c.took, got, c.want)
				break
			}
		}
	}
}

// A machine that stands still during four of five rounds of copies has the rates that it has
// in the fifth.
func TestMeasureLinksOfAMachineThatStalls(t *testing.T) {
	const rate, perRound = 1e9, 5 // copies of a round: three alone, and two at once
	for calm := range int64(5) {
		steady(t, func() {
			watch := &stalls{at: func(n int64) bool { return (n-1)/perRound != calm }}
			link := cpu.Link{BytesPerSecond: rate}
			dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Observe: watch, Links: cpu.Links{Out: link, In: link}})
			if err != nil {
				t.Error(err)
				return
			}
			l, err := MeasureLinks(dev)
			if err := errors.Join(err, dev.Close()); err != nil {
				t.Error(err)
			}
			if watch.copies.Load() != 5*perRound || math.Abs(l.Out-rate) > 0.01*rate || math.Abs(l.In-rate) > 0.01*rate {
				t.Errorf("calm in round %d: %+v after %d copies, want %g both ways", calm, l, watch.copies.Load(), float64(rate))
			}
		})
	}
}

// The measured links are the modelled ones, also where there is little memory.
func TestMeasureLinks(t *testing.T) {
	const late = 2 * time.Millisecond
	want := memory.Links{Out: 800e6, In: 400e6, Both: 800e6, Latency: late}
	for _, capacity := range []memory.Bytes{0, 12 * memory.MiB} {
		steady(t, func() {
			dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{capacity, capacity}, Links: cpu.Links{
				Out: cpu.Link{BytesPerSecond: want.Out, Latency: late}, In: cpu.Link{BytesPerSecond: want.In, Latency: late}}})
			if err != nil {
				t.Error(err)
				return
			}
			l, err := MeasureLinks(dev)
			if err := errors.Join(err, dev.Close()); err != nil { // and nothing is left
				t.Error(err)
			}
			near := func(got, want float64) bool { return math.Abs(got-want) <= 0.01*want }
			if !near(l.Out, want.Out) || !near(l.In, want.In) || !near(l.Both, want.Both) || !near(l.Latency.Seconds(), late.Seconds()) {
				t.Errorf("%+v, want %+v", l, want)
			}
		})
	}
}
