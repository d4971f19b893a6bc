// This file owns the laws of a trace, which tests hold every writer to.

package trace

import "fmt"

// slack is what times of spans may be rounded by.
const slack = 1000

// Check says which law a whole trace breaks first, if any:
//
//   - the bytes in use by a step's storages are those that it has taken and not given
//     back, by tier, and no storage has two places in one;
//   - a step's end says the most there was of them, after which there are none;
//   - what is copied out or back has a place where it goes;
//   - the bytes in use of the device are those that owners have taken and not given
//     back;
//   - pieces of a stream come in order, one after the other.
func (t *Trace) Check() error {
	if t.Cut != nil || t.Dropped > 0 {
		return fmt.Errorf("trace: %d events are missing (%v), so that nothing adds up", t.Dropped, t.Cut)
	}
	l := laws{owners: map[owner]int64{}, ends: map[string]*Event{}}
	for i := range t.Events {
		if err := l.follow(&t.Events[i]); err != nil {
			return fmt.Errorf("trace: event %d, %+v: %w", i, t.Events[i], err)
		}
	}
	return nil
}

// laws is a trace so far.
type laws struct {
	open   bool
	places [2]map[int]int64 // bytes by storage
	inUse  [2]int64
	most   [2]int64
	owners map[owner]int64
	device [2]int64
	ends   map[string]*Event // the last span of each stream
}

type owner struct {
	name string
	tier Tier
}

func (l *laws) follow(e *Event) error {
	switch {
	case e.What >= whats || e.Tier > Host:
		return fmt.Errorf("there is no such event")
	case e.What.Span():
		return l.span(e)
	case e.owned():
		return l.took(e)
	}
	if err := l.decided(e); err != nil {
		return err
	}
	if l.inUse != e.InUse {
		return fmt.Errorf("the storages have %v", l.inUse)
	}
	return nil
}

func (l *laws) decided(e *Event) error {
	here := l.places[e.Tier][e.Storage]
	switch e.What {
	case Begin:
		if l.open {
			return fmt.Errorf("a step begins inside of a step")
		}
		l.open, l.places, l.inUse, l.most = true, [2]map[int]int64{{}, {}}, [2]int64{}, [2]int64{}
	case End:
		if most := [2]int64{e.Bytes, e.Offset}; !l.open || most != l.most {
			return fmt.Errorf("the step had %v at most, or did not begin", l.most)
		}
		l.open, l.inUse = false, [2]int64{}
	case Alloc:
		if here != 0 || e.Bytes <= 0 || !l.open {
			return fmt.Errorf("the storage has a place there already, or gets an empty one, or belongs to no step")
		}
		l.places[e.Tier][e.Storage] = e.Bytes
		l.inUse[e.Tier] += e.Bytes
		l.most[e.Tier] = max(l.most[e.Tier], l.inUse[e.Tier])
	case Free:
		if here != e.Bytes {
			return fmt.Errorf("the storage has %d bytes there", here)
		}
		delete(l.places[e.Tier], e.Storage)
		l.inUse[e.Tier] -= e.Bytes
	case Leave, Return:
		to := Host
		if e.What == Return {
			to = Device
		}
		if l.places[to][e.Storage] < e.Bytes {
			return fmt.Errorf("the storage has no place where it is copied to")
		}
	}
	return nil
}

func (l *laws) took(e *Event) error {
	n := e.Bytes
	if e.What == Free {
		n = -n
	}
	o := owner{e.Name, e.Tier}
	l.owners[o] += n
	if l.device[e.Tier] += n; l.device != e.InUse || l.owners[o] < 0 {
		return fmt.Errorf("owners have taken %v", l.device)
	}
	return nil
}

func (l *laws) span(e *Event) error {
	last := l.ends[e.Stream]
	if e.Last <= e.First || e.Took < 0 || last != nil && (e.First < last.Last || e.Time < last.Time+last.Took-slack) {
		return fmt.Errorf("it overlaps with %+v", last)
	}
	l.ends[e.Stream] = e
	return nil
}
