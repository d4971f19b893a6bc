// This file owns the times of steps after one whose times could not be taken.

package offload

import (
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/device"
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
