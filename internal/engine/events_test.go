// This file owns the laws of the trace.

package engine

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// traced trains a loop on a device that is watched, and reads its trace back.
func traced(t *testing.T, c loopConfig, steps int) (tr *trace.Trace, s memory.Summary) {
	t.Helper()
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{Rank: c.rank, Compute: "compute"}, 0)
	c.Trace = trace.Since(device.Now(), w)
	dev, err := cpu.Open(cpu.Options{Observe: Observe(c.Trace, c.rank)})
	if err != nil {
		t.Fatal(err)
	}
	err = run(dev, c, func(l *loop, rng *rand.Rand) error {
		err := l.train(steps, rng)
		s = l.rt.Summary(l.key())
		return err
	})
	if err := errors.Join(err, dev.Close(), w.Close()); err != nil {
		t.Fatal(err)
	}
	if tr, err = trace.Read(&b); err != nil || tr.Cut != nil || tr.Dropped > 0 {
		t.Fatal(err, tr)
	}
	return tr, s
}

// SPEC S6.5: events of a step balance: what left comes back or the step ends, and
// the bytes in use are those that the events add up to, in captured scopes and replayed
// steps as well; on the device's clock they keep their order.
func TestTraceBalances(t *testing.T) {
	redo := change(hand("core_attn", "expert_fc1"), func(h *policy.ByHand) { h.RecomputeModules = []string{"mlp"} })
	for name, cfg := range map[string]Config{
		"eager":         {ByHand: redo},
		"borrowed":      {ByHand: redo},
		"scopes":        {ByHand: redo, Scopes: scopes},
		"whole":         {ByHand: redo, Scopes: whole},
		"scopes, stash": {ByHand: hand("core_attn", "moe_act"), Scopes: scopes, Stash: store(400, 400)},
		"whole, stash":  {ByHand: hand("core_attn", "moe_act"), Scopes: whole, Stash: store(400, 400)},
	} {
		t.Run(name, func(t *testing.T) {
			c := on(1, cfg)
			if c.Stash != nil {
				c.most = 40
			}
			c.borrows = name == "borrowed"
			const steps = 5
			tr, s := traced(t, c, steps)
			balances(t, tr, steps, s)
			watchedToo(t, tr)
		})
	}
}

// Two keys whose steps are captured as a whole replay in turn: each step has the events of
// its own key.
func TestTraceOfTwoKeys(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{Compute: "compute"}, 0)
	c := on(0, Config{Scopes: whole, ByHand: hand("core_attn", "moe_act"), Trace: w})
	const rounds = 6
	must(t, c, func(l *loop, rng *rand.Rand) error {
		half, err := schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}.Passes(0)
		if err != nil {
			return err
		}
		for range rounds {
			if err := l.one(l.key(), rng); err != nil {
				return err
			}
			long := l.passes
			l.passes = half
			err := l.one(memory.Key{Microbatches: 1}, rng)
			if l.passes = long; err != nil {
				return err
			}
		}
		if g := l.rt.Summary(l.key()).Graphs; g.Captures != 2 || g.Replays == 0 {
			t.Errorf("the graphs: %+v", g)
		}
		return w.Close()
	})
	tr, err := trace.Read(&b)
	if err != nil {
		t.Fatal(err)
	}
	var saves []int // of each step
	for e := range tr.All() {
		switch e.Kind {
		case trace.Begin:
			saves = append(saves, 0)
		case trace.Save:
			saves[len(saves)-1]++
		}
	}
	if len(saves) != 2*rounds {
		t.Fatalf("%d steps", len(saves))
	}
	for i, n := range saves[2:] {
		if n != saves[i] || n == saves[i+1] {
			t.Errorf("step %d: the groups of all steps are %d", i+2, saves)
			break
		}
	}
}

// balances follows the decisions.
func balances(t *testing.T, tr *trace.Trace, steps int, s memory.Summary) {
	if err := tr.Check(); err != nil {
		t.Fatal(err)
	}
	clock, at := tr.Clock(), int64(0)
	peak, depth, issued, seen := int64(0), 0, uint64(0), map[trace.Kind]int{}
	for i, e := range tr.Events {
		if e.Kind.Span() || e.Storage == 0 && (e.Kind == trace.Alloc || e.Kind == trace.Free) {
			continue
		}
		if e.Kind != trace.Save || e.Storage == 0 {
			seen[e.Kind]++
		}
		switch e.Kind {
		case trace.Begin:
			depth++
		case trace.End:
			depth--
			peak = e.Bytes // of the step that the summary is of, in the end
		}
		if e.Rank != tr.Header.Rank || depth < 0 || depth > 1 || e.First < issued || e.Step != seen[trace.Begin] {
			t.Fatalf("event %d has no step or rank, or is out of order: %+v", i, e)
		}
		now := clock.Of(&tr.Events[i])
		if now < at {
			t.Fatalf("event %d, %+v, lies at %d, %d before the last", i, e, now, at-now)
		}
		issued, at = e.First, now
	}
	if seen[trace.Save] != seen[trace.Load] || seen[trace.Load] != seen[trace.Release] || seen[trace.Begin] != steps || seen[trace.End] != steps {
		t.Errorf("%v", seen)
	}
	if seen[trace.Decide] != 1 || seen[trace.Offload] == 0 || seen[trace.Offload] != seen[trace.Reload] || seen[trace.Alloc] == 0 {
		t.Errorf("%v", seen)
	}
	if st := s.Stash; st == nil != (seen[trace.Recompute] > 0) || st != nil && (seen[trace.Stash] == 0 || seen[trace.Stash] != seen[trace.Restore] || seen[trace.Spill] != steps) {
		t.Errorf("%v", seen)
	}
	if s.Graphs != nil && (seen[trace.Capture] == 0 || seen[trace.Capture] != s.Graphs.Captures || seen[trace.Replay] != s.Graphs.Replays || s.Graphs.Replays == 0) {
		t.Errorf("%v, %+v", seen, s.Graphs)
	}
	if own := slices.IndexFunc(tr.Events, func(e trace.Event) bool { return e.Kind == trace.Alloc && e.Storage > 0 && e.Offset < 0 }) < 0; peak < int64(s.Device) || own && peak != int64(s.Device) {
		t.Errorf("the events' peak is %d, the step's %d", peak, s.Device)
	}
}

// watchedToo looks at what the device told besides: memory of several owners, work of
// several streams, and, where no graph hides them, the copies that leave.
func watchedToo(t *testing.T, tr *trace.Trace) {
	owners, streams := map[string]bool{}, map[string]int64{}
	left, graphs := int64(0), false
	for _, e := range tr.Events {
		switch {
		case e.Kind == trace.Offload:
			left += e.Bytes
		case e.Kind.Span():
			streams[e.Stream] += e.Bytes
			graphs = graphs || e.Kind == trace.Graph
		case e.Kind == trace.Alloc && e.Storage == 0:
			owners[e.Name] = true
		}
	}
	if len(owners) < 3 || len(streams) < 3 || !graphs && streams["offload"] != left {
		t.Errorf("%d bytes left; %v, %v", left, owners, streams)
	}
}

// Memory that is the caller's, and lent again when it comes back, is counted like any.
func TestTraceOfLent(t *testing.T) {
	var b bytes.Buffer
	w := trace.NewWriter(&b, trace.Header{}, 0)
	l := newBorrower(t, Config{Trace: w, SavedLimit: 3 * 4096})
	for range 3 {
		if _, err := l.step(t, 8, nil); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	tr, err := trace.Read(&b)
	if err == nil {
		err = tr.Check()
	}
	if err != nil {
		t.Fatal(err)
	}
	seen := map[trace.Kind]int{}
	for _, e := range tr.Events {
		seen[e.Kind]++
	}
	// A storage that is evicted and needed again before its copy is over is used where it
	// lies: it is offloaded and never reloaded. How often depends on the machine's speed.
	if seen[trace.Offload] == 0 || seen[trace.Reload] == 0 || seen[trace.Reload] > seen[trace.Offload] || seen[trace.End] != 3 {
		t.Errorf("%v", seen)
	}
}
