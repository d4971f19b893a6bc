// This file owns Perfetto's wire format: packets, track descriptors and track events. The
// numbers come from protos/perfetto/trace in google/perfetto.

package export

import (
	"bufio"
	"encoding/binary"
	"math"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Numbers of fields.
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

// Values of fields.
const (
	clockRealtime = 1
	clockBoottime = 6 // the default clock of packets

	stateCleared = 1
	stateNeeded  = 2

	orderExplicit = 3
	unitBytes     = 3

	sliceBegin = 1
	sliceEnd   = 2
	instant    = 3
	counter    = 4
)

// note is a number that an event carries beside its name.
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

// category is a category of events.
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

// label is the name of an event in parts.
type label struct {
	kind trace.Kind
	tier memory.Kind // where a copy goes
	name string
}

// packets writes packets. Descriptors belong to sequence one.
type packets struct {
	out       *bufio.Writer
	sequences uint64
	tracks    uint64

	packet, body, part, interned []byte
}

func newPackets(out *bufio.Writer) *packets { return &packets{out: out, sequences: 1} }

// The ways in which protobuf encodes a field.
const varint, fixed64, length = 0, 1, 2

// tag begins a field.
func tag(b []byte, field, kind uint64) []byte { return binary.AppendUvarint(b, field<<3|kind) }

func number(b []byte, field, v uint64) []byte {
	return binary.AppendUvarint(tag(b, field, varint), v)
}

func message(b []byte, field uint64, v []byte) []byte {
	return append(binary.AppendUvarint(tag(b, field, length), uint64(len(v))), v...)
}

func words(b []byte, field uint64, v string) []byte {
	return append(binary.AppendUvarint(tag(b, field, length), uint64(len(v))), v...)
}

func fixed(b []byte, field, v uint64) []byte {
	return binary.LittleEndian.AppendUint64(tag(b, field, fixed64), v)
}

// write writes the current packet.
func (p *packets) write() {
	p.part = binary.AppendUvarint(tag(p.part[:0], tracePacket, length), uint64(len(p.packet)))
	// The buffered writer keeps its first error, which Flush returns.
	_, _ = p.out.Write(p.part)
	_, _ = p.out.Write(p.packet)
}

// clocks writes the time of day of the common time zero.
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

// track is the content of a descriptor: a process if it has a process number, a counter if
// it has bytes.
type track struct {
	parent uint64
	name   string
	order  int
	pid    int
	bytes  bool
}

// describe writes a descriptor and returns the number of the track. Its time is zero,
// because a process must not begin after its events.
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

// sequence is a series of packets with ascending times and one table of names.
type sequence struct {
	p     *packets
	id    uint64
	names map[label]uint64
}

// sequence begins a sequence with its categories and names of notes.
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

// event begins an event. Fields follow, then emit.
func (s *sequence) event(kind, track uint64) {
	s.p.body = number(number(s.p.body[:0], eventType, kind), eventTrack, track)
	s.p.interned = s.p.interned[:0]
}

// emit writes the current event.
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

// named sets the name and category of the event. Each name is written once in a sequence.
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

// note adds a note to the event.
func (s *sequence) note(n note, v int64) {
	s.p.part = number(number(s.p.part[:0], noteName, uint64(n)), noteInt, uint64(v))
	s.p.body = message(s.p.body, eventNote, s.p.part)
}

// rate adds a rate to the event.
func (s *sequence) rate(v float64) {
	s.p.part = fixed(number(s.p.part[:0], noteName, uint64(noteRate)), noteDouble, math.Float64bits(v))
	s.p.body = message(s.p.body, eventNote, s.p.part)
}

// count writes the new value of a counter.
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

// String returns the name as Perfetto shows it.
func (l label) String() string {
	name := l.kind.String()
	switch {
	case l.kind == trace.Copy && l.tier == memory.Host:
		name = "copy to host"
	case l.kind == trace.Copy:
		name = "copy to device"
	case l.kind == trace.Launch && l.name != "":
		return text(l.name)
	}
	if l.name != "" {
		name += " " + l.name
	}
	return text(name)
}
