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
	"github.com/stowage-dev/stowage/memory"
)

func all(c memory.Choice) map[string]memory.Choice {
	m := map[string]memory.Choice{}
	for _, x := range memory.Modules() {
		if len(x.StandsFor) == 0 {
			m[x.Name] = c
		}
	}
	return m
}

// placed has two groups of the caller's own, one of them with a place.
func placed(t *testing.T, s Settings) Settings {
	t.Helper()
	if err := s.Place("my_gate", memory.MLP); err != nil {
		t.Fatal(err)
	}
	return s
}

type choose = map[string]memory.Choice

// detections are one case for each rule. Want lists verdicts by name; a group in
// two kinds of layers has a verdict for each, and its name ends in the kind's
// first letter; a group that is named like a scope ends in "group".
var detections = []struct {
	name   string
	scopes memory.Scopes
	Settings
	want map[string]Placement
}{
	{"nothing captured", 0, Settings{Choices: choose{"core_attn": memory.Offload, "attn_norm": memory.Offload, "moe_act": memory.Stash, "fc1": memory.Recompute, "fc2": memory.Keep}},
		map[string]Placement{"core_attn": Outside, "attn_norm": Outside, "moe_act": Outside, "fc1": Outside}},
	{"offloads inside attn", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Choices: choose{"qkv_linear": memory.Offload, "core_attn": memory.Offload, "attn_proj": memory.Offload, "gdp_qkv": memory.Offload, "expert_fc1": memory.Offload}},
		map[string]Placement{"attn": Inside, "qkv_linear": Inside, "core_attn": Inside, "attn_proj": Inside, "gdp_qkv": Inside, "expert_fc1": Outside}},
	{"the norm before attention", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Choices: choose{"attn_norm": memory.Offload}},
		map[string]Placement{"attn": Inside, "attn_norm": Refused}},
	{"the norm before attention, attention eager", memory.ScopesOf(memory.MLP), Settings{WarmUp: 3, Choices: choose{"attn_norm": memory.Offload}},
		map[string]Placement{"mlp": Inside, "attn_norm": Outside}},
	{"the norm before attention, whole step", memory.ScopesOf(memory.FullIteration), Settings{WarmUp: 1, Choices: choose{"attn_norm": memory.Offload}},
		map[string]Placement{"full_iteration": Inside, "attn_norm": Inside}},
	{"the norm behind attention", memory.ScopesOf(memory.MLP), Settings{WarmUp: 3, Choices: choose{"mlp_norm": memory.Offload}},
		map[string]Placement{"mlp": Inside, "mlp_norm d": Inside, "mlp_norm l": Outside}},
	{"the same in a dense model", memory.ScopesOf(memory.MLP), Settings{WarmUp: 3, Dense: true, Choices: choose{"mlp_norm": memory.Offload}},
		map[string]Placement{"mlp": Inside, "mlp_norm d": Inside}},
	{"the same before a router", memory.ScopesOf(memory.MoERouter), Settings{WarmUp: 3, MoE: true, Choices: choose{"mlp_norm": memory.Offload, "shared_experts": memory.Offload, "moe_act": memory.Offload}},
		map[string]Placement{"moe_router": Inside, "mlp_norm l": Inside, "shared_experts": Inside, "moe_act": Outside}},
	{"both norms computed again", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Dense: true, Choices: choose{"layernorm": memory.Recompute}},
		map[string]Placement{"attn": Inside, "attn_norm": Inside, "mlp_norm d": Outside}},
	{"experts with rows counted on the device", memory.ScopesOf(memory.MoE), Settings{WarmUp: 3, Choices: choose{"expert_fc1": memory.Offload, "router": memory.Offload, "moe": memory.Recompute}},
		map[string]Placement{"moe": Inside, "expert_fc1": Inside, "router": Inside, "moe group": Inside}},
	{"the whole step of a dense model", memory.ScopesOf(memory.FullIteration), Settings{WarmUp: 3, Dense: true},
		map[string]Placement{"full_iteration": Inside}},
	{"a stash inside a scope", memory.ScopesOf(memory.MoE), Settings{WarmUp: 3, Choices: choose{"moe_act": memory.Stash}},
		map[string]Placement{"moe": Inside, "moe_act": Refused}},
	{"a stash outside of the scopes", memory.ScopesOf(memory.Attn, memory.MoERouter), Settings{WarmUp: 3, Choices: choose{"moe_act": memory.Stash}},
		map[string]Placement{"attn": Inside, "moe_router": Inside, "moe_act": Outside}},
	{"a stash inside the step", memory.ScopesOf(memory.FullIteration), Settings{WarmUp: 3, Choices: choose{"moe_act": memory.Stash}},
		map[string]Placement{"full_iteration": Inside, "moe_act": Inside}},
	{"computed again with its backward pass", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Choices: choose{"core_attn": memory.Recompute}},
		map[string]Placement{"attn": Inside, "core_attn": Inside}},
	{"a module captured in part", memory.ScopesOf(memory.MoERouter), Settings{WarmUp: 3, Choices: choose{"moe": memory.Recompute}},
		map[string]Placement{"moe_router": Inside, "moe group": Refused}},
	{"no warm-up", memory.ScopesOf(memory.Attn, memory.MLP), Settings{Choices: choose{"attn_norm": memory.Offload}},
		map[string]Placement{"attn": Refused, "mlp": Refused, "attn_norm": Refused}},
	{"delayed", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Delay: true, Choices: choose{"core_attn": memory.Offload, "moe_act": memory.Offload, "expert_fc1": memory.Stash}},
		map[string]Placement{"attn": Inside, "core_attn": Inside, "moe_act": Delayed, "expert_fc1": Outside}},
	{"a delay and nothing captured", 0, Settings{Delay: true, Choices: choose{"moe_act": memory.Offload}},
		map[string]Placement{"moe_act": Outside, "delay": SwitchedOff}},
	{"a delay and nothing outside", memory.ScopesOf(memory.Attn), Settings{WarmUp: 3, Delay: true, Choices: choose{"core_attn": memory.Offload}},
		map[string]Placement{"attn": Inside, "core_attn": Inside, "delay": SwitchedOff}},
	{"a delay and everything inside", memory.ScopesOf(memory.FullIteration), Settings{WarmUp: 3, Delay: true, Choices: choose{"moe_act": memory.Offload}},
		map[string]Placement{"full_iteration": Inside, "moe_act": Inside, "delay": SwitchedOff}},
	{"a scope of no layer", memory.ScopesOf(memory.MLP, memory.MoERouter), Settings{WarmUp: 3, Dense: true, Choices: choose{"fc1": memory.Offload}},
		map[string]Placement{"mlp": Inside, "moe_router": SwitchedOff, "fc1": Inside}},
	{"another scope of no layer", memory.ScopesOf(memory.MLP), Settings{WarmUp: 3, MoE: true, Delay: true, Choices: choose{"moe_act": memory.Offload}},
		map[string]Placement{"mlp": SwitchedOff, "moe_act": Outside, "delay": SwitchedOff}},
	{"groups of the caller's own", memory.ScopesOf(memory.MLP), Settings{WarmUp: 3, Delay: true, Choices: choose{"my_gate": memory.Offload, "my_other": memory.Offload, "my_third": memory.Recompute}},
		map[string]Placement{"mlp": Inside, "my_gate": Inside, "my_other": Delayed, "my_third": Outside}},
}

// verdicts is a report as the table writes it.
func verdicts(r *Report) map[string]Placement {
	m := map[string]Placement{}
	for _, f := range append(slices.Clone(r.Scopes), r.Settings...) {
		m[f.Name] = f.Placement
	}
	for _, g := range r.Groups {
		name := g.Name
		if _, err := memory.ParseScope(name); err == nil {
			name += " group"
		}
		if g.Layers != AllLayers {
			name += " " + g.Layers.String()[:1]
		}
		m[name] = g.Placement
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
	r := Detect(memory.ScopesOf(memory.Attn, memory.MoERouter), Settings{WarmUp: 3, Dense: true, Delay: true, Choices: choose{"attn_norm": memory.Offload, "layernorm": memory.Recompute}})
	text, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "report.json", string(text)+"\n")
}

// possible reports whether scopes can be captured together.
func possible(set memory.Scopes) bool {
	_, err := memory.ParseScopes(set.String())
	return err == nil
}

func standsFor(name string) []string {
	m, _ := memory.LookupModule(name)
	return slices.Clone(m.StandsFor)
}

// anySettings are settings of every sort.
func anySettings(t *rapid.T) (memory.Scopes, Settings) {
	var set memory.Scopes
	for _, s := range rapid.SliceOfDistinct(rapid.SampledFrom([]memory.Scope{memory.Attn, memory.MLP, memory.MoERouter, memory.MoE, memory.FullIteration}), rapid.ID).Draw(t, "scopes") {
		if next := set | 1<<s; possible(next) {
			set = next
		}
	}
	flag := func(name string) bool { return rapid.Bool().Draw(t, name) }
	names := []string{"mine", "stranger"}
	for _, m := range memory.Modules() {
		names = append(names, m.Name)
	}
	s := Settings{
		Choices: rapid.MapOf(rapid.SampledFrom(names), rapid.SampledFrom([]memory.Choice{memory.Keep, memory.Stash, memory.Offload, memory.Recompute})).Draw(t, "choices"),
		Dense:   flag("dense"), MoE: flag("moe"), Delay: flag("delay"), WarmUp: rapid.IntRange(-1, 2).Draw(t, "warm-up"),
	}
	if err := s.Place("mine", rapid.SampledFrom([]memory.Scope{memory.Attn, memory.MLP, memory.MoERouter, memory.MoE}).Draw(t, "place")); err != nil {
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
			if g.Placement == Refused && (!strings.Contains(g.Why, "; ") || !strings.HasPrefix(g.Why, g.Name)) {
				t.Errorf("%s is refused with %q", g.Name, g.Why)
			}
			if set == memory.ScopesOf(memory.FullIteration) && g.Placement != Inside {
				t.Errorf("the whole step is captured, and %s is %v", g.Name, g.Placement)
			}
			if set == 0 && g.Placement != Outside {
				t.Errorf("nothing is captured, and %s is %v", g.Name, g.Placement)
			}
		}
		for name, c := range s.Choices {
			if seen[name] != (c != memory.Keep) {
				t.Errorf("%s is to be %v, and has a verdict: %v", name, c, seen[name])
			}
		}
		for _, f := range append(slices.Clone(r.Scopes), r.Settings...) {
			if (f.Placement == Inside) != (f.Why == "") || f.Why != "" && !strings.Contains(f.Why, "; ") {
				t.Errorf("%s is %v with %q", f.Name, f.Placement, f.Why)
			}
		}
		mended := maps.Clone(s.Choices)
		kept := map[string]bool{} // a group that is impossible in some layers is kept in all
		for _, g := range r.Groups {
			if g.Placement == Refused {
				kept[g.Name] = true
			}
		}
		for name := range s.Choices {
			for _, part := range append(standsFor(name), name) {
				if kept[part] {
					mended[name] = memory.Keep
				}
			}
		}
		s.Choices = mended
		if err := Detect(r.Captured, s).Err(); err != nil {
			t.Errorf("mended, and still: %v", err)
		}
		if (r.Err() == nil) != (len(kept) == 0 && !slices.ContainsFunc(r.Scopes, func(f Finding) bool { return f.Placement == Refused })) {
			t.Errorf("error %v, kept %v", r.Err(), kept)
		}
	})
}

// Every module has a place in every policy: none is a stranger.
func TestNoModuleIsUnknown(t *testing.T) {
	for _, c := range []memory.Choice{memory.Stash, memory.Offload, memory.Recompute} {
		for _, g := range Detect(memory.ScopesOf(memory.Attn), Settings{WarmUp: 1, Choices: all(c)}).Groups {
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
		scope memory.Scope
		want  string
	}{
		{"", memory.Attn, "a group without a name cannot be placed in scope attn; name it"},
		{"core_attn", memory.MLP, "group core_attn has its place already; give your own group another name"},
		{"layernorm", memory.MLP, "group layernorm has its place already; give your own group another name"},
		{"x", memory.FullIteration, "group x cannot be placed in full_iteration, which holds every group; place it in attn, mlp, moe_router or moe"},
	} {
		if err := s.Place(c.name, c.scope); err == nil || err.Error() != c.want {
			t.Errorf("%q in %v: %v, want %s", c.name, c.scope, err, c.want)
		}
	}
	if len(s.own) != 0 {
		t.Errorf("placed nevertheless: %v", s.own)
	}
	mustPanic(t, "choice 9", func() { Detect(0, Settings{Choices: choose{"x": 9}}) })
	mustPanic(t, "which does not exist", func() { Detect(0, Settings{Choices: choose{"x": memory.Choices}}) })
}

func mustPanic(t *testing.T, want string, f func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if x := recover(); x == nil || !strings.Contains(x.(string), want) {
			t.Errorf("panic %v, want one with %q", x, want)
		}
	}()
	f()
}

func TestPastNames(t *testing.T) {
	for c := memory.Keep; c < memory.Choices; c++ {
		if pastNames[c] == "" {
			t.Errorf("%v has no past participle", c)
		}
	}
}

// The report on several choices for one name describes each of them once.
func TestJoin(t *testing.T) {
	report := func(delay bool, choices map[string]memory.Choice) *Report {
		return Detect(memory.ScopesOf(memory.Attn), Settings{WarmUp: 1, Delay: delay, Choices: choices})
	}
	names := func(r *Report) (out []string) {
		for _, g := range r.Groups {
			out = append(out, g.Name+" "+g.Choice.String())
		}
		return out
	}
	a := map[string]memory.Choice{"mlp": memory.Recompute, "qkv_linear": memory.Offload}
	b := map[string]memory.Choice{"mlp": memory.Offload, "qkv_linear": memory.Offload}
	r := report(true, a).Join(nil).Join(report(true, b))
	if got, want := names(r), []string{"mlp offload", "mlp recompute", "qkv_linear offload"}; !slices.Equal(got, want) {
		t.Errorf("groups %q, want %q", got, want)
	}
	if len(r.Settings) != 0 {
		t.Errorf("the delay has an effect on mlp, and the report has %+v", r.Settings)
	}
	if r := report(true, a).Join(report(true, a)); len(r.Settings) != 1 {
		t.Errorf("the delay has no effect, and the report has %+v", r.Settings)
	}
}
