// This file owns reading the compact form, up to the point where it is damaged.

package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"iter"
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// Trace is a trace in memory.
type Trace struct {
	Header  Header
	Events  []Event // in the order of writing; nil after ReadPacked
	Dropped int64   // how many events the writer had no room for
	Cut     error   // why the events end early; nil if the trace is complete

	packed [][]byte // the blocks of events, as they are in the file
	names  []string // of the header, which events may refer to
	count  int      // events in packed
}

// mostEvents is how many events of a trace are read. A file of 64 MiB has five million
// of the usual size.
const mostEvents = 20_000_000

// Read reads a trace. If the file was cut off or is damaged, Read returns the events
// before that point and sets Cut. It returns an error only if the header cannot be
// read. The events take about fourteen times the memory of the file; see [ReadPacked].
func Read(r io.Reader) (*Trace, error) {
	t, err := ReadPacked(r)
	if err != nil {
		return nil, err
	}
	t.Events = make([]Event, 0, t.count)
	for e := range t.All() {
		t.Events = append(t.Events, *e)
	}
	t.packed = nil
	return t, nil
}

// ReadPacked reads a trace as Read does and keeps its events in the form of the file, which
// takes as much memory as the file. [Trace.All] returns them.
func ReadPacked(r io.Reader) (*Trace, error) {
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(r, head); err != nil || string(head) != magic {
		return nil, errors.New("trace: this is not a trace; expected a rank-N.trace file of a run")
	}
	in := input{r: r, names: []string{""}}
	t := &Trace{}
	if err := in.block(); err != nil {
		return nil, fmt.Errorf("trace: cannot read the header: %w", err)
	}
	t.Header = Header{Rank: int(in.varint()), Began: in.varint(), Budget: in.varint(), Compute: in.string()}
	if h := &t.Header; len(in.rest) > 0 {
		h.Run, h.Host = in.string(), in.string()
		h.Ranks, h.Process, h.Offset, h.Within = int(in.varint()), int(in.varint()), in.varint(), in.varint()
	}
	if in.bad || len(in.rest) > 0 {
		return nil, errors.New("trace: the header is damaged")
	}
	t.names = slices.Clone(in.names)
	for closed := false; t.Cut == nil && !closed; {
		if t.Cut = in.block(); t.Cut != nil {
			break
		}
		closed = in.last()
		t.packed = append(t.packed, in.rest)
		for range in.events(&t.Cut, &t.Dropped) {
			if t.count == mostEvents {
				t.Cut = fmt.Errorf("the trace has more than the %d events that are read", mostEvents)
				break
			}
			t.count++
		}
	}
	return t, nil
}

// All returns the events in the order of writing. An event is valid until the next one.
func (t *Trace) All() iter.Seq[*Event] {
	return func(yield func(*Event) bool) {
		if t.packed == nil {
			for i := range t.Events {
				if !yield(&t.Events[i]) {
					return
				}
			}
			return
		}
		in, left := input{names: slices.Clone(t.names)}, t.count
		var cut error
		var dropped int64
		for _, in.rest = range t.packed {
			for e := range in.events(&cut, &dropped) {
				if left == 0 || !yield(e) {
					return
				}
				left--
			}
		}
	}
}

// input decodes blocks.
type input struct {
	r      io.Reader
	frame  [frame]byte
	rest   []byte // what is left of the current block
	bad    bool   // the block holds something that no writer writes
	names  []string
	before [2]Event // the last decision and the last span
}

// last reports whether the current block is the closing one.
func (in *input) last() bool { return len(in.rest) > 0 && in.rest[0] == closing }

// cutShort describes an error inside of a block.
func cutShort(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return errors.New("the trace ends inside of a block")
	}
	return fmt.Errorf("the trace cannot be read to its end: %w", err)
}

// block reads the next block. A run that was stopped leaves a trace without the
// closing one.
func (in *input) block() error {
	if n, err := io.ReadFull(in.r, in.frame[:]); err == io.EOF && n == 0 {
		return errors.New("the trace was not closed: its run was stopped, or is under way")
	} else if err != nil {
		return cutShort(err)
	}
	n := binary.LittleEndian.Uint32(in.frame[4:])
	if n > largest {
		return fmt.Errorf("a block is damaged: it claims %d bytes", n)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(in.r, data); err != nil {
		return cutShort(err)
	}
	if crc32.Update(crc32.Checksum(in.frame[4:], castagnoli), castagnoli, data) != binary.LittleEndian.Uint32(in.frame[:]) {
		return errors.New("a block is damaged: its checksum is wrong")
	}
	in.rest = data
	return nil
}

// events returns the events of the current block. It sets cut if the block is damaged, and
// dropped if it is the closing one.
func (in *input) events(cut *error, dropped *int64) iter.Seq[*Event] {
	return func(yield func(*Event) bool) {
		for len(in.rest) > 0 && !in.bad {
			if in.rest[0] == closing {
				in.rest = in.rest[1:]
				if n := int64(in.uvarint()); !in.bad {
					*dropped = n
				}
			} else if e := in.event(); !in.bad && !yield(e) {
				return
			}
		}
		if in.bad {
			*cut = errors.New("a block is damaged: its content is not valid")
		}
	}
}

// event reads one event and sets bad if it cannot. The event is valid until the next one
// of its sort.
func (in *input) event() *Event {
	if len(in.rest) < 3 || in.rest[0] >= byte(kinds) {
		in.bad = true
		return nil
	}
	kind, bits := Kind(in.rest[0]), binary.LittleEndian.Uint16(in.rest[1:])
	in.rest = in.rest[3:]
	e := &in.before[sortOf(kind)]
	span := e.Last - e.First
	e.Kind = kind
	e.Time += in.varint()
	num := func(bit int) int64 {
		if bits&(1<<bit) == 0 {
			return 0
		}
		return in.varint()
	}
	e.Rank += int(num(0))
	e.Step += int(num(1))
	e.Took += num(2)
	if bits&(1<<3) != 0 {
		e.Stream = in.string()
	}
	e.First += uint64(num(4))
	e.Last = e.First + span + uint64(num(5))
	if bits&(1<<6) != 0 {
		e.Name = in.string()
	}
	e.Chunk += int(num(7))
	e.Layer += int(num(8))
	e.Microbatch += int(num(9))
	e.Storage += int(num(10))
	e.Tier += memory.Kind(num(11))
	e.Offset += num(12)
	e.Bytes += num(13)
	e.InUse[0] += num(14)
	e.InUse[1] += num(15)
	return e
}

func (in *input) varint() int64 {
	v, n := binary.Varint(in.rest)
	if n <= 0 {
		in.bad = true
		return 0
	}
	in.rest = in.rest[n:]
	return v
}

func (in *input) uvarint() uint64 {
	v, n := binary.Uvarint(in.rest)
	if n <= 0 {
		in.bad = true
		return 0
	}
	in.rest = in.rest[n:]
	return v
}

// string reads a name: the number of a known one, or the next number and the name
// itself.
func (in *input) string() string {
	n := in.uvarint()
	if n < uint64(len(in.names)) {
		return in.names[n]
	}
	length := in.uvarint()
	if in.bad || n != uint64(len(in.names)) || length > longest || length > uint64(len(in.rest)) {
		in.bad = true
		return ""
	}
	s := string(in.rest[:length])
	in.rest = in.rest[length:]
	in.names = append(in.names, s)
	return s
}
