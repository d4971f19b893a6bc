// This file owns the arithmetic of strided bytes: which bytes two rectangles
// share, and whether one holds all of another, exactly and without walking
// their rows where that can be avoided.

package check

import "github.com/stowage-dev/stowage/device"

// span is the bytes of a rectangle as addresses: rows runs of n bytes each,
// pitch bytes apart, the first at off.
type span struct {
	off, n, pitch, rows int64
}

// newSpan returns a rectangle's bytes. Rows that touch become one run.
func newSpan(r device.Rect) span {
	s := span{int64(r.Addr()), int64(r.Len), int64(r.Pitch), int64(r.Rows)}
	if s.n == 0 || s.rows == 0 {
		return span{off: s.off}
	}
	if s.pitch == s.n {
		s.n, s.rows = s.n*s.rows, 1
	}
	if s.rows == 1 {
		s.pitch = s.n
	}
	return s
}

func (s span) end() int64 {
	if s.rows == 0 {
		return s.off
	}
	return s.off + (s.rows-1)*s.pitch + s.n
}

func (s span) empty() bool { return s.n == 0 }

// first returns the first run of bytes of s inside the window [lo,hi).
func (s span) first(lo, hi int64) (from, to int64, ok bool) {
	from = s.off
	if lo >= s.off+s.n {
		// The first row that ends after lo: off + i*pitch + n > lo.
		i := (lo - s.off - s.n) / s.pitch
		i++
		if i >= s.rows {
			return 0, 0, false
		}
		from += i * s.pitch
	}
	to = min(from+s.n, hi)
	from = max(from, lo)
	return from, to, from < to
}

// rowsIn returns the half-open range of rows that have bytes in the window.
func (s span) rowsIn(lo, hi int64) (i, j int64) {
	if lo >= s.off+s.n {
		i = (lo-s.off-s.n)/s.pitch + 1
	}
	if hi > s.off {
		j = (hi-s.off-1)/s.pitch + 1
	}
	j = min(j, s.rows)
	return min(i, j), j
}

// overlap returns the first run of bytes in the window that two spans share.
func overlap(a, b span, lo, hi int64) (from, to int64, ok bool) {
	if a.rows > 1 && b.rows > 1 && a.pitch == b.pitch {
		// Seen modulo the pitch, a is [0,a.n) and b is [d,d+b.n): interleaved
		// columns never meet, however many rows they have.
		d := positiveMod(b.off-a.off, a.pitch)
		if a.n <= d && d+b.n <= a.pitch {
			return 0, 0, false
		}
	}
	for {
		a0, a1, ok := a.first(lo, hi)
		if !ok {
			return 0, 0, false
		}
		b0, b1, ok := b.first(lo, hi)
		if !ok {
			return 0, 0, false
		}
		if from, to = max(a0, b0), min(a1, b1); from < to {
			return from, to, true
		}
		lo = from // the later of the two begins here; nothing is shared before
	}
}

// coverSteps bounds the rows that covers compares one by one. Giving up only
// means that an old entry is kept for longer.
const coverSteps = 16

// covers reports whether a holds all bytes that b has in the window. It may say
// no when the answer is yes.
func covers(a, b span, lo, hi int64) bool {
	if from, to, ok := a.first(lo, hi); ok && from == lo && to == hi {
		return true
	}
	i, j := b.rowsIn(lo, hi)
	if a.rows > 1 && b.rows > 1 && a.pitch == b.pitch && j-i > 2 {
		d := positiveMod(b.off-a.off, a.pitch)
		return d+b.n <= a.n && a.holds(b, i, lo, hi) && a.holds(b, j-1, lo, hi)
	}
	if j-i > coverSteps {
		return false
	}
	for ; i < j; i++ {
		if !a.holds(b, i, lo, hi) {
			return false
		}
	}
	return true
}

// holds reports whether a run of s holds what row i of b has in the window.
func (s span) holds(b span, i, lo, hi int64) bool {
	lo = max(lo, b.off+i*b.pitch)
	hi = min(hi, b.off+i*b.pitch+b.n)
	from, to, ok := s.first(lo, hi)
	return ok && from == lo && to == hi
}

func positiveMod(x, m int64) int64 {
	if x %= m; x < 0 {
		x += m
	}
	return x
}
