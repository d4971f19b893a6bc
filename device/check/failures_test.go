// This file owns the test of FailEach: a program that does it right, and those that do not.

package check

import (
	"errors"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

func TestFailEach(t *testing.T) {
	open := func() (device.Device, error) { return cpu.Open(cpu.Options{}) }
	// work allocates three buffers; at the second failure it does what is wrong.
	work := func(second func(error) error, leak bool) func(device.Device) error {
		return func(d device.Device) (err error) {
			s, err := d.NewStream("test")
			if err != nil {
				return err
			}
			var all []*device.Buffer
			for i := range 3 {
				b, failed := d.Alloc(memory.Device, 100, "test")
				if failed != nil {
					if err = failed; i == 1 {
						err = second(failed)
					}
					if leak && i == 1 {
						all = nil
					}
					break
				}
				all = append(all, b)
			}
			for _, b := range all {
				s.Free(b)
			}
			return errors.Join(err, s.Close())
		}
	}
	as := func(err error) error { return err }
	for _, x := range []struct {
		second         func(error) error
		leak           bool
		felt, survived int
		odd            string
	}{
		{as, false, 3, 0, ""},
		{func(error) error { return nil }, false, 2, 1, ""},
		{func(error) error { return errors.New("mine") }, false, 2, 0, "1 fails: mine"},
		{as, true, 2, 0, "100 B of device memory was not freed"},
	} {
		f, err := FailEach(Allocs, 1, open, work(x.second, x.leak))
		if err != nil || f.Calls != 3 || f.Reported != x.felt || f.Survived != x.survived {
			t.Errorf("%+v, %v; want %+v", f, err, x)
		}
		if got := errors.Join(f.Wrong...); x.odd == "" && got != nil || x.odd != "" && (got == nil || !strings.Contains(got.Error(), x.odd)) {
			t.Errorf("%v, want %q", got, x.odd)
		}
	}
	if f, err := FailEach(Allocs, 2, open, work(as, false)); err != nil || f.Reported != 2 {
		t.Errorf("every second: %+v, %v", f, err)
	}
	broken := errors.New("broken")
	if _, err := FailEach(Allocs, 1, open, func(device.Device) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("a program that fails as it is: %v", err)
	}
}

// A hold is made as short as the failure allows, and not shorter: the holds that are left
// fail, and half of each does not.
func TestHoldsAreAsShortAsTheyMayBe(t *testing.T) {
	for _, needs := range [][]uint64{{1, 1}, {5, 1}, {1, 64}, {33, 2}, {3, 100}} {
		fails := func(holds []hold) bool {
			for i, h := range holds {
				if h.For < needs[i] {
					return false
				}
			}
			return true
		}
		holds := []hold{{Op: 0, For: 200}, {Op: 1, For: forever}}
		s := &shrinker{p: func(c *Checker) error {
			var now []hold
			for i := range needs {
				now = append(now, hold{For: c.sched.holds[spot{op: i}]})
			}
			if fails(now) {
				return errors.New("it fails")
			}
			return nil
		}}
		s.shorter(holds)
		if !fails(holds) {
			t.Errorf("what needs holds of %d does not fail with %v", needs, holds)
		}
		for i, h := range holds {
			full := []uint64{200, forever}[i]
			if h.For != full && h.For >= 2*needs[i] || h.For == full && needs[i] <= 32 {
				t.Errorf("what needs holds of %d is left with %v", needs, holds)
			}
		}
	}
}

// An explanation looks back at the last waits of a stream, as many as are kept.
func TestExplanationsLookBack(t *testing.T) {
	for others := range recentWaits + 2 {
		inner, err := cpu.Open(cpu.Options{})
		if err != nil {
			t.Fatal(err)
		}
		c := New(Options{})
		d := c.Wrap(inner)
		must := func(err error) {
			t.Helper()
			if err != nil {
				t.Fatal(err)
			}
		}
		a, err := d.NewStream("a")
		must(err)
		b, err := d.NewStream("b")
		must(err)
		stale, err := d.NewEvent(0)
		must(err)
		idle, err := d.NewEvent(0)
		must(err)
		x, err := d.Alloc(memory.Device, 100, "test")
		must(err)
		a.Record(stale)
		a.Fill(x.All(), 1)
		b.Wait(stale)
		for range others {
			b.Wait(idle) // which was never recorded
		}
		b.Fill(x.All(), 2)
		var race *Race
		if err := c.Err(); !errors.As(err, &race) || strings.Contains(race.Note, "stale recording") != (others < recentWaits) {
			t.Errorf("%d waits later: %v", others, err)
		}
		b.Free(x)
		_ = d.Close() // returns the race
	}
}
