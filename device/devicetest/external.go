// This file owns the tests of external events, which cross the border of a
// graph and act at every replay. SPEC S4.1.

package devicetest

import (
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var externalCases = []testCase{
	{name: "RecordedInside", fn: testExternalRecord},
	{name: "WaitedForInside", fn: testExternalWait},
	{name: "RecordedInAFork", fn: testExternalInFork},
	{name: "RecordingAtReplayTime", fn: testExternalAtReplayTime},
	{name: "NeverRecorded", fn: testExternalNeverRecorded},
	{name: "HostWaits", fn: testExternalHostWaits},
	{name: "BetweenGraphs", fn: testExternalBetweenGraphs},
	{name: "OutsideOfGraphs", fn: testExternalOutside},
	{name: "TimedInside", fn: testExternalTimed},
}

// testExternalRecord: at every replay the event marks the work captured before
// it, and a stream outside waits for that replay's.
func testExternalRecord(e *env) {
	a, b, _ := e.threeStreams()
	const rounds = 6
	x, src := e.alloc(memory.Device, 4096), e.allocWith(a, memory.Device, pattern(2, 4096))
	y := e.alloc(memory.Host, rounds*4096)
	ev, read := e.event(device.External), e.event(0)
	a.Fill(x.All(), 0)
	g := e.capture(a, func() {
		a.Launch(mix(x.All(), src.All(), 1))
		a.Record(ev)
	})
	value := make([]byte, 4096)
	var want []byte
	for i := range rounds {
		gate := e.gate(a)
		a.Replay(g)
		b.Wait(ev)
		b.Copy(y.Slice(memory.Bytes(i)*4096, 4096), x.All())
		b.Record(read)
		a.Wait(read)
		mixBytes(value, pattern(2, 4096), 1)
		want = append(want, value...)
		if i < 2 {
			time.Sleep(blink)
		}
		gate.release()
	}
	e.sync(a)
	e.want(b, y.All(), want, "read by another stream after each replay")
}

// testExternalWait: every replay waits for what the event marks when the replay
// is issued.
func testExternalWait(e *env) {
	a, b, _ := e.threeStreams()
	const rounds = 6
	x, y := e.alloc(memory.Device, 4096), e.allocWith(a, memory.Device, pattern(1, 4096))
	ev, read := e.event(device.External), e.event(0)
	b.Record(ev)
	g := e.capture(a, func() {
		a.Wait(ev)
		a.Launch(mix(y.All(), x.All(), 1))
	})
	want := pattern(1, 4096)
	for i := range rounds {
		gate := e.gate(b)
		b.Fill(x.All(), byte(i+1))
		b.Record(ev)
		a.Replay(g)
		a.Record(read)
		b.Wait(read)
		mixBytes(want, filled(byte(i+1), 4096), 1)
		if i < 2 {
			time.Sleep(blink)
		}
		gate.release()
	}
	e.sync(b)
	e.want(a, y.All(), want, "written by another stream before each replay")
}

// testExternalInFork is offloading in a captured graph: the copy out is forked,
// its event is waited for outside, and the next replay waits until the copy
// outside has read the result.
func testExternalInFork(e *env) {
	a, out, user := e.threeStreams()
	x, host, sum := e.allocWith(a, memory.Device, pattern(1, 4096)), e.alloc(memory.Host, 4096), e.allocWith(a, memory.Device, pattern(3, 4096))
	left, used := e.event(device.External), e.event(device.External)
	g := e.capture(a, func() {
		a.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), 1))
		e.order(a, out)
		out.Wait(used)
		out.Copy(host.All(), x.All())
		out.Record(left)
		e.order(out, a)
	})
	wx, wsum := pattern(1, 4096), pattern(3, 4096)
	for range 8 {
		a.Replay(g)
		user.Wait(left)
		user.Launch(mix(sum.All(), host.All(), 2))
		user.Record(used)
		mixBytes(wx[:2048], wx[2048:], 1)
		mixBytes(wsum, wx, 2)
	}
	e.sync(a)
	e.want(user, sum.All(), wsum, "used outside after each replay")
}

// testExternalAtReplayTime: a recording made after the replay was issued does
// not count for it. If it did, each stream would wait for the other.
func testExternalAtReplayTime(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.alloc(memory.Device, 1024), e.alloc(memory.Device, 1024)
	ev, read := e.event(device.External), e.event(0)
	g := e.capture(a, func() {
		a.Wait(ev)
		a.Copy(y.All(), x.All())
	})
	gate := e.gate(b)
	b.Fill(x.All(), 1)
	b.Record(ev)
	a.Replay(g)
	a.Record(read)
	b.Wait(read)
	b.Fill(x.All(), 2)
	b.Record(ev)
	time.Sleep(blink)
	gate.release()
	e.want(a, y.All(), filled(1, 1024), "the first replay")
	a.Replay(g)
	e.want(a, y.All(), filled(2, 1024), "the second replay")
	e.sync(b)
}

// testExternalNeverRecorded: inside a graph too it holds nothing back.
func testExternalNeverRecorded(e *env) {
	s, ev, x := e.stream("s"), e.event(device.External), e.alloc(memory.Device, 100)
	g := e.capture(s, func() {
		s.Wait(ev)
		s.Fill(x.All(), 1)
	})
	s.Replay(g)
	e.want(s, x.All(), filled(1, 100), "behind a wait for nothing")
}

// testExternalHostWaits: the host can wait for a place inside a replay, and ask
// whether it was reached.
func testExternalHostWaits(e *env) {
	s, ev := e.stream("s"), e.event(device.External)
	x, h := e.allocWith(s, memory.Device, pattern(1, 4096)), e.alloc(memory.Host, 4096)
	g := e.capture(s, func() {
		s.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), 1))
		s.Copy(h.All(), x.All())
		s.Record(ev)
	})
	if !ev.Done() {
		e.Error("an event that was only captured is not done")
	}
	want := pattern(1, 4096)
	for range 3 {
		gate := e.gate(s)
		s.Replay(g)
		if ev.Done() {
			e.Error("an event inside a replay is done while the replay is held back")
		}
		gate.release()
		e.within("Sync of an event inside a replay", ev.Sync)
		mixBytes(want[:2048], want[2048:], 1)
		if diff := firstDifference(e.dev.View(h.All(), device.Read), want); diff != "" {
			e.Errorf("after Event.Sync: %s", diff)
		}
		e.sync(s)
	}
}

// testExternalBetweenGraphs: two graphs on two streams hand a buffer to and fro.
func testExternalBetweenGraphs(e *env) {
	a, b, _ := e.threeStreams()
	x, y := e.allocWith(a, memory.Device, pattern(1, 2048)), e.allocWith(a, memory.Device, pattern(2, 2048))
	there, back := e.event(device.External), e.event(device.External)
	ga := e.capture(a, func() {
		a.Wait(back)
		a.Launch(mix(x.All(), y.All(), 1))
		a.Record(there)
	})
	gb := e.capture(b, func() {
		b.Wait(there)
		b.Launch(mix(y.All(), x.All(), 2))
		b.Record(back)
	})
	wx, wy := pattern(1, 2048), pattern(2, 2048)
	for range 30 {
		a.Replay(ga)
		b.Replay(gb)
		mixBytes(wx, wy, 1)
		mixBytes(wy, wx, 2)
	}
	e.sync(a)
	e.want(b, x.All(), wx, "first of two graphs")
	e.want(b, y.All(), wy, "second of two graphs")
}

// testExternalOutside: outside of graphs it is an event like any other.
func testExternalOutside(e *env) {
	a, b, _ := e.threeStreams()
	x, y, ev := e.allocWith(a, memory.Device, filled(1, 1024)), e.alloc(memory.Device, 1024), e.event(device.External)
	gate := e.gate(a)
	a.Fill(x.All(), 2)
	a.Record(ev)
	b.Wait(ev)
	b.Copy(y.All(), x.All())
	time.Sleep(blink)
	gate.release()
	e.sync(a)
	e.want(b, y.All(), filled(2, 1024), "behind an external event")
}

// testExternalTimed: time can be taken inside a graph, anew at every replay.
func testExternalTimed(e *env) {
	s, a, b := e.stream("s"), e.event(device.External|device.Timing), e.event(device.External|device.Timing)
	x := e.alloc(memory.Device, 1024)
	var rest atomic.Int64
	g := e.capture(s, func() {
		s.Record(a)
		s.Fill(x.All(), 1)
		s.Host(func() { time.Sleep(time.Duration(rest.Load())) })
		s.Record(b)
	})
	for _, pause := range []time.Duration{4 * time.Millisecond, 0, 2 * time.Millisecond} {
		rest.Store(int64(pause))
		start := time.Now()
		s.Replay(g)
		e.sync(s)
		all := time.Since(start)
		took, err := b.Since(a)
		e.ok(err)
		if took < pause-pause/10 || took > all+time.Millisecond {
			e.Errorf("a replay with a pause of %v in it took %v, of which the host saw %v", pause, took, all)
		}
	}
}
