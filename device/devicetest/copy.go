// This file owns the tests of work that moves bytes: copies in every direction,
// 2-D copies, fills, uploads and downloads. Each compares whole buffers, so
// that a byte written beside the range is seen too.

package devicetest

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var copyCases = []testCase{
	{name: "EveryDirection", fn: testCopyEveryDirection},
	{name: "Large", fn: testCopyLarge},
	{name: "WithinABuffer", fn: testCopyWithinABuffer},
	{name: "Rectangles", fn: testCopy2D},
	{name: "InterleavedColumns", fn: testCopyColumns},
	{name: "Fill", fn: testFill},
	{name: "UploadSourceReused", fn: testUploadSourceReused},
	{name: "UploadLarge", fn: testUploadLarge},
	{name: "MisusePanics", fn: testCopyMisuse},
}

// eachWay calls fn for the four directions.
func eachWay(fn func(dst, src memory.Kind)) {
	for _, dst := range bothKinds {
		for _, src := range bothKinds {
			fn(dst, src)
		}
	}
}

// copyOffsets are pairs of places, aligned and not, alike and not.
var copyOffsets = [][2]memory.Bytes{{0, 0}, {1, 0}, {0, 1}, {3, 5}, {13, 8}, {16, 48}}

// testCopyEveryDirection: sub-ranges of odd sizes at odd places.
func testCopyEveryDirection(e *env) {
	s := e.stream("s")
	const room = 70_000
	for _, n := range []memory.Bytes{1, 2, 3, 7, 16, 63, 255, 1000, 4099, 65_537} {
		eachWay(func(dk, sk memory.Kind) {
			dst, src := e.alloc(dk, room), e.allocWith(s, sk, pattern(int(n), room))
			want := filled(0xEE, room)
			s.Fill(dst.All(), 0xEE)
			for _, at := range copyOffsets {
				s.Copy(dst.Slice(at[0], n), src.Slice(at[1], n))
				copy(want[at[0]:], pattern(int(n), room)[at[1]:at[1]+n])
			}
			e.want(s, dst.All(), want, "%d bytes from %v to %v", n, sk, dk)
			e.want(s, src.All(), pattern(int(n), room), "the source of %d bytes from %v to %v", n, sk, dk)
			s.Free(dst)
			s.Free(src)
		})
	}
}

// testCopyLarge is beyond the sizes where copies split over threads or leave
// the caches alone.
func testCopyLarge(e *env) {
	s := e.stream("s")
	const n = 6*memory.MiB + 5
	content := pattern(9, int(n))
	eachWay(func(dk, sk memory.Kind) {
		dst, src := e.alloc(dk, n+64), e.allocWith(s, sk, content)
		s.Fill(dst.Slice(0, 33), 1)
		s.Fill(dst.Slice(n+33, 31), 2)
		s.Copy(dst.Slice(33, n), src.All())
		want := append(append(filled(1, 33), content...), filled(2, 31)...)
		e.want(s, dst.All(), want, "%v from %v to %v", n, sk, dk)
		s.Free(dst)
		s.Free(src)
	})
}

// testCopyWithinABuffer: ranges of one buffer that touch but do not overlap.
func testCopyWithinABuffer(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b, want := e.allocWith(s, k, pattern(1, 3000)), pattern(1, 3000)
		s.Copy(b.Slice(1000, 1000), b.Slice(0, 1000))
		s.Copy(b.Slice(500, 777), b.Slice(1277, 777))
		copy(want[1000:2000], want[:1000])
		copy(want[500:1277], want[1277:2054])
		e.want(s, b.All(), want, "copies within %v memory", k)
	}
}

// copyRect does on the host what Copy2D does.
func copyRect(dst []byte, to device.Rect, src []byte, from device.Rect) {
	for i := range to.Rows {
		t, f := to.Row(i), from.Row(i)
		copy(dst[t.Off:t.Off+t.Len], src[f.Off:f.Off+f.Len])
	}
}

func rectOf(b *device.Buffer, off, width, pitch memory.Bytes, rows int) device.Rect {
	return device.Rect{Range: device.Range{Buf: b, Off: off, Len: width}, Pitch: pitch, Rows: rows}
}

// testCopy2D: rows of many widths between different pitches; what lies between
// the rows stays as it was, and the last row may end with the buffer.
func testCopy2D(e *env) {
	s := e.stream("s")
	for _, width := range []memory.Bytes{1, 5, 16, 64, 1000} {
		for _, gap := range [][2]memory.Bytes{{0, 0}, {0, 3}, {37, 0}, {5, 64}} {
			for _, rows := range []int{1, 2, 17} {
				eachWay(func(dk, sk memory.Kind) {
					const at, from = 3, 8
					toPitch, fromPitch := width+gap[0], width+gap[1]
					dstSize := at + memory.Bytes(rows-1)*toPitch + width
					srcSize := from + memory.Bytes(rows-1)*fromPitch + width
					dst, src := e.alloc(dk, dstSize), e.alloc(sk, srcSize)
					content := pattern(rows, int(srcSize))
					s.Upload(src.All(), content)
					s.Fill(dst.All(), 0xEE)
					to, fr := rectOf(dst, at, width, toPitch, rows), rectOf(src, from, width, fromPitch, rows)
					s.Copy2D(to, fr)
					want := filled(0xEE, int(dstSize))
					copyRect(want, to, content, fr)
					e.want(s, dst.All(), want, "%d rows of %d bytes by %d and %d from %v to %v", rows, width, toPitch, fromPitch, sk, dk)
					s.Free(dst)
					s.Free(src)
				})
			}
		}
	}
}

// testCopyColumns copies columns of a matrix over other columns of the same.
func testCopyColumns(e *env) {
	s := e.stream("s")
	const pitch, rows = 96, 50
	for _, k := range bothKinds {
		b, want := e.allocWith(s, k, pattern(2, pitch*rows)), pattern(2, pitch*rows)
		for _, c := range [][3]memory.Bytes{{0, 32, 32}, {64, 0, 32}, {1, 90, 5}} { // to, from, width
			to, from := rectOf(b, c[0], c[2], pitch, rows), rectOf(b, c[1], c[2], pitch, rows)
			s.Copy2D(to, from)
			copyRect(want, to, want, from)
		}
		e.want(s, b.All(), want, "columns within %v memory", k)
	}
}

func testFill(e *env) {
	s := e.stream("s")
	const room = 300_000
	for _, k := range bothKinds {
		b, want := e.allocWith(s, k, pattern(8, room)), pattern(8, room)
		for i, r := range [][2]memory.Bytes{{0, 1}, {3, 5}, {17, 64}, {100, 4096}, {5001, 255}, {9999, 0}, {20_001, 200_003}, {room - 1, 1}} {
			value := []byte{0x5A, 0, 0xFF}[i%3]
			s.Fill(b.Slice(r[0], r[1]), value)
			copy(want[r[0]:], filled(value, int(r[1])))
		}
		e.want(s, b.All(), want, "fills of %v memory", k)
	}
}

// testUploadSourceReused: the source is the caller's again when Upload returns,
// even if the stream has not got there.
func testUploadSourceReused(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b := e.alloc(k, 16*4096)
		src := make([]byte, 4096)
		g := e.gate(s)
		var want []byte
		for i := range 16 {
			copy(src, pattern(i, 4096))
			s.Upload(b.Slice(memory.Bytes(i)*4096, 4096), src)
			want = append(want, src...)
			clear(src)
		}
		g.release()
		e.want(s, b.All(), want, "uploads from one reused source to %v memory", k)
	}
}

func testUploadLarge(e *env) {
	s := e.stream("s")
	const n = 5*memory.MiB + 3
	for _, k := range bothKinds {
		b, src := e.alloc(k, n+100), pattern(1, int(n))
		s.Fill(b.All(), 0xEE)
		s.Upload(b.Slice(50, n), src)
		clear(src)
		want := append(append(filled(0xEE, 50), pattern(1, int(n))...), filled(0xEE, 50)...)
		e.want(s, b.All(), want, "%v uploaded to %v memory", n, k)
	}
}

// testCopyMisuse: a copy that makes no sense panics when it is issued and does not change
// the stream.
func testCopyMisuse(e *env) {
	s := e.stream("s")
	a, h := e.allocWith(s, memory.Device, pattern(1, 100)), e.allocWith(s, memory.Host, pattern(2, 100))
	beyond := device.Range{Buf: a, Off: 90, Len: 20}
	for _, c := range []struct {
		what, words string
		fn          func()
	}{
		{"Copy of different lengths", "lengths differ", func() { s.Copy(h.Slice(0, 10), a.Slice(0, 11)) }},
		{"Copy onto itself", "overlap", func() { s.Copy(a.Slice(0, 50), a.Slice(49, 50)) }},
		{"Copy beyond the end", "outside of", func() { s.Copy(beyond, h.Slice(0, 20)) }},
		{"Copy from beyond the end", "outside of", func() { s.Copy(h.Slice(0, 20), beyond) }},
		{"Copy of no buffer", "without a buffer", func() { s.Copy(h.All(), device.Range{}) }},
		{"Copy2D of different widths", "rows of", func() { s.Copy2D(rectOf(h, 0, 4, 8, 3), rectOf(a, 0, 5, 8, 3)) }},
		{"Copy2D onto itself", "overlap", func() { s.Copy2D(rectOf(a, 0, 5, 10, 5), rectOf(a, 4, 5, 10, 5)) }},
		{"Copy2D with a short pitch", "pitch", func() { s.Copy2D(rectOf(h, 0, 8, 7, 3), rectOf(a, 0, 8, 8, 3)) }},
		{"Copy2D beyond the end", "outside of", func() { s.Copy2D(rectOf(h, 0, 8, 47, 3), rectOf(a, 0, 8, 8, 3)) }},
		{"Fill beyond the end", "outside of", func() { s.Fill(beyond, 0) }},
		{"Upload beyond the end", "outside of", func() { s.Upload(beyond, make([]byte, 20)) }},
		{"Upload of another length", "", func() { s.Upload(a.All(), make([]byte, 99)) }},
		{"Download beyond the end", "outside of", func() { _ = s.Download(make([]byte, 20), beyond) }},
		{"Download of another length", "", func() { _ = s.Download(make([]byte, 101), a.All()) }},
		{"Host callback beyond the end", "outside of", func() { s.Host(func() {}, device.Reads(beyond)) }},
		{"Launch beyond the end", "outside of", func() { s.Launch(mix(beyond, h.Slice(0, 16), 0)) }},
	} {
		e.panics(c.what, c.words, c.fn)
	}
	e.want(s, a.All(), pattern(1, 100), "after %s", fmt.Sprintf("refused work on %v", a))
	e.want(s, h.All(), pattern(2, 100), "after refused work")
}
