// This file owns the summary of a runtime's steps, and what they are expected to take.

package engine

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// Summary returns what the steps under a key did. It has no groups before the first
// step under the key.
func (r *Runtime) Summary(key memory.Key) memory.Summary {
	s := memory.Summary{Rank: r.cfg.Rank, Budget: r.limit(), Groups: []memory.GroupSummary{}}
	l := r.keys[key]
	if l == nil {
		return s
	}
	s.Device, s.Host, s.Extent = l.stats.Device, l.stats.Host, l.stats.Extent
	s.Counts = copyCounts(&l.stats)
	for name, n := range l.stats.Names {
		row := memory.GroupSummary{Name: name, Groups: n.Groups, Bytes: n.Saved, Moved: n.Moved, Units: map[memory.Choice]int{}}
		for u := range l.facts {
			if u.Name == name {
				row.Units[l.policy[u]]++
			}
		}
		s.Groups = append(s.Groups, row)
	}
	s.Groups = append(s.Groups, l.rowSummary()...)
	slices.SortFunc(s.Groups, func(a, b memory.GroupSummary) int { return strings.Compare(a.Name, b.Name) })
	if r.stash != nil {
		s.Stash = stashCounts(r.stash.Stats())
	}
	if r.scopes != nil {
		s.Graphs = graphCounts(r.scopes.Counts(), r.scopes.Held())
	}
	return s
}

func copyCounts(c *offload.Stats) memory.CopyCounts {
	return memory.CopyCounts{
		Out: c.Out, In: c.In, OutBytes: c.OutBytes, InBytes: c.InBytes, Evicted: c.Evicted,
		Late: c.Late, Duplicates: c.Duplicates, HostFull: c.HostFull, Packed: c.Packed, Departed: c.Departed,
	}
}

func stashCounts(c stash.Stats) *memory.StashCounts {
	return &memory.StashCounts{
		Steps: c.Steps, Reruns: c.Reruns, Growths: c.Growths, Departures: c.Departures,
		Spilled: int64(c.Spilled), Stashed: int64(c.Stashed), Demand: int64(c.Demand),
		Low: [memory.Kinds]int64{int64(c.Low[stash.Device]), int64(c.Low[stash.Host])},
	}
}

func graphCounts(c capture.Counts, held int) *memory.GraphCounts {
	return &memory.GraphCounts{
		Calls: c.Calls, Eager: c.Eager, Replays: c.Replays, Failed: c.Failed, Captures: c.Captures,
		Closed: c.Closed, Moved: c.Moved, Refused: c.Refused, Evicted: c.Evicted, Held: held,
	}
}

// rowSummary describes the rows that the stash holds, as they were decided.
func (l *learned) rowSummary() (rows []memory.GroupSummary) {
	if l.decision == nil {
		return nil
	}
	for _, u := range l.decision.Forecast.Units {
		if !l.facts[u.Unit].Rows {
			continue
		}
		i := slices.IndexFunc(rows, func(r memory.GroupSummary) bool { return r.Name == u.Name })
		if i < 0 {
			i = len(rows)
			rows = append(rows, memory.GroupSummary{Name: u.Name, Units: map[memory.Choice]int{}})
		}
		r := &rows[i]
		r.Groups += u.Groups
		r.Bytes += u.Bytes * memory.Bytes(u.Groups)
		r.Moved += u.Moved
		r.Units[u.Choice]++
	}
	return rows
}

// Forecast returns what the steps under a key are expected to take, or nil before the
// decision. Its extent is that of the largest step: the recorded step may have taken more
// than the decision needs, and the runtime keeps memory that it took once. If there was
// nothing to decide, the forecast is a simulation of the largest step so far.
func (r *Runtime) Forecast(key memory.Key) *policy.Forecast {
	l := r.keys[key]
	switch {
	case l == nil || l.decision == nil:
		return nil
	case r.moves():
		f := l.decision.Forecast
		f.Extent = max(f.Extent, f.Extent+l.extent-f.Activations(l.profile.Base), l.early)
		return &f
	}
	// Nobody reads the times, so any rates will do.
	f, err := policy.Simulate(l.largest, nil, nil, memory.Links{Out: 1, In: 1}, r.off.Config())
	if err != nil {
		return nil
	}
	return &f
}

// Held returns the memory of both kinds that the runtime holds for activations. It keeps
// this memory from step to step.
func (r *Runtime) Held() (dev, host memory.Bytes) {
	if r.off == nil {
		return 0, 0
	}
	return r.off.Memory()
}
