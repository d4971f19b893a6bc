// This file owns the plain recorders, which make a graph of the work of one stream and of
// the streams that fork from it, or of the streams of several ranks.

package capture

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
)

// OnStream returns a recorder that captures what a body issues on a stream, and replays
// it there. The body must wait for streams that join the capture before it returns. A
// body whose capture fails is called again, so what it changes on the host must allow
// that.
func OnStream(s device.Stream) Recorder { return &streamRecorder{s} }

type streamRecorder struct{ s device.Stream }

// undone is the error of a capture that failed before any of its work was done.
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

// Together returns a recorder of ranks that capture with each other. Capture makes a
// recording without doing its work. If it returns a [device.CaptureError], it has done so
// on all ranks, and each of them calls its body eagerly.
func Together(capture func(body func() error) (Captured, error)) Recorder {
	return RecorderFunc(func(body func() error) (Captured, error) {
		c, err := capture(body)
		var spoilt *device.CaptureError
		switch {
		case errors.As(err, &spoilt):
			return nil, undone{err}
		case err != nil:
			return nil, err
		}
		return c, c.Replay()
	})
}

// record captures a body. It always ends the stream's capture, so that the stream works
// as before if the body fails.
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

// graph is a captured graph with the stream that replays it.
type graph struct {
	s device.Stream
	g device.Graph
}

// Replay issues the graph. A failure on the device appears at the next synchronisation.
func (c *graph) Replay() error {
	c.s.Replay(c.g)
	return nil
}

// Close discards the graph.
func (c *graph) Close() error { return c.g.Close() }
