// This file owns the moves of a schedule: which groups stay, when the others are
// restored, and whether a stack can hold them meanwhile.

package schedule

import "github.com/stowage-dev/stowage/memory"

// Moves says which groups of a schedule stay in their buffers, and when the others are
// restored.
type Moves struct {
	Schedule *Schedule
	// Keep holds the groups that stay where they are, because their backward pass comes
	// next, or so soon that their restore would begin at once.
	Keep map[memory.GroupID]bool
	// Ahead lists, for every position, the groups to restore after the event at that
	// position. A group that is neither kept nor listed is restored when it is loaded.
	Ahead [][]memory.GroupID
	// Stack reports whether the groups that move are restored in the reverse order of
	// their saves, so that an offset can replace the pages.
	Stack bool
}

// Moves returns moves that restore a group at most depth loads ahead of its own.
//
// A group that is restored or stays occupies a working buffer until its load. Buffers
// belong to pools: of returns the pool of a group, and how many of the pool's buffers
// may be occupied in this way, so that a save in between still finds one. A group whose
// load is the next event may always stay.
func (s *Schedule) Moves(depth int, of func(memory.GroupID) (pool, room int)) *Moves {
	p := &Moves{Schedule: s, Keep: map[memory.GroupID]bool{}, Ahead: make([][]memory.GroupID, len(s.events))}
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

// earliest returns the earliest position after which the load at j may occupy a buffer:
// within depth loads, while there is room, and not before its save.
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

// stack reports whether the groups that are not kept are loaded in the reverse order of
// their saves.
func (s *Schedule) stack(keep map[memory.GroupID]bool) bool {
	var stack []memory.GroupID
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
