// This file owns the tests of graphs captured from several streams.

package devicetest

import (
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var forkCases = []testCase{
	{name: "ThreeStreams", fn: testForkThreeStreams},
	{name: "Nested", fn: testForkNested},
	{name: "JoinedThroughAnother", fn: testJoinedThroughAnother},
	{name: "Diamonds", fn: testForkDiamonds},
	{name: "SomeNodesHeldBack", fn: testForkHeldBack},
	{name: "StreamsFreeAfterwards", fn: testForkStreamsFree},
	{name: "ReplayIsOrderedAsOnePiece", fn: testReplayIsOnePiece},
}

// cells is a row of buffers with a copy of what they should hold.
type cells struct {
	e    *env
	bufs []*device.Buffer
	want [][]byte
	ops  []func() // the captured work, done on the host
}

const cellSize = 2048

func (e *env) cells(s device.Stream, n int) *cells {
	c := &cells{e: e}
	for i := range n {
		c.bufs = append(c.bufs, e.allocWith(s, bothKinds[i%2], pattern(i, cellSize)))
		c.want = append(c.want, pattern(i, cellSize))
	}
	return c
}

// mix captures a launch that folds one cell into another.
func (c *cells) mix(s device.Stream, dst, src int, add uint64) {
	s.Launch(mix(c.bufs[dst].All(), c.bufs[src].All(), add))
	c.ops = append(c.ops, func() { mixBytes(c.want[dst], c.want[src], add) })
}

// copy captures a copy between cells.
func (c *cells) copy(s device.Stream, dst, src int) {
	s.Copy(c.bufs[dst].All(), c.bufs[src].All())
	c.ops = append(c.ops, func() { copy(c.want[dst], c.want[src]) })
}

// replayed issues the graph and does its work on the host; the order in which
// the work was captured is one the graph allows.
func (c *cells) replayed(s device.Stream, g device.Graph, times int) {
	for range times {
		s.Replay(g)
		for _, op := range c.ops {
			op()
		}
	}
}

func (c *cells) check(s device.Stream, what string) {
	c.e.Helper()
	for i, b := range c.bufs {
		c.e.want(s, b.All(), c.want[i], "%s: cell %d", what, i)
	}
}

func testForkThreeStreams(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 3)
	g := e.capture(s, func() {
		x.mix(s, 0, 1, 1)
		ev := e.event(0)
		s.Record(ev)
		b.Wait(ev)
		c.Wait(ev)
		x.mix(b, 1, 0, 2)
		x.mix(c, 2, 0, 3)
		e.order(b, s)
		e.order(c, s)
		x.mix(s, 0, 1, 4)
		x.mix(s, 0, 2, 5)
	})
	if n := g.Nodes(); n != 5 {
		e.Errorf("five launches make %d nodes", n)
	}
	x.replayed(s, g, 20)
	x.check(s, "three streams")
}

// testForkNested: a forked stream forks again.
func testForkNested(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 4)
	g := e.capture(s, func() {
		x.mix(s, 0, 3, 1)
		e.order(s, b)
		x.mix(b, 1, 0, 2)
		e.order(b, c)
		x.mix(c, 2, 1, 3)
		x.mix(b, 3, 1, 4)
		e.order(c, b)
		x.mix(b, 3, 2, 5)
		e.order(b, s)
		x.copy(s, 0, 3)
	})
	x.replayed(b, g, 20)
	x.check(b, "nested forks")
}

// testJoinedThroughAnother: it is enough that the origin waits for a stream
// that waits for the others.
func testJoinedThroughAnother(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 3)
	g := e.capture(s, func() {
		e.order(s, b)
		e.order(s, c)
		x.mix(c, 2, 0, 1)
		x.mix(b, 1, 0, 2)
		e.order(c, b)
		e.order(b, s)
	})
	x.replayed(s, g, 10)
	x.mix(s, 0, 1, 3) // not captured: it shows that the replay covers both
	x.mix(s, 0, 2, 4)
	for _, op := range x.ops[len(x.ops)-2:] {
		op()
	}
	x.check(s, "joined through another")
}

// testForkDiamonds forks and joins again and again with the same few events,
// which are recorded anew each time.
func testForkDiamonds(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 3)
	fork, joinB, joinC := e.event(0), e.event(0), e.event(0)
	g := e.capture(s, func() {
		for i := range uint64(10) {
			x.mix(s, 0, int(i)%3, i)
			s.Record(fork)
			b.Wait(fork)
			c.Wait(fork)
			x.mix(b, 1, 0, i)
			x.mix(c, 2, 0, i)
			b.Record(joinB)
			c.Record(joinC)
			s.Wait(joinB)
			s.Wait(joinC)
		}
	})
	if n := g.Nodes(); n != 30 {
		e.Errorf("thirty launches make %d nodes", n)
	}
	x.replayed(s, g, 10)
	x.check(s, "ten diamonds")
}

// testForkHeldBack holds one branch of a graph back with a callback: what
// depends on it waits inside the graph and behind it.
func testForkHeldBack(e *env) {
	s, b, _ := e.threeStreams()
	x := e.cells(s, 3)
	g := e.capture(s, func() {
		x.mix(s, 0, 1, 1)
		e.order(s, b)
		b.Host(func() { time.Sleep(blink) })
		x.mix(b, 1, 0, 2)
		x.mix(s, 2, 0, 3) // beside the callback
		e.order(b, s)
		x.mix(s, 2, 1, 4) // behind it
	})
	for range 3 {
		x.replayed(s, g, 1)
		s.Launch(mix(x.bufs[0].All(), x.bufs[1].All(), 9))
		mixBytes(x.want[0], x.want[1], 9)
	}
	x.check(s, "a branch held back")
}

// testForkStreamsFree: after EndCapture every stream that took part is an
// ordinary stream again, and the events too.
func testForkStreamsFree(e *env) {
	s, b, _ := e.threeStreams()
	x := e.allocWith(s, memory.Device, filled(1, 1024))
	fork, join := e.event(0), e.event(0)
	g := e.capture(s, func() {
		s.Record(fork)
		b.Wait(fork)
		b.Fill(x.Slice(0, 512), 2)
		b.Record(join)
		s.Wait(join)
	})
	b.Fill(x.Slice(512, 512), 3)
	e.want(b, x.All(), append(filled(1, 512), filled(3, 512)...), "a forked stream after the capture")
	gate := e.gate(b)
	b.Fill(x.Slice(0, 512), 4)
	b.Record(join)
	s.Wait(join)
	s.Copy(x.Slice(512, 512), x.Slice(0, 512))
	time.Sleep(blink)
	gate.release()
	e.want(s, x.All(), filled(4, 1024), "an event of the capture used outside again")
	s.Replay(g)
	e.want(s, x.All(), append(filled(2, 512), filled(4, 512)...), "replayed after that")
}

// testReplayIsOnePiece: work before a replay is before all of its branches, and
// work behind it behind all of them, also by way of an event.
func testReplayIsOnePiece(e *env) {
	s, b, c := e.threeStreams()
	x := e.cells(s, 4)
	g := e.capture(s, func() {
		e.order(s, b)
		e.order(s, c)
		x.mix(b, 1, 0, 1)
		x.mix(c, 2, 0, 2)
		e.order(b, s)
		e.order(c, s)
	})
	other := e.stream("other")
	gate := e.gate(s)
	s.Fill(x.bufs[0].All(), 0x77)
	copy(x.want[0], filled(0x77, cellSize))
	x.replayed(s, g, 1)
	e.order(s, other)
	other.Launch(mix(x.bufs[3].All(), x.bufs[1].All(), 3))
	other.Launch(mix(x.bufs[3].All(), x.bufs[2].All(), 4))
	mixBytes(x.want[3], x.want[1], 3)
	mixBytes(x.want[3], x.want[2], 4)
	time.Sleep(blink)
	gate.release()
	x.check(other, "around a replay")
	e.sync(s)
}
