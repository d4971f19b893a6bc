// This file owns bad input and misuse: each is answered by a sentence that says what
// to change.

package engine

import (
	"encoding/json"
	"errors"
	"maps"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// says tells whether a sentence has all of some words.
func says(text string, words ...string) bool {
	for _, w := range words {
		if !strings.Contains(text, w) {
			return false
		}
	}
	return !strings.Contains(text, "\n")
}

// SPEC S4.4, S4.5, S5.3: bad settings are refused when the runtime is opened, or when
// the first step shows them, and nothing is left behind.
func TestBadInput(t *testing.T) {
	attn := memory.ScopesOf(memory.Attn)
	for name, x := range map[string]struct {
		c     Config
		words []string
	}{
		"an unknown module":         {Config{ByHand: hand("core_atn")}, []string{"core_atn", "did you mean core_attn?", "expert_fc1", "moe_act"}},
		"one that is nothing like":  {Config{ByHand: hand("zzz")}, []string{"zzz", "attn_norm", "fused_group_mlp"}},
		"both":                      {Config{ByHand: change(hand("core_attn"), func(h *policy.ByHand) { h.RecomputeModules = []string{"core_attn"} })}, []string{"core_attn", "offload", "recompute", "remove"}},
		"attn_norm before attn":     {Config{ByHand: hand("attn_norm"), Scopes: attn}, []string{"attn_norm", "attn", "leave"}},
		"the same by policy":        {Config{Policy: memory.Policy{{Name: "attn_norm"}: memory.Offload, {Name: "attn_norm", Layer: 1}: memory.Recompute, {Name: "attn_norm", Layer: 2}: memory.Keep}, Scopes: attn}, []string{"attn_norm", "attn"}},
		"a fraction above one":      {Config{ByHand: change(hand(), func(h *policy.ByHand) { h.OffloadFraction = 1.5 })}, []string{"OffloadFraction", "1.5", "0 to 1"}},
		"a fraction below zero":     {Config{ByHand: change(hand(), func(h *policy.ByHand) { h.OffloadFraction = -0.1 })}, []string{"OffloadFraction", "-0.1"}},
		"two who choose":            {Config{ByHand: hand(), Policy: memory.Policy{}}, []string{"Policy", "ByHand", "one of them"}},
		"a negative budget":         {Config{Budget: -1}, []string{"Budget -1", "negative"}},
		"a budget below the floor":  {Config{SavedLimit: 12 * memory.KiB}, []string{"budget", "raise the budget"}},
		"a place that is taken":     {Config{GroupScopes: map[string]memory.Scope{"core_attn": memory.MLP}}, []string{"core_attn", "another name"}},
		"a module that has none":    {Config{Policy: memory.Policy{{Name: "nowhere"}: memory.Offload}}, []string{"nowhere", "choose keep"}},
		"recompute what cannot be":  {Config{Policy: memory.Policy{{Name: "router", Layer: 1}: memory.Recompute}}, []string{"router", "choose keep"}},
		"too little for the stash":  {Config{SavedLimit: 64 * memory.KiB, Stash: store(400, 400)}, []string{"budget of 64.00 KiB", "raise the budget"}},
		"no warm-up":                {Config{WarmUp: -1}, []string{"WarmUp", "negative"}},
		"stash in a captured scope": {Config{Policy: memory.Policy{{Name: "moe_act"}: memory.Stash}, Stash: store(6, 60), Scopes: memory.ScopesOf(memory.MoE)}, []string{"moe_act", "full_iteration"}},
		"stash without a store":     {Config{Policy: memory.Policy{{Name: "moe_act"}: memory.Stash}}, []string{"StashModules moe_act", "no rows", "workspace"}},
		"stash what has no rows":    {Config{ByHand: change(hand(), func(h *policy.ByHand) { h.StashModules = []string{"moe_act"} }), Stash: store(6, 60)}, []string{"StashModules moe_act", "no rows"}},
		"a budget and a limit":      {Config{Budget: 1, SavedLimit: 1}, []string{"Budget", "SavedLimit"}},
	} {
		dev := openCPU(t)
		c := on(0, x.c)
		if x.c.Stash != nil {
			c.most = 40
		}
		err := run(dev, c, steps(2))
		if err == nil || !says(err.Error(), x.words...) {
			t.Errorf("%s: %v", name, err)
		}
		if err := dev.Close(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// SPEC S5.5: what the user may ask next: a budget below the floor names the floor.
func TestBelowTheFloor(t *testing.T) {
	c := on(0, Config{NoRecompute: true})
	c.SavedLimit = extent(t, c) / 5
	dev := openCPU(t)
	err := errors.Join(run(dev, c, steps(2)), dev.Close())
	var below *memory.BudgetError
	var full *residency.Full
	if !errors.As(err, &below) && !errors.As(err, &full) {
		t.Fatal(err)
	}
}

// The report on captured scopes describes every choice of a policy, not the last one only.
func TestReportOfAllChoices(t *testing.T) {
	c := Config{Scopes: scopes, Policy: memory.Policy{
		{Name: "qkv_linear"}: memory.Offload, {Name: "qkv_linear", Layer: 1}: memory.Recompute, {Name: "core_attn"}: memory.Offload,
	}}
	must(t, on(0, c), func(l *loop, rng *rand.Rand) error {
		found := map[string]int{}
		for _, g := range l.rt.Scopes().Groups {
			found[g.Name+" "+g.Choice.String()]++
		}
		if want := map[string]int{"qkv_linear offload": 1, "qkv_linear recompute": 1, "core_attn offload": 1}; !maps.Equal(found, want) {
			t.Errorf("the report has %v, want %v", found, want)
		}
		return nil
	})
}

// A workspace needs a stash, and a module of one's own a place.
func TestWhatGoesTogether(t *testing.T) {
	must(t, on(0, Config{}), func(l *loop, rng *rand.Rand) error {
		if _, err := l.rt.NewWorkspace("w", 1, 0, stash.Tensor{Name: "rows", Row: 64, MaxRows: 1}); err == nil || !says(err.Error(), "Config.Stash") {
			t.Error(err)
		}
		return nil
	})
	places := map[string]memory.Scope{"mlp_gate": memory.MLP}
	must(t, on(0, Config{ByHand: hand("mlp_gate"), GroupScopes: places}), func(l *loop, rng *rand.Rand) error { return nil })
}

// Programmers' errors panic with a sentence.
func TestMisuse(t *testing.T) {
	panics := func(words string, f func()) {
		t.Helper()
		defer func() {
			if x, ok := recover().(string); !ok || !says(x, words) {
				t.Errorf("%v, want %q", x, words)
			}
		}()
		f()
	}
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	rt, err := Open(Config{Device: dev, Compute: compute})
	if err != nil {
		t.Fatal(err)
	}
	g, h := memory.GroupID{Name: "mlp"}, memory.GroupID{Name: "mlp", Layer: 1}
	var last *Step
	err = rt.Step(memory.Key{}, func(s *Step) error {
		last = s
		panics("step inside of a step", func() { _ = rt.Step(memory.Key{}, nil) })
		panics("Close inside of a step", func() { _ = rt.Close() })
		panics("loaded but not saved", func() { _, _ = s.Load(g) })
		to := s.BeginGroup(g)
		panics("begins inside of", func() { s.BeginGroup(h) })
		x, err := s.New(256)
		if err != nil {
			return err
		}
		to.Save(x)
		x.Free()
		if err := to.End(); err != nil {
			return err
		}
		panics("used after its End", func() { to.Save(x) })
		panics("used after its End", func() { _ = to.End() })
		l, err := s.Load(g)
		if err != nil {
			return err
		}
		l.Done()
		panics("more often than loaded", l.Done)
		panics("or was done", func() { _, _ = s.Load(g) })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	panics("after its body returned", func() { last.BeginGroup(g) })
	if err := rt.Close(); err != nil {
		t.Fatal(err)
	}
	panics("second time", func() { _ = rt.Close() })
	panics("after Close", func() { _ = rt.Step(memory.Key{}, nil) })
	if err := errors.Join(compute.Close(), dev.Close()); err != nil {
		t.Fatal(err)
	}
}

// A body's error ends the step and comes back; the steps after it are exact, and
// learn as if it had not been.
func TestErrorsInBodies(t *testing.T) {
	t.Parallel()
	stop := errors.New("stop")
	for _, set := range []memory.Scopes{0, whole, scopes} {
		for fails := range 4 {
			must(t, on(0, Config{Scopes: set, ByHand: change(hand("core_attn", "expert_fc1"), func(h *policy.ByHand) { h.RecomputeModules = []string{"mlp"} })}), func(l *loop, rng *rand.Rand) error {
				for i := range 7 {
					if l.fail = nil; i == fails {
						l.fail = func(g memory.GroupID) error {
							if g.Name == "mlp_norm" && g.Layer == 2 {
								return stop
							}
							return nil
						}
					}
					err := l.one(l.key(), rng)
					replayed := err == nil && i == fails && set != 0 // no body was called that could fail
					if i == fails && !replayed && !errors.Is(err, stop) || i != fails && err != nil {
						t.Errorf("%v: step %d: %v", set, i, err)
					}
				}
				if s := l.rt.Summary(l.key()); s.Counts.Departed || s.Counts.OutBytes == 0 {
					t.Errorf("%v: %+v", set, s)
				}
				return nil
			})
		}
	}
}

func round(n int64) int64 { return (n + 255) / 256 * 256 }

// SPEC S5.4: the summary is a table and JSON.
func TestSummary(t *testing.T) {
	must(t, on(0, Config{ByHand: byHand["mixed"]}), func(l *loop, rng *rand.Rand) error {
		if s := l.rt.Summary(l.key()); len(s.Groups) != 0 {
			t.Error("a summary before the first step")
		}
		if err := l.train(3, rng); err != nil {
			return err
		}
		s := l.rt.Summary(l.key())
		text := s.String()
		for _, w := range []string{"rank 0", "core_attn", "recompute", "offload", "all", "copies out"} {
			if !strings.Contains(text, w) {
				t.Errorf("%q is missing in\n%s", w, text)
			}
		}
		raw, err := json.Marshal(s)
		if err != nil {
			return err
		}
		var back struct {
			Groups []struct {
				Name  string
				Moved int64
				Units map[string]int
			}
		}
		if err := json.Unmarshal(raw, &back); err != nil {
			return err
		}
		var moved int64
		for _, g := range back.Groups {
			moved += g.Moved
			if g.Name == "core_attn" && g.Units["recompute"] != 4 {
				t.Errorf("%+v", g)
			}
		}
		if moved != int64(s.Counts.OutBytes) || moved == 0 {
			t.Errorf("%d bytes moved of %d", moved, s.Counts.OutBytes)
		}
		return nil
	})
}
