// This file owns the tests of the rules.

package capture

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
)

func all(c Choice) map[string]Choice {
	m := map[string]Choice{}
	for name := range modules {
		m[name] = c
	}
	return m
}

// placed has two groups of the caller's own, one of them with a place.
func placed(t *testing.T, s Settings) Settings {
	t.Helper()
	if err := s.Place("my_gate", MLP); err != nil {
		t.Fatal(err)
	}
	return s
}

type choose = map[string]Choice

// detections are one case for each rule. Want lists verdicts by name; a group in
// two kinds of layers has a verdict for each, and its name ends in the kind's
// first letter; a group that is named like a scope ends in "group".
var detections = []struct {
	name   string
	scopes Set
	Settings
	want map[string]Verdict
}{
	{"nothing captured", 0, Settings{Choices: choose{"core_attn": Offload, "attn_norm": Offload, "moe_act": Stash, "fc1": Recompute, "fc2": Keep}},
		map[string]Verdict{"core_attn": Outside, "attn_norm": Outside, "moe_act": Outside, "fc1": Outside}},
	{"offloads inside attn", Of(Attn), Settings{WarmUp: 3, Choices: choose{"qkv_linear": Offload, "core_attn": Offload, "attn_proj": Offload, "gdp_qkv": Offload, "expert_fc1": Offload}},
		map[string]Verdict{"attn": Inside, "qkv_linear": Inside, "core_attn": Inside, "attn_proj": Inside, "gdp_qkv": Inside, "expert_fc1": Outside}},
	{"the norm before attention", Of(Attn), Settings{WarmUp: 3, Choices: choose{"attn_norm": Offload}},
		map[string]Verdict{"attn": Inside, "attn_norm": Refused}},
	{"the norm before attention, attention eager", Of(MLP), Settings{WarmUp: 3, Choices: choose{"attn_norm": Offload}},
		map[string]Verdict{"mlp": Inside, "attn_norm": Outside}},
	{"the norm before attention, whole step", Of(FullIteration), Settings{WarmUp: 1, Choices: choose{"attn_norm": Offload}},
		map[string]Verdict{"full_iteration": Inside, "attn_norm": Inside}},
	{"the norm behind attention", Of(MLP), Settings{WarmUp: 3, Choices: choose{"mlp_norm": Offload}},
		map[string]Verdict{"mlp": Inside, "mlp_norm d": Inside, "mlp_norm l": Outside}},
	{"the same in a dense model", Of(MLP), Settings{WarmUp: 3, Dense: true, Choices: choose{"mlp_norm": Offload}},
		map[string]Verdict{"mlp": Inside, "mlp_norm d": Inside}},
	{"the same before a router", Of(MoERouter), Settings{WarmUp: 3, MoE: true, Choices: choose{"mlp_norm": Offload, "shared_experts": Offload, "moe_act": Offload}},
		map[string]Verdict{"moe_router": Inside, "mlp_norm l": Inside, "shared_experts": Inside, "moe_act": Outside}},
	{"both norms computed again", Of(Attn), Settings{WarmUp: 3, Dense: true, Choices: choose{"layernorm": Recompute}},
		map[string]Verdict{"attn": Inside, "attn_norm": Inside, "mlp_norm d": Outside}},
	{"experts with rows counted on the device", Of(MoE), Settings{WarmUp: 3, Choices: choose{"expert_fc1": Offload, "router": Offload, "moe": Recompute}},
		map[string]Verdict{"moe": Inside, "expert_fc1": Inside, "router": Inside, "moe group": Inside}},
	{"experts with rows counted on the host", Of(Attn, MoE), Settings{WarmUp: 3, HostCounts: true, Choices: choose{"expert_fc1": Offload}},
		map[string]Verdict{"attn": Inside, "moe": Refused, "expert_fc1": Inside}},
	{"the whole step with rows counted on the host", Of(FullIteration), Settings{WarmUp: 3, HostCounts: true},
		map[string]Verdict{"full_iteration": Refused}},
	{"the whole step of a dense model", Of(FullIteration), Settings{WarmUp: 3, HostCounts: true, Dense: true},
		map[string]Verdict{"full_iteration": Inside}},
	{"a stash inside a scope", Of(MoE), Settings{WarmUp: 3, Choices: choose{"moe_act": Stash}},
		map[string]Verdict{"moe": Inside, "moe_act": Refused}},
	{"a stash outside of the scopes", Of(Attn, MoERouter), Settings{WarmUp: 3, Choices: choose{"moe_act": Stash}},
		map[string]Verdict{"attn": Inside, "moe_router": Inside, "moe_act": Outside}},
	{"a stash inside the step", Of(FullIteration), Settings{WarmUp: 3, Choices: choose{"moe_act": Stash}},
		map[string]Verdict{"full_iteration": Inside, "moe_act": Inside}},
	{"computed again with its backward pass", Of(Attn), Settings{WarmUp: 3, Choices: choose{"core_attn": Recompute}},
		map[string]Verdict{"attn": Inside, "core_attn": Inside}},
	{"computed again in an eager backward pass", Of(Attn), Settings{WarmUp: 3, ForwardOnly: true, Choices: choose{"core_attn": Recompute, "moe_act": Recompute, "attn_proj": Offload}},
		map[string]Verdict{"attn": Inside, "core_attn": Refused, "moe_act": Outside, "attn_proj": Inside}},
	{"a module captured in part", Of(MoERouter), Settings{WarmUp: 3, Choices: choose{"moe": Recompute}},
		map[string]Verdict{"moe_router": Inside, "moe group": Refused}},
	{"no warm-up", Of(Attn, MLP), Settings{Choices: choose{"attn_norm": Offload}},
		map[string]Verdict{"attn": Refused, "mlp": Refused, "attn_norm": Refused}},
	{"delayed", Of(Attn), Settings{WarmUp: 3, Delay: true, Choices: choose{"core_attn": Offload, "moe_act": Offload, "expert_fc1": Stash}},
		map[string]Verdict{"attn": Inside, "core_attn": Inside, "moe_act": Delayed, "expert_fc1": Outside}},
	{"a delay and nothing captured", 0, Settings{Delay: true, Choices: choose{"moe_act": Offload}},
		map[string]Verdict{"moe_act": Outside, "delay": SwitchedOff}},
	{"a delay and nothing outside", Of(Attn), Settings{WarmUp: 3, Delay: true, Choices: choose{"core_attn": Offload}},
		map[string]Verdict{"attn": Inside, "core_attn": Inside, "delay": SwitchedOff}},
	{"a delay and everything inside", Of(FullIteration), Settings{WarmUp: 3, Delay: true, Choices: choose{"moe_act": Offload}},
		map[string]Verdict{"full_iteration": Inside, "moe_act": Inside, "delay": SwitchedOff}},
	{"a scope of no layer", Of(MLP, MoERouter), Settings{WarmUp: 3, Dense: true, Choices: choose{"fc1": Offload}},
		map[string]Verdict{"mlp": Inside, "moe_router": SwitchedOff, "fc1": Inside}},
	{"another scope of no layer", Of(MLP), Settings{WarmUp: 3, MoE: true, Delay: true, Choices: choose{"moe_act": Offload}},
		map[string]Verdict{"mlp": SwitchedOff, "moe_act": Outside, "delay": SwitchedOff}},
	{"memory that grows out of its addresses", Of(Attn), Settings{WarmUp: 3, Outgrows: true},
		map[string]Verdict{"attn": Inside, "growth": SwitchedOff}},
	{"the same, nothing captured", 0, Settings{Outgrows: true}, map[string]Verdict{}},
	{"groups of the caller's own", Of(MLP), Settings{WarmUp: 3, Delay: true, Choices: choose{"my_gate": Offload, "my_other": Offload, "my_third": Recompute}},
		map[string]Verdict{"mlp": Inside, "my_gate": Inside, "my_other": Delayed, "my_third": Outside}},
}

// verdicts is a report as the table writes it.
func verdicts(r *Report) map[string]Verdict {
	m := map[string]Verdict{}
	for _, f := range append(slices.Clone(r.Scopes), r.Settings...) {
		m[f.Name] = f.Verdict
	}
	for _, g := range r.Groups {
		name := g.Name
		if slices.Contains(scopeNames[:], name) {
			name += " group"
		}
		if g.Layers != AllLayers {
			name += " " + g.Layers.String()[:1]
		}
		m[name] = g.Verdict
	}
	return m
}

// SPEC S4.2, S4.4: which groups lie in captured scopes is found out, and what is
// impossible is refused or switched off in one sentence that says why and what to
// do.
func TestDetect(t *testing.T) {
	var text strings.Builder
	for _, c := range detections {
		r := Detect(c.scopes, placed(t, c.Settings))
		if got := verdicts(r); !maps.Equal(got, c.want) {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
		fmt.Fprintf(&text, "== %s ==\n%v\n", c.name, r)
	}
	golden.Check(t, "detect.txt", text.String())
}

func TestReportJSON(t *testing.T) {
	r := Detect(Of(Attn, MoERouter), Settings{WarmUp: 3, Dense: true, Delay: true, Choices: choose{"attn_norm": Offload, "layernorm": Recompute}})
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "report.json", string(text)+"\n")
}

// anySettings are settings of every sort.
func anySettings(t *rapid.T) (Set, Settings) {
	var set Set
	for _, s := range rapid.SliceOfDistinct(rapid.SampledFrom([]Scope{Attn, MLP, MoERouter, MoE, FullIteration}), rapid.ID).Draw(t, "scopes") {
		if next := set | 1<<s; next.check() == nil {
			set = next
		}
	}
	flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
	names := append(slices.Sorted(maps.Keys(modules)), "layernorm", "mine", "stranger")
	s := Settings{
		Choices: rapid.MapOf(rapid.SampledFrom(names), rapid.SampledFrom([]Choice{Keep, Stash, Offload, Recompute})).Draw(t, "choices"),
		Dense:   flag("dense"), MoE: flag("moe"), Delay: flag("delay"), ForwardOnly: flag("forward only"),
		HostCounts: flag("host counts"), Outgrows: flag("outgrows"), WarmUp: rapid.IntRange(-1, 2).Draw(t, "warm-up"),
	}
	if err := s.Place("mine", rapid.SampledFrom([]Scope{Attn, MLP, MoERouter, MoE}).Draw(t, "place")); err != nil {
		t.Fatal(err)
	}
	return set, s
}

// SPEC S4.4: every group has a verdict, every refusal says what to do, and who
// does it is refused nothing more.
func TestDetectAny(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		set, s := anySettings(t)
		r := Detect(set, s)
		seen := map[string]bool{}
		for _, g := range r.Groups {
			seen[cmp.Or(g.Of, g.Name)] = true
			if g.Verdict == Refused && (!strings.Contains(g.Why, "; ") || !strings.HasPrefix(g.Why, g.Name)) {
				t.Errorf("%s is refused with %q", g.Name, g.Why)
			}
			if set == Of(FullIteration) && g.Verdict != Inside {
				t.Errorf("the whole step is captured, and %s is %v", g.Name, g.Verdict)
			}
			if set == 0 && g.Verdict != Outside {
				t.Errorf("nothing is captured, and %s is %v", g.Name, g.Verdict)
			}
		}
		for name, c := range s.Choices {
			if seen[name] != (c != Keep) {
				t.Errorf("%s is to be %v, and has a verdict: %v", name, c, seen[name])
			}
		}
		for _, f := range append(slices.Clone(r.Scopes), r.Settings...) {
			if (f.Verdict == Inside) != (f.Why == "") || f.Why != "" && !strings.Contains(f.Why, "; ") {
				t.Errorf("%s is %v with %q", f.Name, f.Verdict, f.Why)
			}
		}
		mended := maps.Clone(s.Choices)
		kept := r.Kept()
		for name := range s.Choices {
			for _, part := range append(slices.Clone(together[name]), name) {
				if kept[part] {
					mended[name] = Keep
				}
			}
		}
		s.Choices = mended
		if err := Detect(r.Captured, s).Err(); err != nil {
			t.Errorf("mended, and still: %v", err)
		}
		if (r.Err() == nil) != (len(kept) == 0 && !slices.ContainsFunc(r.Scopes, func(f Finding) bool { return f.Verdict == Refused })) {
			t.Errorf("error %v, kept %v", r.Err(), kept)
		}
	})
}

// Every module has a place in every policy: none is a stranger.
func TestNoModuleIsUnknown(t *testing.T) {
	for _, c := range []Choice{Stash, Offload, Recompute} {
		for _, g := range Detect(Of(Attn), Settings{WarmUp: 1, Choices: all(c)}).Groups {
			if strings.Contains(g.Why, "no known module") {
				t.Errorf("%s: %s", g.Name, g.Why)
			}
		}
	}
}

func TestPlace(t *testing.T) {
	var s Settings
	for _, c := range []struct {
		name  string
		scope Scope
		want  string
	}{
		{"", Attn, "a group without a name cannot be placed in scope attn; name it"},
		{"core_attn", MLP, "group core_attn has its place already; give your own group another name"},
		{"layernorm", MLP, "group layernorm has its place already; give your own group another name"},
		{"x", FullIteration, "group x cannot be placed in full_iteration, which holds every group; place it in attn, mlp, moe_router or moe"},
	} {
		if err := s.Place(c.name, c.scope); err == nil || err.Error() != c.want {
			t.Errorf("%q in %v: %v, want %s", c.name, c.scope, err, c.want)
		}
	}
	if len(s.own) != 0 {
		t.Errorf("placed nevertheless: %v", s.own)
	}
	mustPanic(t, "choice 9", func() { Detect(0, Settings{Choices: choose{"x": 9}}) })
}
