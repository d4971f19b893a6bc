// This file owns the places of groups: in which scopes and in which layers they lie.

package capture

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Layers says which layers a group belongs to. A module may lie in another scope in a
// dense layer than in a mixture-of-experts layer.
type Layers uint8

const (
	AllLayers Layers = iota
	DenseLayers
	MoELayers
)

// String returns the layers in words.
func (l Layers) String() string {
	return [...]string{"all layers", "dense layers", "layers of experts"}[l]
}

// MarshalText returns the layers in words.
func (l Layers) MarshalText() ([]byte, error) { return []byte(l.String()), nil }

// Place puts a group that the caller has named itself into a scope. It returns an error
// if the name is empty or belongs to a module of [memory.Modules].
func (s *Settings) Place(name string, scope memory.Scope) error {
	_, known := memory.LookupModule(name)
	switch {
	case name == "":
		return fmt.Errorf("a group without a name cannot be placed in scope %v; name it", scope)
	case known:
		return fmt.Errorf("group %s has its place already; give your own group another name", name)
	case scope >= memory.FullIteration:
		return fmt.Errorf("group %s cannot be placed in %v, which holds every group; place it in attn, mlp, moe_router or moe", name, scope)
	}
	if s.own == nil {
		s.own = map[string]memory.Scope{}
	}
	s.own[name] = scope
	return nil
}

// find returns the module of a group's name, and whether it is known.
func (s *Settings) find(name string) (memory.Module, bool) {
	if scope, ok := s.own[name]; ok {
		return memory.Module{Name: name, Scopes: []memory.Scope{scope}}, true
	}
	return memory.LookupModule(name)
}
