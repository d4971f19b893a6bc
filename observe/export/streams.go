// This file owns spans as slices: a track for each stream, on which slices nest. Spans
// that overlap without nesting, which no stream should have, go to further tracks of the
// same name; Perfetto shows these as one.

package export

import (
	"cmp"
	"math"
	"slices"

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

// streams writes the spans of a rank. Their tracks are ordered from the given number on.
func (r *rank) streams(order int) {
	spans := map[string][]*trace.Event{}
	var names []string
	for i := range r.trace.Events {
		e := &r.trace.Events[i]
		if !e.Kind.Span() {
			continue
		}
		if spans[e.Stream] == nil {
			names = append(names, e.Stream)
		}
		spans[e.Stream] = append(spans[e.Stream], e)
	}
	compute := r.trace.Header.Compute
	if i := slices.Index(names, compute); i > 0 {
		names[0], names[i] = names[i], names[0]
	}
	slices.Sort(names[min(1, len(names)):])
	r.work = slices.Clone(spans[compute])
	slices.SortStableFunc(r.work, func(a, b *trace.Event) int { return cmp.Compare(a.First, b.First) })
	for i, name := range names {
		r.stream(track{parent: r.process, name: "stream " + name, order: order + i}, spans[name])
	}
}

// stream writes the spans of one stream. Of spans that begin together, the longest comes
// first and encloses the others.
func (r *rank) stream(t track, spans []*trace.Event) {
	slices.SortStableFunc(spans, func(a, b *trace.Event) int {
		return cmp.Or(cmp.Compare(r.at(a.Time), r.at(b.Time)), cmp.Compare(r.until(b), r.until(a)))
	})
	var all []*lane
	for _, e := range spans {
		begin, end := r.at(e.Time), r.until(e)
		i := slices.IndexFunc(all, func(l *lane) bool { return l.fits(begin, end) })
		if i < 0 {
			i = len(all)
			all = append(all, &lane{sequence: r.sequence(), track: r.describe(t)})
		}
		l := all[i]
		l.ends = append(l.ends, end)
		l.slice(e, begin, end)
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
func (l *lane) slice(e *trace.Event, begin, end int64) {
	c := catKernel
	switch e.Kind {
	case trace.Copy:
		c = catCopy
	case trace.Wait:
		c = catWait
	}
	what := label{kind: e.Kind, name: e.Name}
	if e.Kind == trace.Copy {
		what.tier = e.Tier
	}
	l.event(sliceBegin, l.track)
	l.named(c, what)
	if e.Bytes != 0 {
		l.note(noteBytes, e.Bytes)
		if e.Kind == trace.Copy && end > begin {
			l.rate(float64(e.Bytes) / float64(end-begin)) // bytes a nanosecond are GB/s
		}
	}
	if e.Last > e.First+1 {
		l.note(notePieces, int64(e.Last-e.First))
	}
	l.emit(begin)
}
