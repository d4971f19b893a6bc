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

// moment is an event with its time on the device's clock, valid until the next one. A
// moment without an event is the beginning of a new process, which holds no memory.
type moment struct {
	at int64
	*trace.Event
}

// border is a step of the timeline. Its decisions are those from first up to last, in the
// count of all decisions.
type border struct {
	step        int
	begin, end  int64
	first, last int
}

// timeline is the trace of a rank in the order of the device's clock. The parts of a run
// that was resumed follow each other without a gap.
//
// A timeline does not hold its events, of which there are millions. It reads the packed
// traces again for each question.
type timeline struct {
	parts   []part
	steps   []border
	decided int   // decisions
	changes int   // of memory
	from    int64 // the first change of memory
	end     int64 // the last event
	to      int64 // the end, or the last change of memory if that is later
	tally   tally
}

// part is the trace of one process.
type part struct {
	*trace.Trace
	clock *trace.Clock
	shift int64
	again bool    // whether the run was resumed here
	taken []claim // by time
}

// claim is memory that an owner takes or gives back.
type claim struct {
	at, bytes, inUse int64
	name             string
	kind             trace.Kind
	tier             memory.Kind
}

// newTimeline returns the timeline of a rank. Each part begins later by so much than that
// of the rank that began first.
func newTimeline(later []int64, parts []*trace.Trace) *timeline {
	l := &timeline{tally: newTally()}
	for i, t := range parts {
		l.end = min(l.end+later[i], latest)
		l.add(t, i > 0)
	}
	return l
}

// add appends a part. Again says that it is not the first.
func (l *timeline) add(t *trace.Trace, again bool) {
	p := part{Trace: t, clock: t.Clock(), shift: l.end, again: again}
	last := p.shift
	var steps []turn
	n, first, decided := l.decided, int64(math.MaxInt64), int64(math.MinInt64)
	p.each(func(m moment) {
		if m.Kind == trace.Begin || m.Kind == trace.End {
			steps = append(steps, turn{m.Kind, m.Step, m.at, m.First, l.decided})
		}
		l.tally.add(m)
		l.decided++
		first, decided, last = min(first, m.at), m.at, max(last, m.at)
	}, func(m moment) {
		last = max(last, m.at+m.Took)
	}, func(m moment) {
		p.taken = append(p.taken, claim{m.at, m.Bytes, m.InUse[m.Tier], m.Name, m.Kind, m.Tier})
		last = max(last, m.at)
	})
	slices.SortStableFunc(p.taken, func(a, b claim) int { return cmp.Compare(a.at, b.at) })
	l.borders(steps, decided, p.done(steps))
	l.end = min(last, latest)
	changes := l.decided - n + len(p.taken)
	if again {
		first, decided = p.shift, max(decided, p.shift)
		changes++
	}
	if len(p.taken) > 0 {
		first, decided = min(first, p.taken[0].at), max(decided, p.taken[len(p.taken)-1].at)
	}
	if changes > 0 {
		if l.changes == 0 {
			l.from = first
		}
		l.to = decided
	}
	l.changes += changes
	l.parts = append(l.parts, p)
}

// each calls decision, span and claim with the events of each sort, in the order of
// writing. A nil function skips its sort.
func (p *part) each(decision, span, claim func(moment)) {
	before := int64(math.MinInt64)
	for e := range p.All() {
		if !sane(e) {
			continue
		}
		switch {
		case e.Kind.Span():
			if span != nil {
				span(moment{max(0, e.Time) + p.shift, e})
			}
		case owned(e):
			if claim != nil {
				claim(moment{max(0, e.Time) + p.shift, e})
			}
		case decision != nil:
			// Decisions stay in order, even if the trace is damaged.
			before = max(before, min(max(p.clock.Of(e), 0), latest)+p.shift)
			decision(moment{before, e})
		}
	}
}

// eachChange calls f with what changes memory, by time. Events of owners come first at
// equal times, because storages lie in memory of owners.
func (l *timeline) eachChange(f func(moment)) {
	for i := range l.parts {
		p := &l.parts[i]
		if p.again {
			f(moment{at: p.shift})
		}
		var e trace.Event
		left := p.taken
		claims := func(until int64) {
			for ; len(left) > 0 && left[0].at <= until; left = left[1:] {
				c := left[0]
				e = trace.Event{Kind: c.kind, Tier: c.tier, Name: c.name, Bytes: c.bytes}
				e.InUse[c.tier] = c.inUse
				f(moment{c.at, &e})
			}
		}
		p.each(func(m moment) {
			claims(m.at)
			f(m)
		}, nil, nil)
		claims(math.MaxInt64)
	}
}

// eachSpan calls f with the spans of all parts.
func (l *timeline) eachSpan(f func(moment)) {
	for i := range l.parts {
		l.parts[i].each(nil, f, nil)
	}
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

// turn is the beginning or the end of a step.
type turn struct {
	kind  trace.Kind
	step  int
	at    int64
	first uint64
	index int // among all decisions
}

// borders finds the steps of a part among their turns. A step ends when compute has done
// all work that was issued in it, which done knows. A step without an End event ends with
// the last decision of the part.
func (l *timeline) borders(turns []turn, last int64, done func(begin, end turn) int64) {
	var open *turn
	for i := range turns {
		m := &turns[i]
		switch n := len(l.steps); {
		case m.kind == trace.Begin:
			if open != nil {
				l.steps[n-1].last, l.steps[n-1].end = m.index, m.at
			}
			l.steps = append(l.steps, border{step: m.step, begin: m.at, end: m.at, first: m.index, last: m.index})
			open = m
		case open != nil:
			l.steps[n-1].last, l.steps[n-1].end = m.index+1, done(*open, *m)
			open = nil
		}
	}
	if n := len(l.steps); open != nil {
		l.steps[n-1].last, l.steps[n-1].end = l.decided, last
	}
	for i := range l.steps {
		l.steps[i].end = max(l.steps[i].end, l.steps[i].begin)
	}
}

// answer is what compute did around a number of its work.
type answer struct {
	before      uint64 // the first piece of the last span before the number
	over        int64  // when that span ended
	any         bool   // whether there is one
	graph       int64  // when the graph, or the wait, with that number ended
	beginsGraph bool
}

// done returns a function that returns the time at which compute finished the last piece
// of work of a step. The End event alone says only when the next piece began. A step that
// was captured whole ends with the graph that follows it, or with the wait for the graph
// of several ranks.
func (p *part) done(turns []turn) func(begin, end turn) int64 {
	var ends []uint64
	for _, t := range turns {
		if t.kind == trace.End {
			ends = append(ends, t.first)
		}
	}
	slices.Sort(ends)
	ends = slices.Compact(ends)
	answers := make([]answer, len(ends))
	if len(ends) > 0 {
		p.each(nil, func(m moment) {
			if m.Stream != p.Header.Compute {
				return
			}
			i, found := slices.BinarySearch(ends, m.First)
			if found {
				if a := &answers[i]; (m.Kind == trace.Graph || m.Kind == trace.Wait) && !a.beginsGraph {
					a.graph, a.beginsGraph = m.at+m.Took, true
				}
				i++
			}
			if i < len(ends) && (!answers[i].any || m.First >= answers[i].before) {
				answers[i].before, answers[i].over, answers[i].any = m.First, m.at+m.Took, true
			}
		}, nil)
	}
	for i := 1; i < len(answers); i++ {
		if b := answers[i-1]; !answers[i].any {
			answers[i].before, answers[i].over, answers[i].any = b.before, b.over, b.any
		}
	}
	return func(begin, end turn) int64 {
		i, _ := slices.BinarySearch(ends, end.first)
		switch a := answers[i]; {
		case begin.first == end.first && a.beginsGraph:
			return a.graph
		case !a.any:
			return end.at
		default:
			return min(end.at, a.over)
		}
	}
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
