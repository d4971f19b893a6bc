// This file owns a rank: what its trace comes to.

package report

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/trace"
)

// samples are those of a rank over the whole run: about as many as a screen has columns.
const samples = 2000

// FromTrace makes the figures of a rank from its trace, or from the parts of one whose
// run was resumed, in their order. What the trace does not say stays empty.
func FromTrace(parts ...*trace.Trace) Rank {
	r := Rank{Details: []Detail{}, Policy: []Choice{}, Pools: []Pool{}, Counts: []Figure{}, Stages: []StepBorder{}}
	for _, t := range parts {
		r.Rank, r.Budget = t.Header.Rank, cmp.Or(t.Header.Budget, r.Budget)
		r.Dropped += t.Dropped
	}
	l := newTimeline(parts)
	var peak int64
	r.Memory, peak = memory(l, r.Rank, samples)
	r.Details = details(l, peak)
	r.Rates = rates(l)
	for _, b := range l.steps {
		r.Stages = append(r.Stages, StepBorder{b.step, millis(b.begin), millis(b.end)})
	}
	r.Pools = occupancy(l, r.Rank)
	r.Counts = counts(l.decided)
	r.Policy = append(r.Policy, stashed(l.decided, r.Pools)...)
	return r
}

// stashed are the groups whose rows went into pages. How many bytes they are the device
// alone knows, and the end of the step tells of all of them together.
func stashed(decided []moment, pools []Pool) (out []Choice) {
	units := map[string]map[[2]int]bool{}
	for _, m := range decided {
		if m.What == trace.Stash {
			if units[m.Name] == nil {
				units[m.Name] = map[[2]int]bool{}
			}
			units[m.Name][[2]int{m.Chunk, m.Layer}] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(units)) {
		c := Choice{Group: name, Units: map[string]int{"stash": len(units[name])}, Reason: "stash: its rows are counted on the device"}
		for _, p := range pools {
			if n := len(p.Most); len(units) == 1 && n > 0 && strings.HasPrefix(p.Name, pagesName) {
				if c.Saved += p.Most[n-1]; p.Name == pagesName+tiers[trace.Host] {
					c.Moved += p.Most[n-1]
				}
			}
		}
		out = append(out, c)
	}
	return out
}

// counted are the events that are worth a number.
var counted = []struct {
	what  trace.What
	name  string
	label string
	bytes string // the key of their bytes, if those are worth one too
}{
	{trace.Leave, "copies_out", "copies to the host", "out_bytes"},
	{trace.Return, "copies_in", "copies back", "in_bytes"},
	{trace.Late, "late", "came back late", ""},
	{trace.Evict, "evicted", "left for want of room", ""},
	{trace.Recompute, "recomputed", "groups computed again", ""},
	{trace.Stash, "stashed", "groups stashed", ""},
	{trace.Capture, "captured", "scopes captured", ""},
	{trace.Replay, "replayed", "scopes replayed", ""},
	{trace.Rerun, "reruns", "steps done again", ""},
}

// counts are what happened how often, without what never did.
func counts(decided []moment) []Figure {
	n, bytes := map[trace.What]int{}, map[trace.What]int64{}
	for _, m := range decided {
		if m.What == trace.Spill && (m.Tier != trace.Host || m.Bytes == 0) {
			continue // pages of the device, or none
		}
		n[m.What]++
		bytes[m.What] += m.Bytes
	}
	out := []Figure{}
	for _, c := range counted {
		if n[c.what] == 0 {
			continue
		}
		out = append(out, Figure{Name: c.name, Label: c.label, Unit: Count, Value: float64(n[c.what])})
		if c.bytes != "" {
			out = append(out, Figure{Name: c.bytes, Label: c.label + ", bytes", Unit: Bytes, Value: float64(bytes[c.what])})
		}
	}
	return out
}

// occupancy is how full the pools were, by step.
func occupancy(l *timeline, rank int) []Pool {
	book := newLedger(rank)
	all := [2]Pool{{Name: "activations, device", Unit: 1}, {Name: "activations, host", Unit: 1}}
	step, any := -1, [2]bool{}
	for _, m := range l.memory {
		book.take(m)
		if m.Event != nil && m.What == trace.Begin {
			step++
			for t := range all {
				p := &all[t]
				p.Steps, p.Size, p.Most = append(p.Steps, m.Step), append(p.Size, book.pool[t]), append(p.Most, 0)
			}
		}
		if step < 0 {
			continue
		}
		for t := range all {
			p := &all[t]
			p.Size[step], p.Most[step] = max(p.Size[step], book.pool[t]), max(p.Most[step], book.live[t])
			any[t] = any[t] || book.pool[t] > 0
		}
	}
	out := []Pool{}
	for t, p := range all {
		if any[t] {
			out = append(out, p)
		}
	}
	return append(out, pages(l.decided)...)
}

const pagesName = "stash pages, "

// pages are the tiers of the stash, as the ends of steps tell.
func pages(decided []moment) (out []Pool) {
	all := [2]Pool{}
	for _, m := range decided {
		if m.What != trace.Spill {
			continue
		}
		p := &all[m.Tier]
		if n := len(p.Steps); n > 0 && p.Steps[n-1] == m.Step { // it was done again
			p.Size[n-1], p.Most[n-1] = max(p.Size[n-1], m.Offset), max(p.Most[n-1], m.Bytes)
			continue
		}
		p.Steps, p.Size, p.Most = append(p.Steps, m.Step), append(p.Size, m.Offset), append(p.Most, m.Bytes)
	}
	for t, p := range all {
		if p.Name, p.Unit = pagesName+tiers[t], 1; len(p.Steps) > 0 {
			out = append(out, p)
		}
	}
	return out
}
