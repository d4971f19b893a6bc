// This file owns impossible pipelines, schedules that are compared, and sizers at their limits.

package schedule

import (
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// Shapes of pipelines are refused in a sentence, at their limits.
func TestImpossiblePipelines(t *testing.T) {
	few := "schedule: expected at least one rank, chunk and microbatch, got "
	for _, x := range []struct {
		p    Pipeline
		rank int
		want string
	}{
		{Pipeline{1, 1, 1, 0}, 0, ""},
		{Pipeline{0, 1, 1, 0}, 0, few + "0, 1 and 1"},
		{Pipeline{1, 0, 1, 0}, 0, few + "1, 0 and 1"},
		{Pipeline{1, 1, 0, 0}, 0, few + "1, 1 and 0"},
		{Pipeline{1, 1, 1, -1}, 0, few + "1, 1 and 1"},
		{Pipeline{2, 1, 1, 0}, -1, "schedule: rank -1 does not exist in a pipeline of 2 ranks"},
		{Pipeline{2, 1, 1, 0}, 2, "schedule: rank 2 does not exist in a pipeline of 2 ranks"},
		{Pipeline{2, 2, 1, 0}, 1, ""},
		{Pipeline{1, 2, 1, 0}, 0, "schedule: 2 chunks on one pipeline rank; interleaving needs at least two ranks"},
	} {
		passes, err := x.p.Passes(x.rank)
		if (err == nil) != (x.want == "") || err != nil && err.Error() != x.want || (passes == nil) != (err != nil) {
			t.Errorf("%+v: %v, want %s", x, err, x.want)
		}
	}
}

// schedule returns the schedule of letters, which are saved when they come first and then
// loaded.
func of(letters string) *Schedule {
	s := &Schedule{}
	for _, c := range letters {
		g := memory.GroupID{Name: string(c)}
		if _, saved := s.Saved(g); saved {
			s.Load(g)
		} else {
			s.Save(g)
		}
	}
	return s
}

// Schedules are equal if they have the same events; a group is out from its save to its load.
func TestSchedulesCompared(t *testing.T) {
	all := []string{"", "a", "b", "aa", "ab", "abb", "abba", "abab", "aabb", "abbac"}
	for _, a := range all {
		for _, b := range all {
			if of(a).Equal(of(b)) != (a == b) {
				t.Errorf("%s equals %s: %v", a, b, a != b)
			}
		}
	}
	s := of("abac")
	for name, want := range map[string]bool{"a": false, "b": true, "c": true, "d": false} {
		if s.Out(memory.GroupID{Name: name}) != want {
			t.Errorf("%s is out: %v", name, !want)
		}
	}
	for name, want := range map[string]bool{"a": true, "b": false, "c": false, "d": false, "e": true} {
		if of("aabcbee").next(memory.GroupID{Name: name}) != want {
			t.Errorf("the load of %s comes next: %v", name, !want)
		}
	}
	for letters, stack := range map[string]bool{"": true, "abba": true, "abab": false, "abcb": false, "abbcca": true, "abc": true, "abca": false} {
		s := of(letters)
		m := s.Moves(0, func(memory.GroupID) (int, int) { return 0, 0 })
		if m.Stack != stack || m.Schedule != s {
			t.Errorf("%s is a stack: %v", letters, m.Stack)
		}
	}
}

// A pool is left alone from its margin on, grows to its headroom below that, and never shrinks.
func TestLowWaterLimits(t *testing.T) {
	l := LowWater{Margin: 0.1, Headroom: 0.2}
	for _, x := range []struct{ capacity, demand, want Pages }{
		{100, 90, 100}, {100, 91, 109}, {100, 100, 120}, {100, 150, 180}, {0, 0, 0}, {0, 3, 3}, {10, 0, 10}, {100, 83, 100}, {3, 3, 3},
	} {
		if n := l.Next(Seen{x.capacity, x.demand}); n != x.want {
			t.Errorf("%+v: %d pages", x, n)
		}
	}
	if n := (LowWater{Margin: 0.5, Headroom: 0.5}).Next(Seen{100, 60}); n != 100 {
		t.Errorf("a pool of 100 pages shrinks to %d", n)
	}
	for l, ok := range map[LowWater]bool{{0, 0}: true, {0.1, 0.1}: true, {0.1, 0.09}: false, {-0.1, 1}: false} {
		if (l.Check() == nil) != ok {
			t.Errorf("%+v: %v", l, l.Check())
		}
	}
}
