// This file owns the borders inside buffers: where one mapped chunk of memory
// ends and the next begins, and the cutting of work there.
//
// The driver refuses to fill host memory beyond the chunk that the first byte
// lies in: the call fails as an invalid value and, if it was captured, the making
// of the graph does. The driver of CUDA 13.0 takes all other work across borders,
// but no documentation says so of fills, rectangles and nodes of graphs, so none
// of these crosses one. Plain copies do, and kernels see addresses alone.

package cuda

import (
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// borders returns the ends of chunks inside the n bytes at addr, counted from addr.
func (r *region) borders(addr uintptr, n memory.Bytes) (at []memory.Bytes) {
	from := memory.Bytes(addr - r.addr)
	for _, end := range r.ends() {
		if end > from && end < from+n {
			at = append(at, end-from)
		}
	}
	return at
}

// solid returns how many bytes of a range, from its first on, lie in one chunk.
func (d *Device) solid(r device.Range) memory.Bytes {
	var ends []memory.Bytes
	switch mem := r.Buf.Mem.(type) {
	case *carved:
		ends = mem.ends
	case *region:
		ends = mem.ends()
	default:
		return min(r.Len, d.chunkFrom(uint64(r.Addr())))
	}
	i, on := slices.BinarySearch(ends, r.Off)
	if on { // the range begins where a chunk ends
		i++
	}
	if i == len(ends) {
		return r.Len
	}
	return min(r.Len, ends[i]-r.Off)
}

// Chunks returns the parts of a range that lie in one chunk each. NCCL can be told of these.
func (c *carved) Chunks(r device.Range) []device.Range { return c.dev.chunksOf(r) }

// Chunks returns the parts of a range that lie in one chunk each.
func (g *region) Chunks(r device.Range) []device.Range { return g.dev.chunksOf(r) }

func (d *Device) chunksOf(r device.Range) (parts []device.Range) {
	for at := memory.Bytes(0); at < r.Len; {
		rest := r.Slice(at, r.Len-at)
		n := d.solid(rest)
		parts = append(parts, rest.Slice(0, n))
		at += n
	}
	return parts
}

// chunkFrom returns how many bytes of borrowed memory, from addr on, lie in one chunk
// for certain. Borrowed memory may lie in chunks too, as PyTorch's expandable segments do.
// The driver knows the chunk of device memory, but knows host memory under another address;
// there the next multiple of the granule is used, because every border is at one.
func (d *Device) chunkFrom(addr uint64) memory.Bytes {
	var base, size uint64
	f := d.tryCall(&d.drv.memGetAddressRange, uintptr(pointer(&base)), uintptr(pointer(&size)), uintptr(addr))
	if f == nil && addr >= base && addr < base+size {
		return memory.Bytes(base + size - addr)
	}
	return d.granule - memory.Bytes(addr%uint64(d.granule))
}

// solidRows returns how many rows of a rectangle, from its first on, lie in one chunk.
func (d *Device) solidRows(r device.Rect) int {
	switch n := d.solid(r.Extent()); {
	case n == r.Extent().Len:
		return r.Rows
	case n < r.Len:
		return 0
	default:
		return int((n-r.Len)/r.Pitch) + 1
	}
}

func (s *stream) fillBytes(r device.Range, value byte) {
	for r.Len > 0 {
		n := s.dev.solid(r)
		s.issue(&s.dev.drv.memsetD8Async, r.Addr(), uintptr(value), uintptr(n), s.handle)
		r = r.Slice(n, r.Len-n)
	}
}

// copyBytes leaves copies whole unless they become nodes of a graph.
func (s *stream) copyBytes(c *capture, dst, src device.Range) {
	for dst.Len > 0 {
		n := dst.Len
		if c != nil {
			n = min(s.dev.solid(dst), s.dev.solid(src))
		}
		s.issue(&s.dev.drv.memcpyAsync, dst.Addr(), src.Addr(), uintptr(n), s.handle)
		dst, src = dst.Slice(n, dst.Len-n), src.Slice(n, src.Len-n)
	}
}

// copyRows copies as many rows at a time as the driver takes. A row that lies
// across a border, or too far from the next, goes alone.
func (s *stream) copyRows(c *capture, dst, src device.Rect) {
	for dst.Rows > 0 {
		n := 0
		if dst.Pitch <= maxPitch && src.Pitch <= maxPitch {
			n = min(s.dev.solidRows(dst), s.dev.solidRows(src))
		}
		if n > 0 {
			s.copyRect(dst, src, n)
		} else {
			n = 1
			s.copyBytes(c, dst.Range, src.Range)
		}
		dst, src = below(dst, n), below(src, n)
	}
}

// below returns the rectangle without its first n rows.
func below(r device.Rect, n int) device.Rect {
	r.Off += memory.Bytes(n) * r.Pitch
	r.Rows -= n
	return r
}

// copyRect copies the first rows of a rectangle, which lie in one chunk.
func (s *stream) copyRect(dst, src device.Rect, rows int) {
	if s.idle() {
		return
	}
	d := s.dev
	f := d.drv.frames.Get().(*frame)
	f.rect = memcpy2D{
		src:   pitched{kind: memoryTypeUnified, device: src.Addr(), pitch: uintptr(src.Pitch)},
		dst:   pitched{kind: memoryTypeUnified, device: dst.Addr(), pitch: uintptr(dst.Pitch)},
		width: uintptr(dst.Len), height: uintptr(rows),
	}
	f.args[0], f.args[1] = uintptr(pointer(&f.rect)), s.handle
	s.judge(&d.drv.memcpy2DAsync, d.run(f, &d.drv.memcpy2DAsync, 2))
	d.drv.frames.Put(f)
}
