// This file owns the checks of copies, which every device makes before it issues one.

package devicekit

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// CheckCopy panics if a copy cannot be issued: if a buffer was freed, a range lies outside
// of its buffer, the lengths differ or the ranges overlap.
func CheckCopy(dst, src device.Range) {
	device.CheckAccess(device.Writes(dst))
	device.CheckAccess(device.Reads(src))
	if dst.Len != src.Len {
		panic(fmt.Sprintf("device: copy of %s to %s: lengths differ", src, dst))
	}
	if dst.Addr() < src.Addr()+uintptr(src.Len) && src.Addr() < dst.Addr()+uintptr(dst.Len) {
		panic(fmt.Sprintf("device: copy of %s to %s: they overlap", src, dst))
	}
}

// CheckCopy2D does the same for a copy of rectangles. Rectangles of one buffer may
// interleave, as columns of a matrix do.
func CheckCopy2D(dst, src device.Rect) {
	device.CheckAccess(device.Access{Rect: dst, Mode: device.Write})
	device.CheckAccess(device.Access{Rect: src, Mode: device.Read})
	if dst.Len != src.Len || dst.Rows != src.Rows {
		panic(fmt.Sprintf("device: 2-D copy of %d rows of %d bytes to %d rows of %d bytes: the sizes differ", src.Rows, src.Len, dst.Rows, dst.Len))
	}
	if rectsOverlap(dst, src) {
		panic(fmt.Sprintf("device: 2-D copy of %s to %s: the rectangles overlap", src.Range, dst.Range))
	}
}

// rectsOverlap reports whether two rectangles share a byte. It walks the rows of both in
// the order of addresses, like a merge. It compares addresses and not buffers, because a
// borrowed buffer may be the memory of another one.
func rectsOverlap(a, b device.Rect) bool {
	if a.Len == 0 {
		return false
	}
	n := uintptr(a.Len)
	for i, j := 0, 0; i < a.Rows && j < b.Rows; {
		x, y := a.Row(i).Addr(), b.Row(j).Addr()
		switch {
		case x+n <= y:
			i++
		case y+n <= x:
			j++
		default:
			return true
		}
	}
	return false
}
