// This file owns a rank in Perfetto: a process with tracks for steps, streams, decisions
// and groups, and counters of memory.

package export

import (
	"bufio"
	"cmp"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Perfetto writes traces in the format of ui.perfetto.dev.
//
// Each trace becomes a process. Slices show what streams did, instants show decisions,
// and counters show the bytes in use by tier, group and owner. Decisions are placed on
// the device's clock.
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
			packets: p, trace: t, flows: &flows, offloads: map[storage]uint64{}, counters: map[holder]*meter{},
			timeline: timeline{clock: t.Clock(), shift: max(0, min(max(t.Header.Began, 0), latest)-zero)},
		}
		// Process zero is the idle process.
		name := "rank " + strconv.Itoa(t.Header.Rank)
		if h := t.Header; h.Host != "" {
			name += fmt.Sprintf(" on %s (process %d)", text(h.Host), h.Process)
		}
		r.process = p.describe(track{pid: i + 1, name: name})
		r.write()
	}
	if err := out.Flush(); err != nil {
		return fmt.Errorf("export: cannot write the Perfetto trace: %w", err)
	}
	return nil
}

// rank writes one trace.
type rank struct {
	*packets
	timeline
	trace   *trace.Trace
	process uint64
	// Times ascend within steps, decisions and owners, so each has a sequence of its own.
	stepping, deciding, owning *sequence

	open  bool  // whether a step is open
	ended int64 // when the last step began or ended
	taken int64 // when an owner last took or gave back memory

	steps, decisions, groups uint64 // tracks
	memory                   [2]uint64
	whole, saved             [2]meter
	counters                 map[holder]*meter
	work                     []issue // compute's spans, in the order of issue

	flows    *uint64
	offloads map[storage]uint64 // flows of offloaded storages
}

// meter is a counter.
type meter struct {
	track uint64
	value int64
}

// holder is a group or an owner.
type holder struct {
	owner
	saved bool // whether it is a group
}

// The order of the tracks of a process.
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
		r.whole[tier] = r.meter(memory.Kind(tier), "all memory", 0)
		r.saved[tier] = r.meter(memory.Kind(tier), "storages of the step", 1)
	}
	r.stepping, r.deciding, r.owning = r.sequence(), r.sequence(), r.sequence()
	ledger := newLedger(r.trace.Header.Rank, func(h *holding) { r.change(h, h.Bytes) }, func(h *holding) { r.change(h, -h.Bytes) })
	for e := range r.trace.All() {
		switch {
		case e.Kind.Span():
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

func (r *rank) meter(tier memory.Kind, name string, order int) meter {
	return meter{track: r.describe(track{parent: r.memory[tier], name: name, order: order, bytes: true})}
}

// set writes the value of a counter if it has changed.
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

// change adds bytes to the counter of a group or an owner.
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
	switch e.Kind {
	case trace.Alloc, trace.Free:
		r.inUse(e)
	case trace.Begin, trace.End:
		r.step(e)
		r.inUse(e)
	case trace.Save, trace.Offload, trace.Reload, trace.Load, trace.Release, trace.Stash, trace.Restore:
		r.instant(e, r.groups, catGroup)
	default:
		r.instant(e, r.decisions, catDecision)
	}
}

// inUse writes the counters of all memory in use.
func (r *rank) inUse(e *trace.Event) {
	in, saved := &r.saved, true
	if owned(e) {
		in, saved = &r.whole, false
	}
	for tier := range in {
		r.set(&in[tier], saved, e.InUse[tier])
	}
}

// step opens or closes a step. A new step ends one that was given up.
func (r *rank) step(e *trace.Event) {
	at := max(r.ended, r.last)
	if e.Kind == trace.End {
		at = max(r.ended, min(r.last, r.done(e.First)))
	}
	r.ended = at
	if r.open {
		r.stepping.end(r.steps, at)
	}
	if r.open = e.Kind == trace.Begin; r.open {
		r.stepping.event(sliceBegin, r.steps)
		r.body = number(r.body, eventCategory, uint64(catStep))
		r.body = words(r.body, eventName, "step "+strconv.Itoa(e.Step))
		r.stepping.emit(at)
		clear(r.offloads)
	}
}

// done returns the time at which compute finished the last piece of work before a number.
// The clock says only when the next piece began, which may be much later.
func (r *rank) done(first uint64) int64 {
	i, _ := slices.BinarySearchFunc(r.work, first, func(w issue, first uint64) int { return cmp.Compare(w.first, first) })
	if i == 0 {
		return math.MaxInt64
	}
	return r.work[i-1].end
}

// instant writes an event without a length. An arrow leads from the offload of a storage
// to its reload.
func (r *rank) instant(e *trace.Event, track uint64, c category) {
	s := r.deciding
	s.event(instant, track)
	s.named(c, label{kind: e.Kind, name: e.Name})
	s.note(noteStep, int64(e.Step))
	switch {
	case e.Kind == trace.Capture || e.Kind == trace.Replay:
		s.note(noteNodes, e.Bytes)
	case e.Bytes != 0:
		s.note(noteBytes, e.Bytes)
	}
	if e.Kind != trace.Decide && e.Name != "" {
		s.note(noteChunk, int64(e.Chunk))
		s.note(noteLayer, int64(e.Layer))
		s.note(noteMicrobatch, int64(e.Microbatch))
	}
	if e.Storage != 0 {
		s.note(noteStorage, int64(e.Storage))
		key := storage{step: e.Step, number: e.Storage}
		switch flow := r.offloads[key]; {
		case e.Kind == trace.Offload:
			*r.flows++
			r.offloads[key] = *r.flows
			r.body = fixed(r.body, eventFlow, *r.flows)
		case e.Kind == trace.Reload && flow != 0:
			delete(r.offloads, key)
			r.body = fixed(r.body, eventFlowEnd, flow)
		}
	}
	s.emit(r.last)
}
