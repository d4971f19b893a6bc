// This file owns the times of steps after others: after one whose times could not be taken, and after longer ones.

package offload

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// withoutTiming is a device that has no events with times while it is asked not to.
type withoutTiming struct {
	device.Device
	refuse bool
}

func (d *withoutTiming) NewEvent(f device.EventFlags) (device.Event, error) {
	if d.refuse && f&device.Timing != 0 {
		return nil, errors.New("no events")
	}
	return d.Device.NewEvent(f)
}

// A step whose times could not be taken says so, and the next one has its times.
func TestTimesAfterAFailure(t *testing.T) {
	dev := &withoutTiming{Device: openCPU(t)}
	r := newRig(t, dev, Config{})
	for _, dev.refuse = range []bool{true, false} {
		r.m.BeginProfile(nil)
		a := r.alloc(100)
		r.compute.Fill(a.Range(), 1)
		r.save(someGroup, flat(a))
		a.Free()
		r.ok(r.m.Load(someGroup))
		r.m.Release(someGroup)
		r.ok(r.m.End())
		if err := r.m.Times(); (err != nil) != dev.refuse {
			t.Errorf("events are refused %v: %v", dev.refuse, err)
		}
	}
	r.close()
}

// Times waits for the step that ended last, whose events a longer step before it had, too: its times are its own.
func TestTimesOfAShorterStep(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const pause = 4 * time.Millisecond
		r := newRig(t, openCPU(t), Config{Device: memory.MiB, Host: memory.MiB})
		for _, groups := range []int{3, 1, 2} {
			rest := func() { r.compute.Host(func() { time.Sleep(pause) }) }
			r.m.BeginProfile(nil)
			for i := range groups {
				rest()
				s := r.alloc(1000)
				r.save(memory.GroupID{Layer: i}, flat(s))
				s.Free()
			}
			for i := range groups {
				r.ok(r.m.Load(memory.GroupID{Layer: i}))
				rest()
				r.m.Release(memory.GroupID{Layer: i})
			}
			r.ok(r.m.End())
			if err := r.m.Times(); err != nil || r.m.Tape().Span != time.Duration(2*groups)*pause {
				t.Errorf("a step of %d groups took %v: %v", groups, r.m.Tape().Span, err)
			}
		}
		r.close()
	})
}
