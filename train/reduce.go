// This file owns the sums of gradients over the ranks that hold the same whole parameters:
// which parts are added up, when, and on which stream.

package train

import (
	"errors"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// reduction adds up gradients on a stream of its own, while compute goes on with the
// backward passes of other units. A unit's gradients are complete after its last pass of the
// step. The first step counts the passes and adds up at its end. Ranks that share
// parameters run the same passes, so they make the same calls in the same order.
type reduction struct {
	r       *rank
	grads   device.Range
	parts   []gradPart
	stream  device.Stream // nil if no other rank holds the same parameters
	ready   device.Event  // compute has written the gradients of a part
	summed  device.Event
	passes  []int // by unit: passes of this step that wrote gradients
	expect  []int // in a whole step, or nil
	reduced []bool
	forget  func() // ends what communicators were told of the gradients
}

// gradPart is a range of gradients that is added up by one call of each communicator.
type gradPart struct {
	class class
	unit  int // whose passes complete it, or -1 for parts of all units
	from  memory.Bytes
	n     memory.Bytes
}

// add adds a parameter's gradients, which follow those that were added before. Vectors are
// short, so those of all units are one part, as is what the first and the last stage hold:
// they complete it at different times.
func (x *reduction) add(c class, unit int, vector bool, from, n memory.Bytes) {
	if vector || c == shared {
		unit = -1
	}
	if k := len(x.parts) - 1; k >= 0 && x.parts[k].class == c && x.parts[k].unit == unit {
		x.parts[k].n += n
		return
	}
	x.parts = append(x.parts, gradPart{c, unit, from, n})
}

// open makes the stream.
func (x *reduction) open(units int, grads device.Range) (err error) {
	x.grads, x.passes, x.reduced = grads, make([]int, units), make([]bool, len(x.parts))
	if !x.sums() {
		return nil
	}
	if x.ready, err = x.r.dev.NewEvent(0); err != nil {
		return err
	}
	if x.summed, err = x.r.dev.NewEvent(0); err != nil {
		return err
	}
	if x.stream, err = x.r.dev.NewStream("reduce"); err != nil {
		return err
	}
	// The first and the last stage have the gradients of the embedding in different places.
	x.forget = comm.Register(grads, x.r.replicas, x.r.twin)
	return nil
}

// sums reports whether another rank holds the same parameters.
func (x *reduction) sums() bool {
	for _, p := range x.parts {
		for _, c := range x.r.sharers(p.class) {
			if c != nil && c.Size() > 1 {
				return true
			}
		}
	}
	return false
}

// begin begins a step.
func (x *reduction) begin() {
	clear(x.passes)
	clear(x.reduced)
}

// wrote says that a pass has issued the work that writes a unit's gradients.
func (x *reduction) wrote(unit int, compute device.Stream) {
	x.passes[unit]++
	if x.stream != nil && x.expect != nil && x.passes[unit] == x.expect[unit] {
		x.sum(compute, func(p gradPart) bool { return p.unit == unit })
	}
}

// end adds up what is left, and orders compute after all sums.
func (x *reduction) end(compute device.Stream) {
	if x.expect == nil {
		x.expect = append(x.expect, x.passes...)
	}
	if x.stream == nil {
		return
	}
	x.sum(compute, func(gradPart) bool { return true })
	x.stream.Record(x.summed)
	compute.Wait(x.summed)
}

// sum issues the sums of some parts, after the work that compute was given before.
func (x *reduction) sum(compute device.Stream, which func(gradPart) bool) {
	waits := true
	for i, p := range x.parts {
		if x.reduced[i] || !which(p) {
			continue
		}
		x.reduced[i] = true
		for _, to := range x.r.sharers(p.class) {
			if to == nil || to.Size() == 1 {
				continue
			}
			if waits {
				compute.Record(x.ready)
				x.stream.Wait(x.ready)
				waits = false
			}
			g := x.grads.Slice(p.from, p.n)
			to.AllReduce(x.stream, g, g, comm.F32, comm.Sum)
		}
	}
}

func (x *reduction) close() (err error) {
	if x.stream != nil {
		err = x.stream.Close()
	}
	if x.forget != nil {
		x.forget()
	}
	for _, e := range []device.Event{x.ready, x.summed} {
		if e != nil {
			err = errors.Join(err, e.Close())
		}
	}
	return err
}
