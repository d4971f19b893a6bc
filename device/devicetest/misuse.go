// This file owns the tests of mistakes that a device must catch when they are
// made, because later they would corrupt memory or accounts: graphs over freed
// memory, memory of another device, shapes that cannot be launched, things
// closed twice.

package devicetest

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var misuseCases = []testCase{
	{name: "ReplayOverFreedMemory", fn: testReplayOverFreedMemory},
	{name: "ReplayAfterUpdateAway", fn: testReplayAfterUpdateAway},
	{name: "FreesMemoryOfAnotherDevice", fn: testFreesMemoryOfAnotherDevice},
	{name: "BadShapes", fn: testBadShapes},
	{name: "StreamClosedTwice", fn: testStreamClosedTwice},
}

// testReplayOverFreedMemory: whatever the work that declared it, and on any
// stream of the capture, freed memory keeps a graph from being replayed.
func testReplayOverFreedMemory(e *env) {
	s, side, _ := e.threeStreams()
	kept := e.allocWith(s, memory.Device, pattern(1, 1024))
	rect := func(b *device.Buffer) device.Rect {
		return device.Rect{Range: b.Slice(0, 8), Pitch: 16, Rows: 2}
	}
	uses := []func(b *device.Buffer){
		func(b *device.Buffer) { side.Fill(b.All(), 1) },
		func(b *device.Buffer) { side.Copy(kept.All(), b.All()) },
		func(b *device.Buffer) { s.Copy2D(rect(b), rect(kept)) },
		func(b *device.Buffer) { side.Launch(mix(kept.All(), b.All(), 1)) },
		func(b *device.Buffer) { s.Launch(slotted(mix(b.All(), kept.All(), 1), 5)) },
		func(b *device.Buffer) { s.Host(func() {}, device.Reads(b.All())) },
		func(b *device.Buffer) { side.Copy(b.All(), kept.All()) },
		func(b *device.Buffer) { s.Copy2D(rect(kept), rect(b)) },
		func(b *device.Buffer) { side.Host(func() {}, device.Writes(kept.All()), device.Reads(b.All())) },
	}
	for i, use := range uses {
		b := e.allocWith(s, bothKinds[i%2], pattern(2, 1024))
		g := e.capture(s, func() {
			e.order(s, side)
			use(b)
			e.order(side, s)
		})
		s.Replay(g)
		s.Free(b)
		if !e.replayRefused(fmt.Sprint("use ", i), s, g) {
			return
		}
	}
	s.Fill(kept.All(), 3)
	e.want(s, kept.All(), filled(3, 1024), "after refused replays")
}

// replayRefused checks that a replay panics. A device that checks for mistakes may report
// it instead, which ends the device and the test; replayRefused then returns false.
func (e *env) replayRefused(what string, s device.Stream, g device.Graph) bool {
	e.Helper()
	const words = "use after free"
	text := func() (text string) {
		defer func() {
			if p := recover(); p != nil {
				text = fmt.Sprint(p)
			}
		}()
		s.Replay(g)
		return ""
	}()
	if text != "" {
		if !strings.Contains(text, words) {
			e.Errorf("%s: a replay over freed memory panics with %q; want %q in it", what, text, words)
		}
		return true
	}
	done := make(chan error, 1)
	e.within("Sync after a bad replay", func() error { done <- s.Sync(); return nil })
	if err := <-done; err == nil || !strings.Contains(err.Error(), words) {
		e.Errorf("%s: a replay over freed memory neither panics nor is reported; Sync gives %v", what, err)
	}
	e.closed = true
	e.within("Device.Close", func() error { _ = e.dev.Close(); return nil })
	return false
}

// testReplayAfterUpdateAway: memory that an update took out of a graph may be
// freed, unless other work of the graph declares it as well.
func testReplayAfterUpdateAway(e *env) {
	s := e.stream("s")
	old, twice, out := e.allocWith(s, memory.Device, pattern(1, 512)), e.allocWith(s, memory.Device, pattern(2, 512)), e.allocWith(s, memory.Device, pattern(3, 512))
	g := e.capture(s, func() {
		s.Launch(slotted(mix(out.All(), old.All(), 0), 1))
		s.Launch(slotted(mix(out.All(), twice.All(), 0), 2))
		s.Copy(out.Slice(0, 8), twice.Slice(0, 8))
	})
	fresh := e.allocWith(s, memory.Device, pattern(4, 512))
	e.ok(g.Update(1, mix(out.All(), fresh.All(), 7)))
	e.ok(g.Update(2, mix(out.All(), fresh.All(), 8)))
	s.Free(old)
	s.Replay(g)
	want := pattern(3, 512)
	mixBytes(want, pattern(4, 512), 7)
	mixBytes(want, pattern(4, 512), 8)
	copy(want, pattern(2, 512)[:8])
	e.want(s, out.All(), want, "replayed after an update and a free")
	s.Free(twice)
	e.replayRefused("memory that a copy still declares", s, g)
}

// testFreesMemoryOfAnotherDevice: a stream refuses to free memory of another device, and
// both ledgers stay as they are.
func testFreesMemoryOfAnotherDevice(e *env) {
	other := e.another()
	s := e.stream("s")
	theirs, err := other.NewStream("theirs")
	e.ok(err)
	for _, k := range bothKinds {
		b, err := other.Alloc(k, 4096, "theirs")
		e.ok(err)
		e.panics("a free of another device's "+k.String()+" memory", "", func() { s.Free(b) })
		e.sync(s)
		if !b.Live() {
			e.Error("a refused free ended the buffer")
		}
		if u := other.Memory().Kind[k]; u.Current != 4096 || u.Pending != 0 {
			e.Errorf("after a refused free the owner's %v memory is %+v", k, u)
		}
		e.wantKind("after a refused free", k, 0, 0, 0)
		theirs.Free(b)
	}
	e.within("Sync of the other device", other.Sync)
	e.within("Close of the other device's stream", theirs.Close)
	e.within("Close of the other device", other.Close)
}

// testBadShapes: a launch that no GPU could run panics.
func testBadShapes(e *env) {
	s := e.stream("s")
	x, y := e.allocWith(s, memory.Device, pattern(1, 512)), e.allocWith(s, memory.Device, pattern(2, 512))
	for what, change := range map[string]func(*device.Launch){
		"no blocks":                func(l *device.Launch) { l.Grid[0] = 0 },
		"no blocks in z":           func(l *device.Launch) { l.Grid[2] = 0 },
		"no threads":               func(l *device.Launch) { l.Block[0] = 0 },
		"more than 1024 threads":   func(l *device.Launch) { l.Block = [3]uint32{32, 33, 1} },
		"threads that wrap round":  func(l *device.Launch) { l.Block = [3]uint32{1 << 16, 1 << 16, 1} },
		"2^31 blocks":              func(l *device.Launch) { l.Grid[0] = 1 << 31 },
		"65536 blocks in y":        func(l *device.Launch) { l.Grid[1] = 1 << 16 },
		"no threads in the second": func(l *device.Launch) { l.Block[1] = 0 },
	} {
		l := mix(x.All(), y.All(), 1)
		change(&l)
		e.panics("a launch with "+what, "", func() { s.Launch(l) })
	}
	e.want(s, x.All(), pattern(1, 512), "after refused launches")
}

func testStreamClosedTwice(e *env) {
	s := e.stream("s")
	e.closeStream(s)
	e.panics("a second Close of a stream", "", func() { _ = s.Close() })
}
