// This file owns the plain recorder: the work of one stream, and of those that
// fork from it, as a graph.

package capture

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
)

// OnStream records what a body issues on a stream, and replays it there. Streams
// that join the capture must be waited for before the body ends. A body whose
// capture fails is called again, so that what it changes on the host must bear
// that.
func OnStream(s device.Stream) Recorder { return &streamRecorder{s} }

type streamRecorder struct{ s device.Stream }

// undone is a capture that failed before any of its work was done.
type undone struct{ error }

func (e undone) Undone() bool  { return true }
func (e undone) Unwrap() error { return e.error }

func (r *streamRecorder) Capture(body func() error) (Captured, error) {
	g, err := r.record(body)
	if err != nil {
		return nil, undone{err}
	}
	c := &graph{r.s, g}
	return c, c.Replay()
}

// record ends the stream's capture whatever becomes of the body, so that the
// stream works as before.
func (r *streamRecorder) record(body func() error) (g device.Graph, err error) {
	if r.s.Capturing() {
		return nil, &device.CaptureError{Stream: r.s.Name(), Why: "it is part of a capture already", Do: "end that one first; scopes do not nest"}
	}
	done := false
	defer func() {
		var failed error
		g, failed = r.s.EndCapture()
		if err = errors.Join(err, failed); g != nil && (err != nil || !done) {
			err = errors.Join(err, g.Close())
			g = nil
		}
	}()
	r.s.BeginCapture()
	err = body()
	done = true
	return nil, err
}

// graph is a captured graph and the stream that replays it.
type graph struct {
	s device.Stream
	g device.Graph
}

// Replay issues the graph; what fails on the device comes back at the next
// synchronisation.
func (c *graph) Replay() error {
	c.s.Replay(c.g)
	return nil
}

func (c *graph) Close() error { return c.g.Close() }
