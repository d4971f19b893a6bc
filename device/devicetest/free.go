// This file owns the tests of freeing: in stream order, once, and never under
// work that still needs the memory.

package devicetest

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var freeCases = []testCase{
	{name: "InStreamOrder", fn: testFreeInStreamOrder},
	{name: "NotReusedWhilePending", fn: testNotReusedWhilePending},
	{name: "OnAnotherStream", fn: testFreeOnAnotherStream},
	{name: "AgainAndAgain", fn: testFreeAgainAndAgain},
	{name: "DoubleFreePanics", fn: testDoubleFree},
	{name: "UseAfterFreePanics", fn: testUseAfterFree},
}

// testFreeInStreamOrder: work issued before a free still has the memory; the
// handle is dead at once; the bytes are pending until the stream gets there.
func testFreeInStreamOrder(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		src, out := e.allocWith(s, k, pattern(4, 5000)), e.alloc(memory.Device, 5000)
		base := e.dev.Memory().Kind[k].Current
		g := e.gate(s)
		s.Copy(out.All(), src.All())
		s.Free(src)
		if src.Live() {
			e.Error("a freed buffer is live")
		}
		if u := e.dev.Memory().Kind[k]; u.Current != base || u.Pending != 5000 {
			e.Errorf("freed behind a gate: %+v, want all %v in use and 5000 bytes pending", u, base)
		}
		g.release()
		e.want(s, out.All(), pattern(4, 5000), "copied from a buffer freed behind the copy")
		if u := e.dev.Memory().Kind[k]; u.Current != base-5000 || u.Pending != 0 {
			e.Errorf("after the gate: %+v, want %v in use and nothing pending", u, base-5000)
		}
	}
}

// testNotReusedWhilePending: new buffers keep away from memory that work in
// flight touches. Waiting in Alloc would be no way out: the gate holds.
func testNotReusedWhilePending(e *env) {
	s, other := e.stream("s"), e.stream("other")
	for _, k := range bothKinds {
		src, out := e.allocWith(s, k, pattern(6, 3000)), e.alloc(memory.Device, 3000)
		g := e.gate(s)
		s.Copy(out.All(), src.All())
		s.Free(src)
		for i := range 8 {
			b := e.alloc(k, 3000)
			if b.Addr() < src.Addr()+3000 && src.Addr() < b.Addr()+3000 {
				e.Errorf("%v reuses %v, which is still pending", b, src)
			}
			other.Fill(b.All(), byte(i))
		}
		g.release()
		e.sync(other)
		e.want(s, out.All(), pattern(6, 3000), "copied from a buffer freed behind the copy")
	}
}

// testFreeOnAnotherStream: the stream that frees need not be the one that used
// the buffer, as long as an event orders them.
func testFreeOnAnotherStream(e *env) {
	a, b, _ := e.threeStreams()
	for _, k := range bothKinds {
		src, out := e.allocWith(a, k, pattern(7, 3000)), e.alloc(memory.Host, 3000)
		g := e.gate(a)
		a.Copy(out.All(), src.All())
		e.order(a, b)
		b.Free(src)
		if u := e.dev.Memory().Kind[k]; u.Pending != 3000 {
			e.Errorf("freed behind another stream's gate: %+v, want 3000 bytes pending", u)
		}
		g.release()
		e.sync(b)
		if u := e.dev.Memory().Kind[k]; u.Pending != 0 {
			e.Errorf("the freeing stream is done, but %v is pending", u.Pending)
		}
		e.want(a, out.All(), pattern(7, 3000), "copied before another stream freed it")
	}
}

// testFreeAgainAndAgain allocates and frees more in all than the device holds at once.
func testFreeAgainAndAgain(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		sum := e.alloc(memory.Device, 512)
		s.Fill(sum.All(), 0)
		want := make([]byte, 512)
		for i := range 150 {
			b := e.alloc(k, 512+memory.Bytes(i%7)*300)
			s.Fill(b.All(), byte(i))
			s.Launch(mix(sum.All(), b.Slice(0, 512), 1))
			mixBytes(want, filled(byte(i), 512), 1)
			s.Free(b)
			if i%40 == 39 {
				e.sync(s)
			}
		}
		e.want(s, sum.All(), want, "sum over buffers freed at once")
	}
	e.sync(s)
	e.wantOwner("in the end", "devicetest", memory.Device, 1024, e.dev.Memory().Kind[memory.Device].Peak)
	e.wantKind("in the end", memory.Host, 0, 0, e.dev.Memory().Kind[memory.Host].Peak)
}

func testDoubleFree(e *env) {
	s, other := e.stream("s"), e.stream("other")
	for _, k := range bothKinds {
		b := e.alloc(k, 100)
		s.Free(b)
		e.panics("a second free", "double free", func() { s.Free(b) })
		e.panics("a second free on another stream", "double free", func() { other.Free(b) })
		e.sync(s)
		e.panics("a second free after the first is done", "double free", func() { s.Free(b) })
		e.sync(s)
		e.wantKind("after refused frees", k, 0, 0, 100)
	}
}

// testUseAfterFree: every way to use a dead buffer panics when it is issued.
func testUseAfterFree(e *env) {
	s := e.stream("s")
	live := e.alloc(memory.Host, 64)
	for _, k := range bothKinds {
		b := e.alloc(k, 64)
		r := b.All()
		prepared := mix(live.All(), r, 0)
		s.Free(b)
		rect := device.Rect{Range: device.Range{Buf: b, Len: 8}, Pitch: 16, Rows: 2}
		liveRect := device.Rect{Range: live.Slice(0, 8), Pitch: 16, Rows: 2}
		for what, fn := range map[string]func(){
			"Slice":               func() { b.Slice(0, 1) },
			"Copy to it":          func() { s.Copy(r, live.All()) },
			"Copy from it":        func() { s.Copy(live.All(), r) },
			"Copy2D to it":        func() { s.Copy2D(rect, liveRect) },
			"Copy2D from it":      func() { s.Copy2D(liveRect, rect) },
			"Fill":                func() { s.Fill(r, 0) },
			"Launch":              func() { s.Launch(prepared) },
			"Host callback":       func() { s.Host(func() {}, device.Reads(r)) },
			"Upload":              func() { s.Upload(r, make([]byte, 64)) },
			"Download":            func() { _ = s.Download(make([]byte, 64), r) },
			"Fill during capture": func() { s.BeginCapture(); defer e.end(s); s.Fill(r, 0) },
		} {
			e.panics(what+" of freed "+k.String()+" memory", "use after free", fn)
		}
	}
	e.sync(s)
}
