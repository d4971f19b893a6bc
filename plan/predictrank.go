// This file owns the forecast of one pipeline rank alone, for searches that
// give every rank a policy of its own.

package plan

import "fmt"

// PredictRank returns the forecast for one pipeline rank. The setup must be
// normalised: a search predicts hundreds of ranks, and checking the model each time
// takes longer than the forecast.
func PredictRank(s *Setup, rank int) (*Rank, error) {
	if rank < 0 || rank >= s.Layout.PP {
		return nil, fmt.Errorf("there is no pipeline rank %d; pp is %d", rank, s.Layout.PP)
	}
	return newDims(s).rank(rank)
}
