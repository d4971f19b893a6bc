// This file owns the tests of the shelve kernel.

package kernels

import (
	"encoding/binary"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S6.4: live rows are copied and the rest of the berth is cleared, for rows and
// berths of any size, also for one that has grown since the launch was made; the count is
// noted, also one that is too large or negative; nothing else is written.
func TestShelve(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		before, from := noise(room, 8), noise(room, 9)
		dst, src := x.buf[memory.Device][0], x.buf[memory.Device][1]
		rapid.Check(t, func(t *rapid.T) {
			row := rapid.IntRange(1, 700).Draw(t, "row")
			limit := rapid.IntRange(1, 70000/row).Draw(t, "limit")
			fits := rapid.IntRange(0, limit).Draw(t, "fits")
			n := rapid.OneOf(rapid.Int64Range(0, int64(fits)), rapid.Just(int64(fits)), rapid.Int64Range(-3, 200000)).Draw(t, "rows")
			to, at := 16*rapid.IntRange(1, 99).Draw(t, "dst"), 16*rapid.IntRange(1, 99).Draw(t, "src")
			const note, count = 80000, 80008
			most := rapid.Uint64Range(0, 9).Draw(t, "rows before")
			binary.LittleEndian.PutUint64(before[note:], most)
			binary.LittleEndian.PutUint64(before[note+8:], uint64(fits))
			binary.LittleEndian.PutUint64(from[count:], uint64(n))
			x.Upload(dst.All(), before)
			x.Upload(src.All(), from)
			size := row * limit
			ends := min((row*fits+15)&^15, size)
			then := memory.Bytes(rapid.IntRange(0, ends).Draw(t, "when it was launched"))
			l := ShelveLaunch(dst.Slice(memory.Bytes(to), then), src.Slice(memory.Bytes(at), memory.Bytes(size)), dst.Slice(note, 16), src.Slice(count, 8), memory.Bytes(row))
			grid(t, &l)
			x.Launch(l)
			want := slices.Clone(before)
			binary.LittleEndian.PutUint64(want[note:], max(most, uint64(n)))
			if n < 0 || n > int64(fits) {
				got := make([]byte, room)
				if err := x.Stream.Download(got, dst.All()); err != nil {
					t.Fatal(err)
				}
				copy(want[to:to+ends], got[to:]) // it means nothing
				x.want(t, dst, want)
				return
			}
			clear(want[to : to+ends])
			copy(want[to:], from[at:at+row*int(n)])
			x.want(t, dst, want)
			x.want(t, src, from)
		})
	})
}

// The grid has as many blocks as move a berth's bytes. A small berth has some to grow with,
// but never more than the tensor needs.
func TestShelveGrid(t *testing.T) {
	const size = memory.Bytes(1 << 24)
	b := device.NewBuffer(memory.Device, 1<<30, size, size, "test")
	for _, x := range []struct {
		berth, tensor memory.Bytes
		blocks        uint32
	}{{0, 64, 1}, {0, 8 << 20, 256}, {4096, 8 << 20, 256}, {4096, 8192, 2}, {4 << 20, 8 << 20, 1024}, {8 << 20, 8 << 20, 2048}} {
		if l := ShelveLaunch(b.Slice(0, x.berth), b.Slice(8<<20, x.tensor), b.Slice(0, 16), b.Slice(16, 8), 64); l.Grid[0] != x.blocks {
			t.Errorf("a berth of %v for %v takes %d blocks, want %d", x.berth, x.tensor, l.Grid[0], x.blocks)
		}
	}
}
