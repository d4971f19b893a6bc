// This file owns spans as slices: a track for each stream, on which slices nest. Spans
// that overlap without nesting, which no stream should have, go to further tracks of the
// same name; Perfetto shows these as one.

package export

import (
	"cmp"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

const (
	lanes = 16  // tracks that are searched for room
	depth = 256 // nested slices; Perfetto accepts 512
)

// lane is a track of a stream.
type lane struct {
	*sequence
	track uint64
	ends  []int64 // of the open slices, the innermost last
}

// span is a span with times of the common clock.
type span struct {
	begin, end, bytes, pieces int64
	name                      string
	kind                      trace.Kind
	tier                      memory.Kind
}

// issue is a span of compute: its first piece of work, and when it ended.
type issue struct {
	first uint64
	end   int64
}

// streams writes the spans of a rank. Their tracks are ordered from the given number on.
func (r *rank) streams(order int) {
	spans, count := map[string][]span{}, map[string]int{}
	var names []string
	compute := r.trace.Header.Compute
	for e := range r.trace.All() {
		if e.Kind.Span() {
			count[e.Stream]++
		}
	}
	r.work = make([]issue, 0, count[compute])
	for e := range r.trace.All() {
		if !e.Kind.Span() {
			continue
		}
		if spans[e.Stream] == nil {
			names = append(names, e.Stream)
			spans[e.Stream] = make([]span, 0, count[e.Stream])
		}
		x := span{r.at(e.Time), r.until(e), e.Bytes, 0, e.Name, e.Kind, e.Tier}
		if e.Last > e.First+1 {
			x.pieces = int64(e.Last - e.First)
		}
		spans[e.Stream] = append(spans[e.Stream], x)
		if e.Stream == compute {
			r.work = append(r.work, issue{e.First, x.end})
		}
	}
	if i := slices.Index(names, compute); i > 0 {
		names[0], names[i] = names[i], names[0]
	}
	slices.Sort(names[min(1, len(names)):])
	slices.SortStableFunc(r.work, func(a, b issue) int { return cmp.Compare(a.first, b.first) })
	for i, name := range names {
		r.stream(track{parent: r.process, name: "stream " + name, order: order + i}, spans[name])
		delete(spans, name)
	}
}

// stream writes the spans of one stream. Of spans that begin together, the longest comes
// first and encloses the others.
func (r *rank) stream(t track, spans []span) {
	slices.SortStableFunc(spans, func(a, b span) int {
		return cmp.Or(cmp.Compare(a.begin, b.begin), cmp.Compare(b.end, a.end))
	})
	var all []*lane
	for _, x := range spans {
		i := slices.IndexFunc(all, func(l *lane) bool { return l.fits(x.begin, x.end) })
		if i < 0 {
			i = len(all)
			all = append(all, &lane{sequence: r.sequence(), track: r.describe(t)})
		}
		l := all[i]
		l.ends = append(l.ends, x.end)
		l.slice(x)
		if i == lanes {
			l.close(math.MaxInt64)
			all = all[:i]
		}
	}
	for _, l := range all {
		l.close(math.MaxInt64)
	}
}

// until returns the time at which a span ends.
func (l *timeline) until(e *trace.Event) int64 { return l.at(e.Time) + min(max(e.Took, 0), latest) }

// fits closes the slices that have ended, and reports whether a new slice follows or
// lies inside of the rest.
func (l *lane) fits(begin, end int64) bool {
	l.close(begin)
	n := len(l.ends)
	return n == 0 || n < depth && end <= l.ends[n-1]
}

// close closes the slices that have ended by a time.
func (l *lane) close(at int64) {
	n := len(l.ends)
	for ; n > 0 && l.ends[n-1] <= at; n-- {
		l.end(l.track, l.ends[n-1])
	}
	l.ends = l.ends[:n]
}

// slice opens a slice.
func (l *lane) slice(x span) {
	c := catKernel
	switch x.kind {
	case trace.Copy:
		c = catCopy
	case trace.Wait:
		c = catWait
	}
	what := label{kind: x.kind, name: x.name}
	if x.kind == trace.Copy {
		what.tier = x.tier
	}
	l.event(sliceBegin, l.track)
	l.named(c, what)
	if x.bytes != 0 {
		l.note(noteBytes, x.bytes)
		if x.kind == trace.Copy && x.end > x.begin {
			l.rate(float64(x.bytes) / float64(x.end-x.begin)) // bytes a nanosecond are GB/s
		}
	}
	if x.pieces != 0 {
		l.note(notePieces, x.pieces)
	}
	l.emit(x.begin)
}
