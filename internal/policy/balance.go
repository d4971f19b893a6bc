// This file owns the budget of the ranks of a pipeline: one peak for all of them, instead
// of a setting for each.

package policy

import (
	"errors"
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Share holds the choices of one pipeline rank.
type Share struct {
	Rank     int          `json:"rank"`
	Moved    memory.Bytes `json:"moved"` // bytes that are offloaded in a step
	Decision *Decision    `json:"decision"`
}

// Balance returns the smallest budget for all ranks of a pipeline at which no rank's
// forecast is longer than 1+slack times the slowest rank with everything kept, and the
// choices of each rank. Ranks of a pipeline wait for the slowest, so the others can use
// the time up to that for free. In 1F1B the first rank holds the most microbatches and
// offloads the most; the last ranks often offload nothing.
func Balance(ps []*Profile, l memory.Links, cfg residency.Config, allowed Allowed, slack float64) (budget memory.Bytes, shares []Share, err error) {
	if len(ps) == 0 || !(slack >= 0) {
		return 0, nil, fmt.Errorf("policy: expected at least one rank and a slack of zero or more, got %d ranks and a slack of %g", len(ps), slack)
	}
	b := balance{ps: ps, l: l, cfg: cfg, allowed: allowed}
	var hi memory.Bytes
	var slowest time.Duration
	for _, p := range ps {
		d, err := solve(p, l, cfg, noLimit, allowed, 0)
		if err != nil {
			return 0, nil, err
		}
		hi = max(hi, d.Forecast.Extent)
		slowest = max(slowest, d.Forecast.Step)
	}
	b.most = time.Duration(float64(slowest) * (1 + slack))
	// The smallest budget is in [lo, hi]. A precision of 1/256 is finer than that of
	// recorded times.
	if shares, err = b.at(hi); err != nil {
		return 0, nil, err
	}
	budget = hi
	for lo := memory.Bytes(0); hi-lo > max(hi>>8, cfg.Align); {
		mid := lo + (hi-lo)/2
		s, err := b.at(mid)
		var low *memory.BudgetError
		switch {
		case errors.As(err, &low):
			lo = max(low.Need-1, mid)
		case err != nil:
			return 0, nil, err
		case s == nil:
			lo = mid
		default:
			hi, budget, shares = mid, mid, s
		}
	}
	return budget, shares, nil
}

type balance struct {
	ps      []*Profile
	l       memory.Links
	cfg     residency.Config
	allowed Allowed
	most    time.Duration
}

// at returns the choices of the ranks under a budget, or nil if a rank takes too long.
func (b *balance) at(budget memory.Bytes) ([]Share, error) {
	shares := make([]Share, len(b.ps))
	for r, p := range b.ps {
		d, err := solveAny(p, b.l, b.cfg, budget, b.allowed, 0.25)
		if err != nil {
			return nil, err
		}
		if d.Forecast.Step > b.most {
			return nil, nil
		}
		d.Rank = r
		shares[r] = Share{r, d.Forecast.Counts.OutBytes, d}
	}
	return shares, nil
}
