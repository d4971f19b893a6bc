// This file owns the tests of how tiers follow the demand of steps, what a step tells of
// its pages, and which of two outcomes is worse.

package stash

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// scarce is a device on which no memory of an owner grows beyond a number of bytes.
type scarce struct {
	device.Device
	owner string
	most  memory.Bytes
}

func (d *scarce) Grow(b *device.Buffer, n memory.Bytes) error {
	if b.Owner() == d.owner && n > d.most {
		return &device.OutOfMemory{Asked: n}
	}
	return d.Device.Grow(b, n)
}

// twice is a sizer that wants twice the demand.
type twice struct{}

func (twice) Next(s schedule.Seen) schedule.Pages { return 2 * s.Demand }

// A tier grows to what its sizer wants, or else to the demand exactly. If that is no more
// than it has, it is refused.
func TestTiersFollowDemand(t *testing.T) {
	const page = 4 * memory.KiB
	for name, x := range map[string]struct {
		room, most, demand, want schedule.Pages
		ok                       bool
		grows                    int
	}{
		"all that is wanted":   {20, 100, 10, 20, true, 1},
		"the demand":           {19, 100, 10, 10, true, 1},
		"just the demand":      {10, 100, 10, 10, true, 1},
		"less than the demand": {9, 100, 10, 4, false, 0},
		"to the maximum":       {20, 12, 10, 12, true, 1},
		"less than the most":   {11, 12, 10, 10, true, 1},
		"the most is too much": {9, 10, 10, 4, false, 0},
		"it has the demand":    {4, 100, 4, 4, false, 0},
		"it has what it wants": {20, 100, 2, 4, true, 0},
		"one more":             {20, 5, 10, 5, true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			dev := &scarce{openCPU(t), PagesOwner, 4 * page}
			r := newSmall(t, dev, tight(4, 0, x.most, 0))
			dev.most = memory.Bytes(x.room) * page
			err := r.m.follow(r.m.store, Device, twice{}, x.demand, 0)
			if (err == nil) != x.ok || r.m.store.Pages(Device) != x.want || r.m.Stats().Growths != x.grows {
				t.Errorf("%d pages after %d growths, want %d: %v", r.m.store.Pages(Device), r.m.Stats().Growths, x.want, err)
			}
		})
	}
}

// The host tier takes what the device tier cannot. What both lack is an error only if the
// step must have it.
func TestBothTiersTooSmall(t *testing.T) {
	for _, must := range []bool{false, true} {
		r := newSmall(t, openCPU(t), tight(1, 1, 4, 3))
		for _, x := range []struct{ demand, device, host, lack schedule.Pages }{{0, 1, 1, 0}, {4, 4, 1, 0}, {5, 4, 2, 0}, {7, 4, 3, 0}, {9, 4, 3, 2}} {
			err := r.m.adapt(r.m.store, x.demand, must)
			if lacks := err != nil; lacks != (must && x.lack > 0) || lacks && !strings.Contains(err.Error(), fmt.Sprintf("needs %d more pages", x.lack)) {
				t.Errorf("a demand of %d, must %v: %v", x.demand, must, err)
			}
			if d, h := r.m.store.Pages(Device), r.m.store.Pages(Host); d != x.device || h != x.host {
				t.Errorf("a demand of %d: %d and %d pages, want %d and %d", x.demand, d, h, x.device, x.host)
			}
		}
	}
}

// A step tells how many bytes of each tier it took and has, of tiers that have pages. A
// step with room logs nothing.
func TestPagesOfStepsAreTraced(t *testing.T) {
	for _, host := range []schedule.Pages{0, 3} {
		var got []string
		var log strings.Builder
		c := tight(20, host, 20, host)
		c.Log = slog.New(slog.NewTextHandler(&log, nil))
		c.Emit = func(e trace.Event) {
			if e.Kind == trace.Spill {
				got = append(got, fmt.Sprintf("%v: %d of %d", e.Tier, e.Bytes, e.Offset))
			}
		}
		r := newSmall(t, openCPU(t), c)
		w := r.space("a", 0, 10)
		if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 5, 1, 2); return nil }); err != nil {
			t.Fatal(err)
		}
		want := []string{fmt.Sprintf("device: %d of %d", 10*4096, 20*4096)}
		if host > 0 {
			want = append(want, fmt.Sprintf("host: 0 of %d", 3*4096))
		}
		if !slices.Equal(got, want) {
			t.Errorf("%d host pages: %q, want %q", host, got, want)
		}
		if log.Len() > 0 {
			t.Errorf("a step with room logs %s", log.String())
		}
	}
}

// A step that no growth can mend is not run again.
func TestNoRerunInVain(t *testing.T) {
	r := newSmall(t, openCPU(t), tight(4, 2, 4, 2))
	w := r.space("a", 0, 10)
	attempts := 0
	err := r.m.Step(memory.Key{}, func(int) error { attempts++; r.pass(w, 5, 1, 2); return nil })
	var of *Overflow
	if !errors.As(err, &of) || !strings.Contains(err.Error(), "the step needs 4 more pages than both tiers can have") || attempts != 1 {
		t.Errorf("%d attempts: %v", attempts, err)
	}
}

// Sets that are too small and cannot get larger are an error that says why, at once.
func TestSetsCannotGetLarger(t *testing.T) {
	dev := &scarce{openCPU(t), WorkspaceOwner + "a", memory.GiB}
	r := newSmall(t, dev, roomy(PagesOnly))
	w := r.space("a", 40, 10)
	dev.most = w.buf.Size()
	attempts := 0
	err := r.m.Step(memory.Key{}, func(int) error { attempts++; r.pass(w, 20, 1); return nil })
	var of *Overflow
	var oom *device.OutOfMemory
	if !errors.As(err, &of) || !errors.As(err, &oom) || attempts != 1 {
		t.Errorf("%d attempts: %v", attempts, err)
	}
}

// If one workspace cannot have more sets, all keep those that they have.
func TestSetsStayAlike(t *testing.T) {
	dev := &scarce{openCPU(t), WorkspaceOwner + "b", memory.GiB}
	c := roomy(PagesOnly)
	c.MoreSets = 3
	r := newSmall(t, dev, c)
	r.space("a", 0, 10)
	b := r.space("b", 0, 10)
	if err := r.m.SetMore(1); err != nil {
		t.Fatal(err)
	}
	dev.most = b.buf.Size()
	if err := r.m.SetMore(3); err == nil || !slices.Equal(r.m.Sets(), []int{2, 2}) {
		t.Errorf("the workspaces have %v sets: %v", r.m.Sets(), err)
	}
}

func TestWorseOutcome(t *testing.T) {
	ok := Outcome{}
	failed := func(rank int) Outcome { return Outcome{Failed: true, Rank: rank, Why: "failed"} }
	final := func(rank int) Outcome { return Outcome{Failed: true, Final: true, Rank: rank, Why: "final"} }
	broke := func(o Outcome) Outcome { o.Broke = true; return o }
	for _, x := range []struct{ a, b, want Outcome }{
		{ok, ok, ok},
		{ok, failed(0), failed(0)},
		{ok, final(3), final(3)},
		{failed(2), failed(1), failed(1)},
		{final(2), final(1), final(1)},
		{failed(1), final(2), final(2)},
		{final(1), failed(0), final(1)},
		{ok, broke(failed(1)), broke(failed(1))},
		{failed(0), broke(failed(1)), broke(failed(0))},
		{final(2), broke(failed(1)), broke(final(2))},
	} {
		if got, other := x.a.Worse(x.b), x.b.Worse(x.a); got != x.want || other != x.want {
			t.Errorf("the worse of %+v and %+v is %+v or %+v, want %+v", x.a, x.b, got, other, x.want)
		}
	}
	one, two := failed(1), failed(1)
	two.Why = "failed too"
	if got := one.Worse(two); got != one {
		t.Errorf("of two equal outcomes the second is worse: %+v", got)
	}
}

// Under a budget the number of device pages is decided, and the host tier takes the rest.
// Rows that grow by 8 % a step, most of them in device pages, never find too few pages:
// what is spare is a share of all pages, however few of them are on the host.
func TestRowsThatGrowAreNotRerun(t *testing.T) {
	for _, onDevice := range []schedule.Pages{0, 40, 95, 100, 120} {
		r := newSmall(t, openCPU(t), tight(onDevice, 0, onDevice, 1000))
		w := r.space("a", 0, 200)
		if err := r.m.Expect(100); err != nil {
			t.Fatal(err)
		}
		if have := onDevice + r.m.store.Pages(Host); have < 120 || have > 125 {
			t.Errorf("%d pages for an expected 100, %d of them on the device", have, onDevice)
		}
		rows := 33.0
		for range 12 {
			if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, int(rows), 1, 2, 3); return nil }); err != nil {
				t.Fatal(err)
			}
			rows *= 1.08
		}
		if s := r.m.Stats(); s.Reruns != 0 {
			t.Errorf("%d device pages: %d of %d steps were rerun", onDevice, s.Reruns, s.Steps)
		}
	}
}
