// This file owns the tests of buffers that a device may keep in several pieces: buffers
// that grew in steps, buffers that lie where a pool was extended, and borrowed handles to
// them. Issued and replayed work must not depend on it.

package devicetest

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var piecesCases = []testCase{
	{name: "Fill", fn: testFillPieces},
	{name: "Copy", fn: testCopyPieces},
	{name: "Rectangles", fn: testCopy2DPieces},
}

// pieceSize is several of a GPU's 2 MiB pages, and two buffers of it do not fit
// into 16 MiB, by which pools of memory like to grow.
const pieceSize = 9*memory.MiB + 5

// grown returns a buffer that grew in steps; borders between its pieces lie at
// multiples of 2 MiB.
func (e *env) grown(k memory.Kind) *device.Buffer {
	e.Helper()
	b := e.reserve(k, reserveLimit, "pool")
	for _, n := range []memory.Bytes{1, 2*memory.MiB + 1, 5 * memory.MiB, pieceSize} {
		e.ok(e.dev.Grow(b, n))
	}
	return b
}

// straddling returns the second of two buffers behind a small one.
func (e *env) straddling(k memory.Kind) *device.Buffer {
	e.Helper()
	e.alloc(k, 300)
	e.alloc(k, pieceSize)
	return e.alloc(k, pieceSize)
}

// borrowed returns a borrowed handle to a buffer that grew.
func (e *env) borrowed(k memory.Kind) *device.Buffer {
	e.Helper()
	b := e.dev.Borrow(k, e.grown(k).Addr()+1003, pieceSize-2000, "theirs")
	e.buffers = append(e.buffers, b)
	return b
}

// inPieces lists the ways to get such a buffer.
var inPieces = map[string]func(*env, memory.Kind) *device.Buffer{
	"allocated": (*env).straddling,
	"grown":     (*env).grown,
	"borrowed":  (*env).borrowed,
}

// freeAll frees all buffers and waits, so that the next come to lie in the same
// places.
func (e *env) freeAll(s device.Stream) {
	e.Helper()
	for _, b := range e.buffers {
		s.Free(b)
	}
	e.buffers = nil
	e.sync(s)
}

// twice calls fn to issue work, and then to capture it for a replay. A call
// returns how many pieces of work it issued; a graph has as many nodes.
func (e *env) twice(s device.Stream, fn func(round int) (works int)) {
	e.Helper()
	fn(0)
	works := 0
	g := e.capture(s, func() { works = fn(1) })
	if n := g.Nodes(); n != works {
		e.Errorf("%d pieces of work make %d nodes", works, n)
	}
	s.Replay(g)
}

func testFillPieces(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		for how, get := range inPieces {
			b := get(e, k)
			want := make([]byte, b.Size())
			fill := func(off, n memory.Bytes, value byte) {
				s.Fill(b.Slice(off, n), value)
				copy(want[off:], filled(value, int(n)))
			}
			e.twice(s, func(round int) (works int) {
				fill(0, b.Size(), byte(round+1))
				fill(memory.MiB+1, 4*memory.MiB+1, byte(round+99))
				// Across every border of the grown buffer, and up to it.
				for at := memory.MiB; at < b.Size()-4; at += memory.MiB {
					fill(at-3, 7, byte(10*round)+byte(at/memory.MiB))
					fill(at-64, 64, byte(100*round)+byte(at/memory.MiB))
					works += 2
				}
				return works + 2
			})
			e.want(s, b.All(), want, "fills of %v memory, %s", k, how)
			e.freeAll(s)
		}
	}
}

// eachPair calls fn for buffers in pieces, in the four directions, with what is
// in them: the source is a pattern, the destination all of one value.
func (e *env) eachPair(s device.Stream, fn func(what string, dst, src *device.Buffer, to, from []byte)) {
	e.Helper()
	content := pattern(3, int(pieceSize))
	eachWay(func(dk, sk memory.Kind) {
		for how, get := range inPieces {
			dst, src := get(e, dk), e.grown(sk)
			s.Upload(src.All(), content)
			s.Fill(dst.All(), 0xEE)
			what := fmt.Sprintf("from %v memory, grown, to %v memory, %s", sk, dk, how)
			fn(what, dst, src, filled(0xEE, int(dst.Size())), content)
			e.freeAll(s)
		}
	})
}

func testCopyPieces(e *env) {
	s := e.stream("s")
	e.eachPair(s, func(what string, dst, src *device.Buffer, to, from []byte) {
		const half = pieceSize / 2
		move := func(at, start memory.Bytes) {
			s.Copy(dst.Slice(at, half-4000), src.Slice(start, half-4000))
			copy(to[at:at+half-4000], from[start:])
		}
		e.twice(s, func(round int) int {
			shift := memory.Bytes(1001 * round)
			move(7+shift, half)
			move(half+shift, 2*shift)
			return 2
		})
		e.want(s, dst.All(), to, "copies %s", what)
	})
}

func testCopy2DPieces(e *env) {
	s := e.stream("s")
	e.eachPair(s, func(what string, dst, src *device.Buffer, to, from []byte) {
		e.twice(s, func(round int) (works int) {
			for _, r := range []struct {
				width, toPitch, fromPitch memory.Bytes
				rows                      int
			}{
				{700_001, 1_000_003, 900_001, 9}, // rows lie across borders
				{65_537, 65_537, 65_600, 140},    // close together
				{100, 4099, 4111, 2200},          // mostly between the rows
			} {
				d := rectOf(dst, memory.Bytes(5+31*round), r.width, r.toPitch, r.rows)
				f := rectOf(src, memory.Bytes(16*round), r.width, r.fromPitch, r.rows)
				s.Copy2D(d, f)
				copyRect(to, d, from, f)
				works++
			}
			return works
		})
		e.want(s, dst.All(), to, "rectangles %s", what)
	})
}
