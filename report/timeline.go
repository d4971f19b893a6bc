// This file owns the order of a rank's events: where on the device's clock each of them
// lies, and which step it belongs to.

package report

import (
	"cmp"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/trace"
)

// moment is an event where it lies on the clock; without an event it is the beginning
// of another process, which has nothing yet.
type moment struct {
	at int64
	*trace.Event
}

// border is a step of the timeline: its decisions are those from first to last.
type border struct {
	step        int
	begin, end  int64
	first, last int
}

// timeline is a rank's trace in the order of the device's clock. The parts of a run that
// was resumed follow each other without the time between them.
type timeline struct {
	decided []moment // in the order of issue
	memory  []moment // what changes memory, by time
	spans   []moment // in the order written
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

func (l *timeline) add(t *trace.Trace, again bool) {
	clock, shift := t.Clock(), l.end
	var taken, held []moment // by the device and by steps
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
		case e.What.Span():
			m := moment{at, e}
			l.spans = append(l.spans, m)
			if e.Stream == t.Header.Compute {
				compute = append(compute, m)
			}
			at += e.Took
		case owned(e):
			taken = append(taken, moment{at, e})
		default:
			// Time goes on from decision to decision, whatever a damaged trace says.
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

// latest bounds times, so that sums stay in 63 bits: 2^60 ns are 36 years.
const latest = 1 << 60

// sane tells whether an event can be: files are whatever somebody gave.
func sane(e *trace.Event) bool {
	return e.Time <= latest && e.Took >= 0 && e.Took <= latest && e.Tier <= trace.Host && e.Bytes >= 0
}

// owned tells whether an event is of memory that the device itself gave out.
func owned(e *trace.Event) bool {
	return (e.What == trace.Alloc || e.What == trace.Free) && e.Storage == 0
}

// merge puts two lists into one; at the same time the device's own memory comes first,
// in which the other lies.
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

// borders finds the steps among the decisions of a part. A step is over when compute has
// done what it was given in it; a step that was not ended is over with the part.
func (l *timeline) borders(from int, compute []moment) {
	slices.SortFunc(compute, func(a, b moment) int { return cmp.Compare(a.First, b.First) })
	open := false
	for i := from; i < len(l.decided); i++ {
		m := l.decided[i]
		switch n := len(l.steps); {
		case m.What == trace.Begin:
			if open {
				l.steps[n-1].last, l.steps[n-1].end = i, m.at
			}
			l.steps = append(l.steps, border{step: m.Step, begin: m.at, end: m.at, first: i, last: i})
			open = true
		case m.What == trace.End && open:
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

// done is when the last piece of work was over that compute had been given between the
// beginning and the end of a step; the end says itself when the next one began. A step
// that was captured whole is the graph behind it.
func done(begin, end moment, compute []moment) int64 {
	i, found := slices.BinarySearchFunc(compute, end.First, func(s moment, first uint64) int { return cmp.Compare(s.First, first) })
	switch {
	case begin.First == end.First && found && compute[i].What == trace.Graph:
		return compute[i].at + compute[i].Took
	case i == 0:
		return end.at
	}
	return min(end.at, compute[i-1].at+compute[i-1].Took)
}

// stepAt is the index of the step that a time lies in, or of the last one before it, or
// zero.
func (l *timeline) stepAt(at int64) int {
	i, found := slices.BinarySearchFunc(l.steps, at, func(b border, at int64) int { return cmp.Compare(b.begin, at) })
	if !found {
		i--
	}
	return max(i, 0)
}

// millis is a time of a report: microseconds are enough for eyes, and short in JSON.
func millis(ns int64) float64 { return math.Round(float64(ns)/1e3) / 1e3 }
