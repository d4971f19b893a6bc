// This file owns the tests of the low-water policy over many steps.

package schedule

import (
	"testing"

	"pgregory.net/rapid"
)

// SPEC S1.7: the pool always has room for the last step's demand, never shrinks, and
// never exceeds the largest demand by more than the headroom.
func TestLowWaterFollowsDemand(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l := DefaultLowWater()
		if rapid.Bool().Draw(t, "other figures") {
			l.Headroom = rapid.Float64Range(0, 0.5).Draw(t, "headroom")
			l.Margin = rapid.Float64Range(0, l.Headroom).Draw(t, "margin")
		}
		if err := l.Check(); err != nil {
			t.Fatal(err)
		}
		var pool, most Pages
		for _, demand := range rapid.SliceOfN(rapid.Int64Range(0, 5000), 1, 30).Draw(t, "demand") {
			d := Pages(demand)
			most = max(most, d)
			next := l.Next(Seen{Capacity: pool, Demand: d})
			if next < pool || next < d {
				t.Fatalf("a pool of %d became %d when %d were needed", pool, next, d)
			}
			if float64(next) > (1+l.Headroom)*float64(most)+1e-6 {
				t.Fatalf("a pool of %d where at most %d were ever needed", next, most)
			}
			if again := l.Next(Seen{Capacity: next, Demand: d}); again != next {
				t.Fatalf("the same demand made the pool grow twice, to %d and to %d", next, again)
			}
			pool = next
		}
	})
}

// A pool that is nearly full grows before it overflows; one with room stays.
func TestLowWaterActsEarly(t *testing.T) {
	for _, c := range []struct{ capacity, demand, want Pages }{
		{1000, 980, 1000},
		{1000, 995, 1042},
		{1000, 1000, 1048},
		{1000, 2000, 2096},
		{1, 1, 1}, // one page more would be too much
		{0, 0, 0},
	} {
		if got := DefaultLowWater().Next(Seen{Capacity: c.capacity, Demand: c.demand}); got != c.want {
			t.Errorf("a pool of %d became %d when %d were needed, want %d", c.capacity, got, c.demand, c.want)
		}
	}
}
