// This file owns the figures of a rank that follow from its trace.

package report

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// samples is the number of samples of memory over a run: about one for each column of a
// screen.
const samples = 2000

// NewRank returns the figures of a rank that follow from its trace. A run that was
// resumed has a trace for each part; give them in order. Policy and Pools have only
// what the trace says.
func NewRank(parts ...*trace.Trace) Rank { return newRank(make([]int64, len(parts)), parts) }

// newRank returns the figures of a rank whose parts began later than those of the first
// rank by so much.
func newRank(later []int64, parts []*trace.Trace) Rank {
	r := Rank{Details: []Detail{}, Policy: []PolicyRow{}, Pools: []Pool{}, Counts: []Figure{}, Steps: []StepTime{}}
	for _, t := range parts {
		r.Rank, r.Budget = t.Header.Rank, cmp.Or(t.Header.Budget, r.Budget)
		r.Host, r.Process = t.Header.Host, t.Header.Process
		r.Dropped += t.Dropped
	}
	l := newTimeline(later, parts)
	var peak int64
	r.Memory, peak = memoryOf(l, r.Rank, samples)
	r.Details = details(l, peak)
	r.Rates = rates(l)
	for _, b := range l.steps {
		r.Steps = append(r.Steps, StepTime{b.step, millis(b.begin), millis(b.end)})
	}
	r.Pools = occupancy(l, r.Rank)
	r.Counts = l.tally.counts()
	r.Policy = append(r.Policy, l.tally.stashRows(r.Pools)...)
	return r
}

// tally counts decisions as they are read.
type tally struct {
	n     [256]int   // by kind
	bytes [256]int64 // by kind
	units map[string]map[[2]int]bool
	pages [2]Pool // by tier
}

func newTally() tally { return tally{units: map[string]map[[2]int]bool{}} }

// add counts a decision.
func (a *tally) add(m moment) {
	switch {
	case m.Kind == trace.Stash:
		if a.units[m.Name] == nil {
			a.units[m.Name] = map[[2]int]bool{}
		}
		a.units[m.Name][[2]int{m.Chunk, m.Layer}] = true
	case m.Kind == trace.Spill:
		a.page(m)
	}
	a.n[m.Kind]++
	a.bytes[m.Kind] += m.Bytes
}

// page counts the pages of the stash in use in a step.
func (a *tally) page(m moment) {
	p := &a.pages[m.Tier]
	if n := len(p.Steps); n > 0 && p.Steps[n-1] == m.Step { // the step was rerun
		p.Size[n-1], p.Most[n-1] = max(p.Size[n-1], m.Offset), max(p.Most[n-1], m.Bytes)
		return
	}
	p.Steps, p.Size, p.Most = append(p.Steps, m.Step), append(p.Size, m.Offset), append(p.Most, m.Bytes)
}

// stashRows returns the rows of the policy table for stashed groups. Only the device
// knows the bytes of each group, so they are given only if there is one group.
func (a *tally) stashRows(pools []Pool) (out []PolicyRow) {
	units := a.units
	for _, name := range slices.Sorted(maps.Keys(units)) {
		c := PolicyRow{Group: name, Units: map[string]int{"stash": len(units[name])}, Reason: "stash: the device counts its rows"}
		for _, p := range pools {
			if n := len(p.Most); len(units) == 1 && n > 0 && strings.HasPrefix(p.Name, pagesName) {
				if c.Saved += p.Most[n-1]; p.Name == pagesName+tiers[memory.Host] {
					c.Moved += p.Most[n-1]
				}
			}
		}
		out = append(out, c)
	}
	return out
}

// counted lists the kinds of events that the page counts.
var counted = []struct {
	kind  trace.Kind
	name  string
	label string
	bytes string // the key of the sum of their bytes, or empty
}{
	{trace.Offload, "copies_out", "offloads", "out_bytes"},
	{trace.Reload, "copies_in", "reloads", "in_bytes"},
	{trace.Late, "late", "late reloads", ""},
	{trace.Evict, "evicted", "evictions", ""},
	{trace.Recompute, "recomputed", "groups recomputed", ""},
	{trace.Stash, "stashed", "groups stashed", ""},
	{trace.Capture, "captured", "scopes captured", ""},
	{trace.Replay, "replayed", "scopes replayed", ""},
	{trace.Rerun, "reruns", "steps rerun", ""},
}

// counts returns how often each counted kind of event happened, if it did.
func (a *tally) counts() []Figure {
	n, bytes := &a.n, &a.bytes
	out := []Figure{}
	for _, c := range counted {
		if n[c.kind] == 0 {
			continue
		}
		out = append(out, Figure{Name: c.name, Label: c.label, Unit: Count, Value: float64(n[c.kind])})
		if c.bytes != "" {
			out = append(out, Figure{Name: c.bytes, Label: c.label + ", bytes", Unit: Bytes, Value: float64(bytes[c.kind])})
		}
	}
	return out
}

// occupancy returns how full the heaps and the stash were, step by step.
func occupancy(l *timeline, rank int) []Pool {
	book := newLedger(rank)
	all := [2]Pool{{Name: "activations, device", Unit: 1}, {Name: "activations, host", Unit: 1}}
	step, any := -1, [2]bool{}
	l.eachChange(func(m moment) {
		book.apply(m)
		if m.Event != nil && m.Kind == trace.Begin {
			step++
			for t := range all {
				p := &all[t]
				p.Steps, p.Size, p.Most = append(p.Steps, m.Step), append(p.Size, book.pool[t]), append(p.Most, 0)
			}
		}
		if step < 0 {
			return
		}
		for t := range all {
			p := &all[t]
			p.Size[step], p.Most[step] = max(p.Size[step], book.pool[t]), max(p.Most[step], book.live[t])
			any[t] = any[t] || book.pool[t] > 0
		}
	})
	out := []Pool{}
	for t, p := range all {
		if any[t] {
			out = append(out, p)
		}
	}
	return append(out, l.tally.pools()...)
}

const pagesName = "stash pages, "

// pools returns the occupancy of the stash, by tier.
func (a *tally) pools() (out []Pool) {
	for t, p := range a.pages {
		if p.Name, p.Unit = pagesName+tiers[t], 1; len(p.Steps) > 0 {
			out = append(out, p)
		}
	}
	return out
}
