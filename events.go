// This file owns the trace: one line of events from the runtime's parts.

package stowage

import "github.com/stowage-dev/stowage/trace"

// tracer hands events on. Those of the manager of saved tensors know the step and
// the bytes in use, those of scopes their names.
type tracer struct {
	sink  trace.Sink
	rank  int
	last  trace.Event
	nodes int64 // of the scope that was captured or replayed last
}

// Emit takes an event of the manager. It issues scopes, but does not know which:
// that event follows.
func (t *tracer) Emit(e trace.Event) {
	t.last = e
	if e.What == trace.Capture || e.What == trace.Replay {
		t.nodes = e.Bytes
		return
	}
	t.sink.Emit(e)
}

// emit traces an event of the runtime itself.
func (r *Runtime) emit(e trace.Event) {
	t := &r.events
	if t.sink == nil {
		return
	}
	e.Rank, e.Step = t.rank, t.last.Step
	switch e.What {
	case trace.Decide:
	case trace.Capture, trace.Replay:
		e.Bytes, e.Device, e.Host = t.nodes, t.last.Device, t.last.Host
	default:
		e.Device, e.Host = t.last.Device, t.last.Host
	}
	t.sink.Emit(e)
}
