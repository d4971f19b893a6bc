// This file owns the budgets of the ranks of a pipeline: one peak for all of them,
// instead of a ramp that somebody sets.

package policy

import (
	"errors"
	"fmt"
	"time"

	"github.com/stowage-dev/stowage/residency"
)

// Share is what one pipeline rank does.
type Share struct {
	Rank     int       `json:"rank"`
	Moved    int64     `json:"moved"` // bytes out in a step
	Decision *Decision `json:"decision"`
}

// Balance finds the smallest budget for all ranks of a pipeline at which none is
// predicted to take longer than 1+slack times the slowest rank with everything
// kept. Ranks of a pipeline wait for the slowest, so what the others spend up to
// its time is free. The first rank of 1F1B holds the most microbatches and comes
// out moving the most; the last ones often move nothing.
func Balance(ps []*Profile, l Links, cfg residency.Config, allowed Allowed, slack float64) (budget int64, shares []Share, err error) {
	if len(ps) == 0 || !(slack >= 0) {
		return 0, nil, fmt.Errorf("policy: %d ranks and a slack of %g; give at least one rank, and a slack of zero or more", len(ps), slack)
	}
	b := balance{ps: ps, l: l, cfg: cfg, allowed: allowed}
	var hi int64
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
	// The least budget lies in [lo, hi]. A 256th of it is closer than recorded
	// times are exact.
	if shares, err = b.at(hi); err != nil {
		return 0, nil, err
	}
	budget = hi
	for lo := int64(0); hi-lo > max(hi>>8, cfg.Align); {
		mid := lo + (hi-lo)/2
		s, err := b.at(mid)
		var low *BelowFloor
		switch {
		case errors.As(err, &low):
			lo = min(max(low.Floor-1, mid), hi)
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
	l       Links
	cfg     residency.Config
	allowed Allowed
	most    time.Duration
}

// at is what the ranks do under a budget, or nil where one takes too long.
func (b *balance) at(budget int64) ([]Share, error) {
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
