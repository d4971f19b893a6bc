// This file owns shadow memory: for every byte, the accesses that later work
// could still race with.

package check

import (
	"slices"
	"sort"

	"github.com/stowage-dev/stowage/device"
)

// use is one declaration of an operation.
type use struct {
	span
	mode device.Mode
	buf  *buffer
	rect device.Rect // as declared
}

// act is one execution of an operation: the operation itself, or one replay of
// the graph that holds it.
type act struct {
	op     *op
	slot   int
	tick   uint64
	seq    uint64 // issue order over all streams
	replay int    // of its graph, from one; zero outside of graphs
	on     *lane
}

// before reports whether work with clock k is ordered after the act.
func (a *act) before(k clock) bool { return a.tick <= k.at(a.slot) }

// cell is an access in the shadow. Inside a segment it stands for those of its
// bytes that lie in the segment.
type cell struct {
	by *act
	*use
}

// segment is the accesses of the bytes from lo to the next segment.
type segment struct {
	lo    int64
	cells []cell
}

// shadow is the segments of a range of addresses without gaps. Where segments
// are cut has no meaning: a cut is made where an access begins or ends, and
// taken away when both sides are alike.
//
// The number of cells stays bounded, because an access drops what it covers: a
// write everything ordered before it, a read the ordered reads, an atomic the
// ordered atomics. Nothing is lost: later work that is unordered with a dropped
// access A is unordered with the access B that replaced it (A -> B and B -> X
// would order A -> X), and it conflicts with B wherever it conflicts with A.
// Accesses that the host has synchronised with are dropped too, because all
// later work is ordered after them.
type shadow struct {
	segs []segment
	end  int64
}

func newShadow(lo, end int64) *shadow {
	return &shadow{segs: []segment{{lo: lo}}, end: end}
}

// limits of the shadow: a segment with more cells than cellLimit is cut at all
// their rows, unless that makes more than cutLimit segments. Real programs have
// a few cells a segment: one write, and a read for each stream.
const (
	cellLimit = 256
	cutLimit  = 1 << 20
)

// conflict is a pair of accesses that nothing orders.
type conflict struct {
	first    cell
	second   cell
	from, to int64
}

func (s *shadow) endOf(i int) int64 {
	if i+1 < len(s.segs) {
		return s.segs[i+1].lo
	}
	return s.end
}

// access enters n, whose lane has clock k, and returns the latest issued access
// that conflicts with it, if any. It then leaves n out: the program is wrong
// from there on.
func (s *shadow) access(n cell, k, host clock) *conflict {
	lo, hi := n.off, n.end()
	i, j := s.cut(lo), s.cut(hi)
	var found *conflict
	crowded := false
	for x := i; x < j; x++ {
		if c := s.enter(x, n, k, host); c != nil && (found == nil || c.first.by.seq > found.first.by.seq) {
			found = c
		}
		crowded = crowded || len(s.segs[x].cells) > cellLimit
	}
	if crowded {
		s.cutRows(i, j)
		j = s.find(hi)
	}
	s.uncut(i, j)
	return found
}

// enter checks n against one segment and adds it there.
func (s *shadow) enter(x int, n cell, k, host clock) *conflict {
	seg := &s.segs[x]
	lo, hi := seg.lo, s.endOf(x)
	if _, _, ok := n.first(lo, hi); !ok {
		return nil
	}
	var found *conflict
	keep := seg.cells[:0]
	for _, old := range seg.cells {
		switch {
		case old.by.before(host):
			continue
		case !old.by.before(k):
			if !needOrder(old.mode, n.mode) || found != nil && old.by.seq < found.first.by.seq {
				break
			}
			if from, to, ok := overlap(old.span, n.span, lo, hi); ok {
				found = &conflict{old, n, from, to}
			}
		case (n.mode == device.Write || n.mode == old.mode) && covers(n.span, old.span, lo, hi):
			continue
		}
		keep = append(keep, old)
	}
	clear(seg.cells[len(keep):])
	seg.cells = keep
	if found == nil && !n.by.before(host) {
		seg.cells = append(seg.cells, n)
	}
	return found
}

// find returns the index of the segment that starts at address at, or would.
func (s *shadow) find(at int64) int {
	return sort.Search(len(s.segs), func(i int) bool { return s.segs[i].lo >= at })
}

// cut makes a segment start at the address and returns its index.
func (s *shadow) cut(at int64) int {
	i := s.find(at)
	if at == s.end || i < len(s.segs) && s.segs[i].lo == at {
		return i
	}
	left := &s.segs[i-1]
	hi := s.endOf(i - 1)
	right := segment{lo: at, cells: within(left.cells, at, hi)}
	left.cells = within(left.cells, left.lo, at)
	s.segs = slices.Insert(s.segs, i, right)
	return i
}

// within returns a copy of those cells that have bytes in the window.
func within(cells []cell, lo, hi int64) []cell {
	if len(cells) == 0 {
		return nil
	}
	in := make([]cell, 0, len(cells)+1)
	for _, c := range cells {
		if _, _, ok := c.first(lo, hi); ok {
			in = append(in, c)
		}
	}
	return in
}

// uncut joins neighbours with the same cells, from the segment before i to j.
func (s *shadow) uncut(i, j int) {
	i, j = max(i, 1), min(j, len(s.segs)-1)
	if i > j {
		return
	}
	out := i
	for x := i; x <= j; x++ {
		if slices.Equal(s.segs[out-1].cells, s.segs[x].cells) {
			continue
		}
		s.segs[out] = s.segs[x]
		out++
	}
	if out <= j {
		s.segs = slices.Delete(s.segs, out, j+1)
	}
}

// cutRows cuts the segments i to j where a row of their cells begins. After that each
// cell has the first byte of its segment and one row at most there, so that covering it
// becomes certain.
func (s *shadow) cutRows(i, j int) {
	var made []segment
	for x := i; x < j; x++ {
		seg, hi := s.segs[x], s.endOf(x)
		cuts := []int64{seg.lo}
		if len(seg.cells) > cellLimit {
			cuts = rowCuts(seg, hi)
		}
		if len(cuts) == 1 {
			made = append(made, seg)
			continue
		}
		for n, lo := range cuts {
			end := hi
			if n+1 < len(cuts) {
				end = cuts[n+1]
			}
			made = append(made, segment{lo, within(seg.cells, lo, end)})
		}
	}
	s.segs = slices.Replace(s.segs, i, j, made...)
}

// rowCuts returns the addresses inside a segment where a row of a cell begins, or only
// the segment's own if they are too many.
func rowCuts(seg segment, hi int64) []int64 {
	rows := int64(0)
	for _, c := range seg.cells {
		i, j := c.rowsIn(seg.lo, hi)
		rows += j - i
	}
	if rows > cutLimit {
		return []int64{seg.lo}
	}
	cuts := []int64{seg.lo}
	for _, c := range seg.cells {
		i, j := c.rowsIn(seg.lo, hi)
		for ; i < j; i++ {
			if at := c.off + i*c.pitch; at > seg.lo && at < hi {
				cuts = append(cuts, at)
			}
		}
	}
	slices.Sort(cuts)
	return slices.Compact(cuts)
}

// forget drops all that is known about a range.
func (s *shadow) forget(lo, hi int64) {
	if lo == hi {
		return
	}
	i, j := s.cut(lo), s.cut(hi)
	for x := i; x < j; x++ {
		s.segs[x].cells = nil
	}
	s.uncut(i, j)
}

// needOrder reports whether two accesses to the same byte need an order. Two reads
// do not, nor do two atomic accesses.
func needOrder(a, b device.Mode) bool { return a != b || a == device.Write }
