// This file owns the tests of copy and fill.

package kernels

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Copies are right for every mix of kinds, alignments and lengths, and leave the bytes
// around the range unchanged. SPEC S6.3
func TestCopy(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		before, from := noise(room, 1), noise(room, 2)
		rapid.Check(t, func(t *rapid.T) {
			dst := x.buf[rapid.IntRange(0, 1).Draw(t, "to")][0]
			src := x.buf[rapid.IntRange(0, 1).Draw(t, "from")][1]
			n := length(70000).Draw(t, "length")
			to, at := start().Draw(t, "dst"), start().Draw(t, "src")
			x.Upload(dst.All(), before)
			x.Upload(src.All(), from)
			l := CopyLaunch(dst.Slice(memory.Bytes(to), memory.Bytes(n)), src.Slice(memory.Bytes(at), memory.Bytes(n)))
			grid(t, &l)
			x.Launch(l)
			want := append([]byte(nil), before...)
			copy(want[to:to+n], from[at:at+n])
			x.want(t, dst, want)
			x.want(t, src, from)
		})
	})
}

// Copies are right for each pair of alignments, at lengths where the number of vectors
// between them changes.
func TestCopyAlignments(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		dst, src := x.buf[memory.Device][0], x.buf[memory.Device][1]
		from, zero := noise(room, 3), make([]byte, room)
		x.Upload(src.All(), from)
		// All 256 pairs share one buffer: pair i copies to its own 128 bytes.
		for _, n := range []int{1, 15, 16, 17, 31, 32, 33, 40, 47, 48, 49, 63, 64, 65, 80} {
			x.Upload(dst.All(), zero)
			want := append([]byte(nil), zero...)
			for i := range 256 {
				to, at := 128*i+i%16, 128*i+i/16
				Copy(x.Stream, dst.Slice(memory.Bytes(to), memory.Bytes(n)), src.Slice(memory.Bytes(at), memory.Bytes(n)))
				copy(want[to:to+n], from[at:at+n])
			}
			x.want(t, dst, want)
		}
	})
}

func TestFill(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		before := noise(room, 4)
		rapid.Check(t, func(t *rapid.T) {
			dst := x.buf[rapid.IntRange(0, 1).Draw(t, "to")][0]
			n, to := length(70000).Draw(t, "length"), start().Draw(t, "dst")
			pattern := rapid.OneOf(rapid.Uint32(), rapid.Just[uint32](0), rapid.Just[uint32](0x7f7f7f7f)).Draw(t, "pattern")
			x.Upload(dst.All(), before)
			l := FillLaunch(dst.Slice(memory.Bytes(to), memory.Bytes(n)), pattern)
			grid(t, &l)
			x.Launch(l)
			want := append([]byte(nil), before...)
			for i := range n {
				want[to+i] = byte(pattern >> (8 * (i % 4)))
			}
			x.want(t, dst, want)
		})
	})
}

// A copy with a label gets new ranges between replays, longer and with another alignment
// than the captured ones. A plain copy in a graph works too.
func TestCopyInGraph(t *testing.T) {
	const slot device.Slot = 7
	each(t, func(t *testing.T, x *lab) {
		dst, src := x.buf[memory.Device][0], x.buf[memory.Device][1]
		from, before := noise(room, 5), noise(room, 6)
		x.Upload(src.All(), from)
		x.Upload(dst.All(), before)
		want := append([]byte(nil), before...)

		x.BeginCapture()
		l := CopyLaunch(dst.Slice(0, 100), src.Slice(1, 100))
		l.Slot = slot
		x.Launch(l)
		x.Stream.Copy(dst.Slice(80000, 5000), src.Slice(70000, 5000))
		g, err := x.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		if n := g.Nodes(); n != 2 {
			t.Errorf("%d nodes, want 2", n)
		}
		x.want(t, dst, want)

		x.Replay(g)
		copy(want[:100], from[1:])
		copy(want[80000:85000], from[70000:])
		x.want(t, dst, want)

		u := CopyLaunch(dst.Slice(203, 33333), src.Slice(1000, 33333))
		u.Grid = l.Grid // one block does it all
		if err := g.Update(slot, u); err != nil {
			t.Fatal(err)
		}
		x.Replay(g)
		copy(want[203:203+33333], from[1000:])
		x.want(t, dst, want)
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	})
}

func FuzzCopy(f *testing.F) {
	f.Add([]byte("some bytes to be copied"), uint(3), uint(5))
	f.Fuzz(func(t *testing.T, from []byte, at, to uint) {
		at, to = at%uint(len(from)+1), to%64
		src := append([]byte(nil), from...)
		dst := make([]byte, len(from)+64)
		run(CopyLaunch(rangeOf(t, dst, int(to), len(from)-int(at)), rangeOf(t, src, int(at), len(from)-int(at))))
		want := make([]byte, len(dst))
		copy(want[to:], from[at:])
		if string(dst) != string(want) || string(src) != string(from) {
			t.Fatalf("copy of %q from %d to %d gives %q", from, at, to, dst)
		}
	})
}
