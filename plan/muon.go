// This file owns the state of Muon: matrices have one momentum, all other parameters have
// Adam's two moments, and ranks may hold whole tensors instead of equal shares.

package plan

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// muonState returns a tensor's state per element: the main parameter and either a momentum
// or two moments.
func muonState(t heldTensor) memory.Bytes {
	if t.matrix {
		return 4 + 4
	}
	return 4 + 8
}

func (d *dims) muonBytes(s share) memory.Bytes {
	o, l := d.s.Optimizer, d.s.Layout
	dp, edp := 1, 1
	if o.LayerwiseSharding {
		dp, edp = l.DP()*l.CP, max(l.EDP(), 1)
	}
	var even memory.Bytes
	dense, expert := []heldTensor{}, []heldTensor{}
	for _, t := range s.tensors {
		switch {
		case o.LayerwiseSharding && o.Distributed:
			// Matrices are laid out so that ranks hold nearly equal shares.
			n := memory.Bytes(dp)
			if t.expert {
				n = memory.Bytes(edp)
			}
			even += ceilDiv(muonState(t)*memory.Bytes(t.elements*t.count), n)
		case t.expert:
			expert = append(expert, t)
		default:
			dense = append(dense, t)
		}
	}
	return even + d.dealt(dense, dp) + d.dealt(expert, edp)
}

// dealt returns what one rank holds if tensors are sorted by size and dealt to the ranks
// forwards and backwards in turn.
func (d *dims) dealt(tensors []heldTensor, ranks int) memory.Bytes {
	slices.SortStableFunc(tensors, func(a, b heldTensor) int { return cmp.Compare(a.elements, b.elements) })
	held := make([]memory.Bytes, ranks)
	at := 0
	for _, t := range tensors {
		for range t.count {
			r := at % (2 * ranks)
			if r >= ranks {
				r = 2*ranks - 1 - r
			}
			held[r] += muonState(t) * memory.Bytes(t.elements)
			at++
		}
	}
	if d.s.LastReplica {
		return held[ranks-1]
	}
	return slices.Max(held)
}
