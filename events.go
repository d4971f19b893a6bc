// This file owns the trace: one line of events from the runtime's parts, and what a
// device tells of itself.

package stowage

import (
	"slices"
	"sync/atomic"

	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/trace"
)

// tracer hands events on. Those of the manager of saved tensors know the step and
// the bytes in use, those of scopes their names.
type tracer struct {
	sink    trace.Sink
	rank    int
	compute device.Stream
	at      int      // the step of the last event of the manager,
	inUse   [2]int64 // and what was in use then
	nodes   int64    // of the scope that was captured or replayed last

	// Steps that are captured whole are replayed without the manager: what it said when
	// one was captured is said again.
	whole    bool
	key      Key // of the step under way
	step     []trace.Event
	captured map[Key][]trace.Event
	again    int // steps that were replayed so
}

// Emit takes an event of the manager. It issues scopes, but does not know which:
// that event follows.
func (t *tracer) Emit(e trace.Event) {
	e.Step += t.again
	t.at, t.inUse = e.Step, e.InUse
	if (e.What == trace.Capture || e.What == trace.Replay) && e.Name == "" {
		t.nodes = e.Bytes
		return
	}
	if t.whole {
		if e.What == trace.Begin {
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
	if e.What == trace.Capture || e.What == trace.Replay {
		if t.whole && e.Name == capture.FullIteration.String() {
			t.wholeStep(e.What)
		}
		e.Bytes = t.nodes
	}
	if r.off != nil && r.off.Open() {
		r.off.Trace(e)
		return
	}
	e.Rank, e.Step, e.InUse = t.rank, t.at, t.inUse
	e.Time, e.First = device.Now(), t.compute.Issued()
	if e.What != trace.Decide && e.What != trace.Spill {
		e.Offset = residency.None
	}
	t.sink.Emit(e)
}

// wholeStep notes what a step said that was captured whole, or says it again for one
// that was replayed. The graph is the last piece that compute was given.
func (t *tracer) wholeStep(what trace.What) {
	switch what {
	case trace.Capture:
		if t.captured == nil {
			t.captured = map[Key][]trace.Event{}
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

// Observe makes an observer for a rank's device that tells a sink what its streams did
// and who took memory of it. The device is opened with it.
func Observe(sink trace.Sink, rank int) device.Observer { return &watcher{sink: sink, rank: rank} }

// watcher turns what a device tells into events.
type watcher struct {
	sink  trace.Sink
	rank  int
	inUse [device.Kinds]atomic.Int64
}

var spans = [...]trace.What{
	device.Launched: trace.Launch, device.Copied: trace.Copy, device.Replayed: trace.Graph,
	device.Waited: trace.Wait, device.Mixed: trace.Work,
}

func (w *watcher) Worked(x device.Work) {
	w.sink.Emit(trace.Event{
		What: spans[x.Kind], Rank: w.rank, Time: x.Begin, Took: x.End - x.Begin,
		Stream: x.Stream, First: x.First, Last: x.Last, Name: x.Name, Tier: trace.Tier(x.To), Bytes: int64(x.Bytes),
	})
}

func (w *watcher) Took(kind device.Kind, owner string, bytes, current device.Bytes) {
	w.inUse[kind].Store(int64(current))
	e := trace.Event{
		What: trace.Alloc, Rank: w.rank, Time: device.Now(), Name: owner, Tier: trace.Tier(kind), Offset: residency.None, Bytes: int64(bytes),
		InUse: [2]int64{w.inUse[device.Accel].Load(), w.inUse[device.Host].Load()},
	}
	if bytes < 0 {
		e.What, e.Bytes = trace.Free, -e.Bytes
	}
	w.sink.Emit(e)
}
