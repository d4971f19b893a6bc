// This file owns graphs: lanes that run side by side and wait for each other's
// places, as the captured streams did.

package cpu

import (
	"fmt"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
)

// graph is a capture that can run. The stream that replays it executes lane 0; every
// other lane has a goroutine of its own. Replays (rounds) never
// overlap, so a place in a lane of k nodes is reached in round r when the
// lane's timeline reaches r*k plus the place.
type graph struct {
	dev   *dev
	lanes []runner
	outer []outer
	slots map[device.Slot]int
	nodes int

	// mu orders replays: whoever takes it first gets the earlier round. Locks are taken
	// in the order stream, mu, event.
	mu      sync.Mutex
	wake    sync.Cond
	table   []device.Launch       // never written to: Update makes a new one
	held    devicekit.HeldBuffers // the memory that the nodes declare
	issued  uint64                // rounds given to streams
	started uint64                // rounds begun by their stream
	current replay                // the round begun last
	last    ticket                // the end of the round issued last
	closed  bool
}

// runner is a lane and its progress. The device of the captured stream does its work;
// that may be another device if ranks capture together.
type runner struct {
	dev   *dev
	nodes []node
	line  *timeline
}

// replay is one round: what it runs with was fixed when it was issued.
type replay struct {
	g       *graph
	round   uint64
	prev    ticket // the round before
	table   []device.Launch
	tickets []ticket // one for each external wait
}

func (d *dev) newGraph(c *capture) *graph {
	g := &graph{dev: d, outer: c.outer, slots: c.slots, table: c.table, held: c.held}
	g.wake.L = &g.mu
	waits := 0
	for _, o := range c.outer {
		if !o.record {
			c.lanes[o.at.lane].nodes[o.at.n].index = waits
			waits++
		}
	}
	for _, l := range c.lanes {
		g.lanes = append(g.lanes, runner{l.stream.dev, l.nodes, newTimeline()})
		for i := range l.nodes {
			if k := l.nodes[i].kind; k != opJoin && k != opStamp {
				g.nodes++
			}
		}
	}
	d.mu.Lock()
	d.graphs[g] = struct{}{}
	d.mu.Unlock()
	for i := 1; i < len(g.lanes); i++ {
		d.work.Go(func() { g.follow(i, 0) })
	}
	return g
}

func (g *graph) Nodes() int { return g.nodes }

func (g *graph) Update(slot device.Slot, l device.Launch) error {
	l.Check()
	i, known := g.slots[slot]
	if !known {
		return fmt.Errorf("%s: the graph has no launch with slot %d; set Launch.Slot during capture", g.dev.name, slot)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cpu: a closed graph is updated")
	}
	if old := g.table[i]; old.Kernel != l.Kernel || old.Grid != l.Grid || old.Block != l.Block || old.Shared != l.Shared {
		return fmt.Errorf("%s: slot %d holds kernel %s; an update keeps the kernel and its shape, so capture again", g.dev.name, slot, old.Kernel.Name)
	}
	// The new memory is added first, so that what both declare stays held.
	g.held.AddLaunch(&l)
	g.held.RemoveLaunch(&g.table[i])
	g.table = slices.Clone(g.table)
	g.table[i] = l
	return nil
}

// Replay issues one round. It records and waits for external events here, in the order of
// capture, so that a replay means the same as issuing its work again.
func (s *stream) Replay(dg device.Graph) {
	g, ok := dg.(*graph)
	if !ok || g.dev != s.dev {
		panic(fmt.Sprintf("cpu: a %T is not a graph of %s", dg, s.dev.name))
	}
	if s.refuse("a graph cannot be replayed inside a capture", "replay it before or after") {
		return
	}
	s.issue(opReplay, func(o *op) { o.replay = g.next(ticket{s.line, s.issued + 1}) })
	s.dev.replays.Add(1)
}

// next returns the next round, which is done when its ticket is. It changes nothing if it
// panics.
func (g *graph) next(end ticket) replay {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cpu: a closed graph is replayed")
	}
	g.held.CheckLive()
	r := replay{g: g, round: g.issued, prev: g.last, table: g.table}
	for _, o := range g.outer {
		if !o.record {
			r.tickets = append(r.tickets, o.event.ticket())
			continue
		}
		l := g.lanes[o.at.lane]
		o.event.mu.Lock()
		o.event.last = ticket{l.line, r.round*uint64(len(l.nodes)) + uint64(o.at.n)}
		o.event.mu.Unlock()
	}
	g.issued++
	g.last = end
	return r
}

// run executes one round in the stream's goroutine. All lanes were joined, so the end of
// lane 0 is the end of the round.
func (r *replay) run() {
	g := r.g
	r.prev.wait()
	g.mu.Lock()
	g.current = *r
	g.started = r.round + 1
	g.wake.Broadcast()
	g.mu.Unlock()
	r.runLane(0, 0)
}

// follow executes lane i from a round on, until the graph is closed and all issued rounds
// are done. If a callback ends this goroutine, the device has failed, and a new goroutine
// takes over.
func (g *graph) follow(i int, round uint64) {
	debug.SetPanicOnFault(true) // a wild kernel fails the device, not the process
	ended := false
	defer func() {
		if !ended {
			g.dev.work.Go(func() { g.follow(i, round+1) })
		}
	}()
	for ; ; round++ {
		g.mu.Lock()
		for g.started <= round && (!g.closed || round < g.issued) {
			g.wake.Wait()
		}
		r, stop := g.current, g.started <= round
		g.mu.Unlock()
		if stop {
			ended = true
			return
		}
		r.runLane(i, 0)
	}
}

// runLane executes the nodes of one lane, from one of them on. If a callback ends the
// goroutine, the other nodes are skipped but still counted, because other lanes wait for
// them.
func (r *replay) runLane(i, from int) {
	g, l := r.g, r.g.lanes[i]
	first := r.round * uint64(len(l.nodes))
	k := from
	defer func() {
		if k < len(l.nodes) {
			l.line.advance(first + uint64(k) + 1)
			r.runLane(i, k+1)
		}
	}()
	for ; k < len(l.nodes); k++ {
		n := &l.nodes[k]
		for _, p := range n.after {
			other := g.lanes[p.lane]
			other.line.wait(r.round*uint64(len(other.nodes)) + uint64(p.n))
		}
		r.runNode(l.dev, &n.op)
		l.line.advance(first + uint64(k) + 1)
	}
}

func (r *replay) runNode(d *dev, o *op) {
	switch {
	case o.kind == opWait:
		r.tickets[o.index].wait()
	case o.kind == opLaunch && o.index >= 0 && d.err() == nil:
		d.effect(o, &r.table[o.index])
	default:
		d.execute(o)
	}
}

// Close makes the lanes end after the rounds that were issued.
func (g *graph) Close() error {
	g.dev.mu.Lock()
	delete(g.dev.graphs, g)
	g.dev.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cpu: graph closed twice")
	}
	g.closed = true
	g.wake.Broadcast()
	return nil
}
