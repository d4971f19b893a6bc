// This file owns Perfetto's wire form: packets, track descriptors, track events. The
// numbers are those of protos/perfetto/trace in google/perfetto.

package export

import (
	"bufio"
	"math"

	"google.golang.org/protobuf/encoding/protowire"

	"github.com/stowage-dev/stowage/trace"
)

// Fields.
const (
	tracePacket = 1

	packetClocks     = 6
	packetTimestamp  = 8
	packetSequence   = 10
	packetEvent      = 11
	packetInterned   = 12
	packetFlags      = 13
	packetDescriptor = 60

	snapshotClocks = 1
	clockID        = 1
	clockTime      = 2

	trackUUID     = 1
	trackName     = 2
	trackProcess  = 3
	trackParent   = 5
	trackCounter  = 8
	trackChildren = 11
	trackOrder    = 12
	processPID    = 1
	processName   = 6
	counterUnit   = 3

	eventCategory = 3
	eventNote     = 4
	eventType     = 9
	eventNameID   = 10
	eventTrack    = 11
	eventName     = 23
	eventValue    = 30
	eventFlow     = 47
	eventFlowEnd  = 48

	internedCategories = 1
	internedNames      = 2
	internedNotes      = 3
	entryID            = 1
	entryName          = 2

	noteName   = 1
	noteInt    = 4
	noteDouble = 5
)

// Values.
const (
	clockRealtime = 1
	clockBoottime = 6 // of packets that name none

	stateCleared = 1
	stateNeeded  = 2

	orderExplicit = 3
	unitBytes     = 3

	sliceBegin = 1
	sliceEnd   = 2
	instant    = 3
	counter    = 4
)

// note is what an event has beside its name.
type note uint8

const (
	noteBytes note = 1 + iota
	noteStep
	noteChunk
	noteLayer
	noteMicrobatch
	noteStorage
	notePieces
	noteNodes
	noteRate
	notes
)

var noteNames = [notes]string{noteBytes: "bytes", noteStep: "step", noteChunk: "chunk", noteLayer: "layer", noteMicrobatch: "microbatch", noteStorage: "storage", notePieces: "pieces of work", noteNodes: "nodes", noteRate: "GB/s"}

// category is a sort of events.
type category uint8

const (
	catStep category = 1 + iota
	catDecision
	catGroup
	catKernel
	catCopy
	catWait
	categories
)

var categoryNames = [categories]string{catStep: "step", catDecision: "decision", catGroup: "group", catKernel: "kernel", catCopy: "copy", catWait: "wait"}

// label is an event's name, before it is put together.
type label struct {
	what trace.What
	tier trace.Tier // of a copy
	name string
}

// packets writes packets. Descriptors are of sequence one.
type packets struct {
	out       *bufio.Writer
	sequences uint64
	tracks    uint64

	packet, body, part, interned []byte
}

func newPackets(out *bufio.Writer) *packets { return &packets{out: out, sequences: 1} }

func number(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendVarint(protowire.AppendTag(b, field, protowire.VarintType), v)
}

func message(b []byte, field protowire.Number, v []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(b, field, protowire.BytesType), v)
}

func words(b []byte, field protowire.Number, v string) []byte {
	return protowire.AppendString(protowire.AppendTag(b, field, protowire.BytesType), v)
}

func fixed(b []byte, field protowire.Number, v uint64) []byte {
	return protowire.AppendFixed64(protowire.AppendTag(b, field, protowire.Fixed64Type), v)
}

// write writes the packet that was put together.
func (p *packets) write() {
	p.part = protowire.AppendTag(p.part[:0], tracePacket, protowire.BytesType)
	p.part = protowire.AppendVarint(p.part, uint64(len(p.packet)))
	// The writer keeps its first error, and Flush tells it.
	_, _ = p.out.Write(p.part)
	_, _ = p.out.Write(p.packet)
}

// clocks says what time of day the trace's time zero is.
func (p *packets) clocks(realtime int64) {
	p.body = p.body[:0]
	for _, c := range [][2]uint64{{clockBoottime, 0}, {clockRealtime, uint64(realtime)}} {
		p.body = message(p.body, snapshotClocks, number(number(nil, clockID, c[0]), clockTime, c[1]))
	}
	p.packet = number(p.packet[:0], packetTimestamp, 0)
	p.packet = number(p.packet, packetSequence, 1)
	p.packet = message(p.packet, packetClocks, p.body)
	p.write()
}

// track is what a descriptor says. With a process number it is a process, with a unit
// a counter.
type track struct {
	parent uint64
	name   string
	order  int
	pid    int
	bytes  bool
}

// describe writes a descriptor and gives the track's number. It is placed at time
// zero, because a process must not begin after what it did.
func (p *packets) describe(t track) uint64 {
	p.tracks++
	b := number(p.body[:0], trackUUID, p.tracks)
	if t.pid != 0 {
		b = message(b, trackProcess, words(number(nil, processPID, uint64(t.pid)), processName, text(t.name)))
	} else {
		b = number(b, trackParent, t.parent)
		b = words(b, trackName, text(t.name))
		b = number(b, trackOrder, uint64(t.order))
	}
	if t.bytes {
		b = message(b, trackCounter, number(nil, counterUnit, unitBytes))
	} else {
		b = number(b, trackChildren, orderExplicit)
	}
	p.body = b
	p.packet = number(p.packet[:0], packetTimestamp, 0)
	p.packet = number(p.packet, packetSequence, 1)
	p.packet = message(p.packet, packetDescriptor, b)
	p.write()
	return p.tracks
}

// sequence is packets whose times do not decrease and that share a table of names.
type sequence struct {
	p     *packets
	id    uint64
	names map[label]uint64
}

// sequence begins one. Its categories and the names of notes are told at once.
func (p *packets) sequence() *sequence {
	p.sequences++
	b := p.body[:0]
	for i, name := range categoryNames[1:] {
		b = message(b, internedCategories, words(number(nil, entryID, uint64(i+1)), entryName, name))
	}
	for i, name := range noteNames[1:] {
		b = message(b, internedNotes, words(number(nil, entryID, uint64(i+1)), entryName, name))
	}
	p.body = b
	p.packet = number(p.packet[:0], packetSequence, p.sequences)
	p.packet = number(p.packet, packetFlags, stateCleared)
	p.packet = message(p.packet, packetInterned, b)
	p.write()
	return &sequence{p: p, id: p.sequences, names: map[label]uint64{}}
}

// event begins an event, emit writes it; in between it gets what it has.
func (s *sequence) event(kind, track uint64) {
	s.p.body = number(number(s.p.body[:0], eventType, kind), eventTrack, track)
	s.p.interned = s.p.interned[:0]
}

func (s *sequence) emit(at int64) {
	p := s.p
	b := number(p.packet[:0], packetTimestamp, uint64(at))
	b = number(b, packetSequence, s.id)
	b = number(b, packetFlags, stateNeeded)
	if len(p.interned) > 0 {
		b = message(b, packetInterned, p.interned)
	}
	p.packet = message(b, packetEvent, p.body)
	p.write()
}

// named gives the event its name and category. A name is written once a sequence.
func (s *sequence) named(c category, l label) {
	p := s.p
	id, ok := s.names[l]
	if !ok {
		id = uint64(len(s.names) + 1)
		s.names[l] = id
		p.part = words(number(p.part[:0], entryID, id), entryName, l.String())
		p.interned = message(p.interned, internedNames, p.part)
	}
	p.body = number(p.body, eventCategory, uint64(c))
	p.body = number(p.body, eventNameID, id)
}

// note adds a number.
func (s *sequence) note(n note, v int64) {
	s.p.part = number(number(s.p.part[:0], noteName, uint64(n)), noteInt, uint64(v))
	s.p.body = message(s.p.body, eventNote, s.p.part)
}

// rate adds a rate.
func (s *sequence) rate(v float64) {
	s.p.part = fixed(number(s.p.part[:0], noteName, uint64(noteRate)), noteDouble, math.Float64bits(v))
	s.p.body = message(s.p.body, eventNote, s.p.part)
}

// count writes a counter's new value.
func (s *sequence) count(track uint64, at, value int64) {
	s.event(counter, track)
	s.p.body = number(s.p.body, eventValue, uint64(value))
	s.emit(at)
}

// end writes the end of the innermost slice of a track.
func (s *sequence) end(track uint64, at int64) {
	s.event(sliceEnd, track)
	s.emit(at)
}

func (l label) String() string {
	name := l.what.String()
	switch {
	case l.what == trace.Copy && l.tier == trace.Host:
		name = "copy to host"
	case l.what == trace.Copy:
		name = "copy to device"
	case l.what == trace.Launch && l.name != "":
		return text(l.name)
	}
	if l.name != "" {
		name += " " + l.name
	}
	return text(name)
}
