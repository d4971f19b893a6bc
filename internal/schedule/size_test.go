// This file owns the tests of sizes.

package schedule

import (
	"math"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

func TestPagesOf(t *testing.T) {
	for _, x := range []struct {
		page    memory.Bytes
		tensors []memory.Bytes
		want    Pages
	}{
		{4096, nil, 0},
		{4096, []memory.Bytes{0}, 0},
		{4096, []memory.Bytes{1}, 1},
		{4096, []memory.Bytes{4096}, 1},
		{4096, []memory.Bytes{4097, 1, 0}, 3},
	} {
		if got := PagesOf(x.page, x.tensors...); got != x.want {
			t.Errorf("PagesOf(%d, %v) = %d, want %d", x.page, x.tensors, got, x.want)
		}
	}
}

// Peak equals the largest sum of all groups that are out at a moment.
func TestPeak(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, pages := &Schedule{}, map[memory.GroupID]Pages{}
		var out []memory.GroupID
		var most Pages
		for i := range rapid.IntRange(0, 60).Draw(t, "events") {
			if len(out) > 0 && rapid.Bool().Draw(t, "load") {
				k := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				s.Load(out[k])
				out = append(out[:k:k], out[k+1:]...)
				continue
			}
			g := memory.GroupID{Name: "moe_act", Layer: i}
			pages[g] = Pages(rapid.IntRange(0, 9).Draw(t, "pages"))
			s.Save(g)
			out = append(out, g)
			var now Pages
			for _, x := range out {
				now += pages[x]
			}
			most = max(most, now)
		}
		if got := s.Peak(func(g memory.GroupID) Pages { return pages[g] }); got != most {
			t.Fatalf("peak %d, want %d", got, most)
		}
	})
}

// SPEC S1.7: the next step always has room for what was seen, and a pool never shrinks.
// Low water grows by its headroom and then rests.
func TestSizers(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seen := Seen{Capacity: Pages(rapid.IntRange(0, 1000).Draw(t, "capacity")), Demand: Pages(rapid.IntRange(0, 2000).Draw(t, "demand"))}
		for _, z := range []Sizer{Balanced{Expected: 300, Factor: 1.2}, DefaultLowWater(), HostLowWater()} {
			next := z.Next(seen)
			if next < seen.Capacity || next < seen.Demand {
				t.Fatalf("%T: %d pages after %+v", z, next, seen)
			}
			if again := z.Next(Seen{Capacity: next, Demand: seen.Demand}); again != next {
				t.Fatalf("%T: %d pages, then %d for the same demand", z, next, again)
			}
			if l, low := z.(LowWater); low && float64(next) > max(float64(seen.Capacity), (1+l.Headroom)*float64(seen.Demand)) {
				t.Fatalf("low water keeps %d pages after %+v", next, seen)
			}
		}
	})
	if got := (Balanced{Expected: 10, Factor: 1.25}).Next(Seen{}); got != 13 {
		t.Errorf("balanced expectation: %d pages", got)
	}
	for _, l := range []LowWater{{-1, 1}, {0.5, 0.1}, {math.NaN(), 1}, {0, math.Inf(1)}} {
		if l.Check() == nil {
			t.Errorf("%+v was accepted", l)
		}
	}
}
