// This file owns when compute did what in a profiled step.

package offload

import (
	"cmp"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
)

// stopwatch is the points of a step at which compute's time is taken. What lies
// before an idle point, since the point before it, is waiting.
type stopwatch struct {
	on     bool
	points []point
	held   int            // call at which the points are set, if not zero
	events []device.Event // of all steps so far
	err    error
}

type point struct {
	op   int // calls of the tape that come before
	idle bool
}

func (w *stopwatch) begin(m *Manager, on bool) {
	w.on, w.points, w.err = on, w.points[:0], nil
	w.point(m, false)
}

// end takes the time before compute waits for the copies that are left, and leaves
// the reading of it to Times.
func (w *stopwatch) end(m *Manager) { w.point(m, false) }

// call takes the time of the calls that policies look at.
func (w *stopwatch) call(m *Manager, kind residency.OpKind) {
	if kind == residency.OpSave || kind == residency.OpLoad {
		w.point(m, false)
	}
}

// point takes the time of compute now, which cannot be done inside of a graph.
func (w *stopwatch) point(m *Manager, idle bool) {
	if !w.on || m.scope != nil || w.err != nil {
		return
	}
	if len(w.points) == len(w.events) {
		e, err := m.dev.NewEvent(device.Timing)
		if err != nil {
			w.err = err
			return
		}
		w.events = append(w.events, e)
	}
	m.lane[residency.Compute].Stream.Record(w.events[len(w.points)])
	w.points = append(w.points, point{cmp.Or(w.held, len(m.tape.Ops)), idle})
}

// hold sets the points that follow at an earlier call: one at which a scope began
// whose calls were made already, while its work was not issued.
func (w *stopwatch) hold(op int) { w.held = op }

// Times fills in the times of the tape of the step that ended last, which was
// profiled. It waits until the step is over. Calls between two points share the
// time between them evenly.
func (m *Manager) Times() error {
	w := &m.clock
	if m.ended == nil || !w.on {
		panic("offload: times are asked for of a step that was not profiled, or has not ended")
	}
	if w.err != nil {
		return w.err
	}
	if err := w.events[len(w.points)-1].Sync(); err != nil {
		return err
	}
	var own time.Duration
	ops := m.ended.Ops
	for i := 1; i < len(w.points); i++ {
		from, to := w.points[i-1].op, w.points[i].op
		var d time.Duration
		if !w.points[i].idle {
			var err error
			if d, err = w.events[i].Since(w.events[i-1]); err != nil {
				return err
			}
		}
		for k := from; k < to; k++ {
			ops[k].At = own + d*time.Duration(k-from)/time.Duration(to-from)
		}
		own += d
	}
	m.ended.Span = own
	return nil
}

func (w *stopwatch) close() (first error) {
	for _, e := range w.events {
		if err := e.Close(); first == nil {
			first = err
		}
	}
	w.events = nil
	return first
}
