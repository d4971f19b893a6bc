// This file owns the heap: where storages lie in one run of bytes, and after what
// work freed bytes may be used again.

package residency

import (
	"cmp"
	"fmt"
	"math"
	"slices"
)

// Mark is a point in the work of a lane; zero is a point before everything.
type Mark int

// segment is free bytes that were given back together. Segments of different
// givers are kept apart even where they touch, so that a taker waits for those
// whose bytes it gets and for nobody else. There are thousands of them: they hold
// no pointers.
type segment struct {
	off, size int64
	after     [2]Mark
	out       int // the number of the copy out that reads it, or zero
	scope     int // the scope in which it was given back, or zero
}

func (s *segment) end() int64 { return s.off + s.size }

// Heap hands out runs of bytes. It is pure: the runtime asks it for offsets in a
// buffer, the simulator for the same offsets in none. At every point
//
//	live + free = top, and top is at most limit
//
// where top is the extent ever used. Free segments are in the order of their
// offsets and do not overlap. What the heap does depends only on the order of
// calls, never on time, so that a step that is issued in the same order gets the
// same offsets.
type Heap struct {
	// Extend, if there is one, is asked for memory before the extent grows, and
	// may say that there is none.
	Extend func(top int64) bool

	limit  int64
	align  int64
	window int // copies out that may be under way before a taker waits for one
	free   []segment
	marks  []Mark // what Take said last
	live   int64
	top    int64
	peak   int64 // the most that was live
	outs   int
	scope  int // the scope that is open, or zero
	scopes int

	// account makes it count bytes only: places are numbers, no two alike, and the
	// extent is the most that was live. Nobody waits for whoever had them before.
	account bool
	next    int64

	// A lane comes after so many of the copies out: it waits for none of them again.
	followed [Lanes]int
}

// NewHeap makes an empty heap of at most limit bytes.
func NewHeap(limit, align int64, window int) *Heap {
	if limit < 0 || align < 1 || window < 1 {
		panic(fmt.Sprintf("residency: a heap of %d bytes, aligned to %d, with a window of %d copies", limit, align, window))
	}
	return &Heap{limit: limit - limit%align, align: align, window: window}
}

// Live is what is taken now, Top the extent ever used, Peak the most ever taken.
func (h *Heap) Live() int64  { return h.live }
func (h *Heap) Top() int64   { return h.top }
func (h *Heap) Peak() int64  { return h.peak }
func (h *Heap) Limit() int64 { return h.limit }

// Raise gives the heap a higher limit, and tells whether it is one.
func (h *Heap) Raise(limit int64) bool {
	limit -= limit % h.align
	higher := limit > h.limit
	h.limit = max(h.limit, limit)
	return higher
}

// Round is the bytes that a storage of n takes. An empty one takes some too, so
// that no two storages are at one place.
func (h *Heap) Round(n int64) int64 {
	if n < 0 {
		panic(fmt.Sprintf("residency: a storage of %d bytes", n))
	}
	return (max(n, 1) + h.align - 1) / h.align * h.align
}

// Take finds n bytes for a lane and says what its first work on them comes after;
// the marks are good until the next call.
//
// In order: the smallest free run that can be had without waiting for a copy out
// of the last few; bytes never used, with what is free and ready right before
// them; the run whose last copy out began the longest ago; and bytes never used
// with all that is free before them. So a budget is used up before anybody waits
// for a copy that has just begun.
func (h *Heap) Take(lane Lane, n int64) (off int64, after []Mark, ok bool) {
	return h.take(lane, n, 0)
}

// take is Take for a lane that comes after so many copies out in any case.
func (h *Heap) take(lane Lane, n int64, past int) (off int64, after []Mark, ok bool) {
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

// usable tells whether a lane may have a segment at all. What compute has freed in
// a scope that is open is for compute alone: the work of other lanes that is
// issued in a scope comes before the scope's own.
func (h *Heap) usable(lane Lane, s *segment) bool {
	return lane == Compute || s.scope == 0 || s.scope != h.scope
}

// touches tells whether segment i begins where the one before it ends.
func (h *Heap) touches(i int) bool { return i > 0 && h.free[i-1].end() == h.free[i].off }

// smallest is where the smallest run of ready segments begins that holds n bytes;
// of equals the first. A segment is ready if the lane may have it and its copy out
// lies in the past. Every Take goes through all segments here: few instructions
// for each.
func (h *Heap) smallest(lane Lane, n int64, past int) (best int, found bool) {
	closed := -1
	if lane != Compute && h.scope != 0 {
		closed = h.scope
	}
	first, end := 0, int64(0) // of the run that is being looked at
	size, least := int64(0), int64(math.MaxInt64)
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

// soonest is where the usable segments begin that hold n bytes and whose newest
// copy out is the oldest.
func (h *Heap) soonest(lane Lane, n int64) (best int, found bool) {
	newest := 0
	for i := range h.free {
		size, out := int64(0), 0
		for j := i; j < len(h.free) && size < n && (j == i || h.touches(j)) && h.usable(lane, &h.free[j]); j++ {
			size, out = size+h.free[j].size, max(out, h.free[j].out)
		}
		if size >= n && (!found || out < newest) {
			best, newest, found = i, out, true
		}
	}
	return best, found
}

// grow makes a free segment of bytes never used that, with the acceptable ones
// right before it, holds n bytes, and is where those begin.
func (h *Heap) grow(n int64, accept func(*segment) bool) (i int, ok bool) {
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

// cut takes n bytes from segment i on.
func (h *Heap) cut(lane Lane, i int, n int64) (off int64) {
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

// follow notes that a lane comes after the first n copies out.
func (h *Heap) follow(lane Lane, n int) { h.followed[lane] = max(h.followed[lane], n) }

// Out counts a copy out of the heap, and is its number.
func (h *Heap) Out() int { h.outs++; return h.outs }

// Give gives n bytes back, to be used after at most two marks. Out is the number
// of the copy out that reads them last, or zero.
func (h *Heap) Give(off, n int64, out int, after ...Mark) {
	n = h.Round(n)
	if h.account {
		h.live -= n
		return
	}
	i, _ := slices.BinarySearchFunc(h.free, off, func(s segment, off int64) int { return cmp.Compare(s.off, off) })
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

// BeginScope opens a scope: see usable.
func (h *Heap) BeginScope() { h.scopes++; h.scope = h.scopes }

// EndScope makes what was given back in the scope like everything else.
func (h *Heap) EndScope() { h.scope = 0 }

// largest is the most that could be taken at once, by a lane that waits for
// everything.
func (h *Heap) largest() int64 {
	if h.account {
		return h.limit - h.live
	}
	most, size, end := int64(0), int64(0), int64(0)
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

// Check panics unless the heap's law holds.
func (h *Heap) Check() {
	if h.account {
		if h.live < 0 || h.live > h.peak || h.peak > h.limit {
			panic(fmt.Sprintf("residency: %d bytes are counted, %d at most, of %d", h.live, h.peak, h.limit))
		}
		return
	}
	var free int64
	last := int64(0)
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
