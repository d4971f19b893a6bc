// This file owns what is the CPU device's own: errors, links, queues.

package cpu_test

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

func open(t testing.TB, o cpu.Options) device.Device {
	t.Helper()
	d, err := cpu.Open(o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func stream(t testing.TB, d device.Device, name string) device.Stream {
	t.Helper()
	s, err := d.NewStream(name)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func alloc(t testing.TB, d device.Device, k memory.Kind, n memory.Bytes) *device.Buffer {
	t.Helper()
	b, err := d.Alloc(k, n, t.Name())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var panics = &device.Kernel{Name: "panics", Go: func(*device.Launch) { panic("index out of range") }}

// The first error sticks: work issued later is skipped on every stream, every
// Sync returns the same error, and all of it comes to an end.
func TestFirstErrorSticks(t *testing.T) {
	d := open(t, cpu.Options{})
	a, b := stream(t, d, "a"), stream(t, d, "b")
	host := alloc(t, d, memory.Host, 1)
	first, _ := d.NewEvent(device.Timing)
	second, _ := d.NewEvent(device.Timing)
	a.Record(first)
	a.Record(second)
	a.Launch(device.NewLaunch(panics, 1, 1))
	err := a.Sync()
	a.Record(second) // which takes no time any more
	var de *device.DriverError
	if !errors.As(err, &de) || de.Call != "kernel panics" || !strings.Contains(de.Text, "index out of range") {
		t.Fatalf("Sync after a panic in a kernel: %v", err)
	}
	ran := false
	b.Host(func() { ran = true })
	b.Fill(host.All(), 7)
	if got := b.Sync(); !errors.Is(got, err) {
		t.Errorf("another stream's Sync: %v, want %v", got, err)
	}
	if ran || d.View(host.All(), device.Read)[0] != 0 {
		t.Error("work issued after the error was done")
	}
	if took, got := second.Since(first); !errors.Is(got, err) || took != 0 {
		t.Errorf("Since after the error: %v, %v", took, got)
	}
	if _, got := d.Alloc(memory.Device, 1, "late"); !errors.Is(got, err) {
		t.Errorf("Alloc after the error: %v", got)
	}
	b.Free(host)
	if got := d.Close(); !errors.Is(got, err) || strings.Contains(got.Error(), "never freed") {
		t.Errorf("Close: %v", got)
	}
}

// Launching allocates nothing once the queue has its size.
func TestLaunchAllocatesNothing(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	b := alloc(t, d, memory.Device, 64)
	var sum atomic.Uint64
	k := &device.Kernel{Name: "count", Go: func(l *device.Launch) { sum.Add(l.Args()[1]) }}
	launch := func() {
		l := device.NewLaunch(k, 1, 1)
		l.Write(b.All())
		l.Arg(1)
		s.Launch(l)
	}
	for range 3000 {
		launch()
	}
	if n := testing.AllocsPerRun(1000, launch); n != 0 {
		t.Errorf("a launch allocates %v times", n)
	}
	ev, _ := d.NewEvent(0)
	other := stream(t, d, "other")
	if n := testing.AllocsPerRun(1000, func() { s.Record(ev); other.Wait(ev) }); n != 0 {
		t.Errorf("record and wait allocate %v times", n)
	}
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if got := sum.Load(); got != 4001 {
		t.Errorf("%d launches ran, want 4001", got)
	}
	s.Free(b)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A modelled link carries one copy at a time at its bandwidth, beside the
// other direction. Inside a bubble the clock is exact.
func TestModelledLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, cpu.Options{CopyThreads: 1, Links: cpu.Links{
			Out: cpu.Link{BytesPerSecond: 1e6, Latency: time.Millisecond},
			In:  cpu.Link{BytesPerSecond: 2e6},
		}})
		host, acc := alloc(t, d, memory.Host, 4000), alloc(t, d, memory.Device, 4000)
		a, b, c := stream(t, d, "a"), stream(t, d, "b"), stream(t, d, "c")
		start := time.Now()
		// Two copies out, 1 KB each: 2 x (1 ms + 1 ms), one after the other.
		a.Copy(host.Slice(0, 1000), acc.Slice(0, 1000))
		b.Copy(host.Slice(1000, 1000), acc.Slice(1000, 1000))
		// Meanwhile one copy in: 2 KB at 2 MB/s, 1 ms.
		c.Copy(acc.Slice(2000, 2000), host.Slice(2000, 2000))
		if err := c.Sync(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != time.Millisecond {
			t.Errorf("the copy in took %v, want 1ms", took)
		}
		if err := d.Sync(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != 4*time.Millisecond {
			t.Errorf("two copies out took %v, want 4ms", took)
		}
		// Rows count together: 4 x 500 bytes at 2 MB/s, 1 ms.
		start = time.Now()
		rows := device.Rect{Range: acc.Slice(0, 500), Pitch: 1000, Rows: 4}
		a.Copy2D(rows, device.Rect{Range: host.Slice(0, 500), Pitch: 500, Rows: 4})
		if err := a.Sync(); err != nil {
			t.Fatal(err)
		}
		if took := time.Since(start); took != time.Millisecond {
			t.Errorf("a copy of rows took %v, want 1ms", took)
		}
		a.Free(host)
		a.Free(acc)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// What a kernel reads of host memory takes its time on the link in, and what it writes on
// the link out.
func TestKernelsUseTheLinks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, cpu.Options{Links: cpu.Links{Out: cpu.Link{BytesPerSecond: 1e6}, In: cpu.Link{BytesPerSecond: 4e6}}})
		s := stream(t, d, "s")
		for _, x := range []struct {
			reads, writes memory.Bytes
			want          time.Duration
		}{{0, 0, 0}, {4000, 0, time.Millisecond}, {0, 4000, 4 * time.Millisecond}, {8000, 1000, 3 * time.Millisecond}} {
			start := time.Now()
			s.Launch(device.NewLaunch(&device.Kernel{
				Name: "moves", Go: func(*device.Launch) {},
				HostReads:  func(*device.Launch) memory.Bytes { return x.reads },
				HostWrites: func(*device.Launch) memory.Bytes { return x.writes },
			}, 1, 1))
			if err := s.Sync(); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(start); took != x.want {
				t.Errorf("a kernel that reads %v and writes %v of host memory took %v; want %v", x.reads, x.writes, took, x.want)
			}
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// The host waits when a queue is full instead of queueing without bound, and
// the queue keeps its order while it grows.
func TestQueueIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, cpu.Options{})
		s := stream(t, d, "s")
		gate := make(chan struct{})
		s.Host(func() { <-gate })
		var issued atomic.Int64
		var order []int64
		all := make(chan struct{})
		go func() {
			defer close(all)
			for i := range int64(5000) {
				s.Host(func() { order = append(order, i) })
				issued.Add(1)
			}
		}()
		synctest.Wait() // until the host waits
		// The gate itself may or may not have left the queue when it filled up.
		if n := issued.Load(); n != 1024 && n != 1023 {
			t.Errorf("a stalled stream took %d operations, want 1024", n)
		}
		close(gate)
		<-all
		if err := s.Sync(); err != nil {
			t.Fatal(err)
		}
		for i, v := range order {
			if int64(i) != v {
				t.Fatalf("operation %d ran as number %d", v, i)
			}
		}
		if len(order) != 5000 {
			t.Errorf("%d operations ran", len(order))
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Options are refused in a sentence that names what was asked for.
func TestOpenRefuses(t *testing.T) {
	for want, o := range map[string]cpu.Options{
		"Ordinal -3 is negative; number devices from zero":                                                       {Ordinal: -3},
		"CopyThreads -2 is negative; give a positive number, or zero for one thread for each core":               {CopyThreads: -2},
		"Capacity -7 B of device memory is negative; give a positive size, or zero for all that the machine has": {Capacity: [memory.Kinds]memory.Bytes{-7, 0}},
		"Capacity -8 B of host memory is negative; give a positive size, or zero for all that the machine has":   {Capacity: [memory.Kinds]memory.Bytes{1, -8}},
		"Links of -1 bytes a second and 0s has a negative figure; give positive figures, or zero for no limit":   {Links: cpu.Links{Out: cpu.Link{BytesPerSecond: -1}}},
		"Links of 0 bytes a second and -1ns has a negative figure; give positive figures, or zero for no limit":  {Links: cpu.Links{Local: cpu.Link{Latency: -1}}},
		"Links of -2 bytes a second and 1ns has a negative figure; give positive figures, or zero for no limit":  {Links: cpu.Links{In: cpu.Link{BytesPerSecond: -2, Latency: 1}}},
	} {
		if d, err := cpu.Open(o); d != nil || err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Open(%+v): %v, want %s", o, err, want)
		}
	}
	d := open(t, cpu.Options{Ordinal: 3, Capacity: [memory.Kinds]memory.Bytes{5, 6}})
	if i := d.Info(); i.Ordinal != 3 || i.Name != "cpu:3" || i.Backend != "cpu" || i.Capacity != [memory.Kinds]memory.Bytes{5, 6} || i.Units < 1 {
		t.Errorf("%+v", i)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
	if err := func() (p any) { defer func() { p = recover() }(); _ = d.Close(); return nil }(); err != "cpu: device closed twice" {
		t.Error(err)
	}
}

// A failed device makes nothing more: every call that may return an error returns the first.
func TestNothingAfterAFailure(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	r, err := d.Reserve(memory.Device, 1000, "reserved")
	if err != nil {
		t.Fatal(err)
	}
	s.Launch(device.NewLaunch(panics, 1, 1))
	want := s.Sync()
	for name, f := range map[string]func() error{
		"Alloc": func() error { _, err := d.Alloc(memory.Host, 1, "late"); return err }, "Reserve": func() error { _, err := d.Reserve(memory.Device, 1, "late"); return err },
		"Grow": func() error { return d.Grow(r, 10) }, "Backdrop": func() error { return d.Backdrop(r) },
		"NewStream": func() error { _, err := d.NewStream("late"); return err }, "NewEvent": func() error { _, err := d.NewEvent(0); return err },
		"Sync": d.Sync, "Download": func() error { return s.Download(nil, device.Range{Buf: r}) },
	} {
		if err := f(); err == nil || !errors.Is(err, want) {
			t.Errorf("%s: %v, want %v", name, err, want)
		}
	}
	if r.Size() != 0 {
		t.Errorf("the buffer has %v", r.Size())
	}
	s.Free(r)
	if err := d.Close(); !errors.Is(err, want) {
		t.Error(err)
	}
}

// Of two events the times count only if both were recorded and are done.
func TestSinceNeedsBoth(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	var e [3]device.Event
	for i := range e {
		e[i], _ = d.NewEvent(device.Timing)
	}
	gate := make(chan struct{})
	s.Record(e[0])
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	s.Host(func() { <-gate })
	s.Record(e[1])
	for _, x := range [][2]int{{0, 1}, {1, 0}, {1, 1}, {0, 2}, {2, 0}, {2, 2}, {1, 2}} {
		if took, err := e[x[0]].Since(e[x[1]]); took != 0 || err == nil || !strings.Contains(err.Error(), "cpu:0: one of the two events is not done; synchronise with the later one first") {
			t.Errorf("%d since %d: %v, %v", x[0], x[1], took, err)
		}
	}
	close(gate)
	if err := s.Sync(); err != nil {
		t.Fatal(err)
	}
	if took, err := e[1].Since(e[0]); took <= 0 || err != nil {
		t.Errorf("%v, %v", took, err)
	}
	s.Host(func() {})
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A launch in a graph keeps its kernel, its grid, its block and its shared memory.
func TestUpdateKeepsTheShape(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	kernel, other := &device.Kernel{Name: "k", Go: func(*device.Launch) {}}, &device.Kernel{Name: "o", Go: func(*device.Launch) {}}
	l := device.NewLaunch(kernel, 2, 32)
	l.Slot, l.Shared = 4, 16
	s.BeginCapture()
	s.Launch(l)
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Update(4, l); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(*device.Launch){
		"kernel": func(l *device.Launch) { l.Kernel = other }, "grid": func(l *device.Launch) { l.Grid[1] = 2 }, "block": func(l *device.Launch) { l.Block[0] = 64 },
		"shared": func(l *device.Launch) { l.Shared = 17 },
	} {
		m := l
		change(&m)
		if err := g.Update(4, m); err == nil || err.Error() != "cpu:0: slot 4 holds kernel k; an update keeps the kernel and its shape, so capture again" {
			t.Errorf("another %s: %v", name, err)
		}
	}
	if err := g.Update(5, l); err == nil || err.Error() != "cpu:0: the graph has no launch with slot 5; set Launch.Slot during capture" {
		t.Error(err)
	}
	if err := errors.Join(g.Close(), d.Close()); err != nil {
		t.Error(err)
	}
}

// A stream may wait for an event of another device: ranks exchange data so.
func TestEventsCrossDevices(t *testing.T) {
	d0, d1 := open(t, cpu.Options{}), open(t, cpu.Options{Ordinal: 1})
	a, b := stream(t, d0, "a"), stream(t, d1, "b")
	ev, _ := d0.NewEvent(0)
	gate := make(chan struct{})
	first := false
	a.Host(func() { <-gate; first = true })
	a.Record(ev)
	b.Wait(ev)
	saw := false
	b.Host(func() { saw = first })
	close(gate)
	if err := b.Sync(); err != nil || !saw {
		t.Errorf("the second device did not wait (err %v)", err)
	}
	for _, d := range []device.Device{d0, d1} {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}

func BenchmarkLaunch(b *testing.B) {
	d := open(b, cpu.Options{})
	s := stream(b, d, "s")
	buf := alloc(b, d, memory.Device, 64)
	k := &device.Kernel{Name: "nothing", Go: func(*device.Launch) {}}
	b.ReportAllocs()
	for b.Loop() {
		l := device.NewLaunch(k, 1, 1)
		l.Write(buf.All())
		s.Launch(l)
	}
	_ = s.Sync()
	s.Free(buf)
	_ = d.Close()
}
