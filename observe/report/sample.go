// This file owns sampling: which moments of a run a chart shows.

package report

import (
	"cmp"
	"slices"
)

// size orders moments: by device memory, then by how much of it steps use, then by host
// memory. Pools do not shrink, so device memory alone would leave most moments equal.
type size [3]int64

func (s size) less(o size) bool {
	return cmp.Or(cmp.Compare(s[0], o[0]), cmp.Compare(s[1], o[1]), cmp.Compare(s[2], o[2])) < 0
}

// instant is a moment that stands for its slot.
type instant struct {
	at    int64
	size  size
	state []int64
	set   bool
}

// sampler divides the time of a run into slots and keeps the largest moment of each. The
// state at the beginning of a slot is one of its moments. A slot without events gets a
// sample only if it differs from the one before.
//
// Only the time of steps counts. A pause between two steps, in which the runs of a
// comparison wait for each other, belongs to one slot however long it lasts.
type sampler struct {
	book     *ledger
	from, to int64
	length   int64 // without pauses
	pauses   []pause
	slots    int64
	slot     int64
	best     instant
	peak     instant // of the whole run
	host     int64   // the most host memory
	times    []int64
	states   [][]int64
}

func newSampler(book *ledger, l *timeline, slots int) *sampler {
	s := &sampler{book: book, slots: int64(slots), slot: -1}
	if l.changes > 0 {
		s.from, s.to = l.from, max(l.end, l.to)
	}
	s.pauses = l.pauses(s.from, s.to)
	s.length = s.worked(s.to) + 1
	return s
}

// pause is a time without a step.
type pause struct {
	from, to int64
	before   int64 // the sum of the pauses before it
}

// pauses returns the times without a step. A run without steps has no pauses.
func (l *timeline) pauses(from, to int64) (out []pause) {
	at, before := from, int64(0)
	add := func(until int64) {
		if until > at {
			out = append(out, pause{at, until, before})
			before += until - at
		}
	}
	for _, b := range l.steps {
		add(min(b.begin, to))
		at = max(at, b.end)
	}
	if len(l.steps) > 0 {
		add(to)
	}
	return out
}

// worked returns the time that steps have taken until a moment.
func (s *sampler) worked(at int64) int64 {
	i, found := slices.BinarySearchFunc(s.pauses, at, func(p pause, at int64) int { return cmp.Compare(p.from, at) })
	switch {
	case found:
		return at - s.from - s.pauses[i].before
	case i == 0:
		return at - s.from
	}
	p := s.pauses[i-1]
	return at - s.from - p.before - (min(at, p.to) - p.from)
}

// until returns the first moment at which steps have taken that time. It inverts
// worked.
func (s *sampler) until(worked int64) int64 {
	i, _ := slices.BinarySearchFunc(s.pauses, worked, func(p pause, worked int64) int { return cmp.Compare(p.from-s.from-p.before, worked) })
	if i == 0 {
		return s.from + worked
	}
	p := s.pauses[i-1]
	return s.from + worked + p.before + (p.to - p.from)
}

// slotOf returns the slot of a moment.
func (s *sampler) slotOf(at int64) int64 {
	return min(max(int64(float64(s.worked(at))*float64(s.slots)/float64(s.length)), 0), s.slots-1)
}

// begins returns the moment at which a slot begins.
func (s *sampler) begins(slot int64) int64 {
	return s.until(int64(float64(slot) * float64(s.length) / float64(s.slots)))
}

// apply takes the next event.
func (s *sampler) apply(m moment) {
	if slot := s.slotOf(m.at); slot > s.slot { // rounding may give the slot before
		s.turn(slot)
	}
	s.book.apply(m)
	s.look(m.at)
}

// turn ends the current slot and begins a later one.
func (s *sampler) turn(slot int64) {
	if s.slot >= 0 {
		s.keep()
		if slot > s.slot+1 && !same(s.states[len(s.states)-1], s.book.now) {
			s.look(s.begins(s.slot + 1))
			s.keep()
		}
		s.look(s.begins(slot))
	}
	s.slot = slot
}

// look compares the current state with the best of the slot and of the run.
func (s *sampler) look(at int64) {
	b := s.book
	now := size{b.total[0], b.live[0] + b.out[0], b.total[1]}
	s.host = max(s.host, b.total[1])
	if !s.best.set || s.best.size.less(now) {
		s.best = instant{at, now, append(s.best.state[:0], b.now...), true}
	}
	if !s.peak.set || s.peak.size.less(now) {
		s.peak = instant{at: at, size: now, set: true}
	}
}

// keep adds the best moment of the slot to the samples.
func (s *sampler) keep() {
	if n := len(s.times); n > 0 {
		s.best.at = max(s.best.at, s.times[n-1])
	}
	s.times = append(s.times, s.best.at)
	s.states = append(s.states, slices.Clone(s.best.state))
	s.best.set = false
}

// finish ends the last slot. The last state holds until the end.
func (s *sampler) finish() {
	if s.slot < 0 {
		return
	}
	s.keep()
	if s.look(s.to); s.to > s.times[len(s.times)-1] {
		s.keep()
	}
}

// same reports whether two states are equal. The later one may have more bands.
func same(a, b []int64) bool {
	return slices.Equal(a, b[:len(a)]) && !slices.ContainsFunc(b[len(a):], func(n int64) bool { return n != 0 })
}
