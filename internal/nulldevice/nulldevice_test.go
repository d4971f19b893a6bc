// This file owns the tests of the null device: memory, order and graphs are those of the
// wrapped device, and no work is done.

package nulldevice_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/nulldevice"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pace has figures that are easy to add up.
var pace = nulldevice.Pace{Local: 1e9, Link: 1e8, Latency: time.Microsecond}

type env struct {
	*testing.T
	dev device.Device
}

func open(t *testing.T, capacity memory.Bytes) env {
	t.Helper()
	c, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{capacity, capacity}})
	if err != nil {
		t.Fatal(err)
	}
	d, err := nulldevice.Wrap(c, pace)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return env{t, d}
}

func (e env) stream() device.Stream {
	s, err := e.dev.NewStream("s")
	if err != nil {
		e.Fatal(err)
	}
	return s
}

func (e env) event() device.Event {
	v, err := e.dev.NewEvent(device.Timing)
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { _ = v.Close() })
	return v
}

func (e env) alloc(k memory.Kind, n memory.Bytes) *device.Buffer {
	b, err := e.dev.Alloc(k, n, "test")
	if err != nil {
		e.Fatal(err)
	}
	return b
}

var wild = &device.Kernel{Name: "wild", Go: func(*device.Launch) { panic("a kernel ran") }}

// A program allocates, uses and counts a thousand times the memory of the machine, and
// touches none of it. The work would take hours otherwise.
func TestMemoryIsCountedAndNotTouched(t *testing.T) {
	e := open(t, 1<<45)
	s := e.stream()
	dev, host := e.alloc(memory.Device, 1<<43), e.alloc(memory.Host, 1<<43)
	for range 3 {
		s.Copy(host.All(), dev.All())
		s.Fill(dev.All(), 7)
		l := device.NewLaunch(wild, 1, 1)
		l.Write(dev.All())
		s.Launch(l)
	}
	half := device.Rect{Range: dev.Slice(0, 1<<20), Pitch: 1 << 21, Rows: 1 << 22}
	s.Copy2D(device.Rect{Range: host.Slice(0, 1<<20), Pitch: 1 << 21, Rows: 1 << 22}, half)
	s.Upload(dev.Slice(0, 4), []byte{1, 2, 3, 4})
	got := []byte{9, 9, 9, 9}
	if err := s.Download(got, dev.Slice(0, 4)); err != nil || string(got) != "\x00\x00\x00\x00" {
		t.Fatalf("read %v, %v; want zeros", got, err)
	}
	if u := e.dev.Memory(); u.Kind[memory.Device].Peak != 1<<43 || u.Kind[memory.Host].Peak != 1<<43 {
		t.Errorf("counted %+v", u.Kind)
	}
	s.Free(dev)
	s.Free(host)
	if u := e.dev.Memory(); u.Kind[memory.Device].Current != 0 || u.Kind[memory.Host].Current != 0 {
		t.Errorf("freed memory is still counted: %+v", u.Kind)
	}
	var full *device.OutOfMemory
	if _, err := e.dev.Alloc(memory.Device, 1<<46, "too much"); !errors.As(err, &full) {
		t.Errorf("more than the capacity: %v", err)
	}
}

// The clock advances by bytes, and a wait takes over the time that it waits for.
func TestClock(t *testing.T) {
	e := open(t, 1<<40)
	a, b := e.stream(), e.stream()
	dev, host := e.alloc(memory.Device, 1e6), e.alloc(memory.Host, 1e6)
	start, kernel, copied := e.event(), e.event(), e.event()
	a.Record(start)
	l := device.NewLaunch(wild, 1, 1)
	l.Read(dev.Slice(0, 1e5))
	l.Write(dev.Slice(1e5, 2e5))
	a.Launch(l)
	a.Record(kernel)
	b.Wait(kernel)
	b.Copy(host.All(), dev.All())
	b.Record(copied)
	if err := errors.Join(a.Sync(), b.Sync()); err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		from, to device.Event
		want     time.Duration
	}{
		{start, kernel, 301 * time.Microsecond},     // 3e5 bytes at 1e9 a second, and 1 µs
		{kernel, copied, 10_001 * time.Microsecond}, // 1e6 bytes at 1e8 a second, and 1 µs
		{start, copied, (301 + 10_001) * time.Microsecond},
	} {
		if d, err := x.to.Since(x.from); err != nil || d != x.want {
			t.Errorf("%v, %v; want %v", d, err, x.want)
		}
	}
	if _, err := e.event().Since(start); err == nil {
		t.Error("a time from an event that was never recorded")
	}
	a.Free(dev)
	a.Free(host)
}

// Graphs are captured, updated, replayed and refused as on the wrapped device, and a
// replay takes time.
func TestGraphs(t *testing.T) {
	e := open(t, 1<<40)
	s := e.stream()
	b := e.alloc(memory.Device, 1e6)
	work := func(n memory.Bytes) device.Launch {
		l := device.NewLaunch(wild, 1, 1)
		l.Slot = 1
		l.Write(b.Slice(0, n))
		return l
	}
	s.BeginCapture()
	s.Launch(work(1e6))
	s.Copy(b.Slice(0, 100), b.Slice(100, 100))
	g, err := s.EndCapture()
	if err != nil || g.Nodes() != 2 {
		t.Fatal(g, err)
	}
	if err := g.Update(1, work(10)); err != nil {
		t.Fatal(err)
	}
	from, to := e.event(), e.event()
	s.Record(from)
	s.Replay(g)
	s.Record(to)
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if d, err := to.Since(from); err != nil || d != 1_002_100*time.Nanosecond {
		t.Errorf("a replay takes %v, %v", d, err)
	}
	s.BeginCapture() // a graph takes its own time, not that of those before
	s.Fill(b.Slice(0, 1000), 1)
	second, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	s.Record(from)
	s.Replay(second)
	s.Record(to)
	if err := errors.Join(s.Sync(), second.Close()); err != nil {
		t.Fatal(err)
	}
	if d, err := to.Since(from); err != nil || d != 2*time.Microsecond {
		t.Errorf("a replay of the second graph takes %v, %v", d, err)
	}
	s.BeginCapture()
	s.Upload(b.Slice(0, 1), []byte{1})
	if _, err := s.EndCapture(); err == nil {
		t.Error("an upload was captured")
	}
	s.Free(b)
	defer func() {
		if p := recover(); p == nil || !strings.Contains(p.(string), "use after free") {
			t.Errorf("a graph with freed memory was replayed: %v", p)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}()
	s.Replay(g)
}

func TestPaceIsChecked(t *testing.T) {
	for _, p := range []nulldevice.Pace{{}, {Local: 1}, {Link: 1}, {Local: -1, Link: 1}, {Local: 1, Link: -1}, {Local: 1, Link: 1, Latency: -1}} {
		if _, err := nulldevice.Wrap(nil, p); err == nil {
			t.Errorf("%+v was taken", p)
		}
	}
}

// Every kind of work takes the time of all its bytes, over the link if it crosses it, and a
// wait for what is long over takes none.
func TestTimeOfEveryWork(t *testing.T) {
	e := open(t, 1<<40)
	s, other := e.stream(), e.stream()
	dev, host := e.alloc(memory.Device, 1e6), e.alloc(memory.Host, 1e6)
	early := e.event()
	other.Record(early)
	local, link := time.Microsecond+1000*time.Nanosecond, time.Microsecond+10_000*time.Nanosecond // of 1000 bytes
	rect := func(b *device.Buffer, at memory.Bytes) device.Rect {
		return device.Rect{Range: b.Slice(at, 100), Pitch: 200, Rows: 10}
	}
	for name, x := range map[string]struct {
		work func() error
		want time.Duration
	}{
		"copy out":         {func() error { s.Copy(host.Slice(0, 1000), dev.Slice(0, 1000)); return nil }, link},
		"copy in":          {func() error { s.Copy(dev.Slice(0, 1000), host.Slice(0, 1000)); return nil }, link},
		"copy":             {func() error { s.Copy(dev.Slice(0, 1000), dev.Slice(1000, 1000)); return nil }, local},
		"copy on the host": {func() error { s.Copy(host.Slice(0, 1000), host.Slice(1000, 1000)); return nil }, local},
		"rows out":         {func() error { s.Copy2D(rect(host, 0), rect(dev, 0)); return nil }, link},
		"rows":             {func() error { s.Copy2D(rect(dev, 5000), rect(dev, 0)); return nil }, local},
		"no rows": {func() error {
			s.Copy2D(device.Rect{Range: dev.Slice(0, 1), Pitch: 1}, device.Rect{Range: host.Slice(0, 1), Pitch: 1})
			return nil
		}, 0},
		"fill":           {func() error { s.Fill(dev.Slice(0, 1000), 1); return nil }, local},
		"upload":         {func() error { s.Upload(dev.Slice(0, 1000), make([]byte, 1000)); return nil }, link},
		"upload to host": {func() error { s.Upload(host.Slice(0, 1000), make([]byte, 1000)); return nil }, local},
		"download":       {func() error { return s.Download(make([]byte, 1000), dev.Slice(0, 1000)) }, link},
		"host download":  {func() error { return s.Download(make([]byte, 1000), host.Slice(0, 1000)) }, local},
		"early wait":     {func() error { s.Wait(early); return nil }, 0},
		"launch": {func() error {
			l := device.NewLaunch(wild, 1, 1)
			l.Read(dev.Slice(0, 400))
			l.Declare(device.Access{Rect: device.Rect{Range: dev.Slice(1000, 100), Pitch: 300, Rows: 6}, Mode: device.Write})
			s.Launch(l)
			return nil
		}, local},
	} {
		from, to := e.event(), e.event()
		s.Record(from)
		err := x.work()
		s.Record(to)
		if err := errors.Join(err, s.Sync()); err != nil {
			t.Fatal(err)
		}
		if d, err := to.Since(from); err != nil || d != x.want {
			t.Errorf("%s takes %v, %v; want %v", name, d, err, x.want)
		}
	}
	s.Free(dev)
	s.Free(host)
}

// Wrong work panics as on other devices, and does not take time.
func TestMisusePanics(t *testing.T) {
	e := open(t, 1<<20)
	s := e.stream()
	b, gone := e.alloc(memory.Device, 100), e.alloc(memory.Device, 100)
	s.Free(gone)
	rect := func(b *device.Buffer, off memory.Bytes) device.Rect {
		return device.Rect{Range: device.Range{Buf: b, Off: off, Len: 10}, Pitch: 10, Rows: 2}
	}
	outside := device.Range{Buf: b, Off: 90, Len: 20}
	launch := func(r device.Range) func() {
		return func() {
			l := device.NewLaunch(wild, 1, 1)
			l.Write(r)
			s.Launch(l)
		}
	}
	from, to := e.event(), e.event()
	s.Record(from)
	for name, f := range map[string]func(){
		"a copy from freed memory":     func() { s.Copy(b.Slice(0, 10), device.Range{Buf: gone, Len: 10}) },
		"a copy to freed memory":       func() { s.Copy(device.Range{Buf: gone, Len: 10}, b.Slice(0, 10)) },
		"a copy beyond the end":        func() { s.Copy(outside, b.Slice(0, 20)) },
		"a copy of other lengths":      func() { s.Copy(b.Slice(0, 10), b.Slice(50, 11)) },
		"a copy onto itself":           func() { s.Copy(b.Slice(0, 10), b.Slice(5, 10)) },
		"rows of freed memory":         func() { s.Copy2D(rect(b, 0), rect(gone, 0)) },
		"rows beyond the end":          func() { s.Copy2D(rect(b, 0), rect(b, 90)) },
		"a fill of freed memory":       func() { s.Fill(device.Range{Buf: gone, Len: 10}, 1) },
		"a fill beyond the end":        func() { s.Fill(outside, 1) },
		"a launch on freed memory":     launch(device.Range{Buf: gone, Len: 10}),
		"a launch beyond the end":      launch(outside),
		"an upload to freed memory":    func() { s.Upload(device.Range{Buf: gone, Len: 10}, make([]byte, 10)) },
		"an upload beyond the end":     func() { s.Upload(outside, make([]byte, 20)) },
		"an upload of another length":  func() { s.Upload(b.Slice(0, 10), make([]byte, 9)) },
		"a download of freed memory":   func() { _ = s.Download(make([]byte, 10), device.Range{Buf: gone, Len: 10}) },
		"a download beyond the end":    func() { _ = s.Download(make([]byte, 20), outside) },
		"a download of another length": func() { _ = s.Download(make([]byte, 9), b.Slice(0, 10)) },
		"memory that is freed twice":   func() { s.Free(gone) },
		"a launch without threads":     func() { l := device.NewLaunch(wild, 1, 1); l.Grid[1] = 0; s.Launch(l) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s does not panic", name)
				}
			}()
			f()
		}()
	}
	s.Record(to)
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if d, err := to.Since(from); err != nil || d != 0 {
		t.Errorf("wrong work takes %v, %v", d, err)
	}
	if d, err := to.Since(e.event()); err == nil {
		t.Errorf("an event that was never recorded is %v old", d)
	}
	if d, err := e.event().Since(to); err == nil {
		t.Errorf("an event that was never recorded is %v old", d)
	}
	s.Free(b)
}

// What the wrapped device cannot make is an error.
func TestErrorsOfTheWrappedDevice(t *testing.T) {
	c, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	bad := check.New(check.Options{Faults: []check.Fault{{Class: check.Makes, N: 0, Do: check.Fail}, {Class: check.Makes, N: 1, Do: check.Fail}}}).Wrap(c)
	d, err := nulldevice.Wrap(bad, pace)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := d.NewStream("s"); err == nil || s != nil {
		t.Errorf("a stream: %v, %v", s, err)
	}
	if e, err := d.NewEvent(0); err == nil || e != nil {
		t.Errorf("an event: %v, %v", e, err)
	}
	_ = d.Close()
}
