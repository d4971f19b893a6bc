// This file tests the extent of a plan, which is a limit as long as anything else can
// make room.

package residency

import (
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// Storages that may leave do so before the device uses more than the plan says. Storages
// that may not leave make the extent grow, up to the machine's own limit.
func TestExtentOfAPlan(t *testing.T) {
	const plan, most = 100, 200
	s := begin(t, Config{Device: most, Host: 1000}, &Plan{Device: plan})
	if s.Device().Limit() != plan {
		t.Fatalf("the heap begins with a limit of %d", s.Device().Limit())
	}
	s.forward(groupAt(0), 60)
	held := s.take(60) // for which the group leaves
	if n := s.Counts().Evicted; n != 1 || s.Device().Top() > plan {
		t.Errorf("%d storages left, extent %d", n, s.Device().Top())
	}
	s.take(60) // for which nothing can
	if top := s.Device().Top(); top <= plan || top > most || s.Device().Limit() != most || s.Counts().Evicted != 1 {
		t.Errorf("extent %d of %d, %+v", top, s.Device().Limit(), s.Counts())
	}
	if err := s.Load(groupAt(0)); err != nil { // finds the rest
		t.Error(err)
	}
	_, err := s.Take(60)
	var full *Full
	if !errors.As(err, &full) || full.Limit != most {
		t.Errorf("240 bytes in %d: %v", most, err)
	}
	s.Give(held)
	s.take(60)
	s.Check()
}

// A prefetched group gets no room beyond the plan's extent. It is loaded when it is
// needed, into room that is made then. The plan's window is the machine's.
func TestNothingAheadBeyondThePlan(t *testing.T) {
	p := leaving(0)
	p.Schedule, p.Device, p.Window = order([]int{0, 1}, []int{1, 0}), 100, 7
	p.Prefetch = [][]memory.GroupID{1: {groupAt(0)}}
	s := begin(t, Config{Device: 1000, Host: 1000, Window: 1}, p)
	if s.cfg.Window != 7 {
		t.Errorf("a window of %d copies", s.cfg.Window)
	}
	s.forward(groupAt(0), 60)
	id := s.take(60)
	s.Save(groupAt(1), Item{ID: id, Stay: true})
	if c := s.Counts(); c.In != 0 {
		t.Errorf("%+v: it came ahead of need, extent %d", c, s.Device().Top())
	}
	s.Give(id)
	for _, i := range []int{1, 0} {
		if err := s.Load(groupAt(i)); err != nil {
			t.Fatal(err)
		}
	}
	if c := s.Counts(); c.Late != 1 || s.Device().Top() <= 100 || c.Departed {
		t.Errorf("%+v, extent %d", c, s.Device().Top())
	}
	s.Check()
}

// An extent above the machine's limit has no effect.
func TestExtentAboveTheLimit(t *testing.T) {
	s := begin(t, Config{Device: 100, Host: 1000}, &Plan{Device: 1000})
	var full *Full
	if _, err := s.Take(101); !errors.As(err, &full) || s.Device().Limit() != 100 {
		t.Errorf("%v, limit %d", err, s.Device().Limit())
	}
}
