// Package schedule is the order in which a training step saves groups of
// tensors and needs them back, and everything that follows from that order
// alone: what is live when, which groups may stay where they are, whether a
// stack serves or pages are needed, and how large pools must be. It is pure: the
// planner asks it before a launch, and the runtime asks the same functions
// about the schedule it recorded.
//
// This file owns the recorded order, pipeline.go the orders that pipeline
// parallelism prescribes, size.go the sizes of pools.
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

// Groups is the number of groups saved.
func (s *Schedule) Groups() int { return len(s.save) }

// Saved is the position of a group's save.
func (s *Schedule) Saved(g Group) (int, bool) { i, ok := s.save[g]; return i, ok }

// Loaded is the position of a group's load.
func (s *Schedule) Loaded(g Group) (int, bool) { i, ok := s.load[g]; return i, ok }

// Kept tells whether a group may stay where it is: its backward pass comes
// next, so that nothing else needs the room in between.
func (s *Schedule) Kept(g Group) bool {
	i, saved := s.save[g]
	j, loaded := s.load[g]
	return saved && loaded && j == i+1
}

// Stack tells whether the groups that are moved (neither kept nor forgotten)
// come back in the reverse order of leaving at every point, so that a moving
// offset can serve instead of pages.
func (s *Schedule) Stack() bool {
	var stack []Group
	for _, e := range s.events {
		switch {
		case s.Kept(e.Group):
		case !e.Load:
			stack = append(stack, e.Group)
		case stack[len(stack)-1] != e.Group:
			return false
		default:
			stack = stack[:len(stack)-1]
		}
	}
	return true
}

// Ahead lists, for every position, the loads whose restore is to be issued once
// the event at that position has been passed: at most depth loads ahead of the
// need, and not before something else was saved or loaded after the group. Kept
// groups need none; a group that is not listed is restored on demand.
//
// A restore occupies a working buffer until its load is over. Buffers belong to
// pools; of says which pool a group uses and how many of its buffers may be
// occupied in this way, so that a save that comes first still finds one.
func (s *Schedule) Ahead(depth int, of func(Group) (pool, room int)) [][]Group {
	at := make([][]Group, len(s.events))
	held := map[int][]int{} // by pool: restored and not yet loaded, after each position
	for j, e := range s.events {
		if !e.Load || s.Kept(e.Group) {
			continue
		}
		pool, room := of(e.Group)
		if held[pool] == nil {
			held[pool] = make([]int, len(s.events))
		}
		first, loads := j, 0
		for i := j - 1; i > s.save[e.Group] && held[pool][i] < room; i-- {
			if s.events[i].Load {
				if loads++; loads > depth {
					break
				}
			}
			first = i
		}
		for i := first; i < j; i++ {
			held[pool][i]++
		}
		if first < j {
			at[first] = append(at[first], e.Group)
		}
	}
	return at
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
