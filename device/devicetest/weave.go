// This file owns how random programs stay free of races: the weaver knows which
// work is ordered before which, and adds the events that are missing.

package devicetest

import (
	"math/rand/v2"
	"slices"

	"github.com/stowage-dev/stowage/device"
)

// weaver follows work on several streams. Pieces of work on a stream are
// counted from one; clock[s][t] is how many pieces of stream t are done before
// the next piece of stream s begins, as far as events tell.
type weaver struct {
	rng     *rand.Rand
	streams []device.Stream
	clock   [][]int
	used    map[cell]*usage
	marks   []mark
	next    int // the mark whose event is recorded next
}

// cell is a piece of a buffer that steps use as a whole.
type cell struct{ buffer, index int }

// usage is who used a cell: the last writer and, by stream, the readers since then.
type usage struct {
	writer  int
	written int
	read    []int
}

// mark is what an event marks: so many pieces of a stream, and all they waited
// for.
type mark struct {
	event  device.Event
	stream int
	clock  []int
}

// newWeaver uses the events given, again and again.
func newWeaver(rng *rand.Rand, streams []device.Stream, events []device.Event) *weaver {
	w := &weaver{rng: rng, streams: streams, used: map[cell]*usage{}}
	for range streams {
		w.clock = append(w.clock, make([]int, len(streams)))
	}
	for _, e := range events {
		w.marks = append(w.marks, mark{event: e, stream: -1})
	}
	return w
}

// use prepares stream s for a piece of work with these accesses and counts it.
// The caller issues the piece next and then calls issued.
func (w *weaver) use(s int, reads, writes []cell) {
	for _, c := range reads {
		u := w.usage(c)
		w.after(s, u.writer, u.written)
	}
	for _, c := range writes {
		u := w.usage(c)
		w.after(s, u.writer, u.written)
		for t, n := range u.read {
			w.after(s, t, n)
		}
	}
	w.clock[s][s]++
	n := w.clock[s][s]
	for _, c := range reads {
		w.usage(c).read[s] = n
	}
	for _, c := range writes {
		*w.usage(c) = usage{writer: s, written: n, read: make([]int, len(w.streams))}
	}
}

// issued sometimes marks the piece that was just issued, for later waits.
func (w *weaver) issued(s int) {
	if w.rng.IntN(3) == 0 {
		w.record(s)
	}
}

func (w *weaver) usage(c cell) *usage {
	u := w.used[c]
	if u == nil {
		u = &usage{read: make([]int, len(w.streams))}
		w.used[c] = u
	}
	return u
}

// after makes stream s wait until n pieces of stream t are done, unless it does
// already. It prefers a mark that is there to a new one.
func (w *weaver) after(s, t, n int) {
	if s == t || w.clock[s][t] >= n {
		return
	}
	at := slices.IndexFunc(w.marks, func(m mark) bool { return m.stream == t && m.clock[t] >= n })
	if at < 0 {
		at = w.record(t)
	}
	w.wait(s, at)
}

// record marks all of stream s in the event that was recorded longest ago. The
// waits issued for its earlier mark keep their meaning.
func (w *weaver) record(s int) int {
	at := w.next
	w.next = (w.next + 1) % len(w.marks)
	w.streams[s].Record(w.marks[at].event)
	w.note(at, s)
	return at
}

// note stores that an event now marks all work of stream s.
func (w *weaver) note(at, s int) {
	w.marks[at].stream, w.marks[at].clock = s, slices.Clone(w.clock[s])
}

func (w *weaver) wait(s, at int) {
	w.streams[s].Wait(w.marks[at].event)
	for t, n := range w.marks[at].clock {
		w.clock[s][t] = max(w.clock[s][t], n)
	}
}
