// This file owns the reports: what the checker found, with the places in the
// program and the order that is missing, in words.

package check

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// Operation is one side of a report.
type Operation struct {
	Name   string // "copy", "kernel gather", "view"
	Number int    // among the operations of its stream; inside a graph, of the captured stream
	Stream string // empty for the host
	Mode   device.Mode
	Bytes  device.Rect // what it declared
	Site   Site
	// Replay is the number of the replay that it was part of, from one, and
	// Replayer the stream that replayed; zero and empty outside of graphs.
	Replay   int
	Replayer string
}

func (o Operation) host() bool { return o.Stream == "" }

// String names the operation: `copy #12 on stream "out"`.
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

// Race is a pair of operations that use the same bytes, not both only to read,
// and that no event orders. The second is the first in the program that
// conflicts with anything before it; it was not executed.
type Race struct {
	First, Second Operation
	Bytes         device.Range // the first run of bytes that both use
	Alloc         Site         // where the buffer was allocated
	Missing       string       // the order that is missing
	Note          string       // why an order that seems to be there does not count; may be empty
}

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

// UseAfterFree is a use of memory that was freed before.
type UseAfterFree struct {
	Use   Operation
	Free  Operation
	Alloc Site
}

func (u *UseAfterFree) Error() string {
	return fmt.Sprintf("use after free of %s buffer %q\n  use:       %s at %s\n  freed:     %s at %s\n  allocated: %s",
		u.Use.Bytes.Buf.Kind(), u.Use.Bytes.Buf.Owner(), u.Use, &u.Use.Site, u.Free, &u.Free.Site, &u.Alloc)
}

// DoubleFree is a second free of one buffer.
type DoubleFree struct {
	Buffer        *device.Buffer
	First, Second Operation
	Alloc         Site
}

func (d *DoubleFree) Error() string {
	return fmt.Sprintf("double free of %s\n  first:     %s at %s\n  second:    %s at %s\n  allocated: %s",
		d.Buffer, d.First, &d.First.Site, d.Second, &d.Second.Site, &d.Alloc)
}

// describe is an act as one side of a report.
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
		Bytes: device.Range{Buf: b.outer, Off: device.Bytes(x.from - int64(b.outer.Addr())), Len: device.Bytes(x.to - x.from)},
		Alloc: *b.alloc,
	}
	r.Missing = missing(r, first.op.graph != nil && first.op.graph == second.op.graph && first.replay == second.replay)
	if second.on != nil {
		r.Note = note(first, second, r)
	}
	return r
}

// missing says which edge would order the pair.
func missing(r *Race, oneReplay bool) string {
	if r.Second.host() {
		return fmt.Sprintf("the host must synchronise with stream %q after %s, before it looks at the bytes", r.First.on(), r.First.end())
	}
	if oneReplay {
		return fmt.Sprintf("inside the graph, stream %q must wait, before %s, for an event recorded on stream %q after %s",
			r.Second.Stream, r.Second.begin(), r.First.Stream, r.First.begin())
	}
	s := fmt.Sprintf("stream %q must wait, before %s, for an event recorded on stream %q after %s",
		r.Second.on(), r.Second.begin(), r.First.on(), r.First.end())
	return s + "; or the host must synchronise with the first before it issues the second"
}

// on is the stream on which an edge from or to the operation can be made.
func (o Operation) on() string {
	if o.Replay > 0 {
		return o.Replayer
	}
	return o.Stream
}

func (o Operation) begin() string { return fmt.Sprintf("%s #%d", o.Name, o.Number) }

func (o Operation) end() string {
	if o.Replay > 0 {
		return "it replayed the graph"
	}
	return o.begin()
}

// note looks for a wait that was meant to order the pair and says why it does
// not: its recording is stale, is of another stream, or came after the wait.
func note(first, second *act, r *Race) string {
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
				return fmt.Sprintf("the wait at %s took an earlier recording of its event, made at %s; the recording after %s was made at %s, later than the wait; call Wait after Record", w.site, w.took.site, r.First.begin(), again.site)
			case w.took.slot == first.slot && w.took.tick < first.tick:
				return fmt.Sprintf("the wait at %s is for a stale recording, made at %s before %s was issued; record the event after it", w.site, w.took.site, r.First.begin())
			case w.seq >= first.seq && other == "":
				other = fmt.Sprintf("the wait at %s is for an event recorded on stream %q at %s, which is not ordered after %s", w.site, w.took.stream, w.took.site, r.First.begin())
			}
		}
	}
	return other
}

// covering is the recording if it marks the work, else nil.
func covering(r *recording, a *act) *recording {
	if r == nil || !a.before(r.clock) {
		return nil
	}
	return r
}
