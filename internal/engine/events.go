// This file owns the trace: it merges the events of the runtime's parts, and turns what a
// device reports into events.

package engine

import (
	"slices"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// tracer passes events on to the sink. Events of the manager of saved tensors know the
// step and the bytes in use; events of scopes know their names.
type tracer struct {
	sink    trace.Sink
	rank    int
	compute device.Stream
	at      int      // the step of the manager's last event
	inUse   [2]int64 // the bytes in use at that event
	nodes   int64    // the nodes of the graph that was captured or replayed last

	// The manager takes no part in the replay of a whole step: its events at the capture
	// are emitted again.
	whole    bool
	key      memory.Key // of the step under way
	step     []trace.Event
	captured map[memory.Key][]trace.Event
	again    int // the number of steps that were replayed so
}

// Emit receives an event of the manager. The manager issues scopes without knowing their
// names; the event with the name follows.
func (t *tracer) Emit(e trace.Event) {
	e.Step += t.again
	t.at, t.inUse = e.Step, e.InUse
	if (e.Kind == trace.Capture || e.Kind == trace.Replay) && e.Name == "" {
		t.nodes = e.Bytes
		return
	}
	if t.whole {
		if e.Kind == trace.Begin {
			t.step = t.step[:0]
		}
		t.step = append(t.step, e)
	}
	t.sink.Emit(e)
}

// emit traces an event of the runtime itself.
func (r *Runtime) emit(e trace.Event) {
	t := &r.events
	if t.sink == nil {
		return
	}
	if e.Kind == trace.Capture || e.Kind == trace.Replay {
		if t.whole && e.Name == memory.FullIteration.String() {
			t.wholeStep(e.Kind)
		}
		e.Bytes = t.nodes
	}
	if r.off != nil && r.off.Open() {
		r.off.Trace(e)
		return
	}
	e.Rank, e.Step, e.InUse = t.rank, t.at, t.inUse
	e.Time, e.First = device.Now(), t.compute.Issued()
	if e.Kind != trace.Decide && e.Kind != trace.Spill {
		e.Offset = residency.None
	}
	t.sink.Emit(e)
}

// wholeStep keeps the events of a whole step that was captured, or emits them again for a
// step that was replayed. The graph is the last work that compute was given.
func (t *tracer) wholeStep(what trace.Kind) {
	switch what {
	case trace.Capture:
		if t.captured == nil {
			t.captured = map[memory.Key][]trace.Event{}
		}
		t.captured[t.key] = slices.Clone(t.step)
	case trace.Replay:
		t.again++
		graph := t.compute.Issued() - 1
		for _, e := range t.captured[t.key] {
			e.Step, e.Time, e.First = t.at+1, device.Now(), graph
			t.sink.Emit(e)
		}
		t.at, t.inUse = t.at+1, [2]int64{}
	}
}

// Observe returns an observer that sends what the streams of a rank's device do, and who
// allocates memory, to a sink. Pass it to the device when you open that.
func Observe(sink trace.Sink, rank int) device.Observer { return &watcher{sink: sink, rank: rank} }

// watcher turns what a device reports into events.
type watcher struct {
	sink  trace.Sink
	rank  int
	inUse [memory.Kinds]atomic.Int64
}

var spans = [...]trace.Kind{
	device.Launched: trace.Launch, device.Copied: trace.Copy, device.Replayed: trace.Graph,
	device.Waited: trace.Wait, device.Mixed: trace.Work,
}

func (w *watcher) WorkDone(x device.Work) {
	w.sink.Emit(trace.Event{
		Kind: spans[x.Kind], Rank: w.rank, Time: x.Begin, Took: x.End - x.Begin,
		Stream: x.Stream, First: x.First, Last: x.Last, Name: x.Name, Tier: memory.Kind(x.To), Bytes: int64(x.Bytes),
	})
}

func (w *watcher) MemoryChanged(kind memory.Kind, owner string, bytes, current memory.Bytes) {
	w.inUse[kind].Store(int64(current))
	e := trace.Event{
		Kind: trace.Alloc, Rank: w.rank, Time: device.Now(), Name: owner, Tier: memory.Kind(kind), Offset: residency.None, Bytes: int64(bytes),
		InUse: [2]int64{w.inUse[memory.Device].Load(), w.inUse[memory.Host].Load()},
	}
	if bytes < 0 {
		e.Kind, e.Bytes = trace.Free, -e.Bytes
	}
	w.sink.Emit(e)
}
