// This file owns the tests that reach into the device: its clock, and calls of the system
// that fail.

package cpu

import (
	"errors"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

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

// Memory that the system refuses is not counted: neither that of an allocation nor that of
// a growth, which can be tried again.
func TestRefusedMemoryIsNotCounted(t *testing.T) {
	const much = memory.Bytes(1) << 60 // more addresses than a process has
	var capacity [memory.Kinds]memory.Bytes
	for k := range capacity {
		capacity[k] = much
	}
	o, err := Open(Options{Capacity: capacity})
	if err != nil {
		t.Fatal(err)
	}
	d := o.(*dev)
	s, err := d.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string, err error, asked, held memory.Bytes) {
		t.Helper()
		var full *device.OutOfMemory
		if !errors.As(err, &full) || full.Asked != asked || full.Kind != memory.Host || full.Refused == "" {
			t.Errorf("%s: %+v; want an OutOfMemory for %v", what, full, asked)
		}
		if n := d.Memory().Kind[memory.Host].Current; n != held {
			t.Errorf("%s leaves %v counted, want %v", what, n, held)
		}
	}
	_, err = d.Alloc(memory.Host, much-4096, "much")
	refused("an allocation of all addresses", err, much-4096, 0)
	_, err = d.Reserve(memory.Host, much-4096, "much")
	refused("a reservation of all addresses", err, much-4096, 0)
	b, err := d.Reserve(memory.Host, memory.MiB, "pool")
	if err != nil {
		t.Fatal(err)
	}
	m := b.Mem.(*mapping)
	all := m.bytes
	m.bytes = all[1:] // which is not where a page begins
	refused("a growth", d.Grow(b, 5000), 5000, 0)
	if b.Size() != 0 {
		t.Errorf("a refused growth leaves %v", b)
	}
	m.bytes = all
	if err := d.Grow(b, 1000); err != nil {
		t.Fatal(err)
	}
	m.bytes = all[1:]
	refused("a second growth", d.Grow(b, 5000), 4000, 1000)
	m.bytes = all
	if err := d.Grow(b, 5000); err != nil || b.Size() != 5000 || d.Memory().Kind[memory.Host].Current != 5000 {
		t.Errorf("a growth after a refused one: %v, %v", err, b)
	}
	s.Free(b)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A copy that follows at once makes up for the late return of the sleep before it, but not
// for a pause of the machine, nor for time in which the link had nothing to do.
func TestLinksMakeUpForLateWakeUps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const ms = time.Millisecond
		for _, x := range []struct{ late, ago, want time.Duration }{
			{0, 0, 10 * ms},
			{ms, 0, 9 * ms},
			{ms, linkSlack, 9 * ms},
			{ms, linkSlack + 1, 10 * ms},
			{50 * ms, 0, 8 * ms}, // linkLate
		} {
			l := link{Link: Link{Latency: 10 * ms}}
			start := time.Now()
			l.woke = start.Add(-x.ago)
			l.free = l.woke.Add(-x.late)
			l.carry(0, func() {})
			if took := time.Since(start); took != x.want {
				t.Errorf("a copy that came %v after a sleep that was %v late took %v; want %v", x.ago, x.late, took, x.want)
			}
			if l.woke != time.Now() {
				t.Errorf("the link notes that its sleep returned at %v", l.woke)
			}
		}
	})
}

// Copies take the link of their direction, and copies within host memory that of copies in.
func TestLinkOfEveryCopy(t *testing.T) {
	var d dev
	for _, x := range []struct {
		dst, src memory.Kind
		want     int
	}{
		{memory.Device, memory.Device, linkLocal},
		{memory.Host, memory.Device, linkOut},
		{memory.Device, memory.Host, linkIn},
		{memory.Host, memory.Host, linkIn},
	} {
		if d.linkBetween(x.dst, x.src) != &d.links[x.want] {
			t.Errorf("a copy from %v to %v takes another link than %d", x.src, x.dst, x.want)
		}
	}
}
