// This file owns PyTorch's memory snapshot: what the allocator did, and what was alive at
// the end.

package export

import (
	"bufio"
	"fmt"
	"io"
	"iter"
	"strconv"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// devices bounds the ranks that keep their number as the number of a device.
const devices = 1 << 12

// MemoryViz writes traces as a memory snapshot for the viewer at
// pytorch.org/memory_viz.
//
// Rank r becomes device r, and its host memory becomes device n+r if there are n ranks.
// Storages are blocks of a segment that stands for their heap, with groups as frames
// and categories. Memory of owners, such as parameters, has segments of its own.
func MemoryViz(w io.Writer, traces []*trace.Trace) error {
	out := bufio.NewWriterSize(w, 1<<16)
	v := &snapshot{pickle: newPickle(out)}
	slots := inSlots(traces)
	v.op(opProto)
	v.op(pickleFormat)
	v.dict()
	v.str("device_traces")
	all := v.list()
	for _, tier := range []memory.Kind{memory.Device, memory.Host} {
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
		return fmt.Errorf("export: cannot write the memory snapshot: %w", err)
	}
	return nil
}

// inSlots returns a slice with each trace at the index of its rank, or at the next free
// index.
func inSlots(traces []*trace.Trace) (slots []*trace.Trace) {
	for _, t := range byRank(traces) {
		for len(slots) < min(t.Header.Rank, devices) {
			slots = append(slots, nil)
		}
		slots = append(slots, t)
	}
	return slots
}

// snapshot writes a memory snapshot.
type snapshot struct {
	*pickle
	done []*device

	events *list // of the current device
	places *places
	now    int64 // in microseconds
	pooled bool  // the segment of the heap was written
	step   struct {
		number int
		name   string
	}
}

// device is the state of a device at the end.
type device struct {
	*places
	pooled bool
	alive  []*holding
}

// device writes the events of one device: one tier of a rank. Without a trace it writes an
// empty device.
func (v *snapshot) device(t *trace.Trace, tier memory.Kind) {
	number := len(v.done)
	v.events, v.pooled, v.now = v.list(), false, 0
	if t == nil {
		v.events.end()
		v.done = append(v.done, &device{})
		return
	}
	// Bases differ so that an address tells its device. They stay far below the highest
	// address: 2^8 of 2^42 are 2^50.
	v.places = newPlaces(int64(1+number%255)*largest, t, tier)
	// Times are those of the calls, as in PyTorch: the allocator runs ahead of the device.
	line := timeline{shift: min(max(t.Header.Began, 0), latest)}
	l := newLedger(t.Header.Rank, v.took, v.gave)
	l.groups = map[int]*trace.Event{}
	next, stop := iter.Pull(t.All())
	defer stop()
	lookAhead(l.groups, next)
	for e := range t.All() {
		switch {
		case e.Kind == trace.Begin:
			lookAhead(l.groups, next)
		case e.Kind == trace.End:
		case e.Kind != trace.Alloc && e.Kind != trace.Free || e.Tier != tier || v.pools(e):
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

// lookAhead finds the groups that save the storages of a step, among the events up to the
// next Begin. The viewer wants them at the time of allocation.
func lookAhead(groups map[int]*trace.Event, next func() (*trace.Event, bool)) {
	clear(groups)
	for e, ok := next(); ok && e.Kind != trace.Begin; e, ok = next() {
		if e.Kind == trace.Save && e.Storage != 0 && groups[e.Storage] == nil {
			saves := *e
			groups[e.Storage] = &saves
		}
	}
}

// pools reports whether an event is about the heap itself, whose storages are shown
// instead.
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

// action writes an action. Without a holding it is one of the heap.
func (v *snapshot) action(what string, addr, size int64, h *holding) {
	v.events.item()
	v.dict()
	v.words("action", what)
	v.number("addr", addr)
	v.number("size", size)
	v.number("stream", 0)
	v.number("time_us", v.now)
	if h == nil {
		v.stack(frame{kind: anOwner, name: trace.HeapOwner(v.places.tier)})
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

// inStep names a step. It caches the last name, which is usually the one.
func (v *snapshot) inStep(n int) string {
	if v.step.number != n || v.step.name == "" {
		v.step.number, v.step.name = n, "step "+strconv.Itoa(n)
	}
	return v.step.name
}

// mark ends the events of a device. The viewer wants this category if there are any others.
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

// frames returns the frame that describes a holding.
func frames(h *holding) frame {
	switch {
	case h.Storage == 0:
		return frame{kind: anOwner, name: h.Name}
	case h.Name == "":
		return frame{kind: aStorage}
	}
	return frame{aGroup, h.Name, h.Chunk, h.Layer, h.Microbatch}
}

// segments writes what is alive at the end.
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

// segment writes a segment with its blocks and the gaps between them.
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
