// This file owns PyTorch's memory snapshot: what the allocator did, and what was alive
// in the end.

package export

import (
	"bufio"
	"fmt"
	"io"
	"strconv"

	"github.com/stowage-dev/stowage/trace"
)

// devices bounds the numbers of ranks that are kept as numbers of devices.
const devices = 1 << 12

// MemoryViz writes traces as a memory snapshot of PyTorch, for the viewer at
// pytorch.org/memory_viz. A rank is the device of its number, and its host memory a
// device after all of those: with n ranks that of rank r is device n+r. Storages are
// blocks in a segment that is their pool, with their groups as frames and categories;
// what owners hold, such as parameters, has segments of its own.
func MemoryViz(w io.Writer, traces []*trace.Trace) error {
	out := bufio.NewWriterSize(w, 1<<16)
	v := &snapshot{pickle: newPickle(out)}
	slots := inSlots(traces)
	v.op(opProto)
	v.op(pickleFormat)
	v.dict()
	v.str("device_traces")
	all := v.list()
	for _, tier := range []trace.Tier{trace.Device, trace.Host} {
		for _, t := range slots {
			all.item()
			v.device(t, tier)
		}
	}
	all.end()
	v.segments()
	v.endDict()
	v.op(opStop)
	if err := out.Flush(); err != nil {
		return fmt.Errorf("trace: the memory snapshot cannot be written: %w", err)
	}
	return nil
}

// inSlots puts each trace at its rank's place, or at the next that is free.
func inSlots(traces []*trace.Trace) (slots []*trace.Trace) {
	for _, t := range byRank(traces) {
		for len(slots) < min(t.Header.Rank, devices) {
			slots = append(slots, nil)
		}
		slots = append(slots, t)
	}
	return slots
}

// snapshot writes one.
type snapshot struct {
	*pickle
	done []*device

	events *list // of the device under way
	places *places
	now    int64 // in microseconds
	pooled bool  // the pool's segment was told of
	step   struct {
		number int
		name   string
	}
}

// device is a device as it is in the end.
type device struct {
	*places
	pooled bool
	alive  []*holding
}

// device writes what one did: a rank's memory of one tier, or, without a trace, nothing.
func (v *snapshot) device(t *trace.Trace, tier trace.Tier) {
	number := len(v.done)
	v.events, v.pooled, v.now = v.list(), false, 0
	if t == nil {
		v.events.end()
		v.done = append(v.done, &device{})
		return
	}
	// Bases differ, so that an address tells of which device it is, and are far below
	// the highest: 2^8 of 2^42 are 2^50.
	v.places = newPlaces(int64(1+number%255)*largest, t, tier)
	// Times are those of the calls, as PyTorch's are: the allocator runs ahead of the
	// device.
	line := timeline{shift: min(max(t.Header.Began, 0), latest)}
	l := newLedger(t.Header.Rank, v.took, v.gave)
	l.groups = map[int]*trace.Event{}
	lookAhead(l.groups, t.Events)
	for i := range t.Events {
		e := &t.Events[i]
		switch {
		case e.What == trace.Begin:
			lookAhead(l.groups, t.Events[i+1:])
		case e.What == trace.End:
		case e.What != trace.Alloc && e.What != trace.Free || e.Tier != tier || v.pools(e):
			continue
		}
		v.now = max(v.now, line.at(e.Time)/1000)
		l.apply(e)
	}
	if v.events.n > 0 {
		v.mark()
	}
	v.events.end()
	v.done = append(v.done, &device{v.places, v.pooled, l.alive()})
}

// lookAhead finds which storages of a step are saved, and by whom first. The viewer
// wants to know when they are taken.
func lookAhead(groups map[int]*trace.Event, events []trace.Event) {
	clear(groups)
	for i := range events {
		e := &events[i]
		if e.What == trace.Begin {
			return
		}
		if e.What == trace.Save && e.Storage != 0 && groups[e.Storage] == nil {
			groups[e.Storage] = e
		}
	}
}

// pools tells whether an event is of the pool's own memory: its storages are shown.
func (v *snapshot) pools(e *trace.Event) bool { return v.places.pool > 0 && v.places.ofPool(e) }

func (v *snapshot) took(h *holding) {
	v.places.take(h)
	switch {
	case h.addr == 0:
		return
	case h.own:
		v.action("segment_alloc", h.addr, rounded(h.Bytes), h)
	case !v.pooled:
		v.pooled = true
		v.action("segment_alloc", v.places.base, v.places.pool, nil)
	}
	v.action("alloc", h.addr, h.Bytes, h)
}

func (v *snapshot) gave(h *holding) {
	if h.addr == 0 {
		return
	}
	v.places.give(h)
	v.action("free_requested", h.addr, h.Bytes, h)
	v.action("free_completed", h.addr, h.Bytes, h)
	if h.own {
		v.action("segment_free", h.addr, rounded(h.Bytes), h)
	}
}

// action writes one; without a holding it is the pool's.
func (v *snapshot) action(what string, addr, size int64, h *holding) {
	v.events.item()
	v.dict()
	v.words("action", what)
	v.number("addr", addr)
	v.number("size", size)
	v.number("stream", 0)
	v.number("time_us", v.now)
	if h == nil {
		v.stack(frame{kind: anOwner, name: v.places.tier.Pool()})
	} else {
		v.stack(frames(h))
	}
	if what == "alloc" {
		if h.Name != "" {
			v.words("category", h.Name)
		}
		if h.Storage != 0 {
			v.words("user_metadata", v.inStep(h.Step))
		}
	}
	v.endDict()
}

// inStep says which step it is. Most are the one before.
func (v *snapshot) inStep(n int) string {
	if v.step.number != n || v.step.name == "" {
		v.step.number, v.step.name = n, "step "+strconv.Itoa(n)
	}
	return v.step.name
}

// mark ends a device. The viewer wants a category of that name where there are any.
func (v *snapshot) mark() {
	v.events.item()
	v.dict()
	v.words("action", "snapshot")
	v.number("addr", 0)
	v.number("size", 0)
	v.number("stream", 0)
	v.number("time_us", v.now)
	v.words("category", "unknown")
	v.endDict()
}

// frames says whose a holding is.
func frames(h *holding) frame {
	switch {
	case h.Storage == 0:
		return frame{kind: anOwner, name: h.Name}
	case h.Name == "":
		return frame{kind: aStorage}
	}
	return frame{aGroup, h.Name, h.Chunk, h.Layer, h.Microbatch}
}

// segments writes what there is in the end.
func (v *snapshot) segments() {
	v.str("segments")
	l := v.list()
	for number, d := range v.done {
		if d.pooled {
			l.item()
			v.segment(number, d.base, d.pool, d.blocks)
		}
		for _, h := range d.alive {
			if h.own {
				l.item()
				v.segment(number, h.addr, rounded(h.Bytes), []*holding{h})
			}
		}
	}
	l.end()
}

// segment writes one, with its blocks and what is free between them.
func (v *snapshot) segment(number int, addr, size int64, blocks []*holding) {
	var used int64
	for _, h := range blocks {
		used += h.Bytes
	}
	v.dict()
	v.number("device", int64(number))
	v.number("address", addr)
	v.number("total_size", size)
	v.number("allocated_size", used)
	v.number("active_size", used)
	v.number("requested_size", used)
	v.number("stream", 0)
	v.words("segment_type", "large")
	v.str("blocks")
	l := v.list()
	at := addr
	for _, h := range blocks {
		v.gap(l, &at, h.addr)
		v.block(l, &at, h.Bytes, h.Bytes, "active_allocated", frames(h))
	}
	v.gap(l, &at, addr+size)
	l.end()
	v.endDict()
}

func (v *snapshot) gap(l *list, at *int64, until int64) {
	if until > *at {
		v.block(l, at, until-*at, 0, "inactive", frame{})
	}
}

func (v *snapshot) block(l *list, at *int64, size, requested int64, state string, f frame) {
	l.item()
	v.dict()
	v.number("address", *at)
	v.number("size", size)
	v.number("requested_size", requested)
	v.words("state", state)
	v.stack(f)
	v.endDict()
	*at += size
}
