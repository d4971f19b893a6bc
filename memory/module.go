// This file owns the table of modules: the names that Megatron-LM's settings use,
// and what can be done with each.

package memory

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
)

// ChoiceSet is a set of choices.
type ChoiceSet uint8

// choicesOf returns the set of the given choices.
func choicesOf(list ...Choice) (set ChoiceSet) {
	for _, c := range list {
		set |= 1 << c
	}
	return set
}

// Has reports whether the set contains a choice.
func (s ChoiceSet) Has(c Choice) bool { return s&(1<<c) != 0 }

// Module describes a module: a named part of a layer that saves tensors.
type Module struct {
	Name string
	// Choices are those that a user may make for the module by name. Keep is always
	// possible and not listed.
	Choices ChoiceSet
	// Megatron are those of them that Megatron-LM accepts under this name. The
	// planner accepts no others.
	Megatron ChoiceSet
	// Requires names the modules that must be offloaded if this one is.
	Requires []string
	// Covers names the modules whose tensors this one includes. Offloading both is a
	// mistake.
	Covers []string
	// Recomputes names the groups that recomputing this module drops: what a module
	// computes is saved by the module that reads it. Nil means the module itself;
	// empty means that there is nothing to drop, because the backward pass computes
	// it on the way in any case.
	Recomputes []string
	// StandsFor names the modules that this name is short for.
	StandsFor []string
	// Rows reports whether the module saves rows that are counted on the device.
	Rows bool
	// Scopes are the scopes that hold parts of the module. A module without scopes
	// lies between layers, and only FullIteration captures it.
	Scopes []Scope
	// MoEScopes replaces Scopes in mixture-of-experts layers, unless it is nil.
	MoEScopes []Scope
	// Input reports whether the module saves a tensor that is made before its scope
	// begins.
	Input bool
}

// off, re and st are the choices in the table below.
var off, re, st = choicesOf(Offload), choicesOf(Recompute), choicesOf(Stash)

// modules is the one table of modules. The norm before attention reads the layer's
// input, which the layer before it has made. The norm behind attention reads the sum
// that its own scope begins with. Where the planner finds two modules equally good, it
// takes the one that stands first.
var modules = []Module{
	{Name: "attn_norm", Choices: off, Megatron: off, Scopes: []Scope{Attn}, Input: true},
	{Name: "qkv_linear", Choices: off | re, Megatron: off, Scopes: []Scope{Attn}},
	{Name: "qk_norm", Scopes: []Scope{Attn}},
	{Name: "core_attn", Choices: off | re, Megatron: off | re, Recomputes: []string{"attn_proj"}, Scopes: []Scope{Attn}},
	{Name: "attn_proj", Choices: off | re, Megatron: off, Requires: []string{"core_attn"}, Scopes: []Scope{Attn}},
	{Name: "layernorm", Choices: re, Megatron: re, Recomputes: []string{"qkv_linear", "router"}, StandsFor: []string{"attn_norm", "mlp_norm"}},
	{Name: "mla_up_proj", Choices: off | re, Megatron: re, Recomputes: []string{"core_attn"}, Scopes: []Scope{Attn}},
	{Name: "mlp_norm", Choices: off, Megatron: off, Scopes: []Scope{MLP}, MoEScopes: []Scope{MoERouter}},
	{Name: "mlp", Choices: off | re, Megatron: re, Scopes: []Scope{MLP}},
	{Name: "fc1", Scopes: []Scope{MLP}},
	{Name: "mlp_act", Scopes: []Scope{MLP}},
	{Name: "fc2", Scopes: []Scope{MLP}},
	{Name: "router", Choices: off | re, Scopes: []Scope{MoERouter}},
	{Name: "dispatch", Scopes: []Scope{MoE}},
	{Name: "experts", Scopes: []Scope{MoE}},
	{Name: "expert_fc1", Choices: off | st, Megatron: off | st, Rows: true, Scopes: []Scope{MoE}},
	{Name: "moe_act", Choices: off | re | st, Megatron: off | re | st, Recomputes: []string{}, Rows: true, Scopes: []Scope{MoE}},
	{Name: "expert_fc2", Scopes: []Scope{MoE}},
	{Name: "fused_group_mlp", Choices: off | st, Megatron: off, Covers: []string{"expert_fc1", "moe_act"}, Rows: true, Scopes: []Scope{MoE}},
	{Name: "moe", Choices: re, Megatron: re, Recomputes: []string{"router", "moe_act"}, Scopes: []Scope{MoERouter, MoE}},
	{Name: "shared_experts", Choices: off | re, Megatron: re, Scopes: []Scope{MoERouter}},
	{Name: "gdn_norm_out", Choices: re, Megatron: re, Scopes: []Scope{Attn}},
	{Name: "gdp_in_proj", Choices: re, Megatron: re, Scopes: []Scope{Attn}},
	{Name: "gdp_qkv", Choices: off | re, Megatron: off | re, Scopes: []Scope{Attn}},
	{Name: "mhc", Choices: re, Megatron: re},
	{Name: "mamba_in", Choices: off | re}, // no scope holds state-space layers
	{Name: "mamba_scan", Choices: off | re},
	{Name: "embedding"},
	{Name: "mtp"},
	{Name: "loss"},
}

// Modules returns the table of modules.
func Modules() []Module { return slices.Clone(modules) }

// LookupModule returns the module of a name, and whether there is one.
func LookupModule(name string) (Module, bool) {
	i := slices.IndexFunc(modules, func(m Module) bool { return m.Name == name })
	if i < 0 {
		return Module{Name: name}, false
	}
	return modules[i], true
}

// modulesWith returns the names of the modules that a user may make a choice for.
func modulesWith(c Choice) []string {
	return names(func(m Module) bool { return m.Choices.Has(c) })
}

// MegatronModules returns the names that Megatron-LM accepts for a choice.
func MegatronModules(c Choice) []string {
	return names(func(m Module) bool { return m.Megatron.Has(c) })
}

// Including returns the module of a list that includes the tensors of a module: the
// module itself, or one that covers it. It is empty if the list has none.
func Including(list []string, module string) string {
	for _, name := range list {
		if m, _ := LookupModule(name); module != "" && (name == module || slices.Contains(m.Covers, module)) {
			return name
		}
	}
	return ""
}

// RowModules returns the names of the modules that save rows counted on the device.
func RowModules() []string { return names(func(m Module) bool { return m.Rows }) }

func names(accept func(Module) bool) (list []string) {
	for _, m := range modules {
		if accept(m) {
			list = append(list, m.Name)
		}
	}
	return list
}

// In returns the scopes that hold the module in dense layers, or in
// mixture-of-experts layers if moe is set.
func (m Module) In(moe bool) []Scope {
	if moe && m.MoEScopes != nil {
		return m.MoEScopes
	}
	return m.Scopes
}

// ModuleError reports a choice that cannot be made for a module.
type ModuleError struct {
	Choice  Choice
	Module  string
	Problem string // what is wrong, as the end of a sentence that begins with the module
	Remedy  string // what to do
}

// Error returns the problem and the remedy as one sentence.
func (e *ModuleError) Error() string {
	return fmt.Sprintf("%s module %s %s; %s", e.Choice, e.Module, e.Problem, e.Remedy)
}

// CheckModules returns a *ModuleError if the modules named for some choice do not
// exist, do not allow it, or contradict each other. own lists further names that may
// be given: groups that the caller has named itself.
func CheckModules(named map[Choice][]string, own ...string) error {
	for c := Keep + 1; c < Choices; c++ {
		for _, name := range named[c] {
			if err := checkName(c, name, own); err != nil {
				return err
			}
			for other := c + 1; other < Choices; other++ {
				if slices.Contains(named[other], name) {
					return &ModuleError{c, name, fmt.Sprintf("is also chosen for %v", other), "remove it from one of the lists"}
				}
			}
		}
	}
	return CheckOffload(named[Offload])
}

// CheckOffload returns a *ModuleError if modules that are offloaded lack one that
// they require, or name the same tensors twice.
func CheckOffload(list []string) error {
	for _, name := range list {
		m, _ := LookupModule(name)
		for _, need := range m.Requires {
			if !slices.Contains(list, need) {
				return &ModuleError{Offload, name, "requires " + need, "add " + need}
			}
		}
		for _, part := range m.Covers {
			if slices.Contains(list, part) {
				return &ModuleError{Offload, name, "already includes " + part, "remove one of them"}
			}
		}
	}
	return nil
}

// checkName rejects names that allow no such choice.
func checkName(c Choice, name string, own []string) error {
	list := modulesWith(c)
	if slices.Contains(list, name) || slices.Contains(own, name) {
		return nil
	}
	problem := "is unknown"
	if m, ok := LookupModule(name); ok {
		problem = fmt.Sprintf("has no choice %s", c)
		if m.Choices != 0 {
			problem = fmt.Sprintf("cannot be chosen for %s", c)
		}
	}
	for _, n := range own {
		if !slices.Contains(list, n) {
			list = append(list, n)
		}
	}
	remedy := "choose from " + strings.Join(list, ", ")
	if near := spell.Nearest(name, list); near != "" {
		remedy = fmt.Sprintf("did you mean %s? %s", near, remedy)
	}
	return &ModuleError{c, name, problem, remedy}
}
