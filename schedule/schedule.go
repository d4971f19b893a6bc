// Package schedule is the order in which a training step saves groups of
// tensors and needs them back, and everything that follows from that order
// alone: what is live when, which groups may stay where they are, whether a
// stack serves or pages are needed, and how large pools must be. It is pure: the
// planner asks it before a launch, and the runtime asks the same functions
// about the schedule it recorded.
//
// This file owns the recorded order, plan.go what is to move when, pipeline.go the
// orders that pipeline parallelism prescribes, size.go the sizes of pools.
package schedule

import "fmt"

// Group names the saved tensors of one module of one layer of one microbatch.
// A layer belongs to one of the model chunks (virtual stages) of its rank.
type Group struct {
	Name       string `json:"name"` // "expert_fc1", "moe_act", ...
	Chunk      int    `json:"chunk"`
	Layer      int    `json:"layer"`
	Microbatch int    `json:"microbatch"`
}

func (g Group) String() string {
	return fmt.Sprintf("%s of layer %d, chunk %d, microbatch %d", g.Name, g.Layer, g.Chunk, g.Microbatch)
}

// Event is one entry of a schedule: a group is saved after its forward pass, or
// needed for its backward pass.
type Event struct {
	Group Group
	Load  bool
}

// Schedule is the order of one step. Every group is saved once; it is loaded
// once afterwards, or never.
type Schedule struct {
	events []Event
	save   map[Group]int
	load   map[Group]int
}

// Save appends the saving of a group. Saving one twice panics: its two copies
// could not be told apart.
func (s *Schedule) Save(g Group) {
	if s.save == nil {
		s.save, s.load = map[Group]int{}, map[Group]int{}
	}
	if _, twice := s.save[g]; twice {
		panic("schedule: " + g.String() + " is saved twice in one step")
	}
	s.save[g] = len(s.events)
	s.events = append(s.events, Event{Group: g})
}

// Load appends the loading of a group that was saved and not yet loaded.
func (s *Schedule) Load(g Group) {
	_, saved := s.save[g]
	_, twice := s.load[g]
	if !saved || twice {
		panic("schedule: " + g.String() + " is loaded but not saved, or loaded twice")
	}
	s.load[g] = len(s.events)
	s.events = append(s.events, Event{Group: g, Load: true})
}

// Len is the number of events.
func (s *Schedule) Len() int { return len(s.events) }

// At is event i.
func (s *Schedule) At(i int) Event { return s.events[i] }

// Saved is the position of a group's save.
func (s *Schedule) Saved(g Group) (int, bool) { i, ok := s.save[g]; return i, ok }

// Out tells whether a group was saved and not loaded yet.
func (s *Schedule) Out(g Group) bool {
	_, saved := s.save[g]
	_, loaded := s.load[g]
	return saved && !loaded
}

// next tells whether a group's load comes right after its save, so that nothing
// else needs its buffer in between.
func (s *Schedule) next(g Group) bool {
	i, saved := s.save[g]
	j, loaded := s.load[g]
	return saved && loaded && j == i+1
}

// Equal tells whether two schedules are the same.
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

// Loaded is the position of a group's load.
func (s *Schedule) Loaded(g Group) (int, bool) { i, ok := s.load[g]; return i, ok }
