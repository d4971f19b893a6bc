// This file owns the times of a profiled step: when compute did what.

package offload

import (
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
)

// stopwatch holds the points of a step at which the time of compute is taken. Compute
// waits between an idle point and the point before it.
type stopwatch struct {
	on     bool
	points []point
	held   int            // the call that points belong to, or noCall
	events []device.Event // of all steps so far
	err    error
}

type point struct {
	op   int // the number of calls before it
	idle bool
}

// noCall makes points belong to the call that comes next.
const noCall = -1

func (w *stopwatch) begin(m *Manager, on bool) {
	w.on, w.points, w.held, w.err = on, w.points[:0], noCall, nil
	w.point(m, false)
}

// end takes the time before compute waits for the remaining copies. Times reads it.
func (w *stopwatch) end(m *Manager) { w.point(m, false) }

// call takes the time of saves and loads, which policies need.
func (w *stopwatch) call(m *Manager, kind residency.OpKind) {
	if kind == residency.OpSave || kind == residency.OpLoad {
		w.point(m, false)
	}
}

// point takes the time of compute now. It does nothing inside of a graph.
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
	op := len(m.tape.Ops)
	if w.held != noCall {
		op = w.held
	}
	w.points = append(w.points, point{op, idle})
}

// hold makes the points that follow belong to an earlier call: the beginning of a scope
// whose calls were made before its work is issued. noCall ends that.
func (w *stopwatch) hold(op int) { w.held = op }

// Times waits for the step that ended last and writes its times into its tape. Calls
// between two points share the time between them evenly. Times panics unless the step was
// begun with BeginProfile.
func (m *Manager) Times() error {
	w := &m.clock
	if m.ended == nil || !w.on {
		panic("offload: Times needs a step that was profiled and has ended")
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
