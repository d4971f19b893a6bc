// This file owns the tests of steps that follow their plan or depart from it, and of the
// events that a manager closes.

package stash

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// diary notes the calls of a step and what the manager did, in order.
type diary []string

func (d *diary) Called(c Call, g memory.GroupID, _ int) {
	if c == Returned {
		*d = append(*d, fmt.Sprint("load ", g.Layer))
	}
}

func (*diary) Waited() {}

func (d *diary) emit(e trace.Event) {
	if e.Kind == trace.Restore {
		*d = append(*d, fmt.Sprint("restore ", e.Layer))
	}
}

// A planned step restores a group before it is needed if a set is free, and once. A step
// without a plan restores it when it is needed.
func TestRestoredAheadOfNeed(t *testing.T) {
	var d diary
	c := roomy(PagesOnly)
	c.Watch, c.Emit, c.Ahead = &d, d.emit, 3 // but there is room for one
	r := newSmall(t, openCPU(t), c)
	w, err := r.m.NewWorkspace("a", 2, 0, Tensor{Name: "x", Row: 4096, MaxRows: 10})
	if err != nil {
		t.Fatal(err)
	}
	for step, want := range [][]string{
		{"load 4", "restore 4", "load 3", "restore 3", "load 2", "restore 2", "load 1", "restore 1"},
		{"load 4", "load 3", "restore 2", "load 2", "restore 1", "load 1"}, // 3 and 4 stay in their sets
		{"load 4", "load 3", "restore 2", "load 2", "restore 1", "load 1"},
	} {
		d = nil
		if err := r.m.Step(memory.Key{}, func(int) error { r.pass(w, 5, 1, 2, 3, 4); return nil }); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(d, want) {
			t.Errorf("step %d: %q, want %q", step, d, want)
		}
		if n := len(r.m.plans[memory.Key{}].Keep); n != 2 {
			t.Errorf("step %d: %d groups stay in 2 sets", step, n)
		}
	}
}

// A step that goes on after the end of its plan departs from it once.
func TestLongerThanPlanned(t *testing.T) {
	r := newSmall(t, openCPU(t), roomy(PagesOnly))
	w := r.space("a", 0, 10)
	for i, more := range []int{0, 1, 2} {
		err := r.m.Step(memory.Key{}, func(int) error {
			r.pass(w, 5, 1, 2)
			for k := range more {
				r.pass(w, 5, 3+k)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		if n := r.m.Stats().Departures; n != i {
			t.Errorf("step %d: %d departures", i, n)
		}
	}
}

// eventful is a device that counts its open events.
type eventful struct {
	device.Device
	open int
}

type countedEvent struct {
	device.Event
	dev *eventful
}

type plainStream struct{ device.Stream }

func (d *eventful) NewEvent(f device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(f)
	if err == nil {
		d.open++
		e = &countedEvent{e, d}
	}
	return e, err
}

func (d *eventful) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return plainStream{s}, err
}

func (e *countedEvent) Close() error {
	e.dev.open--
	return e.Event.Close()
}

func (s plainStream) Record(e device.Event) { s.Stream.Record(e.(*countedEvent).Event) }
func (s plainStream) Wait(e device.Event)   { s.Stream.Wait(e.(*countedEvent).Event) }

func TestEventsAreClosed(t *testing.T) {
	dev := &eventful{Device: openCPU(t)}
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	m, err := NewManager(dev, compute, roomy(PagesOnly))
	if err != nil {
		t.Fatal(err)
	}
	r := &small{t, dev, compute, m}
	w := r.space("a", 0, 10)
	if err := m.Step(memory.Key{}, func(int) error { r.pass(w, 5, 1, 2, 3); return nil }); err != nil {
		t.Fatal(err)
	}
	had := dev.open
	if err := errors.Join(m.Close(), compute.Close(), dev.Close()); err != nil || had == 0 || dev.open != 0 {
		t.Errorf("%d of %d events are open: %v", dev.open, had, err)
	}
}
