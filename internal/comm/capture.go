// This file owns graphs of several ranks. The streams of all ranks join one capture, so
// the work of all of them is one graph, and one call of the host issues it.

package comm

import (
	"errors"
	"fmt"
	"sync"

	"github.com/stowage-dev/stowage/device"
)

// Capturer is a Comm whose calls can be captured.
type Capturer interface {
	Comm
	// Capture makes a graph of the work that the bodies of all ranks issue on their
	// streams. Nothing of it is executed. All ranks must call Capture; a body makes its
	// calls of the communicator, and of those split from it, as always. A stream that
	// joins the capture must be joined to s again before the body ends.
	//
	// If a body fails, the communicator fails on every rank: the others could wait for
	// this one for ever. If the work cannot be captured, all ranks get the same
	// [device.CaptureError], and the communicator works as before.
	Capture(s device.Stream, body func() error) (Graph, error)
}

// Graph is one rank's end of a graph that ranks captured together.
type Graph interface {
	// Nodes returns the number of operations of all ranks that this end replays.
	Nodes() int
	// Replay issues the graph, in the order of the stream that was captured. All ranks
	// must call it. It returns the error of Err if the call was not made.
	Replay() error
	// Close ends the graph on all ranks after the replays that were issued.
	Close() error
}

var _ Capturer = (*Local)(nil)

// together is the capture of the ranks of a group. Its life cycle:
//
//  1. open: all ranks have come; the stream of rank 0 is captured and the others have
//     joined it.
//  2. ended: the bodies of all ranks are over. There is a graph, or an error.
//  3. closed: the first rank that closes the graph closes it for all, because none can
//     replay it without the others.
type together struct {
	origin device.Stream // of rank 0
	ended  bool
	left   int // ranks that left without a call of all ranks
	graph  device.Graph
	err    error
	close  sync.Once
}

func (c *Local) Capture(s device.Stream, body func() error) (_ Graph, err error) {
	c.caller().Capture(s)
	x, err := c.begin(s)
	if err != nil {
		return nil, err
	}
	done := false
	defer func() {
		if !done { // the body failed or panicked, or a call of another rank did
			if err == nil {
				err = errors.New("it ended in the middle of a capture")
			}
			c.Abort(err)
			c.g.leave(c.g.ranks[c.rank], x)
		}
	}()
	if err = body(); err != nil {
		return nil, err
	}
	c.g.meet(c.rank, call{sig: sig{kind: endCapture, graph: x}, s: s})
	c.g.mu.Lock()
	ended, lost := x.ended, c.g.lost[c.rank]
	c.g.mu.Unlock()
	if !ended {
		return nil, lost
	}
	done = true
	if x.err != nil {
		return nil, x.err
	}
	return &captured{c, s, x}, nil
}

// begin begins a capture with all ranks. It returns an error if they did not all come.
func (c *Local) begin(s device.Stream) (*together, error) {
	g := c.g
	g.mu.Lock()
	defer g.unlock()
	g.enter(c.rank, call{sig: sig{kind: beginCapture}, s: s})
	g.attend(c.rank)
	if f := g.lost[c.rank]; f != nil {
		return nil, f
	}
	return g.joint, nil
}

// beginCapture makes all streams join a capture of rank 0's.
func (g *group) beginCapture() {
	g.joint = &together{origin: g.calls[0].s}
	g.joint.origin.BeginCapture()
	g.fork(0, len(g.calls))
}

// endCapture makes the graph.
func (g *group) endCapture(x *together) {
	g.join(0, len(g.calls))
	x.graph, x.err = x.origin.EndCapture()
	x.ended = true
}

// leave waits until all ranks have left a capture that failed. The last one ends it: the
// work that others still issue must not be executed.
func (g *group) leave(rank int, x *together) {
	l := g.w.lockstep.Load()
	g.mu.Lock()
	defer g.unlock()
	if x.left++; x.left == len(g.calls) {
		if graph, err := x.origin.EndCapture(); err == nil {
			_ = graph.Close() // the capture has failed already
		}
		x.ended = true
		g.wake.Broadcast()
	}
	for !x.ended {
		if l == nil {
			g.wake.Wait()
			continue
		}
		l.idle = 0
		g.mu.Unlock()
		l.yield(rank)
		g.mu.Lock()
	}
}

// replay issues a graph on rank 0's stream, between the work of all ranks before it and
// their work after it.
func (g *group) replay(x *together) {
	n := len(g.calls)
	g.join(0, n)
	g.calls[0].s.Replay(x.graph)
	g.fork(0, n)
}

// captured is a rank's end of a graph.
type captured struct {
	c *Local
	s device.Stream
	x *together
}

func (d *captured) Nodes() int {
	if d.c.rank != 0 {
		return 0
	}
	return d.x.graph.Nodes()
}

func (d *captured) Replay() error {
	g := d.c.g
	g.mu.Lock()
	defer g.unlock()
	g.enter(d.c.rank, call{sig: sig{kind: replay, graph: d.x}, s: d.s})
	g.attend(d.c.rank)
	if f := g.lost[d.c.rank]; f != nil {
		return f
	}
	return nil
}

func (d *captured) Close() (err error) {
	d.x.close.Do(func() {
		if err = d.x.graph.Close(); err != nil {
			err = fmt.Errorf("comm: closing a graph of %d ranks: %w", d.c.Size(), err)
		}
	})
	return err
}
