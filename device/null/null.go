// Package null is the device for planning: it wraps a device and does everything that
// one does about memory, streams, events, graphs and accounting, but executes no
// kernel and moves no byte. A program that runs on it takes the memory that it would
// take, and touches none of it: on the CPU device, which maps memory lazily, a run for
// many accelerators can be walked through on a small machine.
//
// What the host reads of device memory is zero. Whoever goes by such a number must be
// told another way. Events tell the time of a clock that goes by the bytes that work
// declares, so that times mean something, if little, and are the same in every run.
//
// This file owns the device, its events and graphs, and the clock; stream.go streams.
package null

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// Pace is how fast the clock goes: by how many bytes a second work gets through, and
// what each piece of it takes besides.
type Pace struct {
	Local   float64 // what kernels declare, fills, and copies within one kind of memory
	Link    float64 // copies between device and host memory, in each direction
	Latency time.Duration
}

// DefaultPace is about that of the CPU device: its kernels multiply matrices, and so go
// through their bytes far more slowly than a copy.
func DefaultPace() Pace { return Pace{Local: 1e9, Link: 5e9, Latency: time.Microsecond} }

func (p Pace) check() error {
	if !(p.Local > 0 && p.Link > 0) || p.Latency < 0 {
		return fmt.Errorf("null: a pace of %g bytes a second, %g over the link and a latency of %v; rates must be above zero", p.Local, p.Link, p.Latency)
	}
	return nil
}

// local is the time for bytes that stay where they are.
func (p Pace) local(n device.Bytes) time.Duration {
	return p.Latency + time.Duration(float64(n)/p.Local*1e9)
}

// way is the time for bytes between two kinds of memory.
func (p Pace) way(n device.Bytes, a, b device.Kind) time.Duration {
	if a == b {
		return p.local(n)
	}
	return p.Latency + time.Duration(float64(n)/p.Link*1e9)
}

// dev is a device whose work is nothing.
type dev struct {
	device.Device
	pace Pace
}

// Wrap makes a null device of one that runs kernels written in Go. Closing it closes
// that one.
func Wrap(d device.Device, p Pace) (device.Device, error) {
	if err := p.check(); err != nil {
		return nil, err
	}
	return &dev{d, p}, nil
}

func (d *dev) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	return &stream{Stream: s, pace: d.pace}, nil
}

func (d *dev) NewEvent(flags device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(flags)
	if err != nil {
		return nil, err
	}
	return &event{Event: e}, nil
}

// event is an event and the time at which the clock of its stream stood when it was
// recorded last.
type event struct {
	device.Event
	mu       sync.Mutex
	recorded bool
	at       time.Duration
}

// own is the event behind the interface; those of other null devices will do.
func own(e device.Event) *event {
	x, ok := e.(*event)
	if !ok {
		panic(fmt.Sprintf("null: a %T is not an event of a null device", e))
	}
	return x
}

func (e *event) set(at time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.at, e.recorded = at, true
}

func (e *event) get() (time.Duration, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at, e.recorded
}

// Since is the time between two recordings by the clocks of their streams.
func (e *event) Since(earlier device.Event) (time.Duration, error) {
	a := own(earlier)
	if _, err := e.Event.Since(a.Event); err != nil {
		return 0, err
	}
	to, ok := e.get()
	from, both := a.get()
	if !ok || !both {
		return 0, errors.New("null: time between two events of which one was never recorded; record both")
	}
	return to - from, nil
}

// graph is a graph and the time that its captured stream takes for it.
type graph struct {
	device.Graph
	took time.Duration
}

// Update gives a launch new arguments; it still does nothing.
func (g *graph) Update(slot device.Slot, l device.Launch) error {
	l.Kernel = nothing
	return g.Graph.Update(slot, l)
}
