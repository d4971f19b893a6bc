// This file owns what must hold for random models and orders.

package bucket

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// SPEC S2.2, S2.3, S2.6, S2.7: whatever the model and the order, live buckets
// never overlap, no pool is smaller than its lower bound, and the pools are
// ordered by size.
func TestPoolsHold(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		bytes := map[Kind]int64{}
		for _, kind := range Kinds {
			p, err := New(kind, s, Options{})
			if kind == Max && s.Prefetch+s.Behind == 0 && err != nil {
				continue // no double buffer; TestErrors has the sentence
			}
			if err != nil {
				t.Fatal(err)
			}
			if err := verify(p); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
			again, err := New(kind, s, Options{})
			if err != nil || !reflect.DeepEqual(p, again) {
				t.Fatalf("%v: planned twice, two results", kind)
			}
			bytes[kind] = p.Bytes
			if kind == Max {
				checkMax(t, p)
			}
		}
		most, ok := bytes[Max]
		if ok && bytes[Arena] > most || bytes[Trace] > bytes[Arena] {
			t.Fatalf("trace %d, arena %d, max %d", bytes[Trace], bytes[Arena], most)
		}
		if bytes[Arena] > bytes[Rotary] {
			t.Fatalf("arena %d, rotary %d", bytes[Arena], bytes[Rotary])
		}
	})
}

// checkMax holds the pool against its slots, found anew: of each data type, the
// k-th largest slot is the largest k-th bucket of any unit.
func checkMax(t *rapid.T, p *Plan) {
	var sets int64 // of all but loose modules
	for _, slot := range p.Slots {
		if strings.HasPrefix(slot.Name, "set ") {
			sets += slot.Bytes
		}
	}
	var want, outside int64
	for _, typ := range types {
		for k := range 4 {
			var largest int64
			for unit := range inUse(p) {
				if p.Spec.Units[unit].Loose {
					continue
				}
				if sizes := sizesOf(p.Spec, unit, typ); k < len(sizes) {
					largest = max(largest, sizes[k])
				}
			}
			want += int64(p.Live) * largest
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

func inUse(p *Plan) map[int]bool {
	units := map[int]bool{}
	for _, u := range p.Uses {
		units[u.Unit] = true
	}
	return units
}

// sizesOf are a unit's buckets of a data type from the largest to the smallest.
func sizesOf(s Spec, unit int, typ Type) (sizes []int64) {
	for _, b := range s.Units[unit].Buckets {
		if b.Type == typ {
			at := 0
			for at < len(sizes) && sizes[at] > s.Bytes(b) {
				at++
			}
			sizes = append(sizes[:at], append([]int64{s.Bytes(b)}, sizes[at:]...)...)
		}
	}
	return sizes
}

// SPEC S2.2: any Live units that come one after the other fit at once.
func TestConsecutiveUnitsFit(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		n := len(s.Units)
		for i := range s.Units {
			s.Units[i].Loose = false
		}
		s.Order = thereAndBack(n)
		for _, kind := range []Kind{Rotary, Fixed, Max, Arena, Trace} {
			p, err := New(kind, s, Options{})
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

// SPEC S2.7: while two units are live at once, forward and back again, the trace
// pool wastes nothing, and nobody moves.
func TestTraceIsExactForTwo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := ofSizes(1, rapid.SliceOfN(rapid.Int64Range(0, 1000), 1, 60).Draw(t, "sizes")...)
		if rapid.Bool().Draw(t, "gradients") {
			s.Prefetch, s.Behind = 0, 1
		}
		p, err := New(Trace, s, Options{})
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

// A fallback changes where what is outside of the slots lies, and nothing else.
func TestFallbacks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := anySpec(t)
		s.Prefetch = max(1, s.Prefetch)
		for _, kind := range []Kind{Rotary, Fixed, Max} {
			persistent, err := New(kind, s, Options{})
			dynamic, err2 := New(kind, s, Options{Fallback: DynamicMemory})
			if err := errors.Join(err, err2, verify(persistent), verify(dynamic)); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
			if !reflect.DeepEqual(persistent.Fallback, dynamic.Fallback) || persistent.Dynamic != 0 || dynamic.Bytes > persistent.Bytes {
				t.Fatalf("%v: persistent %d, dynamic %d bytes", kind, persistent.Bytes, dynamic.Bytes)
			}
		}
	})
}

// FuzzNew feeds orders that nobody would record: an error or a sound plan.
func FuzzNew(f *testing.F) {
	f.Add([]byte{0, 128, 1, 129}, 1, 0, int64(16), int64(8))
	f.Add([]byte{0, 1, 128, 129, 2, 130}, 2, 1, int64(0), int64(0))
	f.Add([]byte{128}, 0, 0, int64(1), int64(1))
	f.Fuzz(func(t *testing.T, events []byte, prefetch, behind int, align, multiple int64) {
		s := Spec{Prefetch: prefetch, Behind: behind, Align: align, Multiple: multiple}
		for i := range 5 {
			s.Units = append(s.Units, Unit{Loose: i == 4, Buckets: []Bucket{
				{Type: types[i%3], Elements: int64(17 * i)}, {Type: types[0], Elements: int64(len(events) % (i + 1) * 100)},
			}})
		}
		for _, e := range events[:min(len(events), 60)] {
			s.Order = append(s.Order, Event{Unit: int(e % 8), Release: e >= 128})
		}
		for _, kind := range Kinds {
			p, err := New(kind, s, Options{})
			if err != nil {
				continue
			}
			if err := verify(p); err != nil {
				t.Fatalf("%v: %v", kind, err)
			}
		}
	})
}
