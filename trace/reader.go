// This file owns reading the compact form, up to where it is damaged.

package trace

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
)

// Trace is a trace that was read.
type Trace struct {
	Header  Header
	Events  []Event // in the order written
	Dropped int64   // events that there was no room for
	Cut     error   // nil, or why the trace ends early: what was read before is there
}

// Read reads a trace. There is an error only if nothing can be used; a trace that was
// cut off or damaged is read up to there, and Cut says so.
func Read(r io.Reader) (*Trace, error) {
	head := make([]byte, len(magic))
	if _, err := io.ReadFull(r, head); err != nil || string(head) != magic {
		return nil, errors.New("trace: this is not a trace; give a rank-N.trace file of a run")
	}
	in := input{r: r, names: []string{""}}
	t := &Trace{}
	if err := in.block(); err != nil {
		return nil, fmt.Errorf("trace: the header cannot be read: %w", err)
	}
	t.Header = Header{Rank: int(in.varint()), Began: in.varint(), Budget: in.varint(), Compute: in.string()}
	if in.bad || len(in.rest) > 0 {
		return nil, errors.New("trace: the header is damaged")
	}
	// All blocks first: then is known how many events there are.
	var blocks [][]byte
	total := 0
	for t.Cut == nil && !in.last() {
		if t.Cut = in.block(); t.Cut == nil {
			blocks, total = append(blocks, in.rest), total+in.count
		}
	}
	t.Events = make([]Event, 0, total)
	for _, in.rest = range blocks {
		if err := in.events(t); err != nil {
			t.Cut = err
			break
		}
	}
	return t, nil
}

// input decodes blocks.
type input struct {
	r      io.Reader
	frame  [frame]byte
	rest   []byte // of the block under way
	count  int    // its events
	bad    bool   // it said something that no writer says
	names  []string
	before [2]Event
}

// last tells whether the block read last is the closing one.
func (in *input) last() bool { return len(in.rest) > 0 && in.rest[0] == closing }

// block reads the next one. Its end without one is what a run leaves that was stopped.
func (in *input) block() error {
	if n, err := io.ReadFull(in.r, in.frame[:]); err == io.EOF && n == 0 {
		return errors.New("the trace was not closed: its run was stopped, or is under way")
	} else if err != nil {
		return fmt.Errorf("the trace ends inside of a block: %w", err)
	}
	n, count := binary.LittleEndian.Uint32(in.frame[4:]), binary.LittleEndian.Uint32(in.frame[8:])
	if n > largest || count > n/fewest {
		return fmt.Errorf("a block of %d bytes and %d events is damaged", n, count)
	}
	data := make([]byte, n)
	if _, err := io.ReadFull(in.r, data); err != nil {
		return fmt.Errorf("the trace ends inside of a block: %w", err)
	}
	if crc32.Update(crc32.Checksum(in.frame[4:], castagnoli), castagnoli, data) != binary.LittleEndian.Uint32(in.frame[:]) {
		return errors.New("a block is damaged: its checksum is wrong")
	}
	in.rest, in.count = data, int(count)
	return nil
}

// events reads those of a block.
func (in *input) events(t *Trace) error {
	for len(in.rest) > 0 {
		if in.rest[0] == closing {
			in.rest = in.rest[1:]
			t.Dropped = int64(in.uvarint())
		} else if e := in.event(); !in.bad {
			t.Events = append(t.Events, e)
		}
		if in.bad {
			return errors.New("a block is damaged: it holds what no trace does")
		}
	}
	return nil
}

func (in *input) event() (e Event) {
	if len(in.rest) < 3 || in.rest[0] >= byte(whats) {
		in.bad = true
		return e
	}
	what, bits := What(in.rest[0]), binary.LittleEndian.Uint16(in.rest[1:])
	in.rest = in.rest[3:]
	p := &in.before[sort(what)]
	e = *p
	e.What = what
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
	e.Last = e.First + (p.Last - p.First) + uint64(num(5))
	if bits&(1<<6) != 0 {
		e.Name = in.string()
	}
	e.Chunk += int(num(7))
	e.Layer += int(num(8))
	e.Microbatch += int(num(9))
	e.Storage += int(num(10))
	e.Tier += Tier(num(11))
	e.Offset += num(12)
	e.Bytes += num(13)
	e.InUse[0] += num(14)
	e.InUse[1] += num(15)
	*p = e
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

// string reads a name, which is new if its number is the next.
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
