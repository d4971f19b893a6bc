// This file owns the tests of the end of a device and of its counters.

package devicetest

import (
	"strings"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// testCloseReportsLeaks: memory never freed is reported with its owner.
func testCloseReportsLeaks(e *env) {
	s := e.stream("s")
	kept, err := e.dev.Alloc(memory.Host, 12_345, "forgetful")
	e.ok(err)
	s.Free(e.alloc(memory.Device, 100))
	s.Fill(kept.All(), 1)
	e.closed = true
	done := make(chan error, 1)
	e.within("Device.Close", func() error { done <- e.dev.Close(); return nil })
	if err := <-done; err == nil {
		e.Error("a device closed with memory in use reports nothing")
	} else if text := err.Error(); !strings.Contains(text, `"forgetful"`) || !strings.Contains(text, memory.Bytes(12_345).String()) {
		e.Errorf("the report names neither the owner nor the size: %v", err)
	}
}

// testCloseWaitsForWork: a device that is closed with streams, events and
// graphs open and work in flight does the work first and ends without error.
func testCloseWaitsForWork(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.allocWith(a, memory.Device, pattern(1, 4096)), e.alloc(memory.Host, 4096)
	var calls atomic.Int32
	g := e.capture(a, func() {
		e.order(a, b)
		b.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), 1))
		b.Host(func() { calls.Add(1) })
		e.order(b, a)
	})
	for range 10 {
		a.Replay(g)
	}
	e.order(a, b)
	b.Copy(y.All(), x.All())
	b.Free(x)
	b.Free(y)
	b.Host(func() { calls.Add(1) })
	e.closed = true
	e.within("Device.Close", e.dev.Close)
	if n := calls.Load(); n != 11 {
		e.Errorf("%d of 11 callbacks ran before Close returned", n)
	}
}

// testCountersOfAStep: a step of asynchronous work makes the host neither read
// nor wait, and is counted as what it is. SPEC S1.2.
func testCountersOfAStep(e *env) {
	a, b, _ := e.threeStreams()
	x, y, h := e.allocWith(a, memory.Device, pattern(1, 4096)), e.allocWith(a, memory.Device, pattern(2, 4096)), e.allocWith(a, memory.Host, pattern(3, 4096))
	pool := e.reserve(memory.Device, memory.MiB, "pool")
	e.sync(a, b)
	before := e.dev.Counters()

	g := e.capture(a, func() {
		a.Launch(slotted(mix(x.All(), y.All(), 1), 1))
		e.order(a, b)
		b.Copy(h.All(), x.All())
		e.order(b, a)
	})
	for i := range 3 {
		e.ok(g.Update(1, mix(x.All(), y.All(), uint64(i))))
		a.Replay(g)
	}
	for i := range 5 {
		a.Launch(mix(x.All(), y.All(), uint64(i)))
	}
	a.Fill(y.Slice(0, 100), 1)
	e.order(a, b)
	b.Copy(h.Slice(0, 1000), x.Slice(0, 1000))
	b.Copy2D(rectOf(h, 1000, 10, 20, 30), rectOf(x, 1000, 10, 10, 30))
	b.Host(func() {}, device.Reads(h.All()))
	e.order(b, a)
	a.Free(e.alloc(memory.Device, 100))
	e.ok(e.dev.Grow(pool, 1000))
	e.dev.Memory()
	ev := e.event(0)
	a.Record(ev)
	ev.Done()

	got := e.dev.Counters()
	want := before
	want.Launches += 5
	want.Replays += 3
	want.Copies += 2
	want.CopiedBytes += 1000 + 10*30
	if got != want {
		e.Errorf("a step moved the counters from\n %+v to\n %+v, want\n %+v", before, got, want)
	}
	e.sync(a, b)
}

// testCountersOfTheHost: each read and each wait of the host counts once.
func testCountersOfTheHost(e *env) {
	s, ev, x := e.stream("s"), e.event(0), e.alloc(memory.Device, 100)
	s.Fill(x.All(), 1)
	s.Record(ev)
	read := e.dev.Counters().HostReads
	for i := range 3 {
		e.read(s, x.Slice(memory.Bytes(i), 10))
	}
	if got := e.dev.Counters().HostReads - read; got != 3 {
		e.Errorf("three downloads count as %d host reads", got)
	}
	before := e.dev.Counters()
	for what, wait := range map[string]func() error{"stream": s.Sync, "event": ev.Sync, "device": e.dev.Sync} {
		syncs := e.dev.Counters().HostSyncs
		e.within("Sync of the "+what, wait)
		if got := e.dev.Counters().HostSyncs - syncs; got != 1 {
			e.Errorf("one Sync of the %s counts as %d", what, got)
		}
	}
	after := e.dev.Counters()
	if after.HostSyncs = before.HostSyncs; after != before {
		e.Errorf("three waits moved other counters from %+v to %+v", before, after)
	}
}

// testIssued: streams number their own work in the order of issue. Captured work has no
// number, its replay has one.
func testIssued(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.alloc(memory.Device, 4096), e.alloc(memory.Host, 4096)
	last := map[device.Stream]uint64{a: a.Issued(), b: b.Issued()}
	grows := func(what string, s device.Stream, n uint64, do func()) {
		do()
		if got := s.Issued() - last[s]; got != n {
			e.Errorf("%s: %d pieces of work more on stream %s; want %d", what, got, s.Name(), n)
		}
		last[s] = s.Issued()
	}
	grows("a fill", a, 1, func() { a.Fill(x.All(), 1) })
	grows("a launch", a, 1, func() { a.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), 1)) })
	grows("nothing", b, 0, func() { e.order(a, a) })
	e.order(a, b)
	last[b] = b.Issued() // a wait for what is done may be none
	grows("a copy", b, 1, func() { b.Copy(y.All(), x.All()) })
	e.order(b, a)
	last[a] = a.Issued()
	var g device.Graph
	grows("a capture", a, 0, func() {
		g = e.capture(a, func() { a.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), 1)) })
	})
	grows("a replay", a, 1, func() { a.Replay(g) })
	e.sync(a, b)
	if a.Issued() != last[a] || b.Issued() != last[b] {
		e.Error("a synchronisation is work")
	}
}
