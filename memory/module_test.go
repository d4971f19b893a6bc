package memory

import (
	"errors"
	"strings"
	"testing"
)

// The table refers to itself: whatever a module requires, covers, stands for or
// recomputes is a module, and Megatron-LM's names are among ours.
func TestModuleTable(t *testing.T) {
	seen := map[string]bool{}
	for _, m := range Modules() {
		if m.Name == "" || seen[m.Name] {
			t.Errorf("module %q has no name or stands twice", m.Name)
		}
		seen[m.Name] = true
		if m.Megatron&^m.Choices != 0 {
			t.Errorf("Megatron-LM accepts a choice for %s that we do not", m.Name)
		}
		for _, list := range [][]string{m.Requires, m.Covers, m.Recomputes, m.StandsFor} {
			for _, name := range list {
				if _, ok := LookupModule(name); !ok {
					t.Errorf("%s refers to %s, which is not in the table", m.Name, name)
				}
			}
		}
		if m.Choices.Has(Stash) != m.Rows {
			t.Errorf("%s: rows counted on the device and the choice stash belong together", m.Name)
		}
	}
}

// Megatron-LM's own lists, as its arguments have them.
func TestMegatronModules(t *testing.T) {
	for c, want := range map[Choice]string{
		Offload:   "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act fused_group_mlp gdp_qkv",
		Recompute: "core_attn layernorm mla_up_proj mlp moe_act moe shared_experts gdn_norm_out gdp_in_proj gdp_qkv mhc",
		Stash:     "expert_fc1 moe_act",
		Keep:      "",
	} {
		if got := strings.Join(MegatronModules(c), " "); got != want {
			t.Errorf("%v: %s, want %s", c, got, want)
		}
	}
}

// SPEC S4.5, S5.3: bad settings are refused with what to change.
func TestCheckModules(t *testing.T) {
	for _, c := range []struct {
		named map[Choice][]string
		own   []string
		want  string
	}{
		{map[Choice][]string{Offload: {"core_attn", "attn_proj"}, Recompute: {"layernorm"}, Stash: {"moe_act"}}, nil, ""},
		{map[Choice][]string{Offload: {"mine"}}, []string{"mine"}, ""},
		{map[Choice][]string{Offload: {"mine"}}, nil, "offload module mine is unknown; choose from attn_norm"},
		{map[Choice][]string{Offload: {"cor_attn"}}, nil, "offload module cor_attn is unknown; did you mean core_attn?"},
		{map[Choice][]string{Offload: {"layernorm"}}, nil, "offload module layernorm cannot be chosen for offload"},
		{map[Choice][]string{Recompute: {"embedding"}}, nil, "recompute module embedding has no choice recompute"},
		{map[Choice][]string{Offload: {"attn_proj"}}, nil, "offload module attn_proj requires core_attn; add core_attn"},
		{map[Choice][]string{Offload: {"fused_group_mlp", "moe_act"}}, nil, "offload module fused_group_mlp already includes moe_act; remove one of them"},
		{map[Choice][]string{Offload: {"core_attn"}, Recompute: {"core_attn"}}, nil, "offload module core_attn is also chosen for recompute; remove it from one of the lists"},
		{map[Choice][]string{Stash: {"moe_act"}, Recompute: {"moe_act"}}, nil, "stash module moe_act is also chosen for recompute"},
	} {
		err := CheckModules(c.named, c.own...)
		if c.want == "" {
			if err != nil {
				t.Errorf("%v: %v", c.named, err)
			}
			continue
		}
		var typed *ModuleError
		if !errors.As(err, &typed) || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%v: %v, want %s", c.named, err, c.want)
		}
	}
}

// Where a module lies depends on the kind of layer for mlp_norm alone, and a set of
// scopes covers it wholly, in part or not at all.
func TestModuleScopes(t *testing.T) {
	norm, _ := LookupModule("mlp_norm")
	moe, _ := LookupModule("moe")
	between, _ := LookupModule("mamba_scan")
	for _, c := range []struct {
		set   Scopes
		parts []Scope
		by    int
		whole bool
	}{
		{ScopesOf(MLP), norm.In(false), 1, true},
		{ScopesOf(MLP), norm.In(true), 0, false},
		{ScopesOf(MoERouter), norm.In(true), 1, true},
		{ScopesOf(MoERouter), moe.In(true), 1, false},
		{ScopesOf(MoE), moe.In(true), 2, true},
		{ScopesOf(Attn), between.In(true), 0, false},
		{ScopesOf(FullIteration), between.In(true), 0, true},
	} {
		if by, whole := c.set.Cover(c.parts); len(by) != c.by || whole != c.whole {
			t.Errorf("%v covers %v by %v, wholly: %v; want %d, %v", c.set, c.parts, by, whole, c.by, c.whole)
		}
	}
}

// A list includes a module's tensors if it names the module or one that covers it.
func TestIncluding(t *testing.T) {
	for _, c := range []struct {
		list   []string
		module string
		want   string
	}{
		{[]string{"core_attn", "moe_act"}, "moe_act", "moe_act"},
		{[]string{"core_attn", "fused_group_mlp"}, "moe_act", "fused_group_mlp"},
		{[]string{"moe_act"}, "fused_group_mlp", ""},
		{[]string{"core_attn"}, "moe_act", ""},
		{[]string{""}, "", ""},
	} {
		if got := Including(c.list, c.module); got != c.want {
			t.Errorf("%v includes %s by %q, want %q", c.list, c.module, got, c.want)
		}
	}
}
