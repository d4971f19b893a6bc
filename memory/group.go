// This file owns the names of what is saved: groups and units.

package memory

import (
	"cmp"
	"fmt"
)

// GroupID identifies a group: the saved tensors of one module of one layer of one
// microbatch. A layer belongs to one of the model chunks (virtual pipeline stages)
// of its rank.
type GroupID struct {
	Name       string `json:"name"` // of the module, such as "expert_fc1"
	Chunk      int    `json:"chunk"`
	Layer      int    `json:"layer"`
	Microbatch int    `json:"microbatch"`
}

// Unit returns the unit that the group belongs to.
func (g GroupID) Unit() Unit { return Unit{g.Name, g.Chunk, g.Layer} }

// String returns the group in words.
func (g GroupID) String() string {
	return fmt.Sprintf("%s of layer %d, chunk %d, microbatch %d", g.Name, g.Layer, g.Chunk, g.Microbatch)
}

// Unit identifies one module of one layer. A policy makes one choice for each unit;
// the unit's groups of all microbatches follow it.
type Unit struct {
	Name  string `json:"name"`
	Chunk int    `json:"chunk"`
	Layer int    `json:"layer"`
}

// String returns the unit in words.
func (u Unit) String() string {
	return fmt.Sprintf("%s of layer %d, chunk %d", u.Name, u.Layer, u.Chunk)
}

// Compare orders units by chunk, layer and name.
func (u Unit) Compare(v Unit) int {
	return cmp.Or(cmp.Compare(u.Chunk, v.Chunk), cmp.Compare(u.Layer, v.Layer), cmp.Compare(u.Name, v.Name))
}
