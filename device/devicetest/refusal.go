// This file owns the tests of what cannot be captured: EndCapture returns a typed error
// that says why, and all streams can be used afterwards.

package devicetest

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// refusal is one way to spoil a capture on stream a.
type refusal struct {
	name string
	fn   func(e *env, r *refusalStage)
}

// refusalStage is what a refusal works with.
type refusalStage struct {
	a, b    device.Stream
	x       *device.Buffer
	outside device.Event // recorded before the capture
	graph   device.Graph
}

var refusals = []refusal{
	{"Sync", func(e *env, r *refusalStage) { e.captureError("Sync during capture", r.a.Sync()) }},
	{"Download", func(e *env, r *refusalStage) {
		e.captureError("Download during capture", r.a.Download(make([]byte, 8), r.x.Slice(0, 8)))
	}},
	{"Upload", func(_ *env, r *refusalStage) { r.a.Upload(r.x.Slice(0, 8), make([]byte, 8)) }},
	{"Free", func(_ *env, r *refusalStage) { r.a.Free(r.x) }},
	{"Replay", func(_ *env, r *refusalStage) { r.a.Replay(r.graph) }},
	{"WaitForOutside", func(_ *env, r *refusalStage) { r.a.Wait(r.outside) }},
	{"WaitForAnotherCapture", func(e *env, r *refusalStage) {
		ev := e.event(0)
		r.b.BeginCapture()
		r.b.Fill(r.x.Slice(0, 8), 1)
		r.b.Record(ev)
		r.a.Wait(ev)
		// Whether the other capture is spoilt as well is the device's choice.
		if g, err := r.b.EndCapture(); err == nil {
			e.graphs = append(e.graphs, g)
		}
	}},
	{"WaitForEarlierCapture", func(e *env, r *refusalStage) {
		ev := e.event(0)
		r.b.BeginCapture()
		r.b.Fill(r.x.Slice(0, 8), 1)
		r.b.Record(ev)
		e.end(r.b)
		r.a.Wait(ev)
	}},
	{"ForkNotJoined", func(e *env, r *refusalStage) {
		e.order(r.a, r.b)
		r.b.Fill(r.x.Slice(0, 8), 1)
	}},
	{"EmptyForkNotJoined", func(e *env, r *refusalStage) { e.order(r.a, r.b) }},
	{"WorkAfterTheJoin", func(e *env, r *refusalStage) {
		e.order(r.a, r.b)
		r.b.Fill(r.x.Slice(0, 8), 1)
		e.order(r.b, r.a)
		r.b.Fill(r.x.Slice(0, 8), 2)
	}},
	{"SyncOfAForkedStream", func(e *env, r *refusalStage) {
		e.order(r.a, r.b)
		e.captureError("Sync of a forked stream", r.b.Sync())
		e.order(r.b, r.a)
	}},
	{"FreeOnAForkedStream", func(e *env, r *refusalStage) {
		e.order(r.a, r.b)
		r.b.Free(r.x)
		e.order(r.b, r.a)
	}},
}

var refusalCases = refusalTests()

func refusalTests() (cases []testCase) {
	for _, r := range refusals {
		cases = append(cases, testCase{name: r.name, fn: func(e *env) { testRefusal(e, r) }})
	}
	return cases
}

func testRefusal(e *env, r refusal) {
	a, b, _ := e.threeStreams()
	st := &refusalStage{a: a, b: b, x: e.allocWith(a, memory.Device, filled(1, 4096)), outside: e.event(0)}
	st.graph = e.capture(a, func() { a.Fill(st.x.Slice(0, 8), 9) })
	b.Record(st.outside)
	e.sync(b)

	a.BeginCapture()
	a.Fill(st.x.Slice(100, 8), 2)
	r.fn(e, st)
	a.Fill(st.x.Slice(200, 8), 3)
	g, err := a.EndCapture()
	e.captureError("EndCapture", err)
	if g != nil {
		e.Errorf("a graph came with the error: %v", g)
	}

	// Nothing of it happened, the buffer lives, and both streams work, alone
	// and in a capture.
	if !st.x.Live() {
		e.Fatal("a refused free ended the buffer")
	}
	e.sync(a, b)
	e.want(a, st.x.All(), filled(1, 4096), "after a refused capture")
	again := e.capture(a, func() {
		e.order(a, b)
		b.Fill(st.x.Slice(0, 2048), 4)
		e.order(b, a)
		a.Fill(st.x.Slice(1024, 2048), 5)
	})
	b.Replay(again)
	want := filled(1, 4096)
	copy(want, filled(4, 2048))
	copy(want[1024:], filled(5, 2048))
	e.want(b, st.x.All(), want, "a capture after the refused one")
	b.Free(st.x)
	e.sync(b)
	e.wantKind("in the end", memory.Device, 0, 0, 4096)
}
