// This file owns the search for models of many similar layers. Single units hardly matter
// there, and their number makes a search among them slow: what counts is how many units of
// each kind are offloaded and how many are recomputed.

package policy

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// class is the units of one name, in the order of saving. The first are offloaded, because
// they have the longest time between save and load. The next are recomputed. The last are
// kept: their backward pass comes first and makes room for the others.
type class struct {
	units        []memory.Unit
	off, rec     bool
	bytes, price float64 // of all units, and seconds of recomputation per byte
}

// share is how many units of a class are offloaded and recomputed.
type share struct{ off, rec int }

// classes returns the classes of the units with a choice.
func (v *solver) classes() (list []*class) {
	type key struct {
		name     string
		chunk    int
		off, rec bool
	}
	place := map[key]*class{}
	for _, u := range v.units {
		k := key{u.Name, u.Chunk, v.can(u, memory.Offload), v.can(u, memory.Recompute)}
		c := place[k]
		if c == nil {
			c = &class{off: k.off, rec: k.rec}
			place[k] = c
			list = append(list, c)
		}
		c.units = append(c.units, u)
		i := v.bounds.unit[u]
		c.bytes += float64(v.bounds.bytes[i])
		c.price += v.bounds.again[i].Seconds()
	}
	for _, c := range list {
		c.price /= max(c.bytes, 1)
	}
	return list
}

// regular searches the numbers of units: first along the line of candidates that recompute
// the cheapest bytes and offload the rest of what must go, then with other numbers for each
// class.
func (v *solver) regular(best *trial) *trial {
	list := v.classes()
	best = v.line(list, best)
	return v.exchange(list, best)
}

// worth reports whether a candidate may fit and may be better than best.
func (v *solver) worth(pol memory.Policy, best *trial) bool {
	if best != nil && v.bounds.time(pol).Seconds() >= best.cost(v.l) {
		return false
	}
	return v.mayFit(pol)
}

// mayFit reports whether a candidate may fit.
func (v *solver) mayFit(pol memory.Policy) bool {
	v.bounded++
	return v.bounds.memory(pol) <= v.cfg.Device
}

// line tries numbers of recomputed units, k of all classes from the cheapest byte on, and
// looks more closely around the best.
func (v *solver) line(list []*class, best *trial) *trial {
	var recs []*class
	n := 0
	for _, c := range list {
		if c.rec {
			recs = append(recs, c)
			n += len(c.units)
		}
	}
	slices.SortStableFunc(recs, func(a, b *class) int { return cmp.Compare(a.price, b.price) })
	at := 0
	look := func(k int) {
		if t := v.pick(best, v.fewestBeside(recs, k, best)); t != best {
			best, at = t, k
		}
	}
	const parts = 8
	for i := range parts + 1 {
		look(n * i / parts)
	}
	for step := n / parts; step > 0; step /= 2 {
		middle := at
		look(max(middle-step, 0))
		look(min(middle+step, n))
	}
	return best
}

// fewestBeside returns the trial that recomputes k units of the classes and offloads as few
// others as fit, or nil if it cannot be better than best.
func (v *solver) fewestBeside(recs []*class, k int, best *trial) *trial {
	lo, hi := 0, len(v.offs)
	if !v.worth(v.beside(recs, k, hi), best) {
		return nil
	}
	for lo < hi { // fewer do not fit, whatever the copies take
		if mid := (lo + hi) / 2; v.mayFit(v.beside(recs, k, mid)) {
			hi = mid
		} else {
			lo = mid + 1
		}
	}
	for n, more := lo, 1; ; n, more = min(n+more, len(v.offs)), 2*more {
		if t := v.fresh(v.beside(recs, k, n)); t != nil || n == len(v.offs) || v.spent(best) {
			return t
		}
	}
}

// beside returns the policy that recomputes k units of the classes in their order, and
// offloads the first n of those that remain. Of the class that is recomputed in part, the
// first units are offloaded.
func (v *solver) beside(recs []*class, k, n int) memory.Policy {
	pol := v.defaults()
	var part *class
	for _, c := range recs {
		if k < len(c.units) {
			part = c
			break
		}
		for _, u := range c.units {
			pol[u] = memory.Recompute
		}
		k -= len(c.units)
	}
	for _, u := range v.offs {
		if n > 0 && pol[u] != memory.Recompute {
			pol[u] = memory.Offload
			n--
		}
	}
	if part != nil {
		for _, u := range part.units {
			if k > 0 && pol[u] == memory.Keep {
				pol[u] = memory.Recompute
				k--
			}
		}
	}
	return pol
}

// shares returns how many units of each class a policy offloads and recomputes.
func shares(list []*class, pol memory.Policy) []share {
	all := make([]share, len(list))
	for i, c := range list {
		for _, u := range c.units {
			switch pol[u] {
			case memory.Offload:
				all[i].off++
			case memory.Recompute:
				all[i].rec++
			}
		}
	}
	return all
}

// with returns the policy with so many units of each class, and whether there are so many.
func (v *solver) with(list []*class, all []share) (memory.Policy, bool) {
	pol := v.defaults()
	for i, c := range list {
		s := all[i]
		if s.off < 0 || s.rec < 0 || s.off+s.rec > len(c.units) || s.off > 0 && !c.off || s.rec > 0 && !c.rec {
			return nil, false
		}
		for _, u := range c.units[:s.off] {
			pol[u] = memory.Offload
		}
		for _, u := range c.units[s.off : s.off+s.rec] {
			pol[u] = memory.Recompute
		}
	}
	return pol, true
}

// exchange changes the numbers of one class, or of two classes by about the same bytes, by
// large numbers first, as long as that helps.
func (v *solver) exchange(list []*class, best *trial) *trial {
	most := 0
	for _, c := range list {
		most = max(most, len(c.units))
	}
	for d := max(most/4, 1); d > 0; d /= 2 {
		for again := true; again && !v.spent(best); {
			again = false
			for _, m := range v.moves(list, d) {
				all := shares(list, best.pol)
				m.apply(all)
				pol, ok := v.with(list, all)
				if !ok || v.spent(best) || !v.worth(pol, best) {
					continue
				}
				if t := v.fresh(pol); t != nil && better(t, best, v.l) {
					best, again = t, true
				}
			}
		}
	}
	return best
}

// move changes the shares of one or two classes.
type move struct {
	a, b       int
	forA, forB share
}

func (m *move) apply(all []share) {
	all[m.a].off += m.forA.off
	all[m.a].rec += m.forA.rec
	all[m.b].off += m.forB.off
	all[m.b].rec += m.forB.rec
}

// mostPairs is the number of classes up to which changes of two classes are tried.
const mostPairs = 12

// moves returns the changes by d units of a class.
func (v *solver) moves(list []*class, d int) (all []move) {
	for a := range list {
		for _, s := range []share{{0, -d}, {-d, 0}, {d, -d}, {-d, d}, {d, 0}, {0, d}} {
			all = append(all, move{a: a, b: a, forA: s})
		}
		for b := range list {
			if a == b || len(list) > mostPairs {
				continue
			}
			// As many units of b as have the bytes of d units of a.
			each := func(c *class) float64 { return c.bytes / float64(len(c.units)) }
			e := max(int(float64(d)*each(list[a])/max(each(list[b]), 1)+0.999), 1)
			for _, s := range []share{{0, -d}, {-d, 0}} {
				for _, t := range []share{{0, e}, {e, 0}} {
					all = append(all, move{a, b, s, t})
				}
			}
		}
	}
	return all
}
