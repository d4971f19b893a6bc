// This file owns the tests of schedules, exploring and shrinking.

package check_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

// orderOf runs a program of callbacks under a schedule and returns the order
// in which they were executed.
func orderOf(t *testing.T, s *check.Schedule, program func(w *world, say func(string) func())) string {
	t.Helper()
	var got []string
	_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
		program(w, func(what string) func() { return func() { got = append(got, what) } })
	}))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Join(got, " ")
}

// threeByTwo is two streams of three callbacks, the last of b behind the first
// of a.
func threeByTwo(w *world, say func(string) func()) {
	for i := 1; i <= 3; i++ {
		w.a.Host(say(fmt.Sprint("a", i)))
		if i == 1 {
			w.order(w.a, w.out)
		}
	}
	for i := 1; i <= 3; i++ {
		if i == 3 {
			w.order(w.out, w.b)
		}
		w.b.Host(say(fmt.Sprint("b", i)))
	}
}

// Every order that the events allow comes up, no other does, and a seed always
// gives the same one. Of the 20 ways to weave 3 and 3 callbacks, one has b3
// before a1 (b1 b2 b3 first): 19 are left.
func TestScheduleReachesEveryOrder(t *testing.T) {
	seen := map[string]uint64{}
	for seed := range uint64(3000) {
		got := orderOf(t, &check.Schedule{Seed: seed}, threeByTwo)
		if strings.Index(got, "b3") < strings.Index(got, "a1") {
			t.Fatalf("seed %d: %s", seed, got)
		}
		if _, again := seen[got]; !again {
			seen[got] = seed
		}
	}
	if len(seen) != 19 {
		t.Errorf("%d of 19 orders came up: %v", len(seen), slices.Sorted(maps.Keys(seen)))
	}
	for want, seed := range seen {
		if got := orderOf(t, &check.Schedule{Seed: seed}, threeByTwo); got != want {
			t.Errorf("seed %d gave %s and then %s", seed, want, got)
		}
	}
	if got := orderOf(t, &check.Schedule{}, threeByTwo); got != "a1 a2 a3 b1 b2 b3" {
		t.Errorf("without holds the order is %s", got)
	}
}

// A wait of the host runs what it needs, and the rest when the seed says so.
func TestScheduleRunsNoMoreThanAskedFor(t *testing.T) {
	left, done := 0, 0
	for seed := range uint64(200) {
		ran := false
		_, err := run(t, check.Options{Schedule: &check.Schedule{Seed: seed}}, inWorld(func(w *world) {
			w.b.Host(func() { ran = true })
			first := false
			w.a.Host(func() { first = true })
			e := w.event(0)
			w.a.Record(e)
			must(e.Sync())
			if !first {
				t.Fatalf("seed %d: Sync returned before the work it waits for", seed)
			}
			if ran {
				done++
			} else {
				left++
			}
		}))
		if err != nil || !ran {
			t.Fatalf("seed %d: %v; ran in the end: %v", seed, err, ran)
		}
	}
	if left < 20 || done < 20 {
		t.Errorf("another stream's work was left %d times and done %d times", left, done)
	}
}

// Events that a graph records have the times of its last replay, in every order.
func TestScheduleTakesTimesInGraphs(t *testing.T) {
	for _, s := range []*check.Schedule{nil, {}, {Seed: 1}, {Seed: 5}} {
		_, err := run(t, check.Options{Schedule: s}, inWorld(func(w *world) {
			from, to := w.event(device.Timing), w.event(device.Timing)
			w.a.BeginCapture()
			w.a.Record(from)
			w.a.Fill(w.host.All(), 1)
			w.a.Record(to)
			g, err := w.a.EndCapture()
			must(err)
			for range 2 {
				w.a.Replay(g)
				must(w.a.Sync())
				took, err := to.Since(from)
				if err != nil || took < 0 {
					t.Errorf("%+v: a replay took %v, %v", s, took, err)
				}
			}
			must(g.Close())
		}))
		if err != nil {
			t.Error(err)
		}
	}
}

// sneaky reads src without declaring it, so that only a schedule can tell.
var sneaky = &device.Kernel{Name: "sneaky", Go: func(l *device.Launch) {
	a := l.Args()
	copy(device.Slice[byte](a[0], int(a[2])), device.Slice[byte](a[1], int(a[2])))
}}

// undeclared copies x to y by a kernel that hides what it reads; without the
// wait, y gets what x held before. Much else is going on.
func undeclared(right bool) check.Program {
	return inWorld(func(w *world) {
		noise := w.alloc(memory.Device, "noise")
		for i := range 20 {
			w.out.Fill(noise.All(), byte(i))
		}
		w.a.Fill(w.x.All(), 1)
		must(w.a.Sync())
		w.b.Fill(noise.Slice(0, 0), 0)
		w.a.Fill(w.x.All(), 2)
		if right {
			w.order(w.a, w.b)
		}
		l := device.NewLaunch(sneaky, 1, 1)
		l.Write(w.y.All())
		l.Arg(uint64(w.x.Addr()))
		l.Arg(size)
		w.b.Launch(l)
		for i := range 20 {
			w.out.Fill(noise.All(), byte(i))
		}
		got := make([]byte, 1)
		must(w.b.Download(got, w.y.Slice(5, 1)))
		if got[0] != 2 {
			panic(errors.New("y has the old value"))
		}
	})
}

// SPEC S6.2: exploring finds what declarations hide, and shrinks it to the one
// operation that came too late.
func TestExploreShrinks(t *testing.T) {
	if err := check.Explore(check.Options{}, 100, undeclared(true)); err != nil {
		t.Fatalf("the right program: %v", err)
	}
	err := check.Explore(check.Options{}, 100, undeclared(false))
	var f *check.Failure
	if !errors.As(err, &f) {
		t.Fatalf("100 seeds found nothing: %v", err)
	}
	if len(f.Holds) != 1 || f.Of < 2 {
		t.Errorf("%d holds of %d are left", len(f.Holds), f.Of)
	}
	if len(f.Held) != 1 || !strings.Contains(f.Held[0], `fill #2 on stream "a"`) || !strings.Contains(f.Held[0], "check/explore_test.go:") {
		t.Errorf("held back: %q", f.Held)
	}
	last := f.Executed[len(f.Executed)-1]
	if !strings.Contains(last, "held back") || !strings.Contains(f.Executed[0], `kernel sneaky #2 on stream "b"`) {
		t.Errorf("executed:\n%s", strings.Join(f.Executed, "\n"))
	}
	for _, words := range []string{"y has the old value", "1 held operations", `Holds: "` + check.FormatHolds(f.Holds) + `"`} {
		if !strings.Contains(err.Error(), words) {
			t.Errorf("%q is missing in:\n%v", words, err)
		}
	}
	// The same seed alone, and the short schedule alone, fail again.
	if e := check.Explore(check.Options{Schedule: &check.Schedule{Seed: f.Seed}}, 1, undeclared(false)); e == nil || e.Error() != err.Error() {
		t.Errorf("seed %d again: %v", f.Seed, e)
	}
	if _, e := run(t, check.Options{Schedule: &check.Schedule{Seed: f.Seed, Holds: check.FormatHolds(f.Holds)}}, undeclared(false)); e == nil {
		t.Error("the short schedule does not fail")
	}
}

// What fails in the order of issue needs no holds, and says so.
func TestExploreFailsAtOnce(t *testing.T) {
	err := check.Explore(check.Options{}, 10, inWorld(func(w *world) {
		w.a.Fill(w.x.All(), 1)
		w.b.Fill(w.x.All(), 1)
	}))
	var f *check.Failure
	var r *check.Race
	if !errors.As(err, &f) || !errors.As(err, &r) || len(f.Holds) != 0 || !strings.Contains(err.Error(), "in the order of issue already") {
		t.Errorf("%v", err)
	}
}

// With races ignored, a schedule shows what they do; a free that comes too
// early is caught before the inner device touches the memory.
func TestExploreIgnoringRaces(t *testing.T) {
	o := check.Options{IgnoreRaces: true}
	err := check.Explore(o, 100, inWorld(func(w *world) {
		w.a.Copy(w.y.All(), w.x.All())
		w.b.Free(w.x)
	}))
	var u *check.UseAfterFree
	if !errors.As(err, &u) || u.Use.Name != "copy" || u.Free.Stream != "b" {
		t.Errorf("%v", err)
	}
	defer func() {
		if recover() == nil {
			t.Error("races can be ignored without a schedule")
		}
	}()
	check.New(check.Options{IgnoreRaces: true})
}

// A kernel that the device cannot run is refused in the call that issues it,
// not when a schedule comes to execute it.
func TestScheduleRefusesAtIssue(t *testing.T) {
	_, err := run(t, check.Options{Schedule: &check.Schedule{Seed: 5}}, inWorld(func(w *world) {
		refused := func() (p any) {
			defer func() { p = recover() }()
			w.a.Launch(device.NewLaunch(&device.Kernel{Name: "gpu only"}, 1, 1))
			return nil
		}()
		if refused == nil {
			t.Error("a kernel without a Go form was accepted")
		}
		w.a.Launch(mix(w.x.All(), w.y.All()))
	}))
	if err != nil {
		t.Error(err)
	}
}

// Holds are read as they are written, and what cannot be read is refused.
func TestHoldsAsText(t *testing.T) {
	for _, text := range []string{"none", "0.0.3=16", "0.0.3=16 1.2.0=forever"} {
		if holds, err := check.ParseHolds(text); err != nil || check.FormatHolds(holds) != text {
			t.Errorf("%q is read as %v, %v", text, holds, err)
		}
	}
	for _, text := range []string{"x", "1=3", "1.2=3", "1.2.3", "1.2.3=", "1.2.3=never", "0.0.1=2 ?"} {
		if holds, err := check.ParseHolds(text); err == nil {
			t.Errorf("%q is read as %v", text, holds)
		}
	}
}

// Explore runs a program once under each seed from 1 on, or under the given one alone, and a
// panic is a failure with its words.
func TestSeedsOfExplore(t *testing.T) {
	for _, x := range []struct {
		seed uint64
		n    int
		runs int
	}{{0, 3, 3}, {0, 0, 0}, {7, 3, 1}} {
		runs := 0
		o := check.Options{}
		if x.seed > 0 {
			o.Schedule = &check.Schedule{Seed: x.seed}
		}
		if err := check.Explore(o, x.n, func(*check.Checker) error { runs++; return nil }); err != nil || runs != x.runs {
			t.Errorf("%+v: %d runs, %v", x, runs, err)
		}
		if x.runs == 0 {
			continue
		}
		err := check.Explore(o, x.n, func(*check.Checker) error { panic("no idea") })
		var f *check.Failure
		if !errors.As(err, &f) || f.Seed != max(x.seed, 1) || !strings.Contains(err.Error(), "panic: no idea") {
			t.Errorf("%+v: %v", x, err)
		}
	}
}
