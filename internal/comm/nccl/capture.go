// This file owns graphs of several ranks. Each rank captures its own work, and its replay
// meets those of the others in NCCL's kernels.

package nccl

import (
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/letter"
)

// Capture implements [comm.Capturer].
func (g *group) Capture(s device.Stream, body func() error) (_ comm.Graph, err error) {
	g.caller().Capture(s)
	sends, recvs := g.parts(nil)
	w := g.w
	w.order.mu.Lock()
	made := g.enter(letter.Signature{Kind: letter.Capture}, 0, sends, recvs) != nil
	w.joint, w.begun = made, false
	w.order.mu.Unlock()
	if !made {
		return nil, g.Err()
	}
	s.BeginCapture()
	over := func() (device.Graph, error) {
		w.order.mu.Lock()
		w.joint = false
		w.order.mu.Unlock()
		return s.EndCapture()
	}
	done := false
	defer func() {
		if !done { // the body failed or panicked
			if x, e := over(); e == nil {
				_ = x.Close() // the capture has failed already
			}
			g.Abort(errors.Join(err, errIf(err == nil, "it ended in the middle of a capture")))
		}
	}()
	if err = body(); err != nil {
		return nil, err
	}
	if err = g.failed(); err != nil {
		return nil, err
	}
	done = true
	x, err := over()
	var refused *device.CaptureError
	if err != nil && !errors.As(err, &refused) {
		g.Abort(err)
		return nil, err
	}
	if refused, err = g.agree(refused); err == nil && refused != nil {
		err = refused
	}
	if err != nil {
		if x != nil {
			err = errors.Join(err, x.Close())
		}
		return nil, err
	}
	end := &graph{g, s, x}
	w.order.mu.Lock()
	w.graphs[end] = struct{}{}
	w.order.mu.Unlock()
	return end, nil
}

// failed returns the error of the communicator if it has one now. Unlike Err it waits for no
// rank.
func (g *group) failed() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.lost != nil {
		f := *g.lost
		return &f
	}
	return nil
}

func errIf(is bool, text string) error {
	if is {
		return errors.New(text)
	}
	return nil
}

// agree returns the first reason of all ranks why there is no graph, or nil.
func (g *group) agree(mine *device.CaptureError) (*device.CaptureError, error) {
	if g.alone() {
		return mine, nil
	}
	said, err := everyone(g.host, mine)
	if err != nil {
		g.lose(failureOf(err))
		return nil, g.Err()
	}
	for _, e := range said {
		if e != nil {
			return e, nil
		}
	}
	return nil, nil
}

// graph is this rank's end of a graph.
type graph struct {
	g     *group
	s     device.Stream
	graph device.Graph
}

func (x *graph) Nodes() int { return x.graph.Nodes() }

// Replay issues the graph as one call of NCCL.
func (x *graph) Replay() error {
	g := x.g
	sends, recvs := g.parts(nil)
	g.w.order.mu.Lock()
	defer g.w.order.mu.Unlock()
	if g.enter(letter.Signature{Kind: letter.Replay}, 0, sends, recvs) == nil {
		return g.failed()
	}
	g.w.ordered(x.s, func() { x.s.Replay(x.graph) })
	return nil
}

func (x *graph) Close() error {
	g := x.g
	g.w.order.mu.Lock()
	_, open := g.w.graphs[x]
	delete(g.w.graphs, x)
	g.w.order.mu.Unlock()
	if !open {
		return nil
	}
	if err := x.graph.Close(); err != nil {
		return fmt.Errorf("comm: closing a graph of rank %d: %w", g.ranks[g.me], err)
	}
	return nil
}
