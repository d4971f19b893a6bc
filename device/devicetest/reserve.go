// This file owns the tests of memory that is reserved and grows in place.

package devicetest

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var reserveCases = []testCase{
	{name: "GrowsInPlace", fn: testGrowsInPlace},
	{name: "GrowsUnderAGraph", fn: testGrowsUnderAGraph},
	{name: "GrowsBesideWork", fn: testGrowsBesideWork},
	{name: "MisusePanics", fn: testGrowMisuse},
}

// reserveLimit spans several of a GPU's 2 MiB pages, and grown sizes lie across
// their borders.
const reserveLimit = 16 * memory.MiB

// testGrowsInPlace: the address stays, the content stays, new bytes are usable,
// and only bytes in use are counted.
func testGrowsInPlace(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b := e.reserve(k, reserveLimit, "pool")
		addr := b.Addr()
		if b.Size() != 0 || b.Max() != reserveLimit || b.Kind() != k || addr%uintptr(device.Align) != 0 {
			e.Errorf("a reservation is %v with max %v", b, b.Max())
		}
		e.wantKind("reserved", k, 0, 0, 0)
		var content []byte
		for i, n := range []memory.Bytes{1, 5000, 5000, 300, 2*memory.MiB + 1, 4 * memory.MiB, reserveLimit} {
			e.ok(e.dev.Grow(b, n))
			if want := max(n, memory.Bytes(len(content))); b.Size() != want || b.Addr() != addr {
				e.Fatalf("grown to %v from %d bytes, it is %v", n, len(content), b)
			}
			old := memory.Bytes(len(content))
			e.want(s, b.Slice(0, old), content, "content before growing to %v", n)
			fresh := pattern(i, int(b.Size()-old))
			s.Upload(b.Slice(old, b.Size()-old), fresh)
			content = append(content, fresh...)
			e.wantKind("grown", k, b.Size(), 0, b.Size())
			e.wantOwner("grown", "pool", k, b.Size(), b.Size())
		}
		e.want(s, b.All(), content, "all of it")
		s.Free(b)
		e.sync(s)
		e.wantKind("freed", k, 0, 0, reserveLimit)
	}
}

// testGrowsUnderAGraph: a graph captured before the growth stays valid, and one
// captured afterwards reaches the new bytes. SPEC S1.6.
func testGrowsUnderAGraph(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b, src := e.reserve(k, reserveLimit, "pool"), e.allocWith(s, memory.Device, pattern(5, 4096))
		e.ok(e.dev.Grow(b, 4096))
		s.Fill(b.All(), 0)
		g := e.capture(s, func() {
			s.Copy(b.Slice(0, 1000), src.Slice(0, 1000))
			s.Launch(mix(b.Slice(1024, 1024), src.Slice(0, 1024), 3))
			s.Fill(b.Slice(3000, 96), 9)
		})
		want := make([]byte, 4096)
		replay := func() {
			copy(want, pattern(5, 4096)[:1000])
			mixBytes(want[1024:2048], pattern(5, 4096), 3)
			copy(want[3000:], filled(9, 96))
			s.Replay(g)
		}
		replay()
		e.ok(e.dev.Grow(b, 5*memory.MiB))
		replay()
		e.want(s, b.Slice(0, 4096), want, "replayed before and after growing")
		far := e.capture(s, func() {
			s.Copy(b.Slice(5*memory.MiB-4096, 4096), src.All())
			s.Copy(b.Slice(2*memory.MiB, 4096), b.Slice(0, 4096))
		})
		e.ok(e.dev.Grow(b, 9*memory.MiB))
		replay()
		s.Replay(far)
		e.want(s, b.Slice(0, 4096), want, "replayed after growing twice")
		e.want(s, b.Slice(2*memory.MiB, 4096), want, "copied by the later graph")
		e.want(s, b.Slice(5*memory.MiB-4096, 4096), pattern(5, 4096), "at the end of the first growth")
	}
}

// testGrowsBesideWork grows while work on the old part is in flight.
func testGrowsBesideWork(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b, src := e.reserve(k, reserveLimit, "pool"), e.allocWith(s, memory.Device, pattern(2, 8000))
		e.ok(e.dev.Grow(b, 8000))
		s.Fill(b.All(), 0)
		want := make([]byte, 8000)
		for i := range 20 {
			for range 10 {
				s.Launch(mix(b.Slice(0, 8000), src.All(), uint64(i)))
				mixBytes(want, pattern(2, 8000), uint64(i))
			}
			e.ok(e.dev.Grow(b, b.Size()+memory.Bytes(i)*50_000))
		}
		e.want(s, b.Slice(0, 8000), want, "work while growing")
	}
}

func testGrowMisuse(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b, fixed := e.reserve(k, 1000, "pool"), e.alloc(k, 100)
		e.panics("growing beyond the reservation", "", func() { _ = e.dev.Grow(b, 1001) })
		e.panics("growing what was allocated", "", func() { _ = e.dev.Grow(fixed, 101) })
		e.ok(e.dev.Grow(fixed, 100))
		e.ok(e.dev.Grow(b, 500))
		e.panics("use beyond the present size", "outside of", func() { s.Fill(b.Slice(0, 501), 1) })
		s.Free(b)
		e.panics("growing what was freed", "", func() { _ = e.dev.Grow(b, 600) })
	}
}

// testGrowOutOfMemory: growth that does not fit is refused and changes nothing.
func testGrowOutOfMemory(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b := e.reserve(k, 4*limit[k], "pool")
		e.ok(e.dev.Grow(b, 1000))
		s.Fill(b.All(), 0x11)
		err := e.dev.Grow(b, limit[k]+1)
		// The error speaks of what the growth adds to the 1000 bytes there are.
		e.outOfMemory(err, k, "pool", limit[k]+1-1000, limit[k]-1000)
		if b.Size() != 1000 || !b.Live() {
			e.Errorf("a refused growth left %v", b)
		}
		e.wantKind("refused", k, 1000, 0, 1000)
		e.want(s, b.All(), filled(0x11, 1000), "after a refused growth")
		e.ok(e.dev.Grow(b, limit[k]))
		s.Fill(b.All(), 0x22)
		e.want(s, b.All(), filled(0x22, int(limit[k])), "grown to the last byte")
		s.Free(b)
		e.sync(s)
	}
}
