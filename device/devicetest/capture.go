// This file owns the tests of capture and replay on one stream, and of work
// that cannot be captured.

package devicetest

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var captureCases = []testCase{
	{name: "NothingRunsDuringCapture", fn: testNothingRuns},
	{name: "ReplaysManyTimes", fn: testReplaysManyTimes},
	{name: "AllKindsOfWork", fn: testCaptureAllWork},
	{name: "EmptyGraph", fn: testEmptyGraph},
	{name: "BehindWorkInFlight", fn: testCaptureBehindWork},
	{name: "BesideOtherStreams", fn: testCaptureBesideOthers},
	{name: "MisusePanics", fn: testCaptureMisuse},
	{name: "SlotTwicePanics", fn: testSlotTwice},
}

func testNothingRuns(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x := e.allocWith(s, memory.Device, filled(1, 4096))
	var calls atomic.Int32
	s.BeginCapture()
	s.Fill(x.All(), 2)
	s.Host(func() { calls.Add(1) })
	time.Sleep(blink)
	e.want(other, x.All(), filled(1, 4096), "read while its filling is captured")
	g := e.end(s)
	e.sync(s)
	e.want(s, x.All(), filled(1, 4096), "after the capture")
	if n := calls.Load(); n != 0 {
		e.Errorf("a captured callback ran %d times before any replay", n)
	}
	if n := g.Nodes(); n != 2 {
		e.Errorf("a fill and a callback make %d nodes", n)
	}
	for range 5 {
		s.Replay(g)
	}
	e.want(s, x.All(), filled(2, 4096), "replayed")
	if n := calls.Load(); n != 5 {
		e.Errorf("five replays ran a captured callback %d times", n)
	}
}

// testReplaysManyTimes: every replay does all of the work, once and in order,
// and work issued around replays keeps its place.
func testReplaysManyTimes(e *env) {
	s := e.stream("s")
	const n = 2048
	x, y := e.allocWith(s, memory.Device, pattern(1, n)), e.allocWith(s, memory.Device, pattern(2, n))
	g := e.capture(s, func() {
		s.Launch(mix(x.All(), y.All(), 5))
		s.Copy(y.Slice(0, n/2), x.Slice(n/2, n/2))
		s.Launch(mix(y.All(), x.All(), 7))
	})
	wx, wy := pattern(1, n), pattern(2, n)
	for i := range 50 {
		s.Replay(g)
		mixBytes(wx, wy, 5)
		copy(wy[:n/2], wx[n/2:])
		mixBytes(wy, wx, 7)
		if i%3 == 0 {
			s.Fill(x.Slice(memory.Bytes(i), 5), byte(i))
			copy(wx[i:], filled(byte(i), 5))
		}
	}
	e.want(s, x.All(), wx, "replayed fifty times")
	e.want(s, y.All(), wy, "replayed fifty times")
}

// testCaptureAllWork captures every kind of work that can be.
func testCaptureAllWork(e *env) {
	s := e.stream("s")
	const n = 3000
	var bufs []*device.Buffer
	var want [][]byte
	for i, k := range []memory.Kind{memory.Device, memory.Device, memory.Host, memory.Host} {
		bufs = append(bufs, e.allocWith(s, k, pattern(i, n)))
		want = append(want, pattern(i, n))
	}
	view := e.dev.View(bufs[3].All(), device.Write)
	g := e.capture(s, func() {
		for i := range bufs { // each direction: 0>1 1>2 2>3 3>0
			s.Copy(bufs[(i+1)%4].Slice(1, 1001), bufs[i].Slice(3, 1001))
			s.Copy2D(rectOf(bufs[(i+1)%4], 1100, 33, 50, 20), rectOf(bufs[i], 1200, 33, 60, 20))
			s.Fill(bufs[i].Slice(2500, 77), byte(i+1))
			s.Launch(mix(bufs[i].Slice(2048, 80), bufs[(i+1)%4].Slice(1024, 80), uint64(i)))
		}
		s.Copy(bufs[1].Slice(2900, 100), bufs[0].Slice(2800, 100))
		s.Copy(bufs[3].Slice(2900, 100), bufs[2].Slice(2800, 100))
		s.Host(func() {
			for i := range view[:100] {
				view[i] += 3
			}
		}, device.Writes(bufs[3].Slice(0, 100)))
	})
	model := func() {
		for i := range bufs {
			next := (i + 1) % 4
			copy(want[next][1:1002], want[i][3:])
			copyRect(want[next], rectOf(nil, 1100, 33, 50, 20), want[i], rectOf(nil, 1200, 33, 60, 20))
			copy(want[i][2500:], filled(byte(i+1), 77))
			mixBytes(want[i][2048:2128], want[next][1024:], uint64(i))
		}
		copy(want[1][2900:], want[0][2800:2900])
		copy(want[3][2900:], want[2][2800:2900])
		for i := range 100 {
			want[3][i] += 3
		}
	}
	if got := g.Nodes(); got != 4*4+3 {
		e.Errorf("19 pieces of work make %d nodes", got)
	}
	for range 3 {
		s.Replay(g)
		model()
	}
	for i, b := range bufs {
		e.want(s, b.All(), want[i], "buffer %d after three replays", i)
	}
}

func testEmptyGraph(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x := e.alloc(memory.Device, 100)
	g := e.capture(s, func() {})
	if n := g.Nodes(); n != 0 {
		e.Errorf("an empty graph has %d nodes", n)
	}
	s.Fill(x.All(), 1)
	s.Replay(g)
	s.Replay(g)
	e.order(s, other)
	other.Replay(g)
	other.Fill(x.Slice(0, 50), 2)
	e.want(other, x.All(), slices.Concat(filled(2, 50), filled(1, 50)), "around empty replays")
}

// testCaptureBehindWork: a capture begins while earlier work of the stream is
// still held back, and neither waits for nor contains it.
func testCaptureBehindWork(e *env) {
	s := e.stream("s")
	x := e.allocWith(s, memory.Device, filled(0, 100))
	gate := e.gate(s)
	s.Fill(x.Slice(0, 50), 1)
	g := e.capture(s, func() { s.Fill(x.Slice(25, 50), 2) })
	s.Replay(g)
	s.Fill(x.Slice(50, 10), 3)
	gate.release()
	e.want(s, x.All(), slices.Concat(filled(1, 25), filled(2, 25), filled(3, 10), filled(2, 15), filled(0, 25)), "around a capture")
	if n := g.Nodes(); n != 1 {
		e.Errorf("one fill makes %d nodes", n)
	}
}

// testCaptureBesideOthers: while one stream captures, the device serves the
// others as always.
func testCaptureBesideOthers(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x, y := e.allocWith(s, memory.Device, pattern(1, 4096)), e.allocWith(s, memory.Host, pattern(2, 4096))
	old := e.capture(other, func() { other.Launch(mix(y.All(), x.All(), 1)) })
	s.BeginCapture()
	s.Copy(x.Slice(0, 2048), x.Slice(2048, 2048))
	b, ev := e.alloc(memory.Host, 4096), e.event(0)
	pool := e.reserve(memory.Device, memory.MiB, "pool")
	e.ok(e.dev.Grow(pool, 10_000))
	other.Upload(b.All(), pattern(3, 4096))
	other.Copy(pool.Slice(0, 4096), b.All())
	other.Replay(old)
	other.Record(ev)
	other.Free(b)
	e.within("Event.Sync beside a capture", ev.Sync)
	e.sync(other)
	inner := e.capture(other, func() { other.Fill(pool.Slice(0, 10), 9) })
	other.Replay(inner)
	want := pattern(3, 4096)
	copy(want, filled(9, 10))
	e.want(other, pool.Slice(0, 4096), want, "copied beside a capture")
	g := e.end(s)
	e.want(s, x.All(), pattern(1, 4096), "before the replay")
	s.Replay(g)
	want = pattern(1, 4096)
	copy(want, want[2048:])
	e.want(s, x.All(), want, "captured beside other work")
	wy := pattern(2, 4096)
	mixBytes(wy, pattern(1, 4096), 1)
	e.want(other, y.All(), wy, "replayed beside a capture")
}

func testCaptureMisuse(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x, ev := e.alloc(memory.Device, 1024), e.event(0)
	capturing := func(when string, want bool, streams ...device.Stream) {
		for _, s := range streams {
			if got := s.Capturing(); got != want {
				e.Errorf("%s, stream %s says that it captures: %v", when, s.Name(), got)
			}
		}
	}
	e.panics("EndCapture without BeginCapture", "", func() { _, _ = s.EndCapture() })
	capturing("before a capture", false, s, other)
	s.BeginCapture()
	capturing("after BeginCapture", true, s)
	capturing("beside a capture", false, other)
	e.panics("BeginCapture twice", "", s.BeginCapture)
	s.Record(ev)
	other.Wait(ev)
	capturing("in a capture that it joined", true, s, other)
	e.panics("EndCapture on a stream that joined", "", func() { _, _ = other.EndCapture() })
	e.panics("BeginCapture on a stream that joined", "", other.BeginCapture)
	e.order(other, s)
	g := e.end(s)
	capturing("after EndCapture", false, s, other)
	e.panics("waiting for an event of a capture that has ended", "External", func() { s.Wait(ev) })
	s.Replay(g)
	e.sync(s)
	e.ok(g.Close())
	e.graphs = nil
	e.panics("replay of a closed graph", "", func() { s.Replay(g) })
	s.Fill(x.All(), 3)
	e.want(s, x.All(), filled(3, 1024), "after misuse")
}

// testSlotTwice: the second launch with a label is refused, and the capture
// goes on without it.
func testSlotTwice(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x := e.allocWith(s, memory.Device, pattern(1, 1024))
	l := slotted(mix(x.Slice(0, 512), x.Slice(512, 512), 1), 7)
	g := e.capture(s, func() {
		s.Launch(l)
		e.panics("the same slot twice", "slot", func() { s.Launch(l) })
		e.order(s, other)
		e.panics("the same slot twice on another stream", "slot", func() { other.Launch(l) })
		e.order(other, s)
	})
	s.Launch(l) // outside of captures a label means nothing
	s.Launch(l)
	s.Replay(g)
	want := pattern(1, 1024)
	for range 3 {
		mixBytes(want[:512], want[512:], 1)
	}
	e.want(s, x.All(), want, "a slot used twice")
}
