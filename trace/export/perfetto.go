// This file owns a rank in Perfetto: a process with a track of steps, one for each
// stream, one for decisions and one for what becomes of groups, and counters of memory.

package export

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"github.com/stowage-dev/stowage/trace"
)

// Perfetto writes traces in Perfetto's form, each as a process: slices are what streams
// did, instants what was decided, counters the bytes in use of both tiers, and of each
// group and owner. Decisions are on the device's clock.
func Perfetto(w io.Writer, traces []*trace.Trace) error {
	out := bufio.NewWriterSize(w, 1<<16)
	p := newPackets(out)
	zero := began(traces)
	if zero < latest {
		p.clocks(zero)
	}
	var flows uint64
	for i, t := range byRank(traces) {
		r := &rank{
			packets: p, trace: t, flows: &flows, leaves: map[storage]uint64{}, counters: map[holder]*meter{},
			timeline: timeline{clock: t.Clock(), shift: max(0, min(max(t.Header.Began, 0), latest)-zero)},
		}
		// Process zero is the machine's idle one.
		r.process = p.describe(track{pid: i + 1, name: "rank " + strconv.Itoa(t.Header.Rank)})
		r.write()
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("trace: Perfetto's form cannot be written: %w", err)
	}
	return nil
}

// rank writes one trace.
type rank struct {
	*packets
	timeline
	trace   *trace.Trace
	process uint64
	// A sequence each for what has a clock of its own: steps, decisions, owners.
	stepping, deciding, owning *sequence

	open  bool  // a step is
	ended int64 // when the last one began or ended
	taken int64 // when an owner last took or gave memory

	steps, decisions, groups uint64 // tracks
	memory                   [2]uint64
	whole, saved             [2]meter
	counters                 map[holder]*meter
	work                     []*trace.Event // compute's spans, in the order of issue

	flows  *uint64
	leaves map[storage]uint64 // flows of storages that left
}

// meter is a counter.
type meter struct {
	track uint64
	value int64
}

// holder is a group, or an owner.
type holder struct {
	owner
	saved bool // it is a group
}

// Orders of the tracks of a process.
const (
	orderSteps = iota
	orderDecisions
	orderGroups
	orderMemory
	orderStreams = orderMemory + 2
)

func (r *rank) write() {
	r.steps = r.describe(track{parent: r.process, name: "steps", order: orderSteps})
	r.streams(orderStreams)
	r.decisions = r.describe(track{parent: r.process, name: "decisions", order: orderDecisions})
	r.groups = r.describe(track{parent: r.process, name: "groups", order: orderGroups})
	for tier, name := range [2]string{"device memory", "host memory"} {
		r.memory[tier] = r.describe(track{parent: r.process, name: name, order: orderMemory + tier})
		r.whole[tier] = r.meter(trace.Tier(tier), "all that is taken", 0)
		r.saved[tier] = r.meter(trace.Tier(tier), "storages of the step", 1)
	}
	r.stepping, r.deciding, r.owning = r.sequence(), r.sequence(), r.sequence()
	ledger := newLedger(r.trace.Header.Rank, func(h *holding) { r.change(h, h.Bytes) }, func(h *holding) { r.change(h, -h.Bytes) })
	for i := range r.trace.Events {
		e := &r.trace.Events[i]
		switch {
		case e.What.Span():
			continue
		case owned(e):
			r.taken = max(r.taken, r.at(e.Time))
		default:
			r.decided(e)
		}
		ledger.apply(e)
		r.decision(e)
	}
	if r.open {
		r.stepping.end(r.steps, max(r.ended, r.last))
	}
}

func (r *rank) meter(tier trace.Tier, name string, order int) meter {
	return meter{track: r.describe(track{parent: r.memory[tier], name: name, order: order, bytes: true})}
}

// set gives a counter a value, if it is a new one.
func (r *rank) set(m *meter, saved bool, value int64) {
	if m.value == value {
		return
	}
	m.value = value
	if saved {
		r.deciding.count(m.track, r.last, value)
	} else {
		r.owning.count(m.track, r.taken, value)
	}
}

// change counts what a group or an owner holds.
func (r *rank) change(h *holding, by int64) {
	key := holder{owner{h.Name, h.Tier}, h.Storage != 0}
	m := r.counters[key]
	if m == nil {
		name := "owner " + h.Name
		switch {
		case key.saved && h.Name == "":
			name = "no group"
		case key.saved:
			name = "group " + h.Name
		}
		made := r.meter(h.Tier, name, 2+len(r.counters))
		m = &made
		r.counters[key] = m
	}
	r.set(m, key.saved, m.value+by)
}

// decision writes a decision.
func (r *rank) decision(e *trace.Event) {
	switch e.What {
	case trace.Alloc, trace.Free:
		r.inUse(e)
	case trace.Begin, trace.End:
		r.step(e)
		r.inUse(e)
	case trace.Save, trace.Leave, trace.Return, trace.Load, trace.Release, trace.Stash, trace.Restore:
		r.instant(e, r.groups, catGroup)
	default:
		r.instant(e, r.decisions, catDecision)
	}
}

// inUse counts all that is in use of both tiers.
func (r *rank) inUse(e *trace.Event) {
	in, saved := &r.saved, true
	if owned(e) {
		in, saved = &r.whole, false
	}
	for tier := range in {
		r.set(&in[tier], saved, e.InUse[tier])
	}
}

// step opens or closes a step. One that begins ends the one before: it was given up.
func (r *rank) step(e *trace.Event) {
	at := max(r.ended, r.last)
	if e.What == trace.End {
		at = max(r.ended, min(r.last, r.done(e.First)))
	}
	r.ended = at
	if r.open {
		r.stepping.end(r.steps, at)
	}
	if r.open = e.What == trace.Begin; r.open {
		r.stepping.event(sliceBegin, r.steps)
		r.body = number(r.body, eventCategory, uint64(catStep))
		r.body = words(r.body, eventName, "step "+strconv.Itoa(e.Step))
		r.stepping.emit(at)
		clear(r.leaves)
	}
}

// done is when compute had done the last piece of work before a number. The clock says
// when the next began, which may be long after.
func (r *rank) done(first uint64) int64 {
	i, _ := slices.BinarySearchFunc(r.work, first, func(e *trace.Event, first uint64) int { return cmp.Compare(e.First, first) })
	if i == 0 {
		return math.MaxInt64
	}
	return r.until(r.work[i-1])
}

// instant writes what has a time and no length. An arrow leads from a storage's leaving
// to its return.
func (r *rank) instant(e *trace.Event, track uint64, c category) {
	s := r.deciding
	s.event(instant, track)
	s.named(c, label{what: e.What, name: e.Name})
	s.note(noteStep, int64(e.Step))
	switch {
	case e.What == trace.Capture || e.What == trace.Replay:
		s.note(noteNodes, e.Bytes)
	case e.Bytes != 0:
		s.note(noteBytes, e.Bytes)
	}
	if e.What != trace.Decide && e.Name != "" {
		s.note(noteChunk, int64(e.Chunk))
		s.note(noteLayer, int64(e.Layer))
		s.note(noteMicrobatch, int64(e.Microbatch))
	}
	if e.Storage != 0 {
		s.note(noteStorage, int64(e.Storage))
		key := storage{step: e.Step, number: e.Storage}
		switch flow := r.leaves[key]; {
		case e.What == trace.Leave:
			*r.flows++
			r.leaves[key] = *r.flows
			r.body = fixed(r.body, eventFlow, *r.flows)
		case e.What == trace.Return && flow != 0:
			delete(r.leaves, key)
			r.body = fixed(r.body, eventFlowEnd, flow)
		}
	}
	s.emit(r.last)
}
