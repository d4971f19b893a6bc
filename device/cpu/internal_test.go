// This file owns the tests that reach into the device: its clock, and calls of the system
// that fail.

package cpu

import (
	"errors"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

func openInside(t *testing.T) (*dev, *stream) {
	t.Helper()
	d, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	return d.(*dev), s.(*stream)
}

// The times of events are taken from the clock that never goes back: setting the machine's
// clock does not change what Since returns.
func TestEventsUseTheMonotonicClock(t *testing.T) {
	d, s := openInside(t)
	e, err := d.NewEvent(device.Timing)
	if err != nil {
		t.Fatal(err)
	}
	from := device.Now()
	s.Record(e)
	if err := e.Sync(); err != nil {
		t.Fatal(err)
	}
	if at, to := e.(*event).stamp.Load(), device.Now(); at < from || at > to {
		t.Errorf("an event between %d and %d on the device's clock was reached at %d", from, to, at)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// Memory that the system does not take back fails the device, not the process, and stays
// counted.
func TestMunmapFails(t *testing.T) {
	d, s := openInside(t)
	b, err := d.Alloc(memory.Device, 100, "stubborn")
	if err != nil {
		t.Fatal(err)
	}
	m := b.Mem.(*mapping)
	all := m.bytes
	defer func() { _ = syscall.Munmap(all) }()
	m.bytes = all[:1] // no mapping that the system was asked for
	s.Free(b)
	var de *device.DriverError
	if err := s.Sync(); !errors.As(err, &de) || de.Call != "munmap" || !strings.Contains(de.Text, "stubborn") {
		t.Errorf("Sync after a failed munmap: %v", err)
	}
	if u := d.Memory().Kind[memory.Device]; u.Pending != 100 {
		t.Errorf("after a failed munmap %v are pending; want 100 B", u.Pending)
	}
	if err := d.Close(); err == nil || !strings.Contains(err.Error(), "munmap") {
		t.Errorf("Close: %v", err)
	}
}
