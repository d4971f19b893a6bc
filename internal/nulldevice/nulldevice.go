// Package nulldevice is the device for forecasts. It wraps a device and does everything
// about memory, streams, events, graphs and the ledger, but executes no kernel and copies
// no byte. A program on it allocates all its memory and uses none of it. On the CPU device,
// which maps memory lazily, a run for many accelerators can be rehearsed on a small
// machine.
//
// The host reads zeros from device memory, so a program must not depend on what it reads.
// Events measure the time of a clock that advances by the bytes that work declares. These
// times are rough, and they are the same in every run.
package nulldevice

// This file owns the device, its events and graphs, and the clock; stream.go streams.

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Pace is the speed of the modelled work.
type Pace struct {
	Local   float64       // bytes a second of kernels, fills, and copies within one kind of memory
	Link    float64       // bytes a second of copies between device memory and host memory
	Latency time.Duration // added to each piece of work
}

// DefaultPace returns about the speed of the CPU device. Its kernels multiply matrices, so
// they go through their bytes more slowly than a copy.
func DefaultPace() Pace { return Pace{Local: 1e9, Link: 5e9, Latency: time.Microsecond} }

func (p Pace) check() error {
	if !(p.Local > 0 && p.Link > 0) || p.Latency < 0 {
		return fmt.Errorf("nulldevice: expected rates above zero and a latency of at least zero, got %g bytes a second, %g over the link and %v", p.Local, p.Link, p.Latency)
	}
	return nil
}

// localTime returns the time for n bytes within one kind of memory.
func (p Pace) localTime(n memory.Bytes) time.Duration {
	return p.Latency + time.Duration(float64(n)/p.Local*1e9)
}

// copyTime returns the time for a copy of n bytes between two kinds of memory.
func (p Pace) copyTime(n memory.Bytes, a, b memory.Kind) time.Duration {
	if a == b {
		return p.localTime(n)
	}
	return p.Latency + time.Duration(float64(n)/p.Link*1e9)
}

// dev is a device that does no work.
type dev struct {
	device.Device
	pace Pace
}

// Wrap returns a null device over d, which must run kernels that are written in Go. The
// null device owns d: closing it closes d. Wrap returns an error if a rate of the pace is
// not above zero.
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

// event is an event and the time of its stream's clock at its last recording.
type event struct {
	device.Event
	mu sync.Mutex
	at time.Duration
}

// eventOf returns the event behind the interface. It accepts events of any null device.
func eventOf(e device.Event) *event {
	x, ok := e.(*event)
	if !ok {
		panic(fmt.Sprintf("nulldevice: a %T is not an event of a null device", e))
	}
	return x
}

func (e *event) setTime(at time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.at = at
}

func (e *event) recordedTime() time.Duration {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.at
}

// Since returns the time between two recordings on the clocks of their streams.
func (e *event) Since(earlier device.Event) (time.Duration, error) {
	a := eventOf(earlier)
	if _, err := e.Event.Since(a.Event); err != nil {
		return 0, err
	}
	to, from := e.recordedTime(), a.recordedTime() // both were recorded
	return to - from, nil
}

// graph is a graph and the time that a replay takes.
type graph struct {
	device.Graph
	took time.Duration
}

// Update gives a launch new arguments. The launch still does nothing.
func (g *graph) Update(slot device.Slot, l device.Launch) error {
	l.Kernel = nothing
	return g.Graph.Update(slot, l)
}
