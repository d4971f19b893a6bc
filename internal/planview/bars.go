// This file owns the picture of memory per rank: a bar for each, stacked by
// cause, on one scale with the budget.

package planview

import "github.com/stowage-dev/stowage/memory"

// bars has all ranks. Widths and places are in hundredths of the scale.
type bars struct {
	Rows   []bar
	Legend []swatch
	Budget float64      // zero without one
	Scale  memory.Bytes // bytes at the right end
}

type bar struct {
	Rank     *Rank
	Heaviest bool
	Over     bool // more than the budget
	Parts    []part
	// Reserved is how far the allocator's estimate reaches beyond the parts; Low
	// and High are the ends of its band.
	Reserved, Low, High float64
}

type part struct {
	Name  string
	Color int
	Bytes memory.Bytes
	Width float64
}

type swatch struct {
	Name  string
	Color int
}

func makeBars(r *Report) bars {
	b := bars{Scale: r.Budget}
	for _, k := range r.Ranks {
		b.Scale = max(b.Scale, k.Reserved.High, k.Peak.High)
	}
	b.Scale = max(b.Scale+b.Scale/50, 1)
	place := func(n memory.Bytes) float64 { return 100 * float64(n) / float64(b.Scale) }
	b.Budget = place(r.Budget)
	seen := map[string]bool{}
	for i := range r.Ranks {
		k := &r.Ranks[i]
		row := bar{Rank: k, Heaviest: k.Rank == r.Heaviest, Over: r.Budget > 0 && k.Reserved.High > r.Budget}
		for c, cause := range k.Causes {
			if cause.Bytes <= 0 {
				continue
			}
			row.Parts = append(row.Parts, part{Name: cause.Name, Color: c, Bytes: cause.Bytes, Width: place(cause.Bytes)})
			seen[cause.Name] = true
		}
		row.Reserved = place(max(k.Reserved.Expected-k.Peak.Expected, 0))
		row.Low, row.High = place(k.Reserved.Low), place(k.Reserved.High)
		b.Rows = append(b.Rows, row)
	}
	if len(r.Ranks) > 0 {
		for c, cause := range r.Ranks[0].Causes {
			if seen[cause.Name] {
				b.Legend = append(b.Legend, swatch{cause.Name, c})
			}
		}
	}
	return b
}
