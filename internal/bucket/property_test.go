// This file owns what must hold for random models and orders.

package bucket

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// SPEC S2.2, S2.3, S2.6, S2.7: for every model and order, live buckets never overlap, no
// pool is smaller than its lower bound, and the pools are ordered by size.
func TestPoolsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		bytes := map[PoolKind]memory.Bytes{}
		for _, kind := range PoolKinds {
			p, err := NewPoolPlan(kind, s, Options{})
			if kind == Max && s.Prefetch+s.Behind == 0 && err != nil {
				continue // no double buffer; TestErrors has the sentence
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := verify(p); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
			again, err := NewPoolPlan(kind, s, Options{})
			if err != nil || !reflect.DeepEqual(p, again) {
				t.Fatalf("%v: planned twice, two results", kind)
			}
			bytes[kind] = p.Bytes
			if kind == Max {
				checkMax(t, p)
			}
		}
		most, ok := bytes[Max]
		if ok && bytes[Arena] > most || bytes[Recorded] > bytes[Arena] {
			t.Fatalf("trace %d, arena %d, max %d", bytes[Recorded], bytes[Arena], most)
		}
		if bytes[Arena] > bytes[Rotary] {
			t.Fatalf("arena %d, rotary %d", bytes[Arena], bytes[Rotary])
		}
	})
}

// checkMax compares the pool with slots that it computes itself: the k-th largest slot of
// each data type is as large as the largest k-th bucket of any unit.
func checkMax(t *rapid.T, p *PoolPlan) {
	var sets memory.Bytes // of all but loose modules
	for _, slot := range p.Slots {
		if strings.HasPrefix(slot.Name, "set ") {
			sets += slot.Bytes
		}
	}
	var want, outside memory.Bytes
	for _, typ := range types {
		for k := range 4 {
			var largest memory.Bytes
			for unit := range inUse(p) {
				if p.Spec.Units[unit].Loose {
					continue
				}
				if sizes := sizesOf(p.Spec, unit, typ); k < len(sizes) {
					largest = max(largest, sizes[k])
				}
			}
			want += memory.Bytes(p.Live) * largest
		}
	}
	for unit := range inUse(p) {
		if p.Spec.Units[unit].Loose {
			for _, b := range p.Spec.Units[unit].Buckets {
				outside += p.Spec.Bytes(b)
			}
		}
	}
	if sets != want || p.Bytes != sets+outside {
		t.Fatalf("max takes %d: %d for slots, which should be %d, and %d outside", p.Bytes, sets, want, outside)
	}
}

func inUse(p *PoolPlan) map[int]bool {
	units := map[int]bool{}
	for _, u := range p.Uses {
		units[u.Unit] = true
	}
	return units
}

// sizesOf returns a unit's buckets of a data type from the largest to the smallest.
func sizesOf(s Spec, unit int, typ Type) (sizes []memory.Bytes) {
	for _, b := range s.Units[unit].Buckets {
		if b.Type == typ {
			at := 0
			for at < len(sizes) && sizes[at] > s.Bytes(b) {
				at++
			}
			sizes = append(sizes[:at], append([]memory.Bytes{s.Bytes(b)}, sizes[at:]...)...)
		}
	}
	return sizes
}

// SPEC S2.2: any Live consecutive units fit at once.
func TestConsecutiveUnitsFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		n := len(s.Units)
		for i := range s.Units {
			s.Units[i].Loose = false
		}
		s.Order = thereAndBack(n)
		for _, kind := range []PoolKind{Rotary, Fixed, Max, Arena, Recorded} {
			p, err := NewPoolPlan(kind, s, Options{})
			if err != nil {
				if kind == Max && s.Prefetch+s.Behind == 0 {
					continue
				}
				t.Fatal(err)
			}
			if p.Live != min(n, s.Prefetch+s.Behind+1) {
				t.Fatalf("%d units are live, prefetch is %d and behind %d", p.Live, s.Prefetch, s.Behind)
			}
			for i := range p.Uses {
				together := map[int]int{}
				for j := i; j < min(len(p.Uses), i+s.Prefetch+s.Behind+1); j++ {
					together[p.Uses[j].Unit] = j
				}
				if err := disjoint(p, together); err != nil {
					t.Fatalf("%v, from use %d: %v", kind, i, err)
				}
			}
		}
	})
}

// SPEC S2.7: if two units are live at once, forward and back, the recorded pool wastes
// nothing and no unit moves.
func TestTraceIsExactForTwo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := ofSizes(1, rapid.SliceOfN(rapid.Int64Range(0, 1000), 1, 60).Draw(t, "sizes")...)
		if rapid.Bool().Draw(t, "gradients") {
			s.Prefetch, s.Behind = 0, 1
		}
		p, err := NewPoolPlan(Recorded, s, Options{})
		if err != nil {
			t.Fatal(err)
		}
		if p.Bytes != p.LowerBound || len(p.Moves) != 0 {
			t.Fatalf("%d bytes for %d, with %d moves", p.Bytes, p.LowerBound, len(p.Moves))
		}
		if err := verify(p); err != nil {
			t.Fatal(err)
		}
	})
}

// A fallback changes only where units outside of the slots lie.
func TestFallbacks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		s.Prefetch = max(1, s.Prefetch)
		for _, kind := range []PoolKind{Rotary, Fixed, Max} {
			persistent, err := NewPoolPlan(kind, s, Options{})
			dynamic, err2 := NewPoolPlan(kind, s, Options{Fallback: DynamicMemory})
			if err := errors.Join(err, err2, verify(persistent), verify(dynamic)); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
			if !reflect.DeepEqual(persistent.Fallback, dynamic.Fallback) || persistent.Dynamic != 0 || dynamic.Bytes > persistent.Bytes {
				t.Fatalf("%v: persistent %d, dynamic %d bytes", kind, persistent.Bytes, dynamic.Bytes)
			}
		}
	})
}

// FuzzNew tries orders that no step would record. Each gives an error or a valid plan.
func FuzzNew(f *testing.F) {
	f.Add([]byte{0, 128, 1, 129}, 1, 0, int64(16), int64(8))
	f.Add([]byte{0, 1, 128, 129, 2, 130}, 2, 1, int64(0), int64(0))
	f.Add([]byte{128}, 0, 0, int64(1), int64(1))
	f.Fuzz(func(t *testing.T, events []byte, prefetch, behind int, align, multiple int64) {
		s := Spec{Prefetch: prefetch, Behind: behind, Align: memory.Bytes(align), Multiple: multiple}
		for i := range 5 {
			s.Units = append(s.Units, FSDPUnit{Loose: i == 4, Buckets: []Bucket{
				{Type: types[i%3], Elements: int64(17 * i)}, {Type: types[0], Elements: int64(len(events) % (i + 1) * 100)},
			}})
		}
		for _, e := range events[:min(len(events), 60)] {
			s.Order = append(s.Order, OrderEntry{Unit: int(e % 8), Release: e >= 128})
		}
		for _, kind := range PoolKinds {
			p, err := NewPoolPlan(kind, s, Options{})
			if err != nil {
				continue
			}
			if err := verify(p); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
		}
	})
}

// best returns the smallest pool in which every unit of a chain has one place and any three
// consecutive units fit. It tries all heights and offsets.
func best(sizes []int64) int64 {
	for height := int64(0); ; height++ {
		states := map[[2]int64]bool{{}: true} // where the two units before lie
		for i, n := range sizes {
			next := map[[2]int64]bool{}
			for s := range states {
				for at := range height - n + 1 {
					free := func(back int) bool {
						return i < back || at >= s[back-1]+sizes[i-back] || s[back-1] >= at+n
					}
					if free(1) && free(2) {
						next[[2]int64{at, s[0]}] = true
					}
				}
			}
			states = next
		}
		if len(states) > 0 {
			return height
		}
	}
}

// SPEC S2.7: no pool can always meet the lower bound if three units are live at once. Small
// and large layers in turn, as in hybrid models, need 2+1+2 bytes at once and 6 in all. The
// search finds what is possible.
func TestTraceFindsTheBestForThree(t *testing.T) {
	inTurn := []int64{1, 2, 1, 2, 1, 2, 1, 2, 1, 2}
	if p := planned(t, Recorded, ofSizes(2, inTurn...), Options{}); p.LowerBound != 5 || best(inTurn) != 6 || p.Bytes != 6 || len(p.Moves) != 0 {
		t.Errorf("%d bytes, of at least %d and in truth %d, with %d moves", p.Bytes, p.LowerBound, best(inTurn), len(p.Moves))
	}
	r := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		sizes := make([]int64, 3+r.IntN(18))
		for i := range sizes {
			sizes[i] = 1 + r.Int64N(6)
		}
		// It misses about one in 50,000.
		if p := planned(t, Recorded, ofSizes(2, sizes...), Options{}); int64(p.Bytes) != best(sizes) || len(p.Moves) != 0 {
			t.Errorf("%v: %d bytes with %d moves, possible are %d", sizes, p.Bytes, len(p.Moves), best(sizes))
		}
	}
	// The last attempt is not the best here, but the plan is valid.
	if p := planned(t, Recorded, ofSizes(2, 2, 7, 6, 8, 3, 9, 3, 9, 3, 8), Options{}); p.Bytes != 23 {
		t.Errorf("%d bytes", p.Bytes)
	}
}

// Sizes near the limit of an int64 are refused, or the plan is valid.
func TestHugeSizes(t *testing.T) {
	draw := func(t *rapid.T) Spec {
		s := anySpec(t)
		s.Prefetch = max(1, s.Prefetch)
		scale := int64(1) << rapid.IntRange(40, 54).Draw(t, "scale")
		for i := range s.Units {
			s.Units[i].Buckets = slices.Clone(s.Units[i].Buckets)
			for b := range s.Units[i].Buckets {
				s.Units[i].Buckets[b].Elements *= scale
			}
		}
		return s
	}
	checkSome(t, draw, func(s Spec) (refused int, err error) {
		for _, kind := range PoolKinds {
			p, err := NewPoolPlan(kind, s, Options{})
			if err != nil {
				refused++
			} else if err = verify(p); err != nil {
				return refused, fmt.Errorf("%v: %w", kind, err)
			}
		}
		return refused, nil
	})
}
