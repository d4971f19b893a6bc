// This file owns the copies that a scope causes, as graphs of the copy streams.

package offload

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// tail collects the work of the copy streams at the end of a scope. The machine asks for
// the same work at every replay, because it depends only on the calls before. So the work
// becomes one graph for each copy stream, and costs the host one call each. Waits for
// work outside of the scope differ from step to step, and come before the graphs.
type tail struct {
	m      *Manager
	s      *Scope
	makes  bool                 // the graphs do not exist yet
	inside map[*order.Mark]bool // marks that the scope's graphs record
	work   [residency.Lanes][]func(device.Stream)
	moves  [residency.Lanes][]transfer
	marks  [residency.Lanes]int
}

// copies is the work of one copy stream in a scope.
type copies struct {
	graph  device.Graph
	events []device.Event // recorded inside, in order
	moves  []transfer
}

// transfer is one copy.
type transfer struct{ dst, src device.Range }

// tail begins the tail of a scope.
func (r *scoped) tail() *tail {
	t := &tail{m: r.m, s: r.s, makes: !r.replays, inside: map[*order.Mark]bool{}}
	for _, k := range r.marks {
		t.inside[k] = !r.s.delay // the mark of a delayed scope lies in no graph
	}
	for l := residency.Out; l <= residency.In; l++ {
		r.m.lane[l].Gather(t.inside, func(e device.Event) { t.add(l, func(s device.Stream) { s.Wait(e) }) })
	}
	return t
}

// add collects work of a lane.
func (t *tail) add(l residency.Lane, f func(device.Stream)) {
	if t.makes {
		t.work[l] = append(t.work[l], f)
	}
}

// copy collects a copy.
func (t *tail) copy(l residency.Lane, dst, src device.Range) {
	t.moves[l] = append(t.moves[l], transfer{dst, src})
	t.add(l, func(s device.Stream) { s.Copy(dst, src) })
}

// record marks a lane inside of its graph.
func (t *tail) record(l residency.Lane) *order.Mark {
	c := &t.s.copies[l]
	if t.makes {
		e, err := t.m.dev.NewEvent(device.External)
		if err != nil {
			_ = t.m.fail(memory.GroupID{}, "make an event", err)
			panic(failed{})
		}
		c.events = append(c.events, e)
		t.add(l, func(s device.Stream) { s.Record(e) })
	}
	k := order.External(c.events[t.marks[l]])
	t.marks[l]++
	t.inside[k] = true
	t.m.lane[l].Recorded(k)
	return k
}

// issue issues the graphs: copies out first, because copies in may depend on them.
func (t *tail) issue() (err error) {
	for l := residency.Out; l <= residency.In; l++ {
		lane, c := t.m.lane[l], &t.s.copies[l]
		lane.Gathered()
		if t.makes && len(t.work[l]) > 0 {
			lane.Stream.BeginCapture()
			for _, f := range t.work[l] {
				f(lane.Stream)
			}
			if c.graph, err = lane.Stream.EndCapture(); err != nil {
				return t.m.fail(memory.GroupID{}, "capture the copies of a scope", err)
			}
			c.moves = t.moves[l]
		}
		if !slices.Equal(c.moves, t.moves[l]) {
			panic(fmt.Sprintf("offload: a scope that moved %v is replayed to move %v", c.moves, t.moves[l]))
		}
		if c.graph != nil {
			lane.Stream.Replay(c.graph)
		}
	}
	return nil
}
