// This file owns the modules of the field and the scopes that they lie in.

package capture

import "fmt"

// Layers says in which layers a group is: the same name may lie elsewhere in a
// dense layer than in one of experts.
type Layers uint8

const (
	AllLayers Layers = iota
	DenseLayers
	MoELayers
)

func (l Layers) String() string {
	return [...]string{"all layers", "dense layers", "layers of experts"}[l]
}

// MarshalText gives the name.
func (l Layers) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// place is where a module lies.
type place struct {
	// parts are the scopes that hold pieces of it; a module with none lies between
	// layers and is captured by FullIteration alone.
	parts []Scope
	// experts is where it lies in layers of experts, if that differs.
	experts []Scope
	// input says that what it saves is made before its scope begins.
	input bool
}

var (
	inAttn   = place{parts: []Scope{Attn}}
	inMLP    = place{parts: []Scope{MLP}}
	inRouter = place{parts: []Scope{MoERouter}}
	inMoE    = place{parts: []Scope{MoE}}
	between  = place{}
)

// modules are the field's names. The norm before attention reads the layer's
// input, which the layer before has made; the norm behind it reads the sum that
// its own scope begins with.
var modules = map[string]place{
	"attn_norm":       {parts: []Scope{Attn}, input: true},
	"qkv_linear":      inAttn,
	"core_attn":       inAttn,
	"attn_proj":       inAttn,
	"mla_up_proj":     inAttn,
	"gdp_qkv":         inAttn,
	"gdp_in_proj":     inAttn,
	"gdn_norm_out":    inAttn,
	"mlp_norm":        {parts: []Scope{MLP}, experts: []Scope{MoERouter}},
	"mlp":             inMLP,
	"fc1":             inMLP,
	"mlp_act":         inMLP,
	"fc2":             inMLP,
	"router":          inRouter,
	"shared_experts":  inRouter,
	"moe":             {parts: []Scope{MoERouter, MoE}},
	"dispatch":        inMoE,
	"experts":         inMoE,
	"expert_fc1":      inMoE,
	"moe_act":         inMoE,
	"expert_fc2":      inMoE,
	"fused_group_mlp": inMoE,
	"mamba_in":        between, // no scope is for layers of state spaces
	"mamba_scan":      between,
	"embedding":       between,
	"mtp":             between,
	"loss":            between,
}

// together are names that stand for several modules, each judged by itself.
var together = map[string][]string{
	"layernorm": {"attn_norm", "mlp_norm"},
}

// Place says that a group of the caller's own lies in a scope.
func (s *Settings) Place(name string, scope Scope) error {
	_, known := modules[name]
	_, names := together[name]
	switch {
	case name == "":
		return fmt.Errorf("a group without a name cannot be placed in scope %v; name it", scope)
	case known || names:
		return fmt.Errorf("group %s has its place already; give your own group another name", name)
	case scope >= FullIteration:
		return fmt.Errorf("group %s cannot be placed in %v, which holds every group; place it in attn, mlp, moe_router or moe", name, scope)
	}
	if s.own == nil {
		s.own = map[string]Scope{}
	}
	s.own[name] = scope
	return nil
}

// find is a group's place, and whether it has one.
func (s *Settings) find(name string) (place, bool) {
	if scope, ok := s.own[name]; ok {
		return place{parts: []Scope{scope}}, true
	}
	p, ok := modules[name]
	return p, ok
}

// in is where a module lies in layers of one kind.
func (p place) in(l Layers) []Scope {
	if l == MoELayers && p.experts != nil {
		return p.experts
	}
	return p.parts
}

// covered is how a set holds the parts of a module: the scopes that do, and
// whether they hold all of it.
func (t Set) covered(parts []Scope) (by []Scope, whole bool) {
	whole = len(parts) > 0
	for _, p := range parts {
		switch {
		case t.Has(FullIteration):
			p = FullIteration
		case p == MoERouter && t.Has(MoE):
			p = MoE
		}
		if t.Has(p) {
			by = append(by, p)
		} else {
			whole = false
		}
	}
	return by, whole || t.Has(FullIteration)
}
