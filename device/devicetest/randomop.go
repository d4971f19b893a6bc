// This file owns the operations of random programs, alone and as the bodies of
// captured graphs.

package devicetest

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

type randomKind int

const (
	randomCopy randomKind = iota
	randomRect
	randomFill
	randomMix
	randomHost
)

// randomMixture is how often each kind comes. Copies and fills forget what
// there was, and with it every mistake made before; most work must not.
var randomMixture = []randomKind{
	randomMix, randomMix, randomMix, randomMix, randomMix,
	randomHost, randomHost, randomCopy, randomRect, randomFill,
}

// randomOp reads src and changes dst, which have the same size.
type randomOp struct {
	kind     randomKind
	dst, src span
	value    uint64
}

func (o randomOp) String() string {
	name := [...]string{"copy", "copy rows", "fill", "mix", "callback"}[o.kind]
	return fmt.Sprintf("%s to %v from %v with %#x", name, o.dst, o.src, o.value)
}

// The rows of a 2-D copy: 13 of 17 bytes fit into a cell at both pitches.
const (
	rowsCount, rowsWidth   = 13, 17
	rowsPitchD, rowsPitchS = 19, 18
)

// apply does the operation to the model.
func (o randomOp) apply(model [][]byte) {
	dst := model[o.dst.buffer][o.dst.first*cellBytes:][:o.dst.bytes()]
	src := model[o.src.buffer][o.src.first*cellBytes:][:o.src.bytes()]
	switch o.kind {
	case randomCopy:
		copy(dst, src)
	case randomRect:
		copyRect(dst, rectOf(nil, 0, rowsWidth, rowsPitchD, rowsCount), src, rectOf(nil, 0, rowsWidth, rowsPitchS, rowsCount))
	case randomFill:
		copy(dst, filled(byte(o.value), len(dst)))
	case randomMix:
		mixBytes(dst, src, o.value)
	case randomHost:
		scramble(dst, byte(o.value))
	}
}

// scramble is what callbacks do.
func scramble(b []byte, value byte) {
	for i := range b {
		b[i] = b[i]*5 + value
	}
}

// cells returns what the operation reads and writes.
func (o randomOp) cells() (reads, writes []cell) {
	if o.kind != randomFill && o.kind != randomHost {
		reads = o.src.cells()
	}
	return reads, o.dst.cells()
}

// issue puts the operation on a stream, ordered by the weaver.
func (p *program) issue(w *weaver, s int, o randomOp) {
	reads, writes := o.cells()
	w.use(s, reads, writes)
	st, dst, src := w.streams[s], p.rangeOf(o.dst), p.rangeOf(o.src)
	switch o.kind {
	case randomCopy:
		st.Copy(dst, src)
	case randomRect:
		st.Copy2D(rectOf(dst.Buf, dst.Off, rowsWidth, rowsPitchD, rowsCount), rectOf(src.Buf, src.Off, rowsWidth, rowsPitchS, rowsCount))
	case randomFill:
		st.Fill(dst, byte(o.value))
	case randomMix:
		st.Launch(mix(dst, src, o.value))
	case randomHost:
		view := p.views[o.dst.buffer][dst.Off:][:dst.Len]
		st.Host(func() { scramble(view, byte(o.value)) }, device.Writes(dst))
	}
	w.issued(s)
}

// loop is a captured graph. It ends with a launch that has a slot, and records
// an external event.
type loop struct {
	graph device.Graph
	body  []randomOp
	slot  device.Slot
	mark  int // of the external event, among the weaver's
}

// captureLoop makes a graph of a few operations on up to three streams.
func (p *program) captureLoop(origin int) {
	if len(p.loops) == 3 {
		return
	}
	l := &loop{slot: device.Slot(1 + p.rng.IntN(1000)), mark: len(p.w.marks)}
	ext := p.event(device.External)
	p.w.marks = append(p.w.marks, mark{event: ext, stream: -1})

	inner := newWeaver(p.rng, p.w.streams, []device.Event{p.event(0), p.event(0), p.event(0)})
	joined := map[int]bool{origin: true}
	st := p.w.streams[origin]
	p.log("capture on stream %d:", origin)
	st.BeginCapture()
	for range 3 + p.rng.IntN(8) {
		o, s := p.drawOp(), (origin+p.rng.IntN(3))%randomStreams
		if !joined[s] {
			joined[s] = true
			inner.wait(s, inner.record(origin))
		}
		p.log("  stream %d: %v", s, o)
		p.issue(inner, s, o)
		l.body = append(l.body, o)
	}
	for s := range p.w.streams {
		if joined[s] && s != origin {
			inner.wait(origin, inner.record(s))
		}
	}
	last := p.drawOp()
	last.kind = randomMix
	st.Launch(slotted(mix(p.rangeOf(last.dst), p.rangeOf(last.src), last.value), l.slot))
	l.body = append(l.body, last)
	p.log("  stream %d: %v", origin, last)
	st.Record(ext)
	l.graph = p.end(st)
	if n := l.graph.Nodes(); n < len(l.body) {
		p.Errorf("%d pieces of work make %d nodes", len(l.body), n)
	}
	p.loops = append(p.loops, l)
}

// replayLoop issues one of the graphs on any stream, perhaps with a new argument.
func (p *program) replayLoop(s int) {
	if len(p.loops) == 0 {
		return
	}
	l := p.loops[p.rng.IntN(len(p.loops))]
	if p.rng.IntN(2) == 0 {
		last := &l.body[len(l.body)-1]
		last.value = p.rng.Uint64()
		p.ok(l.graph.Update(l.slot, mix(p.rangeOf(last.dst), p.rangeOf(last.src), last.value)))
	}
	p.log("stream %d: replay of a graph of %d, the last with %#x", s, len(l.body), l.body[len(l.body)-1].value)
	var reads, writes []cell
	for _, o := range l.body {
		r, w := o.cells()
		reads, writes = append(reads, r...), append(writes, w...)
	}
	p.w.use(s, reads, writes)
	p.w.streams[s].Replay(l.graph)
	p.w.note(l.mark, s)
	p.w.issued(s)
	for _, o := range l.body {
		o.apply(p.model)
	}
}
