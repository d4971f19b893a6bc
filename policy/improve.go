// This file owns the search around a candidate: single changes, pairs, and a few at
// random.

package policy

import (
	"cmp"
	"math/rand/v2"
	"slices"
)

// improve changes single units, then pairs, as long as that gains; then it changes
// a few at random and improves that, and begins anew from there if it is better.
func (v *solver) improve(best *trial) *trial {
	random := rand.New(rand.NewPCG(4, 5)) // the same answer every time
	best = v.descend(best, random)
	for kicks := 0; kicks < 300 && !v.spent(best); kicks++ {
		pol := best.pol
		for range 2 + random.IntN(6) {
			if u, c := v.units[random.IntN(len(v.units))], Choice(random.IntN(choices)); v.can(u, c) {
				pol = v.change(pol, u, c)
			}
		}
		if t := v.fresh(pol); t != nil {
			if t = v.climb(t); better(t, best, v.l) {
				best, kicks = v.descend(t, random), 0
			}
		}
	}
	return best
}

// climb changes single units as long as that gains, descend pairs too.
func (v *solver) climb(best *trial) *trial {
	for !v.spent(best) {
		next := v.singles(best)
		if next == best {
			break
		}
		best = next
	}
	return best
}

func (v *solver) descend(best *trial, random *rand.Rand) *trial {
	for {
		best = v.climb(best)
		next := v.pairs(best, random)
		if next == best {
			return best
		}
		best = next
	}
}

// fresh is a candidate that was not tried here before, or nil.
func (v *solver) fresh(pol Policy) *trial {
	key := make([]byte, len(v.units))
	for i, u := range v.units {
		key[i] = byte(pol[u])
	}
	if v.seen[string(key)] {
		return nil
	}
	v.seen[string(key)] = true
	return v.try(pol)
}

// singles tries every other choice of every unit, those first that cost most.
func (v *solver) singles(best *trial) *trial {
	cost := map[Unit]float64{}
	for _, f := range best.forecast().Units {
		cost[f.Unit] = (f.Waiting + f.Again).Seconds()
	}
	order := slices.Clone(v.units)
	slices.SortStableFunc(order, func(a, b Unit) int { return cmp.Compare(cost[b], cost[a]) })
	for _, u := range order {
		for c := Keep; c < choices && !v.spent(best); c++ {
			if c != best.pol[u] && v.can(u, c) {
				best = v.pick(best, v.fresh(v.change(best.pol, u, c)))
			}
		}
	}
	return best
}

// pairs lets two units change at once, in random order, until that gains: one that
// is not kept takes another choice, and another makes up for it.
func (v *solver) pairs(best *trial, random *rand.Rand) *trial {
	n := len(v.units)
	for _, i := range random.Perm(n * n) {
		a, b := v.units[i/n], v.units[i%n]
		if a == b || best.pol[a] == Keep {
			continue
		}
		for c := Keep; c < choices; c++ {
			for e := Keep; e < choices; e++ {
				if c == best.pol[a] || e == best.pol[b] || !v.can(a, c) || !v.can(b, e) {
					continue
				}
				if v.spent(best) {
					return best
				}
				if t := v.fresh(v.change(v.change(best.pol, a, c), b, e)); t != nil && better(t, best, v.l) {
					return t
				}
			}
		}
	}
	return best
}

func (v *solver) change(pol Policy, u Unit, c Choice) Policy {
	q := v.mix(pol, 0, 0)
	q[u] = c
	return q
}
