// Package schedule describes the order in which a training step saves and loads groups,
// and derives what follows from that order alone: which groups are live at once, which
// may stay where they are, whether a stack can replace pages, and how large pools must
// be. It is pure. The planner calls it before a launch, and the runtime calls the same
// functions with the schedule that it recorded.
//
// This file owns the recorded order, moves.go what to move and when, pipeline.go the
// orders of pipeline parallelism, size.go the sizes of pools.
package schedule

import (
	"github.com/stowage-dev/stowage/memory"
)

// Event is one entry of a schedule: a group is saved after its forward pass, or loaded
// for its backward pass.
type Event struct {
	Group memory.GroupID
	Load  bool
}

// Schedule is the order of one step. Every group is saved once, and loaded at most once
// afterwards.
type Schedule struct {
	events []Event
	save   map[memory.GroupID]int
	load   map[memory.GroupID]int
}

// Save appends the save of a group. It panics if the group is saved already.
func (s *Schedule) Save(g memory.GroupID) {
	if s.save == nil {
		s.save, s.load = map[memory.GroupID]int{}, map[memory.GroupID]int{}
	}
	if _, twice := s.save[g]; twice {
		panic("schedule: " + g.String() + " is saved twice in one step")
	}
	s.save[g] = len(s.events)
	s.events = append(s.events, Event{Group: g})
}

// Load appends the load of a group. It panics if the group is not saved or is loaded
// already.
func (s *Schedule) Load(g memory.GroupID) {
	_, saved := s.save[g]
	_, twice := s.load[g]
	if !saved || twice {
		panic("schedule: " + g.String() + " is loaded but not saved, or loaded twice")
	}
	s.load[g] = len(s.events)
	s.events = append(s.events, Event{Group: g, Load: true})
}

// Len returns the number of events.
func (s *Schedule) Len() int { return len(s.events) }

// At returns the event at position i.
func (s *Schedule) At(i int) Event { return s.events[i] }

// Saved returns the position of a group's save, and whether there is one.
func (s *Schedule) Saved(g memory.GroupID) (int, bool) { i, ok := s.save[g]; return i, ok }

// Out reports whether a group is saved and not loaded yet.
func (s *Schedule) Out(g memory.GroupID) bool {
	_, saved := s.save[g]
	_, loaded := s.load[g]
	return saved && !loaded
}

// next reports whether a group's load comes right after its save, so that nothing else
// needs its buffer in between.
func (s *Schedule) next(g memory.GroupID) bool {
	i, saved := s.save[g]
	j, loaded := s.load[g]
	return saved && loaded && j == i+1
}

// Equal reports whether two schedules have the same events in the same order.
func (s *Schedule) Equal(t *Schedule) bool {
	if len(s.events) != len(t.events) {
		return false
	}
	for i, e := range s.events {
		if e != t.events[i] {
			return false
		}
	}
	return true
}

// Loaded returns the position of a group's load, and whether there is one.
func (s *Schedule) Loaded(g memory.GroupID) (int, bool) { i, ok := s.load[g]; return i, ok }
