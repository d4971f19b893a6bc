// This file owns the order of a rank's events: their times on the device's clock, and
// the steps that they belong to.

package report

import (
	"cmp"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// moment is an event with its time on the device's clock. A moment without an event is
// the beginning of a new process, which holds no memory.
type moment struct {
	at int64
	*trace.Event
}

// border is a step of the timeline. Its decisions are those from first up to last.
type border struct {
	step        int
	begin, end  int64
	first, last int
}

// timeline is the trace of a rank in the order of the device's clock. The parts of a run
// that was resumed follow each other without a gap.
type timeline struct {
	decided []moment // in the order of issue
	memory  []moment // events that change memory, by time
	spans   []moment // in the order of writing
	steps   []border
	end     int64
}

func newTimeline(parts []*trace.Trace) *timeline {
	l := &timeline{}
	for i, t := range parts {
		l.add(t, i > 0)
	}
	return l
}

// add appends a part. Again says that it is not the first.
func (l *timeline) add(t *trace.Trace, again bool) {
	clock, shift := t.Clock(), l.end
	var taken, held []moment // events of owners and of steps
	compute := []moment{}
	if again {
		taken = append(taken, moment{at: shift})
	}
	last := shift
	for i := range t.Events {
		e := &t.Events[i]
		if !sane(e) {
			continue
		}
		at := max(0, e.Time) + shift
		switch {
		case e.Kind.Span():
			m := moment{at, e}
			l.spans = append(l.spans, m)
			if e.Stream == t.Header.Compute {
				compute = append(compute, m)
			}
			at += e.Took
		case owned(e):
			taken = append(taken, moment{at, e})
		default:
			// Decisions stay in order, even if the trace is damaged.
			at = min(max(clock.Of(e), 0), latest) + shift
			if n := len(held); n > 0 {
				at = max(at, held[n-1].at)
			}
			held = append(held, moment{at, e})
		}
		last = max(last, at)
	}
	slices.SortStableFunc(taken, func(a, b moment) int { return cmp.Compare(a.at, b.at) })
	from := len(l.decided)
	l.decided = append(l.decided, held...)
	l.borders(from, compute)
	l.memory = append(l.memory, merge(taken, held)...)
	l.end = min(last, latest)
}

// latest bounds times so that sums stay in 63 bits: 2^60 ns are 36 years.
const latest = 1 << 60

// sane reports whether an event is possible. The file may hold anything.
func sane(e *trace.Event) bool {
	return e.Time <= latest && e.Took >= 0 && e.Took <= latest && e.Tier <= memory.Host && e.Bytes >= 0
}

// owned reports whether an event is about memory of an owner, not of a storage.
func owned(e *trace.Event) bool {
	return (e.Kind == trace.Alloc || e.Kind == trace.Free) && e.Storage == 0
}

// merge merges two lists by time. Events of owners come first at equal times, because
// storages lie in memory of owners.
func merge(taken, held []moment) (out []moment) {
	out = make([]moment, 0, len(taken)+len(held))
	for _, m := range held {
		for len(taken) > 0 && taken[0].at <= m.at {
			out, taken = append(out, taken[0]), taken[1:]
		}
		out = append(out, m)
	}
	return append(out, taken...)
}

// borders finds the steps among the decisions of a part. A step ends when compute has
// done all work that was issued in it. A step without an End event ends with the part.
func (l *timeline) borders(from int, compute []moment) {
	slices.SortFunc(compute, func(a, b moment) int { return cmp.Compare(a.First, b.First) })
	open := false
	for i := from; i < len(l.decided); i++ {
		m := l.decided[i]
		switch n := len(l.steps); {
		case m.Kind == trace.Begin:
			if open {
				l.steps[n-1].last, l.steps[n-1].end = i, m.at
			}
			l.steps = append(l.steps, border{step: m.Step, begin: m.at, end: m.at, first: i, last: i})
			open = true
		case m.Kind == trace.End && open:
			l.steps[n-1].last, l.steps[n-1].end = i+1, done(l.decided[l.steps[n-1].first], m, compute)
			open = false
		}
	}
	if n := len(l.decided); open {
		l.steps[len(l.steps)-1].last, l.steps[len(l.steps)-1].end = n, l.decided[n-1].at
	}
	for i := range l.steps {
		l.steps[i].end = max(l.steps[i].end, l.steps[i].begin)
	}
}

// done returns the time at which compute finished the last piece of work of a step. The
// End event alone says only when the next piece began. A step that was captured whole
// ends with the graph that follows it.
func done(begin, end moment, compute []moment) int64 {
	i, found := slices.BinarySearchFunc(compute, end.First, func(s moment, first uint64) int { return cmp.Compare(s.First, first) })
	switch {
	case begin.First == end.First && found && compute[i].Kind == trace.Graph:
		return compute[i].at + compute[i].Took
	case i == 0:
		return end.at
	}
	return min(end.at, compute[i-1].at+compute[i-1].Took)
}

// stepAt returns the index of the step that a time lies in. Between steps it is the one
// before, and before all steps zero.
func (l *timeline) stepAt(at int64) int {
	i, found := slices.BinarySearchFunc(l.steps, at, func(b border, at int64) int { return cmp.Compare(b.begin, at) })
	if !found {
		i--
	}
	return max(i, 0)
}

// millis returns a time in milliseconds, rounded to microseconds to keep the JSON short.
func millis(ns int64) float64 { return math.Round(float64(ns)/1e3) / 1e3 }
