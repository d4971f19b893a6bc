// This file owns the runners-up: the next fastest policies after the best one.

package search

import "slices"

// mostOthers is how many runners-up are reported, and otherTries bounds how many policies
// are predicted to find them.
const mostOthers, otherTries = 4, 24

// others returns the next fastest policies whose full forecast fits.
func (p *problem) others(fastest Outcome, best *choice, list []*choice) (out []*Result, err error) {
	list = slices.Concat(list, p.whole())
	slices.SortFunc(list, order)
	shown := []*choice{best}
	for range otherTries {
		c := p.fastest(list, func(c *choice) bool { return !c.failed && !adds(c, shown) })
		if c == nil || len(out) == mostOthers {
			break
		}
		if c.heights == nil {
			if err := p.refine(c); err != nil {
				return nil, err
			}
			slices.SortFunc(list, order)
			continue // its time may have changed
		}
		shown = append(shown, c)
		r, err := p.result(c, nil)
		if err != nil {
			return nil, err
		}
		out = append(out, &Result{Setup: r.Setup, Budget: r.Budget, After: r.After, Ranks: r.Ranks, Reason: whySlower(fastest, r.After)})
	}
	return out, nil
}

// adds reports whether a choice is one of others, or one of them with more modules.
func adds(c *choice, others []*choice) bool {
	return slices.ContainsFunc(others, func(o *choice) bool {
		if c.recompute.Full || o.recompute.Full {
			return c == o || c.recompute.Full && o.recompute.Full && c.recompute.Method == o.recompute.Method
		}
		return c.rec&o.rec == o.rec && c.off&o.off == o.off
	})
}
