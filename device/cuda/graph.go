// This file owns graphs: captured work as the driver holds it.

package cuda

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
)

// graph is a capture that can run. The driver runs the launches of one executable graph one
// after the other. An update of arguments does not change launches that were issued.
type graph struct {
	dev   *Device
	nodes int
	slots map[device.Slot]*slot
	// What the graph keeps for its nodes.
	calls  []*hostCall
	events []*event

	mu          sync.Mutex            // guards the launches in the slots as well
	held        devicekit.HeldBuffers // the memory that the nodes declare
	graph, exec uintptr               // the nodes belong to graph, which must live as long
	last        *stream               // that replayed it last
	closed      bool
}

func (d *Device) newGraph(c *capture, handle uintptr) (device.Graph, error) {
	var exec uint64
	if f := d.tryCall(&d.drv.graphInstantiate, uintptr(pointer(&exec)), handle, 0); f != nil {
		d.insist(&d.drv.graphDestroy, handle)
		c.letGo()
		return nil, d.refused(f, memory.Device, 0, "graph of stream "+c.origin.name)
	}
	g := &graph{
		dev: d, nodes: c.nodes, slots: c.slots,
		calls: c.calls, events: slices.Collect(maps.Keys(c.events)), held: c.held,
		graph: handle, exec: uintptr(exec),
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.graphs[g] = struct{}{}
	return g, nil
}

func (g *graph) Nodes() int { return g.nodes }

func (g *graph) Update(n device.Slot, l device.Launch) error {
	l.Check()
	s, known := g.slots[n]
	d := g.dev
	if !known {
		return fmt.Errorf("%s: the graph has no launch with slot %d; set Launch.Slot during capture", d.name, n)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cuda: a closed graph is updated")
	}
	run := d.shapeOf(&l)
	if d.shapeOf(&s.launch) != run {
		return fmt.Errorf("%s: slot %d holds kernel %s; an update keeps the kernel and its shape, so capture again", d.name, n, s.launch.Kernel.Name)
	}
	if err := d.err(); err != nil {
		return err
	}
	f := d.drv.frames.Get().(*frame)
	defer d.drv.frames.Put(f)
	p := kernelNodeParams{
		function: s.fn.handle, grid: run.grid, block: run.block, shared: run.shared,
		params: d.pass(f, &l, run),
	}
	if p.params == 0 {
		return d.err()
	}
	if f := d.tryCall(&d.drv.graphExecKernelNodeSetParams, g.exec, s.node, uintptr(pointer(&p))); f != nil {
		return d.broken(f)
	}
	// The new memory is added first, so that what both declare stays held.
	g.held.AddLaunch(&l)
	g.held.RemoveLaunch(&s.launch)
	s.launch = l
	return nil
}

func (s *stream) Replay(dg device.Graph) {
	g, ok := dg.(*graph)
	if !ok || g.dev != s.dev {
		panic(fmt.Sprintf("cuda: a %T is not a graph of %s", dg, s.dev.name))
	}
	if c := s.ready(); c != nil {
		_ = c.spoil(s, "a graph cannot be replayed inside a capture", "replay it before or after")
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cuda: a closed graph is replayed")
	}
	g.held.CheckLive()
	s.begin(device.Replayed, "", 0, 0, false)
	s.order(&s.dev.drv.graphLaunch, g.exec, s.handle)
	s.ended()
	g.last = s
	s.dev.replays.Add(1)
}

// Close makes the driver end the graph after the replays that were issued. Callbacks and
// events stay until the last replay is done.
func (g *graph) Close() error {
	d := g.dev
	d.mu.Lock()
	delete(d.graphs, g)
	d.mu.Unlock()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		panic("cuda: graph closed twice")
	}
	g.closed = true
	d.insist(&d.drv.graphExecDestroy, g.exec)
	d.insist(&d.drv.graphDestroy, g.graph)
	switch {
	case len(g.calls)+len(g.events) == 0:
	case g.last == nil || g.last.closed.Load():
		g.letGo()
	default:
		d.afterReplay(g.last, g.letGo)
	}
	return nil
}

// letGo releases what the nodes needed.
func (g *graph) letGo() {
	forget(g.calls...)
	for _, e := range g.events {
		e.release()
	}
}
