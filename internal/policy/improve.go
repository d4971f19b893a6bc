// This file owns the local search around a candidate: single changes, pairs of changes, and
// a few random ones.

package policy

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// improve changes single units, then pairs, as long as that helps. Then it changes a few
// units at random, improves the result, and continues from there if it is better.
func (v *solver) improve(best *trial) *trial {
	random := rand.New(rand.NewPCG(4, 5)) // a fixed seed gives the same result every time
	best = v.descend(best, random)
	for kicks := 0; kicks < 300 && !v.spent(best); kicks++ {
		pol := best.pol
		for range 2 + random.IntN(6) {
			if u, c := v.units[random.IntN(len(v.units))], memory.Choice(random.IntN(memory.Choices)); v.can(u, c) {
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

// climb changes single units as long as that helps. descend changes pairs too.
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

// fresh tries a candidate, and returns nil if it was tried before or does not fit.
func (v *solver) fresh(pol memory.Policy) *trial {
	key := make([]byte, len(v.units))
	for i, u := range v.units {
		key[i] = byte(pol[u])
	}
	if v.seen[string(key)] {
		return nil
	}
	v.seen[string(key)] = true
	if v.bounds != nil && !v.mayFit(pol) {
		return nil
	}
	return v.try(pol)
}

// singles tries every other choice of every unit, beginning with the costliest units.
func (v *solver) singles(best *trial) *trial {
	cost := map[memory.Unit]float64{}
	for _, f := range best.forecast().Units {
		cost[f.Unit] = (f.Waiting + f.Again).Seconds()
	}
	order := slices.Clone(v.units)
	slices.SortStableFunc(order, func(a, b memory.Unit) int { return cmp.Compare(cost[b], cost[a]) })
	for _, u := range order {
		for c := memory.Keep; c < memory.Choices && !v.spent(best); c++ {
			if c != best.pol[u] && v.can(u, c) {
				best = v.pick(best, v.fresh(v.change(best.pol, u, c)))
			}
		}
	}
	return best
}

// pairs changes two units at once, in random order, until that helps: a unit that is not
// kept gets another choice, and a second unit makes up for its memory.
func (v *solver) pairs(best *trial, random *rand.Rand) *trial {
	n := len(v.units)
	for _, i := range random.Perm(n * n) {
		a, b := v.units[i/n], v.units[i%n]
		if a == b || best.pol[a] == memory.Keep {
			continue
		}
		for c := memory.Keep; c < memory.Choices; c++ {
			for e := memory.Keep; e < memory.Choices; e++ {
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

func (v *solver) change(pol memory.Policy, u memory.Unit, c memory.Choice) memory.Policy {
	q := v.mix(pol, 0, 0)
	q[u] = c
	return q
}

// splitRows looks for a better candidate among those that keep a part of a unit's rows on
// the device: all rows are stashed, and those that find no device page go to the host,
// page by page. For each of several numbers of device pages the other units are chosen
// anew, because pages and saved tensors share the budget. The best number is then
// searched more closely.
func (v *solver) splitRows(best *trial) *trial {
	rows := v.step(nil).rows
	if rows == nil || rows.Fixed || v.enough(best) {
		return best
	}
	all := rows.devicePages(v.defaults())
	effort, whole := max(v.maxTries/12, 20), best
	v.split = true
	defer func() { v.split = false }()
	for i := range schedule.Pages(33) { // with the other choices as they are
		v.pages = all * i / 32
		best = v.pick(best, v.try(v.stashed(whole.pol)))
	}
	at := func(pages schedule.Pages, from *trial) {
		v.pages, v.seen, v.maxTries = pages, map[string]bool{}, v.tried+effort
		t := v.fewest(0)
		if from != nil {
			t = v.pick(t, v.try(v.stashed(from.pol)))
		}
		if t != nil {
			best = v.pick(best, v.climb(t))
		}
	}
	const parts = 8
	for i := range schedule.Pages(parts + 1) {
		if v.dear(best) {
			return best
		}
		at(all*i/parts, whole)
	}
	if best == whole {
		return best
	}
	step := all / parts
	for step /= 2; step > all/128 && !v.dear(best); step /= 2 {
		middle := best.pages
		at(max(middle-step, 0), best)
		at(min(middle+step, all), best)
	}
	return best
}

// stashed returns a policy with all rows stashed.
func (v *solver) stashed(pol memory.Policy) memory.Policy {
	q := v.mix(pol, 0, 0)
	for u, f := range v.p.Units {
		if f.Rows {
			q[u] = memory.Stash
		}
	}
	return q
}
