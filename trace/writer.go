// This file owns the compact form, and writes it.
//
// A trace is a line of magic and then blocks: CRC-32C of what follows, the length of the
// payload and the number of events in it, four bytes each, little-endian, and the
// payload. The first block is the
// header, the last, which only a closed trace has, says how many events were dropped.
// In between an event is its kind, sixteen bits that say which fields differ from the
// event of its sort (decision or span) before it, the difference of the time, and
// those fields: numbers as differences in zigzag varints, strings as numbers in a
// table that the trace builds as it goes. Ten to twenty bytes an event.

package trace

import (
	"encoding/binary"
	"hash/crc32"
	"io"
	"sync"
	"unsafe"
)

const (
	magic   = "stowage trace 1\n"
	frame   = 12      // check, length and events of a block
	fewest  = 4       // bytes of an event
	block   = 1 << 16 // bytes after which a block is written
	largest = 1 << 18 // of a payload that a reader accepts
	longest = 1 << 8  // of a name; what is longer is cut
	closing = 0xff    // in place of a kind: the count of dropped events follows
	usual   = 64 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header says what a trace is of.
type Header struct {
	Rank    int
	Began   int64  // Unix time in nanoseconds of the events' time zero
	Compute string // the compute stream's name
	Budget  int64  // of device memory; zero is none
}

// Writer writes a trace. Its methods may be called from any goroutine.
//
// It is bounded: what would make the trace longer than its limit is dropped and
// counted, beginning a sixteenth before with all that a trace can be read without.
// Begin, End, Decide, Rerun and Spill use up the rest.
type Writer struct {
	mu      sync.Mutex
	w       io.Writer
	err     error
	limit   int64
	written int64 // blocks that were written
	dropped int64
	buf     []byte // the block under way, behind room for its frame
	events  uint32 // in it
	names   map[string]uint64
	recent  [256]recent // of the names
	last    [2]Event    // by sort
	closed  bool
}

// NewWriter writes to w, which the caller closes after the writer. The limit is in
// bytes; zero stands for 64 MiB.
func NewWriter(w io.Writer, h Header, limit int64) *Writer {
	if limit == 0 {
		limit = usual
	}
	t := &Writer{w: w, limit: limit, buf: make([]byte, frame, block+most), names: map[string]uint64{"": 0}}
	_, t.err = io.WriteString(w, magic)
	t.written = int64(len(magic))
	t.buf = binary.AppendVarint(t.buf, int64(h.Rank))
	t.buf = binary.AppendVarint(t.buf, h.Began)
	t.buf = binary.AppendVarint(t.buf, h.Budget)
	t.buf = t.string(t.buf, h.Compute)
	t.flush()
	return t
}

// kept tells whether an event is one that the last of the room is for.
func (w What) kept() bool {
	return w == Begin || w == End || w == Decide || w == Rerun || w == Spill
}

// Emit writes an event.
func (t *Writer) Emit(e Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	room := t.limit - closingRoom
	if !e.What.kept() {
		room -= t.limit / 16
	}
	if t.closed || t.err != nil || t.written+int64(len(t.buf))+most > room || e.What >= whats {
		t.dropped++
		return
	}
	t.event(&e)
	// A run that ends badly leaves its whole steps behind.
	if len(t.buf) >= block || e.What == End {
		t.flush()
	}
}

// closingRoom is what the last block may take.
const closingRoom = frame + 1 + binary.MaxVarintLen64

// most is what an event may take: its kind, the bits, seventeen numbers, and two names
// with their lengths; and the frame of its block.
const most = frame + 3 + 19*binary.MaxVarintLen64 + 2*longest

func sort(w What) int {
	if w.Span() {
		return 1
	}
	return 0
}

// event appends an event to the block, which has room for it.
func (t *Writer) event(e *Event) {
	p := &t.last[sort(e.What)]
	at := len(t.buf)
	b := t.buf[:cap(t.buf)]
	b[at] = byte(e.What)
	n := number(b, at+3, e.Time-p.Time)
	var bits uint16
	if e.Rank != p.Rank {
		bits, n = bits|1<<0, number(b, n, int64(e.Rank-p.Rank))
	}
	if e.Step != p.Step {
		bits, n = bits|1<<1, number(b, n, int64(e.Step-p.Step))
	}
	if e.Took != p.Took {
		bits, n = bits|1<<2, number(b, n, e.Took-p.Took)
	}
	if e.Stream != p.Stream {
		bits, n = bits|1<<3, len(t.string(b[:n], e.Stream))
	}
	if e.First != p.First {
		bits, n = bits|1<<4, number(b, n, int64(e.First-p.First))
	}
	if d := (e.Last - e.First) - (p.Last - p.First); d != 0 {
		bits, n = bits|1<<5, number(b, n, int64(d))
	}
	if e.Name != p.Name {
		bits, n = bits|1<<6, len(t.string(b[:n], e.Name))
	}
	if e.Chunk != p.Chunk {
		bits, n = bits|1<<7, number(b, n, int64(e.Chunk-p.Chunk))
	}
	if e.Layer != p.Layer {
		bits, n = bits|1<<8, number(b, n, int64(e.Layer-p.Layer))
	}
	if e.Microbatch != p.Microbatch {
		bits, n = bits|1<<9, number(b, n, int64(e.Microbatch-p.Microbatch))
	}
	if e.Storage != p.Storage {
		bits, n = bits|1<<10, number(b, n, int64(e.Storage-p.Storage))
	}
	if e.Tier != p.Tier {
		bits, n = bits|1<<11, number(b, n, int64(e.Tier)-int64(p.Tier))
	}
	if e.Offset != p.Offset {
		bits, n = bits|1<<12, number(b, n, e.Offset-p.Offset)
	}
	if e.Bytes != p.Bytes {
		bits, n = bits|1<<13, number(b, n, e.Bytes-p.Bytes)
	}
	if e.InUse[0] != p.InUse[0] {
		bits, n = bits|1<<14, number(b, n, e.InUse[0]-p.InUse[0])
	}
	if e.InUse[1] != p.InUse[1] {
		bits, n = bits|1<<15, number(b, n, e.InUse[1]-p.InUse[1])
	}
	binary.LittleEndian.PutUint16(b[at+1:], bits)
	t.buf = b[:n]
	t.events++
	*p = *e
}

// number writes a zigzag varint at n and returns what lies behind it.
func number(b []byte, n int, v int64) int {
	u := uint64(v)<<1 ^ uint64(v>>63)
	for ; u >= 0x80; n++ {
		b[n] = byte(u) | 0x80
		u >>= 7
	}
	b[n] = byte(u)
	return n + 1
}

// recent is a name that was written not long ago. It is known by where it lies, which
// hashing would take longer to find out; as long as it is held here nothing else does.
type recent struct {
	data *byte
	len  int
	n    uint64
}

// string appends a name: its number, or the number that it gets now and itself.
func (t *Writer) string(b []byte, s string) []byte {
	s = s[:min(len(s), longest)]
	p := unsafe.StringData(s)
	r := &t.recent[uintptr(unsafe.Pointer(p))>>4%uintptr(len(t.recent))]
	if r.data == p && r.len == len(s) {
		return binary.AppendUvarint(b, r.n)
	}
	if n, ok := t.names[s]; ok {
		*r = recent{p, len(s), n}
		return binary.AppendUvarint(b, n)
	}
	n := uint64(len(t.names))
	t.names[s] = n
	b = binary.AppendUvarint(b, n)
	b = binary.AppendUvarint(b, uint64(len(s)))
	return append(b, s...)
}

// flush writes the block under way, if there is anything in it.
func (t *Writer) flush() {
	payload := t.buf[frame:]
	if len(payload) == 0 || t.err != nil {
		return
	}
	binary.LittleEndian.PutUint32(t.buf[4:], uint32(len(payload)))
	binary.LittleEndian.PutUint32(t.buf[8:], t.events)
	binary.LittleEndian.PutUint32(t.buf, crc32.Checksum(t.buf[4:], castagnoli))
	_, t.err = t.w.Write(t.buf)
	t.written += int64(len(t.buf))
	t.buf, t.events = t.buf[:frame], 0
}

// Dropped is how many events there was no room for so far.
func (t *Writer) Dropped() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dropped
}

// Close writes the end. The error is the first of the writer below. Events that come
// later are dropped.
func (t *Writer) Close() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.closed {
		t.flush()
		t.buf = binary.AppendUvarint(append(t.buf, closing), uint64(t.dropped))
		t.flush()
		t.closed = true
	}
	return t.err
}
