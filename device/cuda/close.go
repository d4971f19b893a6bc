// This file owns the end of a device. It calls the driver even if the device has failed: a
// broken context refuses the calls, which changes nothing, and after any other failure
// there is work in flight and memory mapped.

package cuda

import (
	"errors"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/device"
)

// Close waits for all work and ends the streams and graphs that are left. It returns the
// first error of the device and an error if memory was never freed. An unfinished capture
// is dropped.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		panic("cuda: device closed twice")
	}
	d.closed = true
	graphs := slices.Collect(maps.Keys(d.graphs))
	d.mu.Unlock()
	for _, s := range d.allStreams() {
		s.drop()
	}
	for _, g := range graphs {
		_ = g.Close()
	}
	for _, s := range d.allStreams() {
		s.settle()
		s.destroy()
	}
	d.runPassed()
	forget(d.callsLeft()...)
	if d.assist != nil {
		d.within(d.assist.Close)
	}
	err := errors.Join(d.err(), d.ledger.Leaks())
	d.closePools()
	d.closeZeros()
	d.unwatch(d.watch)
	for _, e := range d.eventsLeft() {
		d.insist(&d.drv.eventDestroy, e)
	}
	d.loading.Lock()
	for _, m := range d.modules {
		d.insist(&d.drv.moduleUnload, m)
	}
	d.loading.Unlock()
	if d.retained {
		d.drv.call(&d.drv.primaryCtxRelease, uintptr(d.gpu))
	}
	// Handles of the context are invalid from here on.
	d.gone.Store(true)
	d.fail(&device.DriverError{Device: d.name, Call: "Close", Text: "the device is closed"})
	return err
}

// callsLeft returns the callbacks that the driver never made; a failed driver may drop
// them.
func (d *Device) callsLeft() []*hostCall {
	d.callsMu.Lock()
	defer d.callsMu.Unlock()
	return slices.Collect(maps.Keys(d.calls))
}

// eventsLeft returns all events, the callers' included.
func (d *Device) eventsLeft() []uintptr {
	d.mu.Lock()
	defer d.mu.Unlock()
	all := slices.AppendSeq(d.events, maps.Keys(d.users))
	for _, p := range d.pending {
		if !p.borrowed && p.event != 0 {
			all = append(all, p.event)
		}
	}
	d.events, d.pending, d.users = nil, nil, map[uintptr]int{}
	return all
}
