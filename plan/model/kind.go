// This file owns kinds of layers. A model has many layers of few kinds, so what follows from
// a layer is computed once for each kind.

package model

// Kind identifies layers that are equal. Kinds are comparable.
type Kind struct {
	parts     uint8 // which of the next ones the layer has; an empty one differs from none
	attention Attention
	mla       MLA
	mamba     Mamba
	delta     DeltaNet
	lightning Lightning
	dense     Dense
	moe       MoE
}

// KindOf returns the kind of a layer.
func KindOf(l Layer) (k Kind) {
	if l.Attention != nil {
		k.attention, k.parts = *l.Attention, k.parts|1<<0
	}
	if l.MLA != nil {
		k.mla, k.parts = *l.MLA, k.parts|1<<1
	}
	if l.Mamba != nil {
		k.mamba, k.parts = *l.Mamba, k.parts|1<<2
	}
	if l.DeltaNet != nil {
		k.delta, k.parts = *l.DeltaNet, k.parts|1<<3
	}
	if l.Lightning != nil {
		k.lightning, k.parts = *l.Lightning, k.parts|1<<6
	}
	if l.Dense != nil {
		k.dense, k.parts = *l.Dense, k.parts|1<<4
	}
	if l.MoE != nil {
		k.moe, k.parts = *l.MoE, k.parts|1<<5
	}
	return k
}

// group is a number of equal layers: one of them, the index of the first, and how many
// there are.
type group struct {
	layer        Layer
	first, count int
}

// groupsOf returns the kinds among layers, in the order in which they first occur.
func groupsOf(layers []Layer) (groups []group) {
	index := map[Kind]int{}
	at := -1
	for i, l := range layers {
		if i == 0 || l != layers[i-1] { // equal layers are often one in memory too
			k := KindOf(l)
			known := false
			if at, known = index[k]; !known {
				at = len(groups)
				index[k] = at
				groups = append(groups, group{layer: l, first: i})
			}
		}
		groups[at].count++
	}
	return groups
}
