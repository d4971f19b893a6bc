// This file owns the generator of random programs that are correct by
// construction: before every operation it orders the stream after all that the
// oracle says the operation would race with.

package check_test

import "math/rand/v2"

// generator builds a program and asks the oracle on the way.
type generator struct {
	rng   *rand.Rand
	p     program
	o     *oracle
	inner *oracle // of the capture under way: as if it ran once, alone
	who   []int   // streams that take part in the capture
	done  int     // operations executed
}

// generate makes a program of about n operations, replays counted in full.
func generate(seed uint64, n int) program {
	g := &generator{rng: rand.New(rand.NewPCG(seed, 99)), o: newOracle()}
	from, again := g.rng.IntN(n/3), 1+g.rng.IntN(3)
	captured := false
	for g.done < n {
		if !captured && g.done >= from {
			g.capture(3 + g.rng.IntN(n/20+1))
			captured = true
		}
		switch roll := g.rng.IntN(100); {
		case captured && roll < 2*again:
			g.replay()
		case roll < 94:
			s := g.rng.IntN(streams)
			g.work(g.draw(s))
		case roll < 96:
			g.view()
		default:
			g.sync(g.rng.IntN(streams))
		}
	}
	for s := range streams {
		g.emit(call{kind: doSyncStream, stream: s})
	}
	return g.p
}

func (g *generator) emit(c call) {
	g.o.step(len(g.p), c)
	if g.inner != nil && c.kind != doBegin {
		g.inner.step(len(g.p), c)
	}
	g.p = append(g.p, c)
}

// draw makes an operation for a stream.
func (g *generator) draw(s int) call {
	c := call{kind: kind(g.rng.IntN(int(doView))), stream: s, value: byte(1 + g.rng.IntN(255))}
	if g.inner != nil && c.kind >= doUpload {
		c.kind = doMix
	}
	line := func(buf int) rect {
		n := 1 + g.rng.IntN(64)
		return rect{buf, g.rng.IntN(bufBytes - n), n, n, 1}
	}
	switch c.kind {
	case doCopy2D, doColumns:
		rows, n := 2+g.rng.IntN(5), 1+g.rng.IntN(12)
		grid := func(buf int) rect {
			r := rect{buf, g.rng.IntN(32), n, n + g.rng.IntN(25), rows}
			if g.rng.IntN(2) == 0 {
				r.pitch = 16 // columns of one matrix, often
			}
			return r
		}
		c.dst = grid(g.rng.IntN(buffers))
		c.src = grid((c.dst.buf + 1 + g.rng.IntN(buffers-1)) % buffers)
	case doAdd:
		n := 1 + g.rng.IntN(6)
		c.dst = rect{g.rng.IntN(2), 8 * g.rng.IntN(bufBytes/8-n), 8 * n, 8 * n, 1}
	case doHost:
		c.dst = line(firstHost + g.rng.IntN(buffers-firstHost))
	default:
		c.dst = line(g.rng.IntN(buffers))
		c.src = line((c.dst.buf + 1 + g.rng.IntN(buffers-1)) % buffers)
		n := min(c.dst.n, c.src.n)
		c.dst.n, c.dst.pitch, c.src.n, c.src.pitch = n, n, n, n
	}
	return c
}

// work emits an operation behind the edges it needs.
func (g *generator) work(c call) {
	o := g.o
	if g.inner != nil {
		o = g.inner
	}
	g.order(o, c.stream, footprints(c.uses()))
	g.emit(c)
	g.done++
}

// order makes the next work of a stream come after all it would clash with.
func (g *generator) order(o *oracle, s int, uses []footprint) {
	for {
		ready, first := o.ready(s), none
		for i := range o.nodes {
			if clash(o.nodes[i].uses, uses) && !ready.has(i) {
				first = i
			}
		}
		if first == none {
			return
		}
		g.edge(o, first, s)
	}
}

// edge orders stream s after a node, in one of the ways there are.
func (g *generator) edge(o *oracle, n, s int) {
	from := o.nodes[n].stream
	if g.inner == nil {
		// An event that covers the node already will do, now and then.
		for e, m := range o.mark {
			if m != none && (m == n || o.nodes[m].before.has(n)) && g.rng.IntN(2) == 0 {
				g.emit(call{kind: doWait, stream: s, event: e})
				return
			}
		}
		switch g.rng.IntN(12) {
		case 0:
			g.emit(call{kind: doSyncStream, stream: from})
			return
		case 1, 2:
			e := g.event()
			g.emit(call{kind: doRecord, stream: from, event: e})
			g.emit(call{kind: doSyncEvent + kind(2*g.rng.IntN(2)), event: e}) // or doPoll
			return
		}
	}
	e := g.event()
	if g.inner == nil && g.rng.IntN(6) == 0 {
		e = plain + g.rng.IntN(2)
	}
	g.emit(call{kind: doRecord, stream: from, event: e})
	g.emit(call{kind: doWait, stream: s, event: e})
}

// event returns a plain event for the place: those of captures mean nothing outside.
func (g *generator) event() int {
	if g.inner != nil {
		return plain/2 + g.rng.IntN(plain/2)
	}
	return g.rng.IntN(plain / 2)
}

// view is a look of the host, which must have waited.
func (g *generator) view() {
	c := call{kind: doView, value: byte(g.rng.IntN(256))}
	c.dst = rect{firstHost + g.rng.IntN(buffers-firstHost), g.rng.IntN(bufBytes - 16), 16, 16, 1}
	uses := footprints(c.uses())
	for {
		var known nodeSet
		if g.o.host != none {
			known.add(g.o.host)
			known.addAll(g.o.nodes[g.o.host].before)
		}
		first := none
		for i := range g.o.nodes {
			if clash(g.o.nodes[i].uses, uses) && !known.has(i) {
				first = i
			}
		}
		if first == none {
			break
		}
		g.sync(g.o.nodes[first].stream)
	}
	g.emit(c)
	g.done++
}

func (g *generator) sync(s int) {
	if g.rng.IntN(4) == 0 {
		g.emit(call{kind: doSyncDevice})
	} else {
		g.emit(call{kind: doSyncStream, stream: s})
	}
}

// capture makes a graph of n operations on two or three streams.
func (g *generator) capture(n int) {
	origin := g.rng.IntN(streams)
	done := g.done
	g.emit(call{kind: doBegin, stream: origin})
	g.inner, g.who = newOracle(), []int{origin}
	for _, s := range g.rng.Perm(streams)[:1+g.rng.IntN(2)] {
		if s == origin {
			continue
		}
		e := g.event()
		g.emit(call{kind: doRecord, stream: g.who[g.rng.IntN(len(g.who))], event: e})
		g.emit(call{kind: doWait, stream: s, event: e})
		g.who = append(g.who, s)
	}
	label := g.rng.IntN(n)
	for i := range n {
		c := g.draw(g.who[g.rng.IntN(len(g.who))])
		if i == label {
			for c.kind != doMix {
				c = g.draw(c.stream)
			}
			c.slot = 1
		}
		g.work(c)
		if g.rng.IntN(8) == 0 {
			g.emit(call{kind: doRecord + kind(g.rng.IntN(2)), stream: c.stream, event: plain + g.rng.IntN(2)})
		}
	}
	for _, s := range g.who[1:] {
		e := g.event()
		g.emit(call{kind: doRecord, stream: s, event: e})
		g.emit(call{kind: doWait, stream: origin, event: e})
	}
	g.inner = nil
	g.emit(call{kind: doEnd, stream: origin})
	g.done = done
}

// replay replays the graph, perhaps updated, behind the edges that all of it
// needs. External waits inside may make some of them superfluous.
func (g *generator) replay() {
	k := g.o.graph
	if g.rng.IntN(2) == 0 {
		for _, c := range k.calls {
			if c.slot == 1 {
				c.kind, c.value = doUpdate, byte(g.rng.IntN(256))
				g.emit(c)
			}
		}
	}
	s := g.rng.IntN(streams)
	for _, c := range k.calls {
		if c.work() {
			g.order(g.o, s, footprints(c.uses()))
			g.done++
		}
	}
	g.emit(call{kind: doReplay, stream: s})
}
