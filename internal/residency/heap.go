// This file owns the heap, which places storages in a run of bytes and says after which
// work freed bytes may be used again.

package residency

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// Mark is a point in the work of a lane. Zero is a point before everything.
type Mark int

// segment is a run of free bytes that were given back together. Segments stay separate
// even if they touch, so that whoever takes bytes waits only for the work that used these
// bytes. There are thousands of segments, so they hold no pointers.
type segment struct {
	off, size memory.Bytes
	after     [2]Mark
	out       int // the number of the copy out that reads it, or zero
	scope     int // the scope in which it was given back, or zero
}

func (s *segment) end() memory.Bytes { return s.off + s.size }

// Heap hands out runs of bytes. It is pure: the runtime uses its offsets in a buffer, the
// simulator uses the same offsets without one. At every point
//
//	live + free = top, and top is at most limit
//
// where top is the extent ever used. Free segments are in the order of their offsets and
// do not overlap. The heap depends only on the order of calls, never on time, so a step
// that is issued in the same order gets the same offsets.
type Heap struct {
	// Extend, if it is not nil, provides memory before the extent grows, and reports
	// whether there was any.
	Extend func(top memory.Bytes) bool

	limit  memory.Bytes
	align  memory.Bytes
	window int // copies out that may be under way before a taker waits for one
	free   []segment
	marks  []Mark // what Take said last
	live   memory.Bytes
	top    memory.Bytes
	peak   memory.Bytes // the most that was live
	outs   int
	scope  int // the scope that is open, or zero
	scopes int

	// account makes the heap only count bytes: offsets are distinct numbers, the extent is
	// the most that was live, and nobody waits for earlier users of the bytes.
	account bool
	next    memory.Bytes
	highest memory.Bytes // limit that it had, if the limit was lowered

	// followed holds the number of copies out that each lane is ordered after already.
	followed [Lanes]int
}

// NewHeap returns an empty heap of at most limit bytes.
func NewHeap(limit, align memory.Bytes, window int) *Heap {
	if limit < 0 || align < 1 || window < 1 {
		panic(fmt.Sprintf("residency: a heap of %d bytes, aligned to %d, with a window of %d copies", limit, align, window))
	}
	return &Heap{limit: limit - limit%align, align: align, window: window}
}

// Live returns the number of bytes that are taken now.
func (h *Heap) Live() memory.Bytes { return h.live }

// Top returns the extent ever used.
func (h *Heap) Top() memory.Bytes { return h.top }

// Peak returns the largest number of bytes that were ever taken at once.
func (h *Heap) Peak() memory.Bytes { return h.peak }

// Limit returns the limit of the extent.
func (h *Heap) Limit() memory.Bytes { return h.limit }

// Raise raises the limit, and reports whether the given limit is higher than before.
func (h *Heap) Raise(limit memory.Bytes) bool {
	limit -= limit % h.align
	higher := limit > h.limit
	h.limit = max(h.limit, limit)
	return higher
}

// Lower gives a heap that only counts bytes a lower limit. Bytes that are taken already
// stay; the next ones find room below the new limit.
func (h *Heap) Lower(limit memory.Bytes) {
	if !h.account {
		panic("residency: a heap with places is given a lower limit")
	}
	h.highest = max(h.highest, h.limit)
	h.limit = min(h.limit, limit-limit%h.align)
}

// Round returns the bytes that a storage of n bytes takes. An empty storage takes some
// too, so that no two storages have the same offset.
func (h *Heap) Round(n memory.Bytes) memory.Bytes {
	if n < 0 {
		panic(fmt.Sprintf("residency: a storage of %d bytes", n))
	}
	return (max(n, 1) + h.align - 1) / h.align * h.align
}

// Take finds n bytes for a lane. It returns the marks after which the lane may use them;
// they are valid until the next call.
//
// Take prefers, in this order: the smallest free run that needs no wait for one of the
// last few copies out; bytes never used, with the free and ready bytes right before
// them; the run whose last copy out began the longest ago; and bytes never used, with
// all free bytes before them. So a budget is used up before anybody waits for a copy that
// has just begun.
func (h *Heap) Take(lane Lane, n memory.Bytes) (off memory.Bytes, after []Mark, ok bool) {
	return h.take(lane, n, 0)
}

// take is Take for a lane that is ordered after the first past copies out in any case.
func (h *Heap) take(lane Lane, n memory.Bytes, past int) (off memory.Bytes, after []Mark, ok bool) {
	n = h.Round(n)
	if h.account {
		if h.live+n > h.limit {
			return 0, nil, false
		}
		off, h.next, h.live = h.next, h.next+n, h.live+n
		h.peak = max(h.peak, h.live)
		h.top = h.peak
		return off, nil, true
	}
	past = max(past, h.followed[lane], h.outs-h.window) // at least zero: what was never copied is ready
	i, ok := h.smallest(lane, n, past)
	if !ok {
		i, ok = h.grow(n, func(s *segment) bool { return s.out <= past && h.usable(lane, s) })
	}
	if !ok {
		i, ok = h.soonest(lane, n)
	}
	if !ok {
		i, ok = h.grow(n, func(s *segment) bool { return h.usable(lane, s) })
	}
	if !ok {
		return 0, nil, false
	}
	off = h.cut(lane, i, n)
	return off, h.marks, true
}

// usable reports whether a lane may take a segment at all. What compute frees in an open
// scope is for compute alone, because the work of other lanes that is issued in a scope
// comes before the scope's own work.
func (h *Heap) usable(lane Lane, s *segment) bool {
	return lane == Compute || s.scope == 0 || s.scope != h.scope
}

// touches reports whether segment i begins where the one before it ends.
func (h *Heap) touches(i int) bool { return i > 0 && h.free[i-1].end() == h.free[i].off }

// smallest returns the first segment of the smallest run of ready segments that holds n
// bytes; the first of equals. A segment is ready if the lane may take it and is ordered
// after its copy out. Every Take visits all segments here, so each costs few
// instructions.
func (h *Heap) smallest(lane Lane, n memory.Bytes, past int) (best int, found bool) {
	closed := -1
	if lane != Compute && h.scope != 0 {
		closed = h.scope
	}
	first, end := 0, memory.Bytes(0) // of the run that is being looked at
	size, least := memory.Bytes(0), memory.Bytes(math.MaxInt64)
	for i := range h.free {
		s := &h.free[i]
		ready := s.out <= past && s.scope != closed
		if !ready || s.off != end {
			if size >= n && size < least {
				if best, least = first, size; size == n {
					return best, true
				}
			}
			first, size = i, 0
		}
		if ready {
			size += s.size
		}
		end = s.end()
		if !ready {
			end = -1
		}
	}
	if size >= n && size < least {
		best, least = first, size
	}
	return best, least < math.MaxInt64
}

// soonest returns the first segment of the usable run that holds n bytes and whose newest
// copy out is the oldest.
func (h *Heap) soonest(lane Lane, n memory.Bytes) (best int, found bool) {
	newest := 0
	for i := range h.free {
		size, out := memory.Bytes(0), 0
		for j := i; j < len(h.free) && size < n && (j == i || h.touches(j)) && h.usable(lane, &h.free[j]); j++ {
			size, out = size+h.free[j].size, max(out, h.free[j].out)
		}
		if size >= n && (!found || out < newest) {
			best, newest, found = i, out, true
		}
	}
	return best, found
}

// grow adds a free segment of bytes never used that holds n bytes together with the
// accepted segments right before it. It returns the first of them.
func (h *Heap) grow(n memory.Bytes, accept func(*segment) bool) (i int, ok bool) {
	i, at := len(h.free), h.top
	for i > 0 && h.free[i-1].end() == at && accept(&h.free[i-1]) {
		i, at = i-1, h.free[i-1].off
	}
	if h.limit-at < n || h.Extend != nil && !h.Extend(at+n) {
		return 0, false
	}
	h.free = append(h.free, segment{off: h.top, size: at + n - h.top})
	h.top = at + n
	return i, true
}

// cut takes n bytes, beginning with segment i.
func (h *Heap) cut(lane Lane, i int, n memory.Bytes) (off memory.Bytes) {
	off, h.marks = h.free[i].off, h.marks[:0]
	j := i
	for left := n; left > 0; j++ {
		s := &h.free[j]
		h.follow(lane, s.out)
		for _, k := range s.after {
			if k != 0 {
				h.marks = append(h.marks, k)
			}
		}
		if s.size > left {
			s.off, s.size = s.off+left, s.size-left
			break
		}
		left -= s.size
	}
	h.free = slices.Delete(h.free, i, j)
	h.live += n
	h.peak = max(h.peak, h.live)
	return off
}

// follow notes that a lane is ordered after the first n copies out.
func (h *Heap) follow(lane Lane, n int) { h.followed[lane] = max(h.followed[lane], n) }

// Out counts a copy out of the heap, and returns its number.
func (h *Heap) Out() int { h.outs++; return h.outs }

// Give gives n bytes back, which may be used again after at most two marks. Out is the
// number of the copy out that reads them last, or zero.
func (h *Heap) Give(off, n memory.Bytes, out int, after ...Mark) {
	n = h.Round(n)
	if h.account {
		h.live -= n
		return
	}
	i, _ := slices.BinarySearchFunc(h.free, off, func(s segment, off memory.Bytes) int { return cmp.Compare(s.off, off) })
	if off < 0 || off+n > h.top || i > 0 && h.free[i-1].end() > off || i < len(h.free) && h.free[i].off < off+n {
		panic(fmt.Sprintf("residency: bytes [%d,%d) are given back that nobody has", off, off+n))
	}
	s := segment{off: off, size: n, out: out, scope: h.scope}
	if copy(s.after[:], after) < len(after) {
		panic(fmt.Sprintf("residency: bytes are given back after %d marks", len(after)))
	}
	h.free = slices.Insert(h.free, i, s)
	h.live -= n
}

// BeginScope opens a scope. What compute gives back in it is for compute alone until
// EndScope.
func (h *Heap) BeginScope() { h.scopes++; h.scope = h.scopes }

// EndScope closes the scope.
func (h *Heap) EndScope() { h.scope = 0 }

// largest returns the most bytes that a lane could take at once if it waited for
// everything.
func (h *Heap) largest() memory.Bytes {
	if h.account {
		return h.limit - h.live
	}
	most, size, end := memory.Bytes(0), memory.Bytes(0), memory.Bytes(0)
	for _, s := range h.free {
		if s.off != end {
			size = 0
		}
		size, end = size+s.size, s.end()
		most = max(most, size)
	}
	if end != h.top {
		size = 0
	}
	return max(most, size+h.limit-h.top)
}

// Check panics if the heap's law is broken.
func (h *Heap) Check() {
	if h.account {
		if h.live < 0 || h.live > h.peak || h.peak > max(h.limit, h.highest) {
			panic(fmt.Sprintf("residency: %d bytes are counted, %d at most, of %d", h.live, h.peak, h.limit))
		}
		return
	}
	var free memory.Bytes
	last := memory.Bytes(0)
	for _, s := range h.free {
		if s.off < last || s.size <= 0 {
			panic(fmt.Sprintf("residency: free bytes [%d,%d) overlap others", s.off, s.end()))
		}
		last, free = s.end(), free+s.size
	}
	if h.live+free != h.top || last > h.top || h.top > h.limit || h.live > h.peak || h.peak > h.top {
		panic(fmt.Sprintf("residency: %d bytes live, %d free, extent %d of at most %d", h.live, free, h.top, h.limit))
	}
}
