package policy

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Bad settings are refused with what to change.
// SPEC S4.5 S5.3
func TestByHandRefusals(t *testing.T) {
	for _, c := range []struct {
		name string
		set  func(*ByHand)
		want []string
	}{
		{"unknown offload", func(h *ByHand) { h.OffloadModules = []string{"cor_attn"} }, []string{"cor_attn", "did you mean core_attn?", "fused_group_mlp", "mamba_scan"}},
		{"unknown recompute", func(h *ByHand) { h.RecomputeModules = []string{"everything"} }, []string{"everything", "shared_experts", "layernorm"}},
		{"unknown stash", func(h *ByHand) { h.StashModules = []string{"expert_fc2"} }, []string{"did you mean expert_fc1?"}},
		{"both", func(h *ByHand) {
			h.OffloadModules, h.RecomputeModules = []string{"core_attn"}, []string{"core_attn"}
		}, []string{"core_attn is also chosen for recompute; remove it"}},
		{"stashed too", func(h *ByHand) { h.OffloadModules, h.StashModules = []string{"moe_act"}, []string{"moe_act"} }, []string{"module moe_act is also chosen for", "remove"}},
		{"stashed and recomputed", func(h *ByHand) { h.RecomputeModules, h.StashModules = []string{"moe_act"}, []string{"moe_act"} }, []string{"module moe_act is also chosen for", "remove"}},
		{"fraction", func(h *ByHand) { h.OffloadFraction = 1.5 }, []string{"OffloadFraction 1.5 is outside of 0 to 1"}},
		{"negative fraction", func(h *ByHand) { h.OffloadFraction = -0.1 }, []string{"OffloadFraction"}},
		{"no fraction", func(h *ByHand) { h.OffloadFraction = math.NaN() }, []string{"OffloadFraction NaN"}},
		{"size", func(h *ByHand) { h.MinBytes = -1 }, []string{"MinBytes -1 is negative"}},
		{"delta", func(h *ByHand) { h.DeltaBytes = -1 }, []string{"DeltaBytes"}},
		{"margin", func(h *ByHand) { h.Margin = -1 }, []string{"Margin"}},
		{"inflight", func(h *ByHand) { h.MaxInflight = -1 }, []string{"MaxInflight"}},
		{"attn_proj alone", func(h *ByHand) { h.OffloadModules = []string{"attn_proj"} }, []string{"requires core_attn", "add core_attn"}},
		{"fused", func(h *ByHand) { h.OffloadModules = []string{"fused_group_mlp", "moe_act"} }, []string{"already includes moe_act; remove one"}},
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
func chosen(p memory.Policy, name string, c memory.Choice) (layers []int) {
	for _, u := range p.Units() {
		if u.Name == name && p[u] == c {
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
	p.Units[memory.Unit{Name: "mamba_scan", Chunk: 0, Layer: 3}] = Facts{}
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
		{"all of it is the delta's", func(h *ByHand) { h.DeltaBytes = 1 << 40 }, 2, nil, nil, nil},
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
		if a, s, r := chosen(pol, "core_attn", memory.Offload), chosen(pol, "mamba_scan", memory.Offload), chosen(pol, "moe_act", memory.Recompute); !reflect.DeepEqual(a, c.attn) || !reflect.DeepEqual(s, c.scan) || !reflect.DeepEqual(r, c.recomputing) {
			t.Errorf("%s: core_attn %v, mamba_scan %v, moe_act again %v", c.name, a, s, r)
		}
	}
	h := ByHand{MinBytes: 7, MaxInflight: 3}
	if c := h.Config(residency.Config{Device: 9}); c.Least != 7 || c.Cap != 3 || c.Device != 9 {
		t.Errorf("%+v", c)
	}
}

// Notes names known modules that no group has, and no others.
// SPEC S5.4
func TestByHandNotes(t *testing.T) {
	p := record(single, 2, module{"core_attn", 100, ms, ms}, module{"mamba_scan", 300, ms, ms})
	h := Defaults()
	h.OffloadModules, h.RecomputeModules, h.StashModules = []string{"core_attn", "qkv_linear", "mamba_scan"}, []string{"mlp"}, []string{"expert_fc1"}
	d := Decision{Notes: h.Notes(p)}
	if len(d.Notes) != 3 {
		t.Errorf("%q", d.Notes)
	}
	for _, want := range []string{"OffloadModules: no group in this step is named qkv_linear", "RecomputeModules: no group in this step is named mlp", "StashModules: no group in this step is named expert_fc1"} {
		if !strings.Contains(d.Text(), "note: "+want+"; remove it or rename the groups") {
			t.Errorf("%q does not say %q", d.Text(), want)
		}
	}
}

// A note says that a fraction of zero offloads nothing, and which modules have no rows to stash.
func TestNotesOfNothing(t *testing.T) {
	p := withRows(record(single, 2, module{"core_attn", 100, ms, ms}, module{"fused_group_mlp", 300, ms, ms}), "fused_group_mlp", 8, 1)
	for _, x := range []struct {
		set   func(h *ByHand)
		words string
	}{
		{func(h *ByHand) { h.OffloadModules, h.OffloadFraction = []string{"core_attn"}, 0 }, "OffloadFraction is 0, so nothing is offloaded"},
		{func(h *ByHand) { h.OffloadFraction = 0 }, ""},
		{func(h *ByHand) { h.OffloadModules = []string{"core_attn"} }, ""},
		{func(h *ByHand) { h.StashModules = []string{"core_attn"} }, "StashModules: core_attn saves no rows that the stash holds"},
		{func(h *ByHand) { h.StashModules = []string{"fused_group_mlp"} }, ""},
		{func(h *ByHand) { h.StashModules = []string{"moe_act"} }, ""}, // its rows are in the workspace
		{func(h *ByHand) { h.RecomputeModules = []string{"moe_act"} }, ""},
	} {
		h := Defaults()
		x.set(&h)
		if notes := h.Notes(p); len(notes) != min(len(x.words), 1) || x.words != "" && !strings.HasPrefix(notes[0], x.words) {
			t.Errorf("%q, want %q", notes, x.words)
		}
	}
}
