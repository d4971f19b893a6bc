// This file owns random programs: seeded sequences of everything a device can
// do, on four streams, with the events that make them free of races. Whatever
// order the device takes, the result must be that of doing it all in sequence.

package devicetest

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

const (
	randomSeeds   = 16
	randomSteps   = 250
	randomStreams = 4
	randomBuffers = 6
	cellBytes     = 256
	bufferCells   = 5
	bufferBytes   = cellBytes * bufferCells
	// heldSteps bounds the work behind a gate below what queues hold.
	heldSteps = 60
)

var randomCases = randomTests()

func randomTests() (cases []testCase) {
	for seed := range uint64(randomSeeds) {
		cases = append(cases, testCase{name: fmt.Sprintf("Seed%d", seed), fn: func(e *env) { testRandom(e, seed) }})
	}
	return cases
}

// span is one or more cells of a buffer.
type span struct{ buffer, first, n int }

func (p span) cells() (cs []cell) {
	for i := range p.n {
		cs = append(cs, cell{p.buffer, p.first + i})
	}
	return cs
}

func (p span) bytes() int { return p.n * cellBytes }

func (p span) String() string { return fmt.Sprintf("%d[%d+%d]", p.buffer, p.first, p.n) }

// program is a random program under way, with the bytes it should have made.
type program struct {
	*env
	w       *weaver
	rng     *rand.Rand
	bufs    []*device.Buffer
	views   [][]byte // of host buffers
	model   [][]byte
	loops   []*loop
	holding *gate
	held    int
	trace   []string
}

func testRandom(e *env, seed uint64) {
	p := &program{env: e, rng: rand.New(rand.NewPCG(seed, 0))}
	e.Cleanup(func() {
		if e.Failed() {
			e.Logf("the program was:\n%s", strings.Join(p.trace, "\n"))
		}
	})
	p.setUp()
	for range randomSteps {
		p.step()
	}
	p.letGo()
	e.within("Device.Sync", e.dev.Sync)
	for i, b := range p.bufs {
		e.want(p.w.streams[i%randomStreams], b.All(), p.model[i], "buffer %d in the end", i)
	}
}

func (p *program) setUp() {
	var streams []device.Stream
	var events []device.Event
	for i := range randomStreams {
		streams = append(streams, p.stream(fmt.Sprint("stream ", i)))
	}
	for range 6 {
		events = append(events, p.event(0))
	}
	for i := range randomBuffers {
		p.bufs = append(p.bufs, p.allocWith(streams[0], bothKinds[i%2], pattern(i, bufferBytes)))
		p.model = append(p.model, pattern(i, bufferBytes))
		var view []byte
		if bothKinds[i%2] == memory.Host {
			view = p.dev.View(p.bufs[i].All(), device.Write)
		}
		p.views = append(p.views, view)
	}
	p.loadKernel(streams[0])
	p.w = newWeaver(p.rng, streams, events)
}

func (p *program) log(format string, args ...any) {
	p.trace = append(p.trace, fmt.Sprintf(format, args...))
}

// letGo opens the gate, if one is closed; the host may wait afterwards.
func (p *program) letGo() {
	if p.holding != nil {
		p.holding.release()
		p.holding = nil
	}
}

// step issues one random step and does the same to the model.
func (p *program) step() {
	if p.held++; p.holding != nil && p.held > heldSteps {
		p.letGo()
	}
	s := p.rng.IntN(randomStreams)
	switch roll := p.rng.IntN(100); {
	case roll < 60:
		o := p.drawOp()
		p.log("stream %d: %v", s, o)
		p.issue(p.w, s, o)
		o.apply(p.model)
	case roll < 63:
		p.upload(s)
	case roll < 68:
		p.temporary(s)
	case roll < 74:
		p.captureLoop(s)
	case roll < 88:
		p.replayLoop(s)
	case roll < 93:
		p.download(s)
	case roll < 97:
		p.letGo()
		p.log("sync of stream %d", s)
		p.sync(p.w.streams[s])
	default:
		if p.holding == nil {
			p.log("gate on stream %d", s)
			p.holding, p.held = p.env.gate(p.w.streams[s]), 0
		}
	}
}

func (p *program) drawSpan(n int) span {
	return span{p.rng.IntN(randomBuffers), p.rng.IntN(bufferCells - n + 1), n}
}

// drawOp draws an operation whose source and destination lie apart.
func (p *program) drawOp() randomOp {
	for {
		n := 1 + p.rng.IntN(2)
		o := randomOp{kind: randomMixture[p.rng.IntN(len(randomMixture))], dst: p.drawSpan(n), src: p.drawSpan(n), value: p.rng.Uint64()}
		apart := o.dst.buffer != o.src.buffer || o.dst.first+n <= o.src.first || o.src.first+n <= o.dst.first
		if apart && (o.kind != randomHost || p.views[o.dst.buffer] != nil) {
			return o
		}
	}
}

func (p *program) rangeOf(s span) device.Range {
	return p.bufs[s.buffer].Slice(memory.Bytes(s.first*cellBytes), memory.Bytes(s.bytes()))
}

func (p *program) modelOf(s span) []byte {
	return p.model[s.buffer][s.first*cellBytes:][:s.bytes()]
}

func (p *program) upload(s int) {
	to, content := p.drawSpan(1+p.rng.IntN(3)), pattern(p.rng.IntN(256), bufferBytes)
	p.log("stream %d: upload to %v", s, to)
	p.w.use(s, nil, to.cells())
	p.w.streams[s].Upload(p.rangeOf(to), content[:to.bytes()])
	p.w.issued(s)
	copy(p.modelOf(to), content)
	clear(content)
}

// download reads in the middle of things and compares at once.
func (p *program) download(s int) {
	p.letGo()
	from := p.drawSpan(1 + p.rng.IntN(3))
	p.log("stream %d: download of %v", s, from)
	p.w.use(s, from.cells(), nil)
	p.want(p.w.streams[s], p.rangeOf(from), p.modelOf(from), "download in the middle")
}

// temporary passes bytes through a buffer that lives for two copies, on two
// streams, and is freed at once.
func (p *program) temporary(s int) {
	n := 1 + p.rng.IntN(2)
	from, to, t := p.drawSpan(n), p.drawSpan(n), p.rng.IntN(randomStreams)
	p.log("streams %d, %d: %v to %v through a temporary", s, t, from, to)
	b := p.alloc(bothKinds[p.rng.IntN(2)], memory.Bytes(from.bytes()))
	p.w.use(s, from.cells(), nil)
	p.w.streams[s].Copy(b.All(), p.rangeOf(from))
	p.w.after(t, s, p.w.clock[s][s])
	p.w.use(t, nil, to.cells())
	p.w.streams[t].Copy(p.rangeOf(to), b.All())
	p.w.streams[t].Free(b)
	p.w.issued(t)
	copy(p.modelOf(to), append([]byte(nil), p.modelOf(from)...))
}
