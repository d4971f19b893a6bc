// This file owns the tests of captured graphs: new arguments between replays, several
// streams, several graphs, and closing them.

package devicetest

import (
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var graphCases = []testCase{
	{name: "UpdateLaterReplaysOnly", fn: testUpdateLaterOnly},
	{name: "UpdateManySlots", fn: testUpdateManySlots},
	{name: "UpdateRefuses", fn: testUpdateRefuses},
	{name: "ReplaysNeverOverlap", fn: testReplaysNeverOverlap},
	{name: "ReplaysInOrderOfIssue", fn: testReplaysInOrder},
	{name: "TwoGraphs", fn: testTwoGraphs},
	{name: "OutlivesItsStream", fn: testGraphOutlivesStream},
	{name: "ClosedInFlight", fn: testGraphClosedInFlight},
	{name: "ManyNodes", fn: testManyNodes},
	{name: "MoreReplaysThanTheQueueHolds", fn: testManyReplays},
	{name: "RecordingsAreNoNodes", fn: testRecordingsAreNoNodes},
}

func slotted(l device.Launch, slot device.Slot) device.Launch {
	l.Slot = slot
	return l
}

// testUpdateLaterOnly: a replay runs with the arguments the graph had when it
// was issued, even if it has not begun when they change.
func testUpdateLaterOnly(e *env) {
	s := e.stream("s")
	src, out := e.allocWith(s, memory.Device, pattern(1, 512)), e.alloc(memory.Device, 5*512)
	s.Fill(out.All(), 0)
	at := func(i int) device.Launch {
		return slotted(mix(out.Slice(memory.Bytes(i)*512, 512), src.All(), uint64(i)), 4)
	}
	g := e.capture(s, func() { s.Launch(at(0)) })
	want := make([]byte, 5*512)
	s.Replay(g)
	e.sync(s)
	mixBytes(want[:512], pattern(1, 512), 0)
	gate := e.gate(s)
	for i := range 5 {
		e.ok(g.Update(4, at(i)))
		s.Replay(g)
		mixBytes(want[i*512:(i+1)*512], pattern(1, 512), uint64(i))
	}
	gate.release()
	e.want(s, out.All(), want, "five replays with five sets of arguments")
	s.Replay(g)
	mixBytes(want[4*512:], pattern(1, 512), 4)
	e.want(s, out.All(), want, "the last arguments stay")
}

// testUpdateManySlots: slots are the caller's numbers, in any order and on any
// stream of the capture; launches without one stay as they are.
func testUpdateManySlots(e *env) {
	s, b, _ := e.threeStreams()
	src, out := e.allocWith(s, memory.Device, pattern(1, 512)), e.alloc(memory.Device, 4*512)
	s.Fill(out.All(), 0)
	launch := func(i int, add uint64) device.Launch {
		return mix(out.Slice(memory.Bytes(i)*512, 512), src.All(), add)
	}
	slots := []device.Slot{1 << 31, 7, 1}
	g := e.capture(s, func() {
		s.Launch(slotted(launch(0, 0), slots[0]))
		e.order(s, b)
		b.Launch(slotted(launch(1, 0), slots[1]))
		s.Launch(slotted(launch(2, 0), slots[2]))
		s.Launch(launch(3, 99))
		e.order(b, s)
	})
	want := make([]byte, 4*512)
	adds := []uint64{0, 0, 0, 99}
	for round := range 10 {
		for i, slot := range slots {
			if (round+i)%3 == 0 {
				adds[i] = uint64(100*round + i)
				e.ok(g.Update(slot, launch(i, adds[i])))
			}
		}
		s.Replay(g)
		for i, add := range adds {
			mixBytes(want[i*512:(i+1)*512], pattern(1, 512), add)
		}
	}
	e.want(s, out.All(), want, "slots updated in turn")
}

// testUpdateRefuses: what does not fit is an error and changes nothing.
func testUpdateRefuses(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 512)), e.allocWith(s, memory.Device, pattern(2, 512))
	l := mix(x.All(), y.All(), 3)
	g := e.capture(s, func() {
		s.Launch(slotted(l, 1))
		s.Launch(mix(y.All(), x.All(), 4))
	})
	other := *mixKernel
	foreign, larger := l, l
	foreign.Kernel = &other
	larger.Grid[0]++
	for what, err := range map[string]error{
		"an unknown slot": g.Update(2, l),
		"no slot":         g.Update(0, l),
		"another kernel":  g.Update(1, foreign),
		"another shape":   g.Update(1, larger),
	} {
		if err == nil {
			e.Errorf("Update with %s is no error", what)
		}
	}
	dead := e.alloc(memory.Device, 512)
	gone := mix(dead.All(), y.All(), 0)
	s.Free(dead)
	e.panics("Update to freed memory", "use after free", func() { _ = g.Update(1, gone) })
	wx, wy := pattern(1, 512), pattern(2, 512)
	for range 2 {
		s.Replay(g)
		mixBytes(wx, wy, 3)
		mixBytes(wy, wx, 4)
	}
	e.want(s, x.All(), wx, "after refused updates")
	e.want(s, y.All(), wy, "after refused updates")
}

// testReplaysNeverOverlap replays one graph on two streams that no event
// orders: the replays read and write the same bytes and yet lose nothing.
func testReplaysNeverOverlap(e *env) {
	a, b, fork := e.threeStreams()
	x, y := e.allocWith(a, memory.Device, pattern(1, 2048)), e.allocWith(a, memory.Device, pattern(2, 2048))
	var inside, most atomic.Int32
	g := e.capture(a, func() {
		e.order(a, fork)
		fork.Host(func() {
			if n := inside.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(50 * time.Microsecond)
		})
		a.Launch(mix(x.All(), y.All(), 1))
		e.order(fork, a)
		a.Launch(mix(y.All(), x.All(), 2))
		a.Host(func() { inside.Add(-1) })
	})
	wx, wy := pattern(1, 2048), pattern(2, 2048)
	for range 20 {
		a.Replay(g)
		b.Replay(g)
		for range 2 {
			mixBytes(wx, wy, 1)
			mixBytes(wy, wx, 2)
		}
	}
	e.sync(a, b)
	if n := most.Load(); n != 1 {
		e.Errorf("%d replays of one graph ran at the same time", n)
	}
	e.want(a, x.All(), wx, "replayed on two streams")
	e.want(a, y.All(), wy, "replayed on two streams")
}

// testReplaysInOrder: replays of one graph take effect in the order in which
// they were issued, whatever their streams. Different arguments show it.
func testReplaysInOrder(e *env) {
	ss := make([]device.Stream, 3)
	for i := range ss {
		ss[i] = e.stream("s")
	}
	x, y := e.allocWith(ss[0], memory.Device, pattern(1, 1024)), e.allocWith(ss[0], memory.Device, pattern(2, 1024))
	g := e.capture(ss[0], func() { ss[0].Launch(slotted(mix(x.All(), y.All(), 0), 1)) })
	ss[0].Replay(g)
	e.sync(ss[0])
	want := pattern(1, 1024)
	mixBytes(want, pattern(2, 1024), 0)
	gate := e.gate(ss[0])
	for i := range 60 {
		e.ok(g.Update(1, mix(x.All(), y.All(), uint64(i))))
		ss[i*7%11%3].Replay(g)
		mixBytes(want, pattern(2, 1024), uint64(i))
	}
	gate.release()
	e.sync(ss...)
	e.want(ss[0], x.All(), want, "replayed on three streams")
}

// testTwoGraphs: graphs that share streams, captures and memory stay apart.
func testTwoGraphs(e *env) {
	s, b, _ := e.threeStreams()
	x := e.cells(s, 3)
	first := e.capture(s, func() {
		x.mix(s, 0, 1, 1)
		e.order(s, b)
		x.mix(b, 2, 0, 2)
		e.order(b, s)
	})
	ops := x.ops
	x.ops = nil
	second := e.capture(b, func() {
		x.mix(b, 1, 2, 3)
		e.order(b, s)
		x.copy(s, 2, 1)
		e.order(s, b)
	})
	for i := range 20 {
		if i%3 == 2 {
			x.replayed(s, second, 1)
			continue
		}
		s.Replay(first)
		for _, op := range ops {
			op()
		}
	}
	x.check(s, "two graphs in turn")
}

func testGraphOutlivesStream(e *env) {
	s, b, _ := e.threeStreams()
	other := e.stream("other")
	x := e.cells(s, 2)
	ev := e.event(0)
	g := e.capture(s, func() {
		x.mix(s, 0, 1, 1)
		s.Record(ev)
		b.Wait(ev)
		x.mix(b, 1, 0, 2)
		e.order(b, s)
	})
	e.closeStream(s)
	e.closeStream(b)
	x.replayed(other, g, 5)
	x.check(other, "replayed after its streams were closed")
}

// testGraphClosedInFlight: replays that were issued run to their end.
func testGraphClosedInFlight(e *env) {
	s, b, _ := e.threeStreams()
	x := e.cells(s, 2)
	s.BeginCapture()
	x.mix(s, 0, 1, 1)
	e.order(s, b)
	x.mix(b, 1, 0, 2)
	e.order(b, s)
	g, err := s.EndCapture()
	e.ok(err)
	x.replayed(s, g, 1)
	e.sync(s)
	gate := e.gate(s)
	x.replayed(s, g, 10)
	time.AfterFunc(blink, gate.unlock)
	e.within("Graph.Close", g.Close)
	x.check(s, "closed in flight")
}

// testManyNodes is a graph of the size of a training step.
func testManyNodes(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 4)
	fork, join := e.event(0), e.event(0)
	g := e.capture(s, func() {
		for i := range uint64(100) {
			x.mix(s, 0, 1+int(i)%3, i)
			s.Record(fork)
			side, k := b, 1
			if i%2 == 1 {
				side, k = c, 2
			}
			side.Wait(fork)
			x.mix(side, k, 0, i)
			x.copy(s, 3, 0)
			side.Record(join)
			s.Wait(join)
		}
	})
	if n := g.Nodes(); n != 300 {
		e.Errorf("three hundred pieces of work make %d nodes", n)
	}
	x.replayed(s, g, 5)
	x.check(s, "three hundred nodes")
}

// testManyReplays issues more replays than any queue holds at once, on one
// stream and with side branches: the host may have to wait for room, but
// nothing is lost and nothing hangs.
func testManyReplays(e *env) {
	const times = 5000
	s, b, c := e.threeStreams()
	x, y := e.allocWith(s, memory.Device, pattern(1, 64)), e.allocWith(s, memory.Device, pattern(2, 64))
	z := e.allocWith(s, memory.Device, pattern(3, 64))
	one := e.capture(s, func() { s.Launch(mix(x.All(), y.All(), 1)) })
	three := e.capture(s, func() {
		e.order(s, b)
		e.order(s, c)
		s.Launch(mix(x.All(), x.All(), 2))
		b.Launch(mix(y.All(), y.All(), 3))
		c.Launch(mix(z.All(), z.All(), 4))
		e.order(b, s)
		e.order(c, s)
	})
	wx, wy, wz := pattern(1, 64), pattern(2, 64), pattern(3, 64)
	for range times {
		s.Replay(one)
		mixBytes(wx, wy, 1)
	}
	e.want(s, x.All(), wx, "after five thousand replays")
	for range times {
		s.Replay(three)
		mixBytes(wx, wx, 2)
		mixBytes(wy, wy, 3)
		mixBytes(wz, wz, 4)
	}
	e.want(s, x.All(), wx, "after five thousand replays of three branches")
	e.want(s, y.All(), wy, "after five thousand replays of three branches")
	e.want(s, z.All(), wz, "after five thousand replays of three branches")
}

// testRecordingsAreNoNodes: taking a time is not a piece of work.
func testRecordingsAreNoNodes(e *env) {
	s, ev := e.stream("s"), e.event(device.Timing)
	x := e.alloc(memory.Device, 64)
	g := e.capture(s, func() {
		s.Record(ev)
		s.Fill(x.All(), 1)
		s.Record(ev)
	})
	if n := g.Nodes(); n != 1 {
		e.Errorf("a fill between two timed recordings makes %d nodes, want 1", n)
	}
	s.Replay(g)
	e.want(s, x.All(), filled(1, 64), "a replay with timed recordings")
}
