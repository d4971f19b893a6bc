// This file owns the nearest setup that flags can express if a setup gives every pipeline
// rank its own share of offloaded bytes.

package megatron

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// Closest returns the setup that flags ask for instead of one whose offload settings
// they cannot express. It has one fraction of groups for all ranks, and a number of
// bytes that each rank keeps beyond those of the rank before it
// (--delta-offload-bytes-across-pp-ranks). No rank exceeds the budget, or what the
// fullest rank needs if that is more. Closest returns s itself if flags can ask for it.
func Closest(s *plan.Setup) *plan.Setup {
	o := s.Offload
	whole := o.Fraction == 0 || o.Fraction == 1
	if len(o.Modules) == 0 || len(o.Fractions) == 0 && (!o.ByBytes || whole) {
		return s
	}
	n := *s
	n.Offload.Fractions, n.Offload.ByBytes = nil, false
	if len(o.Fractions) > 0 {
		n.Offload.Fraction = slices.Max(o.Fractions)
	}
	want, err := plan.Predict(s)
	if err != nil {
		return &n // there is nothing to compare with
	}
	limit := max(want.Budget, needs(want))
	for {
		p, err := plan.Predict(&n)
		if err != nil {
			return &n
		}
		if needs(p) <= limit {
			return evened(&n, p, limit)
		}
		if n.Offload.Fraction >= 1 {
			return &n
		}
		n.Offload.Fraction = min(n.Offload.Fraction+1./64, 1)
	}
}

// needs returns the most memory that the fullest rank reserves.
func needs(p *plan.Forecast) (n memory.Bytes) {
	for _, r := range p.Ranks {
		n = max(n, r.Reserved.High)
	}
	return n
}

// evened lets later ranks keep what they have room for. Kept bytes may cost more than their
// size, because the allocator's holes grow with them. So evened tries a quarter less until
// it fits.
func evened(n *plan.Setup, p *plan.Forecast, limit memory.Bytes) *plan.Setup {
	most := memory.Bytes(-1)
	for i := 1; i < len(p.Ranks); i++ {
		if r := &p.Ranks[i]; r.Host > 0 {
			room := float64(limit-r.Reserved.High) * float64(r.Peak.Expected) / float64(r.Reserved.High)
			if each := memory.Bytes(room) / memory.Bytes(i); most < 0 || each < most {
				most = each
			}
		}
	}
	const step = 1 << 20 // a number that people can read
	for d := most / step * step; d > 0; d = d * 3 / 4 / step * step {
		t := *n
		t.Offload.Delta = d
		if q, err := plan.Predict(&t); err == nil && needs(q) <= limit {
			return &t
		}
	}
	return n
}
