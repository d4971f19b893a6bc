package devicekit_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

func rect(b *device.Buffer, off, width, pitch memory.Bytes, rows int) device.Rect {
	return device.Rect{Range: device.Range{Buf: b, Off: off, Len: width}, Pitch: pitch, Rows: rows}
}

func buffer(size memory.Bytes) *device.Buffer {
	return device.NewBuffer(memory.Device, 0x1000, size, size, "w")
}

func TestCheckCopy(t *testing.T) {
	b, c := buffer(100), device.NewBuffer(memory.Host, 0x9000, 100, 100, "c")
	alias := device.NewBuffer(memory.Device, 0x1000+40, 20, 20, "alias")
	devicekit.CheckCopy(b.Slice(0, 50), b.Slice(50, 50))
	devicekit.CheckCopy(b.Slice(50, 50), b.Slice(0, 50))
	devicekit.CheckCopy(b.Slice(10, 0), b.Slice(10, 0))
	devicekit.CheckCopy(c.All(), b.All())
	wantPanic(t, "lengths differ", func() { devicekit.CheckCopy(c.Slice(0, 9), b.Slice(0, 10)) })
	wantPanic(t, "they overlap", func() { devicekit.CheckCopy(b.Slice(0, 50), b.Slice(49, 50)) })
	wantPanic(t, "they overlap", func() { devicekit.CheckCopy(b.Slice(49, 50), b.Slice(0, 50)) })
	wantPanic(t, "they overlap", func() { devicekit.CheckCopy(alias.All(), b.Slice(59, 20)) })
	wantPanic(t, "outside of", func() { devicekit.CheckCopy(device.Range{Buf: c, Off: 95, Len: 10}, b.Slice(0, 10)) })
	wantPanic(t, "outside of", func() { devicekit.CheckCopy(b.Slice(0, 10), device.Range{Buf: c, Off: 95, Len: 10}) })
	wantPanic(t, "a range without a buffer", func() { devicekit.CheckCopy(c.All(), device.Range{}) })
	c.Retire()
	wantPanic(t, "use after free", func() { devicekit.CheckCopy(device.Range{Buf: c, Len: 1}, b.Slice(0, 1)) })
	wantPanic(t, "use after free", func() { devicekit.CheckCopy(b.Slice(0, 1), device.Range{Buf: c, Len: 1}) })
}

func TestCheckCopy2D(t *testing.T) {
	b, c := buffer(100), device.NewBuffer(memory.Device, 1<<20, 100, 100, "elsewhere")
	alias := device.NewBuffer(memory.Device, b.Addr()+50, 50, 50, "alias")
	// Two columns of one matrix interleave and share no byte.
	devicekit.CheckCopy2D(rect(b, 0, 5, 10, 10), rect(b, 5, 5, 10, 10))
	devicekit.CheckCopy2D(rect(b, 0, 5, 10, 0), rect(b, 0, 5, 10, 0))
	devicekit.CheckCopy2D(rect(b, 0, 5, 10, 2), rect(c, 0, 5, 7, 2))
	wantPanic(t, "2 rows of 5 bytes to 2 rows of 4 bytes", func() { devicekit.CheckCopy2D(rect(c, 0, 4, 10, 2), rect(b, 0, 5, 10, 2)) })
	wantPanic(t, "2 rows of 5 bytes to 3 rows of 5 bytes", func() { devicekit.CheckCopy2D(rect(c, 0, 5, 10, 3), rect(b, 0, 5, 10, 2)) })
	wantPanic(t, "the rectangles overlap", func() { devicekit.CheckCopy2D(rect(b, 0, 5, 10, 9), rect(b, 4, 5, 10, 9)) })
	wantPanic(t, "the rectangles overlap", func() { devicekit.CheckCopy2D(rect(alias, 0, 5, 10, 2), rect(b, 0, 5, 50, 2)) })
	wantPanic(t, "outside of", func() { devicekit.CheckCopy2D(rect(c, 96, 5, 5, 1), rect(b, 0, 5, 5, 1)) })
	wantPanic(t, "outside of", func() { devicekit.CheckCopy2D(rect(b, 0, 5, 5, 1), rect(c, 96, 5, 5, 1)) })
	gone := device.NewBuffer(memory.Device, 1<<21, 100, 100, "gone")
	gone.Retire()
	wantPanic(t, "use after free", func() { devicekit.CheckCopy2D(rect(b, 0, 5, 5, 1), rect(gone, 0, 5, 5, 1)) })
	wantPanic(t, "use after free", func() { devicekit.CheckCopy2D(rect(gone, 0, 5, 5, 1), rect(b, 0, 5, 5, 1)) })
	for _, r := range []device.Rect{rect(b, 0, -5, 10, 2), rect(b, 0, -5, 10, 0), rect(b, 0, 5, 1<<62, 5), rect(b, 0, 5, 4, 2), rect(b, 0, 5, 5, -1)} {
		wantPanic(t, "cannot have a pitch of", func() { devicekit.CheckCopy2D(r, r) })
	}
}

// TestCheckCopy2DOverlap holds the overlap test against a map of bytes.
func TestCheckCopy2DOverlap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := buffer(4096)
		width := memory.Bytes(rapid.IntRange(0, 12).Draw(t, "width"))
		rows := rapid.IntRange(0, 6).Draw(t, "rows")
		draw := func(name string) device.Rect {
			off := memory.Bytes(rapid.IntRange(0, 60).Draw(t, name+" offset"))
			pitch := width + memory.Bytes(rapid.IntRange(0, 25).Draw(t, name+" gap"))
			return rect(b, off, width, pitch, rows)
		}
		dst, src := draw("dst"), draw("src")
		used, overlap := map[memory.Bytes]bool{}, false
		for i := range rows {
			for j := range width {
				used[dst.Row(i).Off+j] = true
			}
		}
		for i := range rows {
			for j := range width {
				overlap = overlap || used[src.Row(i).Off+j]
			}
		}
		if text, panicked := caught(func() { devicekit.CheckCopy2D(dst, src) }); panicked != overlap {
			t.Fatalf("%d rows of %d bytes at %d by %d and at %d by %d: overlap %v, panic %v %s",
				rows, width, dst.Off, dst.Pitch, src.Off, src.Pitch, overlap, panicked, text)
		}
	})
}
