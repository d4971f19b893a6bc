//go:build linux

// This file tests what a failed device still does, and what captures refuse.

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// A device that has failed makes no call that gives work to the driver or takes something of
// it, but for marks that it waits for, and every call that returns an error returns the failure.
func TestFailedDeviceIsIdle(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	l := &listener{f: f, lines: []string{""}, names: map[uintptr]string{}, numbers: map[string]int{}}
	d, err := v.open(Options{HostCapacity: memory.GiB})
	if err != nil {
		t.Fatal(err)
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	s, err := d.NewStream("s")
	must(err)
	other, err := d.NewStream("other")
	must(err)
	var events [2]device.Event
	for i := range events {
		events[i], err = d.NewEvent(device.Timing)
		must(err)
		s.Record(events[i])
	}
	a, err := d.Alloc(memory.Device, 4096, "a")
	must(err)
	h, err := d.Alloc(memory.Host, 4096, "h")
	must(err)
	pool, err := d.Reserve(memory.Device, 64*memory.MiB, "pool")
	must(err)
	launch := addLaunch(a.All(), 1)
	launch.Slot = 3
	s.Launch(launch)
	s.BeginCapture()
	s.Launch(launch)
	g, err := s.EndCapture()
	must(err)
	must(s.Sync())
	f.heard = l.hear
	d.fail(&device.DriverError{Device: d.name, Call: "a test", Text: "has broken it"})
	ran := false
	for name, call := range map[string]func() error{
		"NewStream": func() error { _, err := d.NewStream("no"); return err }, "NewEvent": func() error { _, err := d.NewEvent(0); return err },
		"Alloc": func() error { _, err := d.Alloc(memory.Device, 1, "no"); return err }, "Reserve": func() error { _, err := d.Reserve(memory.Device, 1, "no"); return err },
		"Grow": func() error { return d.Grow(pool, memory.MiB) }, "Backdrop": func() error { return d.Backdrop(pool) },
		"Since": func() error { _, err := events[1].Since(events[0]); return err }, "Sync of an event": events[0].Sync, "Sync": s.Sync, "Sync of all": d.Sync,
		"Update": func() error { return g.Update(3, launch) }, "Download": func() error { return s.Download(make([]byte, 8), a.Slice(0, 8)) },
	} {
		if err := call(); !errors.Is(err, d.err()) {
			t.Errorf("%s returns %v", name, err)
		}
	}
	s.Copy(a.Slice(0, 8), h.Slice(0, 8))
	s.Copy(h.Slice(8, 8), h.Slice(0, 8))
	s.Copy2D(device.Rect{Range: a.Slice(0, 8), Pitch: 8, Rows: 2}, device.Rect{Range: h.Slice(0, 8), Pitch: 8, Rows: 2})
	s.Fill(a.All(), 1)
	s.Launch(launch)
	s.Host(func() { ran = true })
	s.Upload(a.Slice(0, 8), make([]byte, 8))
	s.Upload(h.Slice(0, 8), make([]byte, 8))
	s.Record(events[0])
	other.Wait(events[0])
	s.Replay(g)
	f.heard = nil
	for _, line := range l.lines[1:] {
		if call, _, _ := strings.Cut(line, " "); !slices.Contains([]string{"cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuEventCreate", "cuEventRecord"}, call) || call == "cuEventRecord" && !strings.Contains(line, " event ") {
			t.Errorf("a failed device calls %s", line)
		}
	}
	if ran {
		t.Error("a failed device calls back")
	}
	must(g.Close())
	for _, b := range []*device.Buffer{a, h, pool} {
		s.Free(b)
	}
	if err := d.Close(); err == nil || !strings.Contains(err.Error(), "has broken it") {
		t.Errorf("closing it returns %v", err)
	}
}

// What cannot be captured spoils the capture, and its end says so.
func TestSpoiltCaptures(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s, _ := d.NewStream("s")
	other, _ := d.NewStream("other")
	a, err := d.Alloc(memory.Device, 4096, "a")
	if err != nil {
		t.Fatal(err)
	}
	s.BeginCapture()
	s.Launch(addLaunch(a.All(), 1))
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	outside, _ := d.NewEvent(0)
	other.Record(outside)
	another := func() {
		e, _ := d.NewEvent(0)
		other.BeginCapture()
		other.Record(e)
		h, err := other.EndCapture()
		if err != nil {
			t.Error(err)
		}
		s.Wait(e)
		_, _ = h.Close(), e.Close()
	}
	underWay := func() {
		e, _ := d.NewEvent(0)
		other.BeginCapture()
		other.Record(e)
		s.Wait(e)
		h, err := other.EndCapture()
		if err != nil {
			t.Error(err)
		}
		_, _ = h.Close(), e.Close()
	}
	joined := func() {
		e, _ := d.NewEvent(0)
		s.Record(e)
		other.Wait(e)
		other.Launch(addLaunch(a.All(), 1))
		_ = e.Close()
	}
	for _, x := range []struct {
		work func()
		want string
	}{
		{func() { s.Replay(g) }, `a graph cannot be replayed inside a capture; replay it before or after`},
		{func() { s.Upload(a.Slice(0, 1), []byte{1}) }, "an upload cannot be captured; upload before the capture, or copy from host memory"},
		{func() { _ = s.Download([]byte{1}, a.Slice(0, 1)) }, "a download makes the host wait; download after the replay"},
		{func() { _ = s.Sync() }, "a synchronisation makes the host wait; synchronise after the replay"},
		{func() { s.Free(a) }, "memory cannot be freed by a graph; free it after the capture"},
		{func() { s.Wait(outside) }, "it waits for an event that was recorded outside of the capture; record the event inside, or make it External"},
		{another, "it waits for an event of another capture; make the event External"},
		{underWay, "it waits for an event of another capture that is under way; make the event External"},
		{joined, `stream "other" took part and was not joined; record an event on it after its last work and wait for that event here`},
	} {
		s.BeginCapture()
		s.Launch(addLaunch(a.All(), 1))
		x.work()
		s.Fill(a.All(), 2)
		h, err := s.EndCapture()
		if want := fmt.Sprintf("capture on stream %q: %s", "s", x.want); err == nil || h != nil || err.Error() != want {
			t.Errorf("got  %v\nwant %s", err, want)
		}
	}
	if err := errors.Join(g.Close(), outside.Close(), d.err()); err != nil {
		t.Error(err)
	}
	s.Free(a)
	if got := s.Issued(); got != 0 {
		t.Errorf("%d pieces of work were issued outside of captures", got)
	}
}
