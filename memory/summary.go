// This file owns the summary of a rank's steps: plain figures, and their table.

package memory

import (
	"fmt"
	"strings"
)

// Summary holds what the steps of one rank did. The figures of groups are those of
// the step that was issued last.
type Summary struct {
	Rank   int            `json:"rank"`
	Budget Bytes          `json:"budget,omitempty"`
	Groups []GroupSummary `json:"groups"`        // in the order of their names
	Device Bytes          `json:"device_peak"`   // the most that the step's tensors used at once
	Extent Bytes          `json:"device_extent"` // device memory that the runtime took for them
	Host   Bytes          `json:"host_peak"`
	Counts CopyCounts     `json:"counts"`
	Stash  *StashCounts   `json:"stash,omitempty"`  // nil without a stash
	Graphs *GraphCounts   `json:"graphs,omitempty"` // nil if nothing is captured
}

// GroupSummary holds the figures of all groups of one name.
type GroupSummary struct {
	Name   string         `json:"name"`
	Groups int            `json:"groups"`
	Bytes  Bytes          `json:"bytes"` // saved
	Moved  Bytes          `json:"moved"` // of them, offloaded
	Units  map[Choice]int `json:"units"` // the number of units with each choice
}

// CopyCounts counts the copies of one step between device and host memory.
type CopyCounts struct {
	Out, In           int   // copies to the host and back
	OutBytes, InBytes Bytes // and their bytes
	Evicted           int   // storages that were offloaded for want of room, not by plan
	Late              int   // storages whose reload began only when they were needed
	Duplicates        int   // saves of a storage that another group had saved
	HostFull          int   // storages that stayed against the plan because host memory was full
	Packed            int   // sparse views that were packed before they were saved
	Departed          bool  // the step departed from its plan
}

// StashCounts counts what a stash did over all steps, those that were rerun included.
type StashCounts struct {
	Steps      int   `json:"steps"`
	Reruns     int   `json:"reruns"`
	Growths    int   `json:"growths"`
	Departures int   `json:"departures"` // steps that departed from their plan
	Spilled    int64 `json:"spilled_pages"`
	Stashed    int64 `json:"stashed_pages"`
	Demand     int64 `json:"demand_pages"` // the most that a step needed
	// Low holds the fewest free pages of the device and the host tier in the last step.
	Low [Kinds]int64 `json:"low_pages"`
}

// GraphCounts counts the calls of captured scopes.
type GraphCounts struct {
	Calls    int `json:"calls"`
	Eager    int `json:"eager"` // calls that ran without a graph
	Replays  int `json:"replays"`
	Failed   int `json:"failed"`
	Captures int `json:"captures"`
	Closed   int `json:"closed"`  // graphs that were discarded
	Moved    int `json:"moved"`   // replays that found tensors at other addresses
	Refused  int `json:"refused"` // scopes that run eagerly for good
	Evicted  int `json:"evicted"` // scopes that were forgotten to make room for others
	Held     int `json:"held"`    // graphs that are ready to be replayed
}

// String returns the summary as a table, with a line for the groups of each name.
func (s Summary) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "rank %d   %-18s %7s %12s %12s   %s\n", s.Rank, "group", "groups", "saved", "offloaded", "choices")
	var saved, moved Bytes
	for _, g := range s.Groups {
		var words []string
		for c := Keep; c < Choices; c++ {
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
