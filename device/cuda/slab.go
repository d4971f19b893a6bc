// This file owns the carving of one range of addresses into blocks of exact
// size. It knows offsets only; arena.go puts memory behind them.

package cuda

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// slab hands out blocks. At every point
//
//	size = sum of holes + sum of blocks
//
// where a block is what was asked for, rounded up to device.Align and nothing
// more. Holes are sorted, lie inside the slab, and never touch each other.
type slab struct {
	size  memory.Bytes
	holes []span
}

// span is the bytes [from, to).
type span struct{ from, to memory.Bytes }

func roundUp(n, to memory.Bytes) memory.Bytes { return (n + to - 1) / to * to }

// blockSize returns the size of a block for n bytes. A block of no bytes has a size too, so
// that every buffer has an address of its own.
func blockSize(n memory.Bytes) memory.Bytes { return roundUp(max(n, 1), device.Align) }

// allocate cuts a block from the front of the smallest hole that holds it.
func (s *slab) allocate(n memory.Bytes) (off memory.Bytes, ok bool) {
	n = blockSize(n)
	best := -1
	for i, h := range s.holes {
		if room := h.to - h.from; room >= n && (best < 0 || room < s.holes[best].to-s.holes[best].from) {
			best = i
		}
	}
	if best < 0 {
		return 0, false
	}
	h := &s.holes[best]
	off = h.from
	h.from += n
	if h.from == h.to {
		s.holes = slices.Delete(s.holes, best, best+1)
	}
	return off, true
}

// free takes a block back and joins it with the holes beside it.
func (s *slab) free(off, n memory.Bytes) {
	s.insertHole(span{off, off + blockSize(n)})
}

func (s *slab) insertHole(b span) {
	i, _ := slices.BinarySearchFunc(s.holes, b.from, func(h span, at memory.Bytes) int { return int(h.from - at) })
	if b.from < 0 || b.to > s.size || i > 0 && s.holes[i-1].to > b.from || i < len(s.holes) && s.holes[i].from < b.to {
		panic(fmt.Sprintf("cuda: bytes [%d,%d) of the slab are freed twice", b.from, b.to))
	}
	s.holes = slices.Insert(s.holes, i, b)
	if i+1 < len(s.holes) && s.holes[i+1].from == b.to {
		s.holes[i].to = s.holes[i+1].to
		s.holes = slices.Delete(s.holes, i+1, i+2)
	}
	if i > 0 && s.holes[i-1].to == b.from {
		s.holes[i-1].to = s.holes[i].to
		s.holes = slices.Delete(s.holes, i, i+1)
	}
}

// resize makes the slab larger, or smaller by cutting into its last hole.
func (s *slab) resize(size memory.Bytes) {
	old := s.size
	if size >= old {
		s.size = size
		if size > old {
			s.insertHole(span{old, size})
		}
		return
	}
	if size < s.usedEnd() {
		panic(fmt.Sprintf("cuda: the slab cannot shrink to %d bytes: %d are in use", size, s.usedEnd()))
	}
	last := &s.holes[len(s.holes)-1]
	last.to = size
	if last.from == size {
		s.holes = s.holes[:len(s.holes)-1]
	}
	s.size = size
}

// usedEnd returns the end of the last block.
func (s *slab) usedEnd() memory.Bytes {
	if n := len(s.holes); n > 0 && s.holes[n-1].to == s.size {
		return s.holes[n-1].from
	}
	return s.size
}

// largest returns the size of the largest hole.
func (s *slab) largest() (n memory.Bytes) {
	for _, h := range s.holes {
		n = max(n, h.to-h.from)
	}
	return n
}
