package policy

import (
	"encoding/json"
	"math"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/residency"
)

func TestPolicyJSON(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := Policy{}
		for range rapid.IntRange(0, 10).Draw(t, "units") {
			u := Unit{rapid.StringMatching(`[a-z_]{1,9}`).Draw(t, "name"), rapid.IntRange(0, 3).Draw(t, "chunk"), rapid.IntRange(0, 70).Draw(t, "layer")}
			p[u] = Choice(rapid.IntRange(1, choices-1).Draw(t, "choice"))
		}
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		var q Policy
		if err := json.Unmarshal(text, &q); err != nil || !reflect.DeepEqual(p, q) {
			t.Fatalf("%s becomes %v, %v", text, q, err)
		}
	})
	p := Policy{{"moe_act", 0, 2}: Offload, {"core_attn", 0, 1}: Recompute, {"moe_act", 0, 1}: Stash, {"moe_act", 0, 0}: Keep}
	text, _ := json.Marshal(p)
	if want := `[{"name":"core_attn","chunk":0,"layer":1,"choice":"recompute"},{"name":"moe_act","chunk":0,"layer":1,"choice":"stash"},{"name":"moe_act","chunk":0,"layer":2,"choice":"offload"}]`; string(text) != want {
		t.Errorf("%s\nwant %s", text, want)
	}
	if by := p.By("moe_act"); !reflect.DeepEqual(by, []Unit{{"moe_act", 0, 1}, {"moe_act", 0, 2}}) {
		t.Errorf("moe_act: %v", by)
	}
	if _, err := json.Marshal(Policy{{"a", 0, 0}: choices}); err == nil {
		t.Error("a choice that is none was written")
	}
}

var badPolicies = []string{
	`{}`, `[{"name":"a","chunk":0,"layer":0,"choice":"drop"}]`, `[{"name":"","chunk":0,"layer":0,"choice":"keep"}]`,
	`[{"name":"a","chunk":-1,"layer":0,"choice":"keep"}]`, `[{"name":"a","layer":-1,"choice":"keep"}]`,
	`[{"name":"a","choice":"keep"},{"name":"a","choice":"offload"}]`, `[{"name":"a","weight":1}]`, `[`, `[{"name":"a","choice":3}]`,
}

func TestPolicyJSONRefusals(t *testing.T) {
	for _, text := range badPolicies {
		p := Policy{{"before", 0, 0}: Offload}
		if err := json.Unmarshal([]byte(text), &p); err == nil {
			t.Errorf("%s was read as %v", text, p)
		}
		if p[Unit{"before", 0, 0}] != Offload {
			t.Errorf("%s was refused, but changed the policy", text)
		}
	}
	if err := new(Policy).UnmarshalJSON([]byte(`[] []`)); err == nil {
		t.Error("two lists were read as one")
	}
}

// What is read is written and read as the same.
func FuzzPolicyJSON(f *testing.F) {
	f.Add([]byte(`[{"name":"core_attn","chunk":0,"layer":1,"choice":"recompute"}]`))
	for _, text := range badPolicies {
		f.Add([]byte(text))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var p, q Policy
		if json.Unmarshal(text, &p) != nil {
			return
		}
		out, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(out, &q); err != nil || !reflect.DeepEqual(p.Units(), q.Units()) {
			t.Fatalf("%s becomes %s: %v", text, out, err)
		}
		for _, u := range p.Units() {
			if p[u] != q[u] {
				t.Fatalf("%v is %v, then %v", u, p[u], q[u])
			}
		}
	})
}

// Bad settings are refused with what to change.
// SPEC S4.5 S5.3
func TestByHandRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*ByHand)
		want []string
	}{
		{"unknown offload", func(h *ByHand) { h.OffloadModules = []string{"cor_attn"} }, []string{`"cor_attn"`, "did you mean core_attn?", "fused_group_mlp", "mamba_scan"}},
		{"unknown recompute", func(h *ByHand) { h.RecomputeModules = []string{"everything"} }, []string{`"everything"`, "shared_experts", "layernorm"}},
		{"unknown stash", func(h *ByHand) { h.StashModules = []string{"expert_fc2"} }, []string{"did you mean expert_fc1?"}},
		{"both", func(h *ByHand) {
			h.OffloadModules, h.RecomputeModules = []string{"core_attn"}, []string{"core_attn"}
		}, []string{"core_attn is both in offload-modules and in recompute-modules; remove it"}},
		{"stashed too", func(h *ByHand) { h.OffloadModules, h.StashModules = []string{"moe_act"}, []string{"moe_act"} }, []string{"moe_act is stashed", "remove"}},
		{"stashed and recomputed", func(h *ByHand) { h.RecomputeModules, h.StashModules = []string{"moe_act"}, []string{"moe_act"} }, []string{"moe_act is stashed", "remove"}},
		{"fraction", func(h *ByHand) { h.OffloadFraction = 1.5 }, []string{"activation-offload-fraction 1.5 is outside of 0 to 1"}},
		{"negative fraction", func(h *ByHand) { h.OffloadFraction = -0.1 }, []string{"activation-offload-fraction"}},
		{"no fraction", func(h *ByHand) { h.OffloadFraction = math.NaN() }, []string{"activation-offload-fraction NaN"}},
		{"size", func(h *ByHand) { h.MinBytes = -1 }, []string{"min-offloaded-tensor-size -1 is below zero"}},
		{"delta", func(h *ByHand) { h.DeltaBytes = -1 }, []string{"delta-offload-bytes-across-pp-ranks"}},
		{"margin", func(h *ByHand) { h.Margin = -1 }, []string{"margin"}},
		{"inflight", func(h *ByHand) { h.MaxInflight = -1 }, []string{"fine-grained-offloading-max-inflight-offloads"}},
		{"attn_proj alone", func(h *ByHand) { h.OffloadModules = []string{"attn_proj"} }, []string{"needs core_attn", "add core_attn"}},
		{"fused", func(h *ByHand) { h.OffloadModules = []string{"fused_group_mlp", "moe_act"} }, []string{"excludes moe_act; remove one"}},
	} {
		h := Defaults()
		if err := h.Check("mamba_scan"); err != nil {
			t.Fatal(err)
		}
		c.set(&h)
		err := h.Check("mamba_scan")
		if err == nil {
			t.Errorf("%s: accepted", c.name)
			continue
		}
		for _, w := range c.want {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%s: %q does not say %q", c.name, err, w)
			}
		}
	}
	if _, err := Defaults().Policy(record(single, 1), -1); err == nil {
		t.Error("rank -1 was accepted")
	}
}

// chosen are the layers of a name with a choice.
func chosen(p Policy, name string, c Choice) (layers []int) {
	for _, u := range p.By(name) {
		if p[u] == c {
			layers = append(layers, u.Layer)
		}
	}
	return layers
}

// Which layers leave, by hand: ten layers of core_attn (100 bytes) and mamba_scan
// (300 bytes, a name that only the step has).
// SPEC S4.5 S5.2 S5.3
func TestByHandPolicy(t *testing.T) {
	p := record(single, 10, module{"core_attn", 100, ms, ms}, module{"mamba_scan", 300, ms, ms}, module{"moe_act", 50, ms, ms})
	p.Units[Unit{"mamba_scan", 0, 3}] = Facts{}
	for _, c := range []struct {
		name        string
		set         func(*ByHand)
		rank        int
		attn, scan  []int
		recomputing []int
	}{
		{"all but the last", func(h *ByHand) {}, 0, []int{0, 1, 2, 3, 4, 5, 6, 7, 8}, []int{0, 1, 2, 4, 5, 6, 7, 8}, nil},
		{"no margin", func(h *ByHand) { h.Margin = 0; h.OffloadModules = []string{"core_attn"} }, 0, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}, nil, nil},
		{"margin of four", func(h *ByHand) { h.Margin = 4 }, 0, []int{0, 1, 2, 3, 4, 5}, []int{0, 1, 2, 4, 5}, nil},
		{"nothing", func(h *ByHand) { h.OffloadFraction = 0 }, 0, nil, nil, nil},
		// 17 groups are left, 8 stay of them: layers 5 to 8.
		{"half of the groups", func(h *ByHand) { h.OffloadFraction, h.FractionOfGroups = 0.5, true }, 0, []int{0, 1, 2, 3, 4}, []int{0, 1, 2, 4}, nil},
		// 3,300 bytes are left, 660 may stay: 300 + 100, and no 300 more.
		{"four fifths of the bytes", func(h *ByHand) { h.OffloadFraction = 0.8 }, 0, []int{0, 1, 2, 3, 4, 5, 6, 7}, []int{0, 1, 2, 4, 5, 6, 7}, nil},
		{"only large ones", func(h *ByHand) { h.MinBytes = 101 }, 0, nil, []int{0, 1, 2, 4, 5, 6, 7, 8}, nil},
		// Rank 2 keeps 800 bytes: both of layers 0 and 1.
		{"delta", func(h *ByHand) { h.DeltaBytes = 400 }, 2, []int{2, 3, 4, 5, 6, 7, 8}, []int{2, 4, 5, 6, 7, 8}, nil},
		{"recomputed beside", func(h *ByHand) { h.OffloadModules = []string{"core_attn"}; h.RecomputeModules = []string{"moe_act"} }, 0,
			[]int{0, 1, 2, 3, 4, 5, 6, 7, 8}, nil, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
	} {
		h := Defaults()
		h.OffloadModules = []string{"core_attn", "mamba_scan"}
		c.set(&h)
		pol, err := h.Policy(p, c.rank)
		if err != nil {
			t.Fatal(err)
		}
		if a, s, r := chosen(pol, "core_attn", Offload), chosen(pol, "mamba_scan", Offload), chosen(pol, "moe_act", Recompute); !reflect.DeepEqual(a, c.attn) || !reflect.DeepEqual(s, c.scan) || !reflect.DeepEqual(r, c.recomputing) {
			t.Errorf("%s: core_attn %v, mamba_scan %v, moe_act again %v", c.name, a, s, r)
		}
	}
	h := ByHand{MinBytes: 7, MaxInflight: 3}
	if c := h.Config(residency.Config{Device: 9}); c.Least != 7 || c.Cap != 3 || c.Device != 9 {
		t.Errorf("%+v", c)
	}
}

// Names that are the field's and no group's are told, those of groups are not.
// SPEC S5.4
func TestByHandNotes(t *testing.T) {
	p := record(single, 2, module{"core_attn", 100, ms, ms}, module{"mamba_scan", 300, ms, ms})
	h := Defaults()
	h.OffloadModules, h.RecomputeModules, h.StashModules = []string{"core_attn", "qkv_linear", "mamba_scan"}, []string{"mlp"}, []string{"expert_fc1"}
	d := Decision{Notes: h.Notes(p)}
	if len(d.Notes) != 3 {
		t.Errorf("%q", d.Notes)
	}
	for _, want := range []string{"offload-modules names qkv_linear", "recompute-modules names mlp", "stash-modules names expert_fc1"} {
		if !strings.Contains(d.Text(), "note: "+want+", which no group of this step is called; remove it") {
			t.Errorf("%q does not say %q", d.Text(), want)
		}
	}
}
