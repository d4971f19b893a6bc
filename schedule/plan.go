// This file owns the plan for a schedule: which groups stay, when the others come
// back, and whether a stack can hold them meanwhile.

package schedule

// Plan says what to do with the groups of a schedule.
type Plan struct {
	Schedule *Schedule
	// Keep are the groups that stay where they are: their backward pass comes
	// next, or soon enough that bringing them back would begin at once.
	Keep map[Group]bool
	// Ahead lists, for every position, the groups whose restore is to be issued
	// once the event at that position has been passed. A group that is neither
	// kept nor listed is restored on demand.
	Ahead [][]Group
	// Stack says that the groups that move come back in the reverse order of
	// leaving, so that a moving offset can serve instead of pages.
	Stack bool
}

// Plan makes a plan that restores a group at most depth loads ahead of need.
//
// A restored group, or one that stays, occupies a working buffer until its load.
// Buffers belong to pools; of says which pool a group uses and how many of its
// buffers may be occupied in this way, so that a save that comes first still
// finds one. A group whose load is the very next event may always stay.
func (s *Schedule) Plan(depth int, of func(Group) (pool, room int)) *Plan {
	p := &Plan{Schedule: s, Keep: map[Group]bool{}, Ahead: make([][]Group, len(s.events))}
	held := map[int][]int{} // by pool: occupied after each position
	for j, e := range s.events {
		if !e.Load {
			continue
		}
		if s.next(e.Group) {
			p.Keep[e.Group] = true
			continue
		}
		pool, room := of(e.Group)
		if held[pool] == nil {
			held[pool] = make([]int, len(s.events))
		}
		first := s.earliest(j, depth, room, held[pool])
		for i := first; i < j; i++ {
			held[pool][i]++
		}
		switch {
		case first == s.save[e.Group]:
			p.Keep[e.Group] = true
		case first < j:
			p.Ahead[first] = append(p.Ahead[first], e.Group)
		}
	}
	p.Stack = s.stack(p.Keep)
	return p
}

// earliest is the earliest position after which the load at j may occupy a
// buffer: within depth loads, while there is room, not before its save.
func (s *Schedule) earliest(j, depth, room int, held []int) int {
	first, loads := j, 0
	for i := j - 1; i >= s.save[s.events[j].Group] && held[i] < room; i-- {
		if s.events[i].Load {
			if loads++; loads > depth {
				break
			}
		}
		first = i
	}
	return first
}

// stack tells whether the groups that are not kept come back in the reverse order
// of leaving at every point.
func (s *Schedule) stack(keep map[Group]bool) bool {
	var stack []Group
	for _, e := range s.events {
		switch {
		case keep[e.Group]:
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
