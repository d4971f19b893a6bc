// This file owns the tests of the places that units get: in turn, their former place, or
// another if they must move.

package bucket

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// SPEC S2.2: rotary takes blocks in turn, even if the first is free.
func TestRotaryTakesTurns(t *testing.T) {
	s := ofSizes(0, 1, 2, 4, 8)
	use, done := func(unit int) OrderEntry { return OrderEntry{Unit: unit} }, func(unit int) OrderEntry { return OrderEntry{Unit: unit, Release: true} }
	s.Order = []OrderEntry{use(0), done(0), use(1), done(1), use(2), use(3), done(3), done(2)}
	p := planned(t, Rotary, s, Options{})
	var slots []int
	for _, places := range p.Places {
		slots = append(slots, places[0].Slot)
	}
	if p.Live != 2 || !slices.Equal(slots, []int{0, 1, 0, 1}) {
		t.Errorf("%d blocks are taken as %v", p.Live, slots)
	}
}

// SPEC S2.2: two units of one size have different shapes if their data types differ.
func TestFixedTellsTypesApart(t *testing.T) {
	s := ofSizes(1, 1, 1, 1)
	for i, b := range []Bucket{{Type: bf16, Elements: 8}, {Type: fp32, Elements: 4}, {Type: fp32, Elements: 4}} {
		s.Units[i].Buckets = []Bucket{b}
	}
	if p := planned(t, Fixed, s, Options{}); p.Bytes != 2*16+16 || !slices.Equal(p.Fallback, []int{0}) {
		t.Errorf("%d bytes, with %v outside", p.Bytes, p.Fallback)
	}
}

// SPEC S2.3: while unit 1 is used twice, unit 0 is released, and its set is the first free
// one. Unit 2 does not get it, because unit 0 returns.
func TestSetsAreKeptForTheirUnits(t *testing.T) {
	s := ofSizes(2, 8, 8, 8)
	s.Order = nil
	for _, unit := range []int{0, 1, 1, 2, 0} {
		s.Order = append(s.Order, OrderEntry{Unit: unit}, OrderEntry{Unit: unit, Release: true})
	}
	for _, kind := range []PoolKind{Fixed, Max, Arena, Recorded} {
		if p := planned(t, kind, s, Options{}); len(p.Moves) != 0 || p.Bytes > 24 {
			t.Errorf("%v: %d bytes, %d moves", kind, p.Bytes, len(p.Moves))
		}
	}
}

// SPEC S2.3: four units use three sets in a circle. Unit 0 must move. Unit 2 does not,
// although the set before its own is free too.
func TestOneMovesAndAnotherStays(t *testing.T) {
	s := ofSizes(2, 8, 8, 8, 8)
	s.Order = nil
	for _, unit := range []int{0, 3, 2, 1, 0, 0, 2} {
		s.Order = append(s.Order, OrderEntry{Unit: unit}, OrderEntry{Unit: unit, Release: true})
	}
	for _, kind := range []PoolKind{Fixed, Max} {
		if p := planned(t, kind, s, Options{}); len(p.Moves) != 1 || p.Moves[0].Unit != 0 {
			t.Errorf("%v: %+v", kind, p.Moves)
		}
	}
}

// SPEC S2.3: a unit moves only if another unit has its former place when it returns.
func TestMovesAreNeeded(t *testing.T) {
	check := func(s Spec) (moved int, err error) {
		s.Prefetch = max(1, s.Prefetch)
		for _, kind := range []PoolKind{Fixed, Max, Arena} {
			p, err := NewPoolPlan(kind, s, Options{})
			if err != nil {
				return moved, err
			}
			for _, m := range p.Moves {
				moved++
				at, _ := spanOf(s, p.Uses, m.After)
				if !held(p, p.Places[m.Before][m.Bucket].Slot, at, m.Unit) {
					return moved, fmt.Errorf("%v: nobody has the place: %s", kind, p.Describe(m))
				}
			}
		}
		return moved, nil
	}
	checkSome(t, anySpec, check)
}

// checkSome checks random examples, and that what a check counts happens in examples that
// are always the same: of random ones there may be none.
func checkSome[T any](t *testing.T, draw func(*rapid.T) T, check func(T) (int, error)) {
	t.Helper()
	rapid.Check(t, func(t *rapid.T) {
		if _, err := check(draw(t)); err != nil {
			t.Fatal(err)
		}
	})
	all := 0
	for seed := range 500 {
		n, err := check(rapid.Custom(draw).Example(seed))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		all += n
	}
	if t.Logf("%d in 500 examples", all); all == 0 {
		t.Error("what is counted never happens")
	}
}

// held reports whether another unit has a slot's set or block at a position of the order. A
// unit without buckets may have one too.
func held(p *PoolPlan, slot, at, unit int) bool {
	group := func(slot int) int { return slot }
	if p.Kind != Arena { // slots of one set come one after the other
		set := 0
		for set < len(p.Slots) && strings.HasPrefix(p.Slots[set].Name, "set 0, ") {
			set++
		}
		group = func(slot int) int { return slot / set }
	}
	for i, u := range p.Uses {
		from, to := spanOf(p.Spec, p.Uses, i)
		if u.Unit != unit && from <= at && at <= to && !slices.Contains(p.Fallback, u.Unit) &&
			(len(p.Places[i]) == 0 || group(p.Places[i][0].Slot) == group(slot)) {
			return true
		}
	}
	return false
}

// SPEC S2.3: the recorded pool grows by half a percent rather than move a unit. Units of
// 100, 100 and 1 bytes are used in a circle, and there is a larger one.
func TestTraceStaysIfThatIsCheap(t *testing.T) {
	s := ofSizes(1, 100, 100, 1, 150)
	s.Order = nil
	for _, unit := range []int{0, 1, 2, 0, 2, 3, 2} {
		s.Order = append(s.Order, OrderEntry{Unit: unit}, OrderEntry{Unit: unit, Release: true})
	}
	if p := planned(t, Recorded, s, Options{}); p.LowerBound != 200 || p.Bytes != 201 || len(p.Moves) != 0 {
		t.Errorf("%d bytes for %d, with %d moves", p.Bytes, p.LowerBound, len(p.Moves))
	}
}
