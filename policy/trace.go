// This file owns the trace of a simulated step: the events that the runtime would tell,
// on the clocks of the simulation, so that a plan can be looked at like a run.

package policy

import (
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/trace"
)

// Streams of a simulated step go by the names that the runtime gives them.
const (
	computeStream = "compute"
	outStream     = "offload"
	inStream      = "reload"
)

// Trace is Simulate for a picture: a step's events go to a sink, as those of a rank. What
// compute does between two decisions is one piece of work.
func Trace(p *Profile, pol Policy, plan *residency.Plan, l Links, cfg residency.Config, rank int, sink trace.Sink) error {
	s := p.step(pol)
	w := &witness{rank: rank, sizes: s.sizes}
	t := s.attempt(plan, l, cfg, w)
	if t.err != nil {
		return t.err
	}
	w.play(t, sink)
	return nil
}

// witness notes what a machine decides.
type witness struct {
	rank  int
	score *score
	heaps [2]*residency.Heap
	inUse [2]int64
	most  [2]int64
	sizes []int64
	group map[int]schedule.Group // that saved a storage first
	notes []note
}

// note is an event, and where in compute's work it lies.
type note struct {
	trace.Event
	at residency.Mark
}

func (w *witness) begin(t *trial) {
	w.score, w.heaps, w.group = t.score, [2]*residency.Heap{t.machine.Device(), t.machine.Host()}, map[int]schedule.Group{}
	t.machine.Watch = w.watch
	w.decide(trace.Begin, schedule.Group{}, 0, 0)
}

func (w *witness) end() {
	w.inUse = [2]int64{}
	w.decide(trace.End, schedule.Group{}, 0, w.most[trace.Device])
	w.notes[len(w.notes)-1].Offset = w.most[trace.Host]
}

func (w *witness) decide(what trace.What, g schedule.Group, storage int, bytes int64) {
	w.notes = append(w.notes, note{trace.Event{
		What: what, Rank: w.rank, Step: 1, Name: g.Name, Chunk: g.Chunk, Layer: g.Layer, Microbatch: g.Microbatch,
		Storage: storage, Offset: residency.None, Bytes: bytes, InUse: w.inUse,
	}, w.score.Record(residency.Compute)})
}

// call notes a call of the step that is about to be made.
func (w *witness) call(op residency.Op) {
	switch op.Kind {
	case residency.OpSave:
		var bytes int64
		for _, it := range op.Items {
			if _, saved := w.group[it.ID]; !saved {
				w.group[it.ID] = op.Group
				bytes += w.sizes[it.ID]
				w.decide(trace.Save, op.Group, it.ID+1, w.sizes[it.ID])
			}
		}
		w.decide(trace.Save, op.Group, 0, bytes)
	case residency.OpLoad:
		w.decide(trace.Load, op.Group, 0, 0)
	case residency.OpRelease:
		w.decide(trace.Release, op.Group, 0, 0)
	}
}

// watch notes places that storages get and give back, and the copies that go with them.
func (w *witness) watch(s *residency.Storage, host, taken bool) {
	tier, off := trace.Device, s.Device
	if host {
		tier, off = trace.Host, s.Host
	}
	bytes, what, sign := s.Bytes, trace.Free, int64(-1)
	if off != residency.None {
		bytes = w.heaps[tier].Round(s.Bytes)
	}
	if taken {
		what, sign = trace.Alloc, 1
	}
	g := w.group[s.ID]
	w.inUse[tier] += sign * bytes
	w.most[tier] = max(w.most[tier], w.inUse[tier])
	w.decide(what, g, s.ID+1, bytes)
	last := &w.notes[len(w.notes)-1]
	last.Tier, last.Offset = tier, off
	switch {
	case !taken:
	case host:
		if !w.score.planned {
			w.decide(trace.Evict, g, s.ID+1, s.Bytes)
		}
		w.decide(trace.Leave, g, s.ID+1, s.Bytes)
	case s.State == residency.Returning:
		w.decide(trace.Return, g, s.ID+1, s.Bytes)
	}
}

// play tells everything, once times are known.
func (w *witness) play(t *trial, sink trace.Sink) {
	p := player{score: t.score}
	for _, l := range []residency.Lane{residency.Out, residency.In} {
		p.lanes[l].next = len(t.score.copies[l])
	}
	line := computeLine{rank: w.rank, sink: sink}
	waited := 0
	for _, n := range w.notes {
		x := t.score.points[n.at-1]
		for ; waited < x.index; waited++ {
			line.wait(nanos(p.resumed[waited]-p.held[waited]), nanos(p.resumed[waited]))
		}
		at, _ := p.when(x)
		line.work(nanos(at))
		if n.What == trace.End && t.end > at { // the last copies
			at = t.end
			line.wait(line.now, nanos(at))
		}
		n.Time, n.First = nanos(at), line.pieces
		sink.Emit(n.Event)
	}
	for i, name := range []string{outStream, inStream} {
		for k, c := range t.score.copies[int(residency.Out)+i] {
			sink.Emit(trace.Event{
				What: trace.Copy, Rank: w.rank, Time: nanos(c.begin), Took: nanos(c.end) - nanos(c.begin), Stream: name,
				First: uint64(k), Last: uint64(k + 1), Tier: trace.Tier(1 - i), Bytes: int64(c.bytes),
			})
		}
	}
}

func nanos(s float64) int64 { return int64(seconds(s)) }

// computeLine tells what compute did: it works, and it waits.
type computeLine struct {
	rank   int
	sink   trace.Sink
	pieces uint64
	now    int64
}

func (l *computeLine) span(what trace.What, until int64) {
	if until <= l.now {
		return
	}
	l.sink.Emit(trace.Event{What: what, Rank: l.rank, Time: l.now, Took: until - l.now, Stream: computeStream, First: l.pieces, Last: l.pieces + 1})
	l.pieces, l.now = l.pieces+1, until
}

func (l *computeLine) work(until int64) { l.span(trace.Work, until) }

func (l *computeLine) wait(from, until int64) {
	l.span(trace.Work, from)
	l.span(trace.Wait, until)
}
