//go:build linux

// This file tests the host's cost of issuing work, and that issuing it does not
// wait. It needs a GPU.

package cuda

import (
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// A single launch cannot be held to 2 µs of CPU time everywhere: beside an H200
// it took 3.7 to 4.8 µs, of which the driver itself takes 3.0 to 3.9, called from
// C as well, so what we add is bound to 1 µs. The hot path is a replay (of 100
// launches in 1.9 to 2.6 µs, 0.03 µs each), and there each is bound to 2 µs.
func TestLaunchOverhead(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s").(*stream)
	b, h := alloc(t, d, memory.Device, 4096), alloc(t, d, memory.Host, 4096)
	e, _ := d.NewEvent(0)
	launches := func(n int) device.Graph {
		s.BeginCapture()
		for range n {
			s.Launch(addLaunch(b.All(), 1))
		}
		g, err := s.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	twenty, hundred := launches(20), launches(100)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	s.Launch(device.NewLaunch(emptyKernel, 1, 32))
	raw := newFrame().(*frame)
	raw.args = [12]uintptr{d.function(emptyKernel).handle, 1, 1, 1, 32, 1, 1, 0, s.handle, uintptr(pointer(&raw.where))}
	var alone time.Duration // the driver's share of a launch
	for _, c := range []struct {
		name     string
		burst    time.Duration
		launches time.Duration // in one call
		fn       func()
	}{
		{"driver's launch alone", 32, 1, func() { raw.call(&d.drv.launchKernel, 11) }},
		{"context made current", 32, 0, func() { d.drv.call(&d.drv.ctxSetCurrent, d.ctx[0]) }},
		{"empty launch", 32, 1, func() { s.Launch(device.NewLaunch(emptyKernel, 1, 32)) }},
		{"launch with arguments", 32, 1, func() { s.Launch(addLaunch(b.All(), 1)) }},
		{"copy on the device", 32, 0, func() { s.Copy(b.Slice(0, 1024), b.Slice(2048, 1024)) }},
		{"copy out", 32, 0, func() { s.Copy(h.All(), b.All()) }},
		{"fill", 32, 0, func() { s.Fill(b.All(), 1) }},
		{"record and wait", 32, 0, func() { s.Record(e); s.Wait(e) }},
		{"replay of 20 launches", 4, 20, func() { s.Replay(twenty) }},
		{"replay of 100 launches", 4, 100, func() { s.Replay(hundred) }},
	} {
		cpu, wall := leastCost(t, s, c.burst, c.fn)
		allocs := testing.AllocsPerRun(100, c.fn)
		t.Logf("%-24s %5d ns of CPU time, %5d ns in all, %v allocations", c.name, cpu, wall, allocs)
		if allocs != 0 {
			t.Errorf("%s: %v allocations", c.name, allocs)
		}
		switch {
		case c.name == "driver's launch alone":
			alone = cpu
		case c.launches == 1:
			more := cpu - alone
			t.Logf("%-24s %5d ns of CPU time beyond the driver's", "", more)
			if more > time.Microsecond {
				t.Errorf("%s takes %v of CPU time beyond the driver's own %v", c.name, more, alone)
			}
		case c.launches > 1:
			each := cpu / c.launches
			t.Logf("%-24s %5d ns of CPU time for each launch", "", each)
			if each > 2*time.Microsecond {
				t.Errorf("%s takes %v of CPU time for each launch", c.name, each)
			}
		}
	}
	s.Free(b)
	s.Free(h)
}

// leastCost returns what a call of fn takes of the thread's CPU time and in all, at
// best. Bursts are short, so that nothing waits for the GPU.
func leastCost(t *testing.T, s *stream, burst time.Duration, fn func()) (cpu, wall time.Duration) {
	t.Helper()
	cpu, wall = time.Hour, time.Hour
	for range 200 {
		synced(t, s)
		start, began := threadTime(), time.Now()
		for range burst {
			fn()
		}
		cpu, wall = min(cpu, (threadTime()-start)/burst), min(wall, time.Since(began)/burst)
	}
	synced(t, s)
	return cpu, wall
}

// threadTime returns the CPU time of this thread.
func threadTime() time.Duration {
	const threadClock = 3 // CLOCK_THREAD_CPUTIME_ID
	var ts syscall.Timespec
	if _, _, errno := syscall.Syscall(syscall.SYS_CLOCK_GETTIME, threadClock, uintptr(pointer(&ts)), 0); errno != 0 {
		panic(errno)
	}
	return time.Duration(ts.Nano())
}

// While one stream is held back, calls that need not wait for it do not.
func TestNothingWaitsForAHeldStream(t *testing.T) {
	d := open(t, Options{})
	defer closeDevice(t, d)
	held, s, idle := newStream(t, d, "held"), newStream(t, d, "s"), newStream(t, d, "idle")
	a, a2, h, h2 := alloc(t, d, memory.Device, 1<<20), alloc(t, d, memory.Device, 1<<20), alloc(t, d, memory.Host, 1<<20), alloc(t, d, memory.Host, 1<<20)
	ac, ho := memory.Device, memory.Host
	reserve := func(k memory.Kind) *device.Buffer {
		p, err := d.Reserve(k, memory.GiB, "pool")
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	pools := [memory.Kinds]*device.Buffer{reserve(ac), reserve(ho)}
	capture := func(s device.Stream, fn func()) device.Graph {
		s.BeginCapture()
		fn()
		g, err := s.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		return g
	}
	rect := func(b *device.Buffer) device.Rect {
		return device.Rect{Range: b.Slice(0, 100), Pitch: 200, Rows: 50}
	}
	labelled := addLaunch(a.All(), 1)
	labelled.Slot = 1
	whole := capture(s, func() {
		s.Launch(labelled)
		s.Copy(h.All(), a.All())
		s.Copy(a2.All(), a.All())
		s.Copy(h2.All(), h.All())
		s.Fill(h2.All(), 1)
		s.Fill(a2.All(), 1)
		s.Copy2D(rect(h), rect(a))
		s.Host(func() {})
	})
	s.Replay(whole)
	s.Launch(addLaunch(a.All(), 1))
	ev, _ := d.NewEvent(0)
	gone, _ := d.NewEvent(0)
	old := capture(s, func() { s.Fill(a.All(), 2) })
	synced(t, s)
	s.Free(reserved(t, d, reserve(ac)))
	s.Free(reserved(t, d, reserve(ho)))
	s.Record(ev)
	if err := ev.Sync(); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		fn   func()
	}{
		{"reap of reserved memory", func() { d.Memory() }},
		{"launch", func() { held.Launch(addLaunch(a.All(), 1)) }},
		{"copy on the device", func() { held.Copy(a.All(), a2.All()) }},
		{"copy out", func() { held.Copy(h.All(), a.All()) }},
		{"copy in", func() { held.Copy(a.All(), h.All()) }},
		{"copy on the host", func() { held.Copy(h.All(), h2.All()) }},
		{"rows on the device", func() { held.Copy2D(rect(a), rect(a2)) }},
		{"rows out", func() { held.Copy2D(rect(h), rect(a)) }},
		{"rows in", func() { held.Copy2D(rect(a), rect(h)) }},
		{"fill", func() { held.Fill(a.All(), 1) }},
		{"fill of host memory", func() { held.Fill(h.All(), 1) }},
		{"upload", func() { held.Upload(a.All(), make([]byte, 1<<20)) }},
		{"upload to the host", func() { held.Upload(h.All(), make([]byte, 1<<20)) }},
		{"callback", func() { held.Host(func() {}) }},
		{"record and wait", func() { held.Record(ev); s.Wait(ev) }},
		{"replay", func() { held.Replay(whole) }},
		{"update", func() { _ = whole.Update(1, addLaunch(a.All(), 2)) }},
		{"replay again", func() { held.Replay(whole) }},
		{"replay elsewhere", func() { idle.Replay(whole) }},
		{"capture", func() { capture(idle, func() { idle.Fill(a2.All(), 1) }) }},
		{"growth", func() { _ = d.Grow(pools[ac], pools[ac].Size()+100*memory.MiB) }},
		{"growth of host memory", func() { _ = d.Grow(pools[ho], pools[ho].Size()+50*memory.MiB) }},
		{"allocation", func() { idle.Free(alloc(t, d, ac, 200*memory.MiB)) }},
		{"allocation of host memory", func() { idle.Free(alloc(t, d, ho, 50*memory.MiB)) }},
		{"reservation", func() { idle.Free(reserve(ac)) }},
		{"new stream", func() { newStream(t, d, "new") }},
		{"new event", func() { _, _ = d.NewEvent(device.Timing) }},
		{"event's end", func() { _ = gone.Close() }},
		{"graph's end", func() { _ = old.Close() }},
		{"usage", func() { d.Memory() }},
	} {
		open := make(chan struct{})
		var over atomic.Bool
		held.Host(func() {
			select {
			case <-open:
			case <-time.After(time.Minute): // for a call that waits
				over.Store(true)
			}
		})
		start := time.Now()
		c.fn()
		took, waited := time.Since(start), over.Load()
		close(open)
		if err := d.Sync(); err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		t.Logf("%-26s %v", c.name, took)
		if waited {
			t.Errorf("%s waited for a stream that was held back", c.name)
		}
	}
	for _, b := range []*device.Buffer{a, a2, h, h2, pools[0], pools[1]} {
		s.Free(b)
	}
}

// reserved returns a reservation with memory behind it.
func reserved(t *testing.T, d *Device, b *device.Buffer) *device.Buffer {
	t.Helper()
	if err := d.Grow(b, 50*memory.MiB); err != nil {
		t.Fatal(err)
	}
	return b
}
