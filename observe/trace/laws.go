// This file owns the laws that every complete trace obeys. Tests check all emitters
// against them.

package trace

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// slack is the rounding, in nanoseconds, that the times of spans may have.
const slack = 1000

// Check returns an error that describes the first event that breaks a law of traces:
//
//   - The bytes in use by a step's storages are those that the step has taken and not
//     given back, by tier. A storage has at most one place in a tier.
//   - The end of a step states the most bytes that were in use. After it there are none.
//   - A storage that is offloaded or reloaded has a place where it is copied to.
//   - The bytes in use on the device are those that owners have taken and not given
//     back.
//   - The spans of a stream come in order and do not overlap.
//
// Check returns an error as well if the trace is incomplete.
func (t *Trace) Check() error {
	if t.Cut != nil || t.Dropped > 0 {
		return fmt.Errorf("trace: %d events are missing (%v); only a complete trace can be checked", t.Dropped, t.Cut)
	}
	l := checker{owners: map[owner]int64{}, ends: map[string]*Event{}}
	i := 0
	for e := range t.All() {
		if err := l.follow(e); err != nil {
			return fmt.Errorf("trace: event %d, %+v: %w", i, *e, err)
		}
		i++
	}
	return nil
}

// checker holds the state that the events so far lead to.
type checker struct {
	open   bool
	places [2]map[int]int64 // bytes by storage
	inUse  [2]int64
	most   [2]int64 // of inUse, in this step
	owners map[owner]int64
	device [2]int64          // in use by all owners
	ends   map[string]*Event // the last span of each stream
}

type owner struct {
	name string
	tier memory.Kind
}

// follow checks an event and applies it.
func (l *checker) follow(e *Event) error {
	switch {
	case e.Kind >= kinds || e.Tier > memory.Host:
		return fmt.Errorf("unknown kind of event or memory")
	case e.Kind.Span():
		return l.span(e)
	case e.owned():
		return l.owned(e)
	}
	if err := l.decided(e); err != nil {
		return err
	}
	if l.inUse != e.InUse {
		return fmt.Errorf("expected %v in use by the storages", l.inUse)
	}
	return nil
}

// decided checks a decision.
func (l *checker) decided(e *Event) error {
	here := l.places[e.Tier][e.Storage]
	switch e.Kind {
	case Begin:
		if l.open {
			return fmt.Errorf("a step begins before the last one has ended")
		}
		l.open, l.places, l.inUse, l.most = true, [2]map[int]int64{{}, {}}, [2]int64{}, [2]int64{}
	case End:
		if most := [2]int64{e.Bytes, e.Offset}; !l.open || most != l.most {
			return fmt.Errorf("the step used %v at most, or did not begin", l.most)
		}
		l.open, l.inUse = false, [2]int64{}
	case Alloc:
		if here != 0 || e.Bytes <= 0 || !l.open {
			return fmt.Errorf("the storage has a place there already, has no bytes, or belongs to no step")
		}
		l.places[e.Tier][e.Storage] = e.Bytes
		l.inUse[e.Tier] += e.Bytes
		l.most[e.Tier] = max(l.most[e.Tier], l.inUse[e.Tier])
	case Free:
		if here != e.Bytes {
			return fmt.Errorf("expected %d bytes, as the storage has there", here)
		}
		delete(l.places[e.Tier], e.Storage)
		l.inUse[e.Tier] -= e.Bytes
	case Offload, Reload:
		to := memory.Host
		if e.Kind == Reload {
			to = memory.Device
		}
		if l.places[to][e.Storage] < e.Bytes {
			return fmt.Errorf("the storage has no place where it is copied to")
		}
	}
	return nil
}

// owned checks memory that an owner takes or gives back.
func (l *checker) owned(e *Event) error {
	n := e.Bytes
	if e.Kind == Free {
		n = -n
	}
	o := owner{e.Name, e.Tier}
	l.owners[o] += n
	if l.device[e.Tier] += n; l.device != e.InUse || l.owners[o] < 0 {
		return fmt.Errorf("expected %v in use by all owners", l.device)
	}
	return nil
}

// span checks that a span follows the one before it on its stream.
func (l *checker) span(e *Event) error {
	last := l.ends[e.Stream]
	if e.Last <= e.First || e.Took < 0 || last != nil && (e.First < last.Last || e.Time < last.Time+last.Took-slack) {
		return fmt.Errorf("the span is empty or begins before the last one of its stream ends: %+v", last)
	}
	now := *e
	l.ends[e.Stream] = &now
	return nil
}
