// This file owns the summary: what the steps did, as a table and as JSON.

package stowage

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/offload"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/stash"
)

// Summary is what one rank's steps did. The figures of groups are those of one step
// under the key, the one that was issued last.
type Summary struct {
	Rank   int           `json:"rank"`
	Budget device.Bytes  `json:"budget,omitempty"`
	Groups []GroupRow    `json:"groups"`
	Device device.Bytes  `json:"device_peak"`   // of saved and other activations
	Extent device.Bytes  `json:"device_extent"` // what the runtime took for them
	Host   device.Bytes  `json:"host_peak"`
	Counts offload.Stats `json:"counts"`
	Stash  *stash.Stats  `json:"stash,omitempty"`
	Graphs *GraphRow     `json:"graphs,omitempty"`
}

// GroupRow is the groups of one name.
type GroupRow struct {
	Name   string                `json:"name"`
	Groups int                   `json:"groups"`
	Bytes  device.Bytes          `json:"bytes"` // saved
	Moved  device.Bytes          `json:"moved"` // to the host
	Units  map[policy.Choice]int `json:"units"` // by choice
}

// GraphRow is what became of captured scopes.
type GraphRow struct {
	capture.Counts
	Held int `json:"held"`
}

// Summary is of the steps under a key.
func (r *Runtime) Summary(key Key) Summary {
	s := Summary{Rank: r.cfg.Rank, Budget: r.cfg.Budget, Groups: []GroupRow{}}
	l := r.keys[key]
	if l == nil {
		return s
	}
	s.Counts, s.Device, s.Host, s.Extent = l.stats, l.stats.Device, l.stats.Host, l.stats.Extent
	for name, n := range l.stats.Names {
		row := GroupRow{Name: name, Groups: n.Groups, Bytes: n.Saved, Moved: n.Moved, Units: map[policy.Choice]int{}}
		for u := range l.facts {
			if u.Name == name {
				row.Units[l.policy[u]]++
			}
		}
		s.Groups = append(s.Groups, row)
	}
	slices.SortFunc(s.Groups, func(a, b GroupRow) int { return strings.Compare(a.Name, b.Name) })
	if r.stash != nil {
		st := r.stash.Stats()
		s.Stash = &st
	}
	if r.scopes != nil {
		s.Graphs = &GraphRow{r.scopes.Counts(), r.scopes.Held()}
	}
	return s
}

// Forecast is what steps under a key come to as it was decided, or nil before that. Its
// extent is that of the largest: the recorded one may have taken more than what was
// decided then, and memory is not given back.
// Where nothing was to be decided it is the largest step so far, made again with
// everything kept that there is room for: row counts that the host reads are data.
func (r *Runtime) Forecast(key Key) *policy.Forecast {
	l := r.keys[key]
	switch {
	case l == nil || l.decision == nil:
		return nil
	case r.moves():
		f := l.decision.Forecast
		f.Extent = max(f.Extent, int64(l.extent)+l.profile.Base)
		return &f
	}
	// Times are not asked for, and so any rates will do.
	f, err := policy.Simulate(l.largest, nil, nil, policy.Links{Out: 1, In: 1}, r.off.Config())
	if err != nil {
		return nil
	}
	return &f
}

// Held is the memory of both kinds that the runtime has taken for activations, which
// it keeps from step to step.
func (r *Runtime) Held() (dev, host device.Bytes) {
	if r.off == nil {
		return 0, 0
	}
	return r.off.Memory()
}

// String is the table. Choices count modules of layers; what is late came back only
// when it was needed already, what was evicted left for want of room and not by
// plan, and a duplicate is a storage that another group had saved before.
func (s Summary) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d   %-18s %7s %12s %12s   %s\n", s.Rank, "group", "groups", "saved", "offloaded", "choices")
	var saved, moved device.Bytes
	for _, g := range s.Groups {
		var words []string
		for c := policy.Keep; c <= policy.Recompute; c++ {
			if n := g.Units[c]; n > 0 {
				words = append(words, fmt.Sprintf("%d %v", n, c))
			}
		}
		fmt.Fprintf(&b, "         %-18s %7d %12v %12v   %s\n", g.Name, g.Groups, g.Bytes, g.Moved, strings.Join(words, ", "))
		saved, moved = saved+g.Bytes, moved+g.Moved
	}
	fmt.Fprintf(&b, "         %-18s %7s %12v %12v\n", "all", "", saved, moved)
	fmt.Fprintf(&b, "device %v at most, host %v", s.Device, s.Host)
	if s.Budget > 0 {
		fmt.Fprintf(&b, ", budget %v", s.Budget)
	}
	c := s.Counts
	fmt.Fprintf(&b, "; %d copies out, %d in, %d late, %d evicted, %d duplicates\n", c.Out, c.In, c.Late, c.Evicted, c.Duplicates)
	return b.String()
}
