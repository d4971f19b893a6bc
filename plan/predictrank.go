// This file owns forecasts of single ranks under many policies, for searches.

package plan

import "fmt"

// PredictRanks returns a function that predicts one rank of a setup under another policy
// than its own. The function computes what policies share only once, and its ranks lack
// the timeline and the groups. The setup must be normalised, and policies must have their
// defaults filled in. Only one goroutine at a time may call the function.
func PredictRanks(s *Setup) func(rank int, r Recompute, o Offload) (*Rank, error) {
	base := newDims(s)
	return func(rank int, r Recompute, o Offload) (*Rank, error) {
		if rank < 0 || rank >= s.Layout.PP {
			return nil, fmt.Errorf("there is no pipeline rank %d; pp is %d", rank, s.Layout.PP)
		}
		d, n := *base, *s
		n.Recompute, n.Offload = r, o
		d.s = &n
		return d.rank(rank, true)
	}
}
