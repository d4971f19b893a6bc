// This file owns the tests of the handles for memory: buffers, ranges and rectangles.

package device_test

import (
	"math"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

func buffer(size memory.Bytes) *device.Buffer {
	return device.NewBuffer(memory.Device, 0x1000, size, size, "w")
}

func TestBufferLifeCycle(t *testing.T) {
	b := device.NewBuffer(memory.Host, 0x4000, 10, 100, "pool")
	if b.Kind() != memory.Host || b.Addr() != 0x4000 || b.Size() != 10 || b.Max() != 100 || b.Owner() != "pool" || !b.Live() {
		t.Fatalf("a new buffer is %v, max %v", b, b.Max())
	}
	if got, want := b.String(), `host buffer "pool" (10 bytes at 0x4000)`; got != want {
		t.Errorf("String = %q, want %q", got, want)
	}
	b.SetSize(60)
	if got := b.All(); got != (device.Range{Buf: b, Len: 60}) {
		t.Errorf("after growing, All is %v", got)
	}
	b.Retire()
	if b.Live() {
		t.Error("a retired buffer is live")
	}
	wantPanic(t, `double free of host buffer "pool"`, b.Retire)
	wantPanic(t, `use after free of host buffer "pool"`, func() { b.Slice(0, 1) })
}

func TestRangeSlice(t *testing.T) {
	b := buffer(100)
	r := b.Slice(10, 50)
	if r.Addr() != 0x1000+10 {
		t.Errorf("address of %v is %#x", r, r.Addr())
	}
	inner := r.Slice(5, 20)
	if inner != (device.Range{Buf: b, Off: 15, Len: 20}) {
		t.Errorf("slice of a slice is %v", inner)
	}
	if got, want := inner.String(), `bytes [15,35) of device buffer "w"`; got != want {
		t.Errorf("String = %q, want %q", got, want)
	}
	if got := (device.Range{}).String(); got != "no memory" {
		t.Errorf("the zero range is %q", got)
	}
	// The end of a buffer is a valid place for no bytes.
	if got := b.Slice(100, 0); got.Len != 0 || r.Slice(50, 0).Off != 60 {
		t.Errorf("empty slice at the end is %v", got)
	}
}

// huge is an offset whose sum with another overflows, so that a bound check
// written as off+n > size would let it pass.
const huge = memory.Bytes(math.MaxInt64)

func TestRangePanics(t *testing.T) {
	b := buffer(100)
	r := b.Slice(10, 50)
	for name, fn := range map[string]func(){
		"before":         func() { b.Slice(-1, 2) },
		"negative":       func() { b.Slice(5, -1) },
		"behind":         func() { b.Slice(90, 11) },
		"overflow":       func() { b.Slice(50, huge) },
		"inner before":   func() { r.Slice(-1, 2) },
		"inner negative": func() { r.Slice(5, -1) },
		"inner behind":   func() { r.Slice(40, 11) },
		"inner overflow": func() { r.Slice(50, huge) },
	} {
		t.Run(name, func(t *testing.T) { wantPanic(t, "outside of", fn) })
	}
	wantPanic(t, "a range without a buffer", func() { device.CheckAccess(device.Reads(device.Range{})) })
}

func rect(b *device.Buffer, off, width, pitch memory.Bytes, rows int) device.Rect {
	return device.Rect{Range: device.Range{Buf: b, Off: off, Len: width}, Pitch: pitch, Rows: rows}
}

func TestRectRowsAndExtent(t *testing.T) {
	b := buffer(100)
	r := rect(b, 4, 3, 10, 5)
	if got := r.Row(2); got != (device.Range{Buf: b, Off: 24, Len: 3}) {
		t.Errorf("row 2 is %v", got)
	}
	// Four pitches and one row: 4*10 + 3.
	if got := r.Extent(); got != (device.Range{Buf: b, Off: 4, Len: 43}) {
		t.Errorf("extent is %v", got)
	}
	if got := rect(b, 4, 3, 10, 0).Extent(); got.Len != 0 {
		t.Errorf("extent of no rows is %v", got)
	}
}

func TestRectPanics(t *testing.T) {
	b := buffer(100)
	check := func(r device.Rect) func() {
		return func() { device.CheckAccess(device.Access{Rect: r, Mode: device.Read}) }
	}
	// The last row may end with the buffer although its pitch does not fit:
	// 9*10 + 10 bytes here, and 9*10 + 1 at offset 9 there.
	check(rect(b, 0, 10, 10, 10))()
	check(rect(b, 9, 1, 10, 10))()
	wantPanic(t, "cannot have a pitch of 9", check(rect(b, 0, 10, 9, 2)))
	wantPanic(t, "-1 rows", check(rect(b, 0, 10, 10, -1)))
	wantPanic(t, "outside of", check(rect(b, 1, 10, 10, 10)))
	wantPanic(t, "outside of", check(rect(b, 101, 0, 0, 0)))
	wantPanic(t, "outside of", check(rect(b, -1, 1, 1, 1)))
	b.Retire()
	wantPanic(t, "use after free", check(rect(b, 0, 10, 10, 0)))
}

func TestSliceOfAddress(t *testing.T) {
	words := []uint32{1, 2, 3, 4}
	got := device.Slice[uint32](uint64(uintptr(unsafe.Pointer(&words[1]))), 2)
	if len(got) != 2 || cap(got) != 2 || got[0] != 2 || got[1] != 3 {
		t.Errorf("Slice gives %v", got)
	}
	if got := device.Slice[uint32](0, 0); got != nil {
		t.Errorf("Slice of nothing gives %v", got)
	}
}
