// This file owns the reports: what the checker found, where in the program, and which
// order is missing.

package check

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Operation is an operation in a report.
type Operation struct {
	Name   string // "copy", "kernel gather", "view"
	Number int    // among the operations of its stream; in a graph, of the captured stream
	Stream string // the stream's name, or empty for the host
	Mode   device.Mode
	Bytes  device.Rect // what it declared
	Site   Site        // where it was issued
	// Replay is the number of the replay that it was part of, from one, and Replayer
	// the stream that replayed the graph. They are zero and empty outside of graphs.
	Replay   int
	Replayer string
}

func (o Operation) host() bool { return o.Stream == "" }

// String returns a description such as `copy #12 on stream "out"`.
func (o Operation) String() string {
	if o.host() {
		return "the host's " + o.Name
	}
	s := fmt.Sprintf("%s #%d on stream %q", o.Name, o.Number, o.Stream)
	if o.Replay > 0 {
		s += fmt.Sprintf(" in replay %d on stream %q", o.Replay, o.Replayer)
	}
	return s
}

// Race reports two operations that use the same bytes without an order, at least one of
// them to write. Second is the first operation of the program that conflicts with an
// earlier one; it was not executed.
type Race struct {
	First, Second Operation
	Bytes         device.Range // the first run of bytes that both use
	Alloc         Site         // where the buffer was allocated
	Missing       string       // the order that is missing
	Note          string       // why a wait that seems to order them does not, or empty
}

// Error names both operations, the bytes and the missing order.
func (r *Race) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "race on %s, allocated at %s\n", r.Bytes, &r.Alloc)
	fmt.Fprintf(&s, "  first:   %s (%s) at %s\n", r.First, r.First.Mode, &r.First.Site)
	fmt.Fprintf(&s, "  second:  %s (%s) at %s\n", r.Second, r.Second.Mode, &r.Second.Site)
	fmt.Fprintf(&s, "  missing: %s", r.Missing)
	if r.Note != "" {
		fmt.Fprintf(&s, "\n  note:    %s", r.Note)
	}
	return s.String()
}

// UseAfterFree reports a use of memory that was freed before. A second free of the
// same buffer is such a use too, with the name "free".
type UseAfterFree struct {
	Use   Operation // the use, with the bytes that it declared
	Free  Operation // the first free
	Alloc Site      // where the buffer was allocated
}

// Error names the buffer and the three places.
func (u *UseAfterFree) Error() string {
	b, what, use := u.Use.Bytes.Buf, "use after free", "use:      "
	if u.Use.Name == opFree {
		what, use = "double free", "again:    "
	}
	return fmt.Sprintf("%s of %s buffer %q\n  %s %s at %s\n  freed:     %s at %s\n  allocated: %s",
		what, b.Kind(), b.Owner(), use, u.Use, &u.Use.Site, u.Free, &u.Free.Site, &u.Alloc)
}

// describe returns an act as an operation of a report.
func (a *act) describe(u *use) Operation {
	o := Operation{Name: a.op.name, Number: a.op.number, Stream: a.op.stream, Replay: a.replay}
	if a.op.site != nil {
		o.Site = *a.op.site
	}
	if u != nil {
		o.Mode, o.Bytes = u.mode, u.rect
	}
	if a.replay > 0 {
		o.Replayer = a.on.stream.name
	}
	return o
}

func (c *Checker) race(x *conflict) *Race {
	first, second := x.first.by, x.second.by
	b := x.second.buf
	r := &Race{
		First: first.describe(x.first.use), Second: second.describe(x.second.use),
		Bytes: device.Range{Buf: b.outer, Off: memory.Bytes(x.from - int64(b.outer.Addr())), Len: memory.Bytes(x.to - x.from)},
		Alloc: *b.alloc,
	}
	r.Missing = missingOrder(r, first.op.graph != nil && first.op.graph == second.op.graph && first.replay == second.replay)
	if second.on != nil {
		r.Note = explainWait(first, second, r)
	}
	return r
}

// missingOrder says which edge would order the pair.
func missingOrder(r *Race, oneReplay bool) string {
	if r.Second.host() {
		return fmt.Sprintf("the host must synchronise with stream %q after %s, before it looks at the bytes", r.First.edgeStream(), r.First.whenDone())
	}
	if oneReplay {
		return fmt.Sprintf("inside the graph, stream %q must wait, before %s, for an event recorded on stream %q after %s",
			r.Second.Stream, r.Second.label(), r.First.Stream, r.First.label())
	}
	s := fmt.Sprintf("stream %q must wait, before %s, for an event recorded on stream %q after %s",
		r.Second.edgeStream(), r.Second.label(), r.First.edgeStream(), r.First.whenDone())
	return s + "; or the host must synchronise with the first before it issues the second"
}

// edgeStream returns the stream on which an edge from or to the operation can be made.
func (o Operation) edgeStream() string {
	if o.Replay > 0 {
		return o.Replayer
	}
	return o.Stream
}

func (o Operation) label() string { return fmt.Sprintf("%s #%d", o.Name, o.Number) }

func (o Operation) whenDone() string {
	if o.Replay > 0 {
		return "it replayed the graph"
	}
	return o.label()
}

// explainWait looks for a wait that was meant to order the pair and says why it does
// not: its recording is stale, is of another stream, or came after the wait.
func explainWait(first, second *act, r *Race) string {
	lanes := []*lane{second.on}
	if second.on.index > 0 {
		lanes = append(lanes, second.on.stream.lanes[0])
	}
	other := ""
	for _, l := range lanes {
		for n := l.nwaits - 1; n >= 0 && n > l.nwaits-1-recentWaits; n-- {
			w := l.waits[n%recentWaits]
			again := covering(w.event.mark, first)
			switch {
			case w.took == nil && again != nil:
				return fmt.Sprintf("the wait at %s held nothing back: the event was recorded only after it, at %s; call Wait after Record", w.site, again.site)
			case w.took == nil:
			case w.took.slot == first.slot && w.took.tick < first.tick && again != nil:
				return fmt.Sprintf("the wait at %s took an earlier recording of its event, made at %s; the recording after %s was made at %s, later than the wait; call Wait after Record", w.site, w.took.site, r.First.label(), again.site)
			case w.took.slot == first.slot && w.took.tick < first.tick:
				return fmt.Sprintf("the wait at %s is for a stale recording, made at %s before %s was issued; record the event after it", w.site, w.took.site, r.First.label())
			case w.seq >= first.seq && other == "":
				other = fmt.Sprintf("the wait at %s is for an event recorded on stream %q at %s, which is not ordered after %s", w.site, w.took.stream, w.took.site, r.First.label())
			}
		}
	}
	return other
}

// covering returns the recording if it marks the work, else nil.
func covering(r *recording, a *act) *recording {
	if r == nil || !a.before(r.clock) {
		return nil
	}
	return r
}
