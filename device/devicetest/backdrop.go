// This file owns the tests of backdrops: what lies behind a reserved buffer reads as
// zeros, however the buffer grows.

package devicetest

import (
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var backdropCases = []testCase{
	{name: "ReadsZeros", fn: testBackdropReadsZeros},
	{name: "GrowsInFront", fn: testBackdropGrows},
	{name: "UnderAGraph", fn: testBackdropUnderAGraph},
	{name: "AgainAndAgain", fn: testBackdropAgain},
	{name: "MisusePanics", fn: testBackdropMisuse},
}

// A GPU maps the rest of a buffer in pieces of 8 MiB where these fit, and of 2 MiB
// elsewhere: two of the first kind fit into one of these limits, one into the other,
// and neither ends at a page.
const (
	twoPieces = 66*memory.MiB + 1000
	onePiece  = 38*memory.MiB + 5
)

// backed returns a buffer with a backdrop, and a handle to all that can be read of it.
func (e *env) backed(limit, size memory.Bytes) (b, whole *device.Buffer) {
	e.Helper()
	b = e.reserve(memory.Device, limit, "pool")
	e.ok(e.dev.Grow(b, size))
	e.ok(e.dev.Backdrop(b))
	return b, e.all(b)
}

func (e *env) all(b *device.Buffer) *device.Buffer {
	whole := e.dev.Borrow(b.Kind(), b.Addr(), b.Max(), "whole")
	e.buffers = append(e.buffers, whole)
	return whole
}

// testBackdropReadsZeros: by downloads and copies, with and without memory in front,
// also after the freeze; the ledger does not notice.
func testBackdropReadsZeros(e *env) {
	s := e.stream("s")
	front := pattern(3, 5000)
	empty, full := e.reserve(memory.Device, twoPieces, "empty"), e.reserve(memory.Device, onePiece, "full")
	dst := e.alloc(memory.Device, onePiece)
	e.ok(e.dev.Grow(full, 5000))
	s.Upload(full.All(), front)
	s.Fill(dst.All(), 0xAA)
	e.sync(s)
	e.dev.Freeze()
	before := e.dev.Memory()
	for _, b := range []*device.Buffer{empty, full, full} { // a second backdrop is none
		e.ok(e.dev.Backdrop(b))
	}
	if after := e.dev.Memory(); after.Kind != before.Kind || !slices.Equal(after.Owners, before.Owners) {
		e.Errorf("backdrops changed the ledger from %+v to %+v", before, after)
	}
	if empty.Size() != 0 || full.Size() != 5000 {
		e.Errorf("backdrops changed sizes: %v, %v", empty, full)
	}
	e.want(s, e.all(empty).All(), make([]byte, twoPieces), "behind nothing")
	s.Copy(dst.All(), e.all(full).All())
	e.want(s, dst.All(), append(front, make([]byte, onePiece-5000)...), "copied from memory and what is behind")
	e.panics("use of the backdrop through the buffer", "outside of", func() { s.Fill(full.Slice(0, 5001), 1) })
}

// testBackdropGrows: content stays, new bytes are zero, and so is the rest, whether
// the border stays in its page or moves by many.
func testBackdropGrows(e *env) {
	s := e.stream("s")
	content := make([]byte, onePiece)
	b, whole := e.backed(onePiece, 0)
	for i, n := range []memory.Bytes{1, 5000, 2*memory.MiB - 1, 2*memory.MiB + 1, 7 * memory.MiB, 32*memory.MiB + 3, 37 * memory.MiB, onePiece} {
		old := b.Size()
		e.ok(e.dev.Grow(b, n))
		if b.Size() != n || b.Addr() != whole.Addr() {
			e.Fatalf("grown to %d bytes, it is %v", n, b)
		}
		e.wantKind("grown", memory.Device, n, 0, n)
		e.want(s, whole.All(), content, "grown to %d bytes", n)
		last := min(n-old, 5000) // up to the border, over that of the page
		s.Upload(b.Slice(n-last, last), pattern(i, int(last)))
		copy(content[n-last:], pattern(i, int(last)))
		e.sync(s)
	}
	e.want(s, whole.All(), content, "grown to the end")
}

// testBackdropUnderAGraph: a kernel captured before the growth reads memory and zeros,
// and after it the new memory at the same addresses.
func testBackdropUnderAGraph(e *env) {
	const limit = 6 * memory.MiB
	s := e.stream("s")
	b, whole := e.backed(limit, 4096)
	dst := e.alloc(memory.Device, limit)
	s.Fill(dst.All(), 0)
	s.Upload(b.All(), pattern(1, 4096))
	g := e.capture(s, func() {
		s.Launch(mix(dst.All(), whole.All(), 1))
		s.Copy(b.Slice(0, 8), dst.Slice(8, 8))
	})
	src, want := make([]byte, limit), make([]byte, limit)
	copy(src, pattern(1, 4096))
	replay := func(when string) {
		mixBytes(want, src, 1)
		copy(src, want[8:16])
		s.Replay(g)
		e.want(s, dst.All(), want, "%s", when)
	}
	replay("before growing")
	for _, n := range []memory.Bytes{3 * memory.MiB, limit} {
		old := b.Size()
		e.ok(e.dev.Grow(b, n))
		replay("with new memory")
		s.Upload(b.Slice(n-8, 8), pattern(int(n), 8))
		copy(src[n-8:], pattern(int(n), 8))
		replay("with new content")
		e.want(s, b.Slice(old, 8), src[old:old+8], "at the old border")
	}
}

// testBackdropAgain: what one buffer leaves behind does not show in the next one.
func testBackdropAgain(e *env) {
	s := e.stream("s")
	for i := range 5 {
		b := e.reserve(memory.Device, 5*memory.MiB, "pool")
		e.ok(e.dev.Grow(b, 3000+memory.Bytes(i)))
		s.Fill(b.All(), 0x77)
		e.sync(s)
		e.ok(e.dev.Backdrop(b))
		e.ok(e.dev.Grow(b, 2*memory.MiB+100))
		whole := e.all(b)
		e.want(s, whole.All(), append(filled(0x77, 3000+i), make([]byte, 5*memory.MiB-3000-memory.Bytes(i))...), "buffer %d", i)
		s.Fill(b.All(), 0x66)
		s.Free(whole)
		s.Free(b)
		e.sync(s)
	}
}

func testBackdropMisuse(e *env) {
	s := e.stream("s")
	b := e.reserve(memory.Device, 1000, "pool")
	for what, b := range map[string]*device.Buffer{
		"host memory": e.reserve(memory.Host, 1000, "pool"), "what was allocated": e.alloc(memory.Device, 100), "an import": e.all(b),
	} {
		e.panics("a backdrop behind "+what, "backdrop", func() { _ = e.dev.Backdrop(b) })
	}
	s.Free(b)
	e.panics("a backdrop behind what was freed", "", func() { _ = e.dev.Backdrop(b) })
}

// testBackdropRefusedGrowth: growth that does not fit leaves content and backdrop.
func testBackdropRefusedGrowth(e *env) {
	s := e.stream("s")
	most := limit[memory.Device]
	b, whole := e.backed(4*most, 1000)
	s.Fill(b.All(), 0x11)
	e.sync(s)
	e.outOfMemory(e.dev.Grow(b, most+1), memory.Device, "pool", most+1-1000, most-1000)
	content := append(filled(0x11, 1000), make([]byte, 4*most-1000)...)
	e.want(s, whole.All(), content, "after a refused growth")
	e.ok(e.dev.Grow(b, most))
	e.want(s, whole.All(), content, "after one that fits")
}
