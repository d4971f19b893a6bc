// This file owns the tests of order within a stream, of asynchrony, and of host
// callbacks.

package devicetest

import (
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var orderCases = []testCase{
	{name: "WithinAStream", fn: testOrderWithinAStream},
	{name: "HostGoesOn", fn: testHostGoesOn},
	{name: "HostCallbacks", fn: testHostCallbacks},
	{name: "HostCallbackSeesMemory", fn: testHostCallbackSeesMemory},
	{name: "WaitsOfTheHost", fn: testWaitsOfTheHost},
	{name: "DeviceSync", fn: testDeviceSync},
	{name: "StreamCloseWaits", fn: testStreamCloseWaits},
	{name: "StreamNames", fn: testStreamNames},
}

// blink is long enough for work that is wrongly free to run to have run. A
// correct device passes without it; it only gives an incorrect one its chance.
const blink = 2 * time.Millisecond

// testOrderWithinAStream is a chain in which every link needs the one before.
func testOrderWithinAStream(e *env) {
	s := e.stream("s")
	const n = 4096
	x, y, h := e.allocWith(s, memory.Device, pattern(1, n)), e.allocWith(s, memory.Device, pattern(2, n)), e.allocWith(s, memory.Host, pattern(3, n))
	wx, wy, wh := pattern(1, n), pattern(2, n), pattern(3, n)
	for i := range 60 {
		s.Launch(mix(x.All(), y.All(), uint64(i)))
		mixBytes(wx, wy, uint64(i))
		s.Copy(h.Slice(8, n-8), x.Slice(0, n-8))
		copy(wh[8:], wx[:n-8])
		s.Fill(y.Slice(memory.Bytes(i), 9), byte(i))
		copy(wy[i:], filled(byte(i), 9))
		s.Copy(y.Slice(n/2, n/2), h.Slice(0, n/2))
		copy(wy[n/2:], wh[:n/2])
		s.Upload(h.Slice(0, 8), pattern(i, 8))
		copy(wh, pattern(i, 8))
	}
	e.want(s, x.All(), wx, "first of a chain")
	e.want(s, y.All(), wy, "second of a chain")
	e.want(s, h.All(), wh, "third of a chain")
}

// testHostGoesOn issues everything there is behind a gate: all of it returns,
// and none of it happens before the gate opens.
func testHostGoesOn(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x, y, h, dead := e.allocWith(s, memory.Device, pattern(1, 1024)), e.alloc(memory.Device, 1024), e.alloc(memory.Host, 1024), e.alloc(memory.Device, 1024)
	e.loadKernel(s)
	g0 := e.capture(s, func() { s.Launch(mix(x.All(), y.All(), 1)) })
	want := pattern(1, 1024)

	var ran atomic.Bool
	g := e.gate(s)
	s.Host(func() { ran.Store(true) })
	s.Copy(y.All(), x.All())
	s.Copy2D(rectOf(h, 0, 100, 200, 5), rectOf(x, 0, 100, 100, 5))
	s.Launch(mix(x.All(), y.All(), 3))
	s.Fill(y.All(), 3)
	s.Upload(h.Slice(1000, 24), pattern(9, 24))
	s.Replay(g0)
	s.Free(dead)
	e.order(s, other)
	other.Copy(h.Slice(0, 10), x.Slice(0, 10))
	time.Sleep(blink)
	if ran.Load() {
		e.Error("a callback ran while the work before it was held back")
	}
	g.release()
	e.sync(other)
	if !ran.Load() {
		e.Error("a callback did not run")
	}
	mixBytes(want, slices.Clone(want), 3)
	mixBytes(want, filled(3, 1024), 1)
	e.want(s, x.All(), want, "after the gate")
	e.want(s, h.Slice(0, 10), want[:10], "on the other stream")
	e.want(s, h.Slice(1000, 24), pattern(9, 24), "uploaded")
}

// testHostCallbacks: callbacks of a stream run once each and in order, and
// Sync waits for the last.
func testHostCallbacks(e *env) {
	s := e.stream("s")
	var mu sync.Mutex
	var got, want []int
	for i := range 100 {
		s.Host(func() {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, i)
		})
		want = append(want, i)
	}
	e.sync(s)
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(got, want) {
		e.Errorf("callbacks ran as %v", got)
	}
}

// testHostCallbackSeesMemory: a callback reads what the work before it wrote
// and writes what the work behind it reads.
func testHostCallbackSeesMemory(e *env) {
	s := e.stream("s")
	const n = 2048
	x, h := e.allocWith(s, memory.Device, pattern(1, n)), e.alloc(memory.Host, n)
	view := e.dev.View(h.All(), device.Write)
	want := pattern(1, n)
	for i := range 20 {
		s.Copy(h.All(), x.All())
		s.Host(func() {
			for j := range view {
				view[j] = view[j]*3 + byte(i)
			}
		}, device.Writes(h.All()))
		s.Copy(x.All(), h.All())
		for j := range want {
			want[j] = want[j]*3 + byte(i)
		}
	}
	e.want(s, x.All(), want, "through callbacks")
}

// testWaitsOfTheHost: every way to wait for a stream does wait, here for work
// behind a gate that opens a moment later.
func testWaitsOfTheHost(e *env) {
	s, ev := e.stream("s"), e.event(0)
	h := e.allocWith(s, memory.Host, filled(0, 4096))
	got := make([]byte, 4096)
	for i, wait := range []func() error{
		s.Sync,
		ev.Sync,
		func() error { return s.Download(got, h.All()) },
		s.Close,
	} {
		g := e.gate(s)
		s.Fill(h.All(), byte(i+1))
		s.Record(ev)
		time.AfterFunc(blink, g.unlock)
		e.within("a wait of the host", wait)
		if diff := firstDifference(e.dev.View(h.All(), device.Read), filled(byte(i+1), 4096)); diff != "" {
			e.Errorf("wait %d of the host did not wait: %s", i, diff)
		}
	}
	if diff := firstDifference(got, filled(3, 4096)); diff != "" {
		e.Errorf("a download did not wait: %s", diff)
	}
	e.forget(s)
}

// testDeviceSync waits for all streams.
func testDeviceSync(e *env) {
	a, b, c := e.threeStreams()
	x := e.allocWith(a, memory.Device, pattern(1, 4096))
	var hs []*device.Buffer
	for i, s := range []device.Stream{a, b, c} {
		h := e.alloc(memory.Host, 4096)
		hs = append(hs, h)
		g := e.gate(s)
		s.Copy(h.All(), x.All())
		s.Fill(h.Slice(0, 1), byte(i))
		time.AfterFunc(blink, g.unlock)
	}
	e.within("Device.Sync", e.dev.Sync)
	for i, h := range hs {
		want := pattern(1, 4096)
		want[0] = byte(i)
		if diff := firstDifference(e.dev.View(h.All(), device.Read), want); diff != "" {
			e.Errorf("after Device.Sync, stream %d is not done: %s", i, diff)
		}
	}
}

// testStreamCloseWaits: closing a stream loses no work.
func testStreamCloseWaits(e *env) {
	s, other := e.stream("s"), e.stream("other")
	x := e.allocWith(s, memory.Device, pattern(1, 4096))
	want := pattern(1, 4096)
	for i := range 50 {
		s.Launch(mix(x.Slice(0, 2048), x.Slice(2048, 2048), uint64(i)))
		mixBytes(want[:2048], want[2048:], uint64(i))
	}
	e.closeStream(s)
	e.want(other, x.All(), want, "after its stream was closed")
}

func testStreamNames(e *env) {
	for _, name := range []string{"compute", "", "stash out"} {
		if got := e.stream(name).Name(); got != name {
			e.Errorf("stream %q calls itself %q", name, got)
		}
	}
}
