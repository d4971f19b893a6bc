// This file owns names, refusals and the memory of pools at its limits.

package bucket

import (
	"strings"
	"testing"
)

// Names of fallbacks are read as they are written.
func TestParseFallback(t *testing.T) {
	for _, f := range []Fallback{Persistent, DynamicMemory} {
		if got, err := ParseFallback(f.String()); got != f || err != nil {
			t.Errorf("%v became %v, %v", f, got, err)
		}
	}
	if _, err := ParseFallback("none"); err == nil || err.Error() != `expected a fallback (persistent or dynamic), got "none"` {
		t.Error(err)
	}
}

// A unit may take all of the memory and no more, be it the first or the last; so may a pool.
// A plan has the options that it was made with, and its slots have names.
func TestMemoryOfPools(t *testing.T) {
	u := func(n int64) FSDPUnit {
		return FSDPUnit{Name: string(rune('a' + n%26)), Buckets: []Bucket{{Name: "b", Type: Type{Name: "x", Size: 1}, Elements: n}}}
	}
	var order []OrderEntry
	for i := range 3 {
		order = append(order, OrderEntry{Unit: i}, OrderEntry{Unit: i, Release: true})
	}
	for last := range 3 {
		s := Spec{Units: []FSDPUnit{u(10), u(11), u(12)}, Align: 1, Multiple: 1, Order: order}
		s.Units[0], s.Units[last] = s.Units[last], s.Units[0]
		for _, kind := range []PoolKind{Arena, Recorded} {
			o := Options{Memory: 12, Fallback: DynamicMemory}
			p, err := NewPoolPlan(kind, s, o)
			if err != nil || p.Options != o || p.Bytes != 12 || p.LowerBound != 12 || p.Waste() != 0 {
				t.Errorf("%v: %v, %+v", kind, err, p)
			}
			if err == nil {
				for _, slot := range p.Slots {
					if slot.Name == "" {
						t.Errorf("%v: a slot without a name in %+v", kind, p.Slots)
					}
				}
			}
			o.Memory = 11
			if _, err := NewPoolPlan(kind, s, o); err == nil || !strings.Contains(err.Error(), `FSDP unit "m" needs 12 B, but only 11 B are available`) {
				t.Errorf("%v: %v", kind, err)
			}
		}
	}
	if (&PoolPlan{Bytes: 5}).Waste() != 0 {
		t.Error("a pool without a lower bound has waste")
	}
	for _, bad := range []Spec{{Align: -1}, {Multiple: -1}, {Align: 1<<40 + 1}, {Order: []OrderEntry{{Unit: -1}}}, {Order: []OrderEntry{{Unit: 1}}}} {
		bad.Units = []FSDPUnit{u(3)}
		if _, err := NewPoolPlan(Arena, bad, Options{}); err == nil {
			t.Errorf("%+v has a plan", bad)
		}
	}
}
