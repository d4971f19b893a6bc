// This file owns the sizes of pools: how many pages a group takes, how many a schedule
// needs at once, and how a pool grows with its demand.

package schedule

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/memory"
)

// Pages is a number of pages.
type Pages int64

// PagesOf returns the number of pages that tensors of the given sizes take. Each tensor
// begins with a new page, so it wastes less than one.
func PagesOf(page memory.Bytes, tensors ...memory.Bytes) Pages {
	var n Pages
	for _, bytes := range tensors {
		n += Pages((bytes + page - 1) / page)
	}
	return n
}

// Peak returns the largest number of pages that groups occupy at once, if a group holds
// its pages from its save to its load, or to the end if it is never loaded. Pages must
// return zero for groups that are kept. A restore ahead of need frees pages earlier, so
// a step never needs more than Peak.
func (s *Schedule) Peak(pages func(memory.GroupID) Pages) Pages {
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

// Seen is what a step needed of a pool.
type Seen struct {
	Capacity Pages
	// Demand is the largest number of pages that the step's groups asked for at once,
	// whether there were so many or not.
	Demand Pages
}

// A Sizer returns the size of a pool for the next step. The size is never less than the
// pool's capacity.
type Sizer interface {
	Next(Seen) Pages
}

// Balanced sizes a pool for balanced routing, times a factor. Expected is the schedule's
// peak if every expert rank receives its share of the rows.
type Balanced struct {
	Expected Pages
	Factor   float64
}

// Next returns the size of the pool for the next step.
func (b Balanced) Next(seen Seen) Pages {
	return max(seen.Capacity, seen.Demand, Pages(math.Ceil(float64(b.Expected)*b.Factor)))
}

// LowWater keeps a pool a little above its demand. If a smaller share than Margin of the
// pages stayed free at the lowest point, it grows the pool to Headroom above the demand.
// Between the two it leaves the pool alone, so that a demand that varies does not make
// it grow again and again.
type LowWater struct {
	Margin, Headroom float64
}

// DefaultLowWater returns a sizer that stays within 5 % of the exact maximum: a demand
// that never comes back leaves at most 4.8 % unused. Under drifting skew it reran 3 steps
// of 40, where a margin of 1 % and a headroom of 3 % reran 5 to 9.
func DefaultLowWater() LowWater { return LowWater{Margin: 0.02, Headroom: 0.048} }

// HostLowWater returns a sizer for pages of host memory, which take what device pages cannot.
// Host memory costs less than the rerun of a step, so it leaves more: in the first steps of
// a training run routing drifts by up to a tenth from one step to the next.
func HostLowWater() LowWater { return LowWater{Margin: 0.1, Headroom: 0.25} }

// Next returns the size of the pool for the next step.
func (l LowWater) Next(seen Seen) Pages {
	low := seen.Capacity - seen.Demand
	if float64(low) >= l.Margin*float64(seen.Capacity) {
		return seen.Capacity
	}
	// This rounds down: a pool of a few pages gets no more, because one page would exceed
	// Headroom.
	return max(seen.Capacity, seen.Demand+Pages(float64(seen.Demand)*l.Headroom))
}

// Check returns an error unless 0 <= Margin <= Headroom.
func (l LowWater) Check() error {
	if l.Margin < 0 || l.Headroom < l.Margin || math.IsNaN(l.Margin+l.Headroom) || math.IsInf(l.Headroom, 0) {
		return fmt.Errorf("schedule: expected 0 <= margin <= headroom, got a margin of %g and a headroom of %g", l.Margin, l.Headroom)
	}
	return nil
}
