// This file owns the sizes of pools: how many pages a group takes, how many a
// schedule needs at once, and how a pool follows what it has seen.

package schedule

import (
	"fmt"
	"math"
)

// Pages is a number of pages.
type Pages int64

// PagesOf is the number of pages that tensors of so many bytes take. Each
// tensor begins a page of its own, so that it wastes less than one.
func PagesOf(page int64, tensors ...int64) Pages {
	var n Pages
	for _, bytes := range tensors {
		n += Pages((bytes + page - 1) / page)
	}
	return n
}

// Peak is the largest number of pages that groups occupy at once, if a group
// holds its pages from its save to its load. Groups that are never loaded hold
// theirs to the end; for those that are kept, pages is to say zero. Restoring
// ahead of need frees pages earlier, so that no timing makes a step need more.
func (s *Schedule) Peak(pages func(Group) Pages) Pages {
	var now, most Pages
	for _, e := range s.events {
		if e.Load {
			now -= pages(e.Group)
			continue
		}
		now += pages(e.Group)
		most = max(most, now)
	}
	return most
}

// Seen is what a step observed of a pool.
type Seen struct {
	Capacity Pages
	// Demand is the most pages that the step's groups occupy at once, whether
	// they were to be had or not.
	Demand Pages
}

// A Sizer says how large a pool should be for the next step. It never asks for
// less than the pool has: a smaller pool is the next launch's.
type Sizer interface {
	Next(Seen) Pages
}

// Balanced sizes a pool for routing that is balanced, times a factor; the
// expectation is the schedule's peak with every expert rank receiving its share.
type Balanced struct {
	Expected Pages
	Factor   float64
}

func (b Balanced) Next(seen Seen) Pages {
	return max(seen.Capacity, seen.Demand, Pages(math.Ceil(float64(b.Expected)*b.Factor)))
}

// Observed sizes a pool to the most that was ever needed.
type Observed struct{}

func (Observed) Next(seen Seen) Pages { return max(seen.Capacity, seen.Demand) }

// LowWater keeps the pool a little above what was needed. It acts when fewer
// than Margin of the pages stayed free at the lowest point, and then provides
// Headroom; between the two it leaves the pool alone, so that demand that
// wavers does not make it grow again and again.
type LowWater struct {
	Margin, Headroom float64
}

// DefaultLowWater stays within 5 % of the exact maximum: at most 4.8 % are left
// unused by a demand that never comes back. Under drifting skew it reran 3 steps
// of 40 where a margin of 1 % and a headroom of 3 % reran 5 to 9.
func DefaultLowWater() LowWater { return LowWater{Margin: 0.02, Headroom: 0.048} }

func (l LowWater) Next(seen Seen) Pages {
	low := seen.Capacity - seen.Demand
	if float64(low) >= l.Margin*float64(seen.Capacity) && low >= 0 {
		return seen.Capacity
	}
	// Rounded down: a pool of a few pages gets none besides, because one page
	// would be more than Headroom.
	return max(seen.Capacity, seen.Demand+Pages(float64(seen.Demand)*l.Headroom))
}

// Check tells whether the figures make sense.
func (l LowWater) Check() error {
	if l.Margin < 0 || l.Headroom < l.Margin || math.IsNaN(l.Margin+l.Headroom) || math.IsInf(l.Headroom, 0) {
		return fmt.Errorf("schedule: a margin of %g and a headroom of %g; want 0 <= margin <= headroom", l.Margin, l.Headroom)
	}
	return nil
}
