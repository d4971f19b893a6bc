// This file owns the compact form and writes it.
//
// A trace is a line of magic followed by blocks. A block is a frame of three
// little-endian uint32 and a payload. The frame holds the CRC-32C of all that follows it,
// the length of the payload, and the number of events in it. The first block is the
// header; ranks that live in several processes have a second half of it. The last one, which only a closed trace has, holds the number of dropped
// events.
//
// The blocks in between hold events. An event is its kind, sixteen bits that say which
// fields differ from the last event of its sort (decision or span), the difference of
// the time, and those fields. Numbers are differences in zigzag varints. Strings are
// numbers in a table that grows as new names come. That makes about 13 bytes an
// event.

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
	frame   = 12      // bytes of a frame
	block   = 1 << 16 // bytes after which a block is written
	largest = 1 << 18 // bytes of the largest payload that a reader accepts
	longest = 1 << 8  // bytes of the longest name; longer ones are cut
	closing = 0xff    // stands where a kind would; the count of dropped events follows
	usual   = 64 << 20
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Header says which rank of which run a trace belongs to. The fields from Run on are zero
// if all ranks live in one process, and in traces of versions that did not have them.
type Header struct {
	Rank    int
	Began   int64  // the Unix time on the clock of rank 0, in nanoseconds, from which events count theirs
	Compute string // the name of the compute stream
	Budget  int64  // the rank's budget in bytes; zero if it has none

	Run     string // names the run: the same in the traces of all ranks, and in no other run
	Ranks   int    // of the run
	Host    string // the machine that the rank is on
	Process int    // the rank's process there
	// Offset is what was added to the clock of the machine to get that of rank 0, in
	// nanoseconds, and Within the most by which it may be wrong.
	Offset, Within int64
}

// spread reports whether the header has fields of a rank in one of several processes.
func (h *Header) spread() bool {
	return h.Run != "" || h.Ranks != 0 || h.Host != "" || h.Process != 0 || h.Offset != 0 || h.Within != 0
}

// Writer is a Sink that writes a trace. It is safe for use by several goroutines.
//
// The trace never grows beyond the writer's limit: the writer drops events that do not
// fit, and counts them. It keeps the last sixteenth for the events Begin, End, Decide,
// Rerun and Spill, so that even a full trace shows all steps.
type Writer struct {
	mu      sync.Mutex
	w       io.Writer
	err     error
	limit   int64
	written int64 // bytes
	dropped int64
	buf     []byte // the current block, behind room for its frame
	events  uint32 // in the current block
	names   map[string]uint64
	recent  [256]recent // names that were written lately
	last    [2]Event    // the last decision and the last span
	closed  bool
}

// NewWriter returns a writer that writes a trace of at most limit bytes to w. Zero
// stands for 64 MiB. The caller closes the writer first and then w. Errors of w are
// returned by Close.
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
	if h.spread() {
		t.buf = t.string(t.string(t.buf, h.Run), h.Host)
		for _, x := range []int64{int64(h.Ranks), int64(h.Process), h.Offset, h.Within} {
			t.buf = binary.AppendVarint(t.buf, x)
		}
	}
	t.flush()
	return t
}

// essential reports whether events of this kind may use the last sixteenth of a trace.
func (k Kind) essential() bool {
	return k == Begin || k == End || k == Decide || k == Rerun || k == Spill
}

// Emit writes an event, or drops it if there is no room for it or if the writer is
// closed. A block goes to the file when it is full and at the end of each step.
func (t *Writer) Emit(e Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	room := t.limit - closingRoom
	if !e.Kind.essential() {
		room -= t.limit / 16
	}
	if t.closed || t.err != nil || t.written+int64(len(t.buf))+most > room || e.Kind >= kinds {
		t.dropped++
		return
	}
	t.event(&e)
	// A run that is killed leaves the steps that it has completed.
	if len(t.buf) >= block || e.Kind == End {
		t.flush()
	}
}

// closingRoom is the most bytes that the last block takes.
const closingRoom = frame + 1 + binary.MaxVarintLen64

// most is the most bytes that an event takes: its kind and bits, seventeen numbers, two
// names with their lengths, and the frame of its block.
const most = frame + 3 + 19*binary.MaxVarintLen64 + 2*longest

// sortOf returns 1 for spans and 0 for decisions.
func sortOf(k Kind) int {
	if k.Span() {
		return 1
	}
	return 0
}

// event appends an event to the current block, which has room for it.
func (t *Writer) event(e *Event) {
	p := &t.last[sortOf(e.Kind)]
	at := len(t.buf)
	b := t.buf[:cap(t.buf)]
	b[at] = byte(e.Kind)
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

// number writes a zigzag varint at b[n] and returns the index behind it.
func number(b []byte, n int, v int64) int {
	u := uint64(v)<<1 ^ uint64(v>>63)
	for ; u >= 0x80; n++ {
		b[n] = byte(u) | 0x80
		u >>= 7
	}
	b[n] = byte(u)
	return n + 1
}

// recent is a name that was written lately. Comparing its address is faster than hashing
// it, and safe: as long as this pointer exists, no other string can lie there.
type recent struct {
	data *byte
	len  int
	n    uint64
}

// string appends the number of a name. The first time, the name itself follows.
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

// flush writes the current block, if it is not empty.
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

// Dropped returns the number of events that the writer has dropped so far.
func (t *Writer) Dropped() int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.dropped
}

// Close writes the end of the trace and returns the first error of the underlying
// writer. Events that are emitted later are dropped.
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
