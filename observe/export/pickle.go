// This file owns writing pickles: the part of protocol 2 that the viewer of PyTorch's
// memory snapshots (torch/utils/viz/MemoryViz.js) reads.

package export

import (
	"bufio"
	"encoding/binary"
	"math"
	"strconv"
)

const (
	opProto      = 0x80
	opDict       = '}'
	opList       = ']'
	opMark       = '('
	opSetItems   = 'u'
	opAppends    = 'e'
	opInt1       = 'K'
	opInt2       = 'M'
	opInt        = 'J'
	opLong       = 0x8a
	opString     = 'X'
	opPut        = 'q'
	opLongPut    = 'r'
	opGet        = 'h'
	opLongGet    = 'j'
	opStop       = '.'
	pickleFormat = 2

	batch = 1000    // items appended at once: the viewer passes them as arguments
	memos = 1 << 15 // entries of the memo
)

// pickle writes a pickle. The buffered writer keeps its first error, which Flush returns.
type pickle struct {
	out     *bufio.Writer
	strings map[string]uint32 // their places in the memo
	frames  map[frame]uint32
	next    uint32
	scratch [16]byte
}

func newPickle(out *bufio.Writer) *pickle {
	return &pickle{out: out, strings: map[string]uint32{}, frames: map[frame]uint32{}}
}

func (p *pickle) op(op byte) { _ = p.out.WriteByte(op) }

// int writes a number in as few bytes as possible.
func (p *pickle) int(v int64) {
	b := p.scratch[:0]
	switch {
	case v >= 0 && v <= math.MaxUint8:
		b = append(b, opInt1, byte(v))
	case v >= 0 && v <= math.MaxUint16:
		b = binary.LittleEndian.AppendUint16(append(b, opInt2), uint16(v))
	case v >= math.MinInt32 && v <= math.MaxInt32:
		b = binary.LittleEndian.AppendUint32(append(b, opInt), uint32(v))
	default:
		b = binary.LittleEndian.AppendUint64(append(b, opLong, 8), uint64(v))
	}
	_, _ = p.out.Write(b)
}

// str writes a string: in full the first time, then as its place in the memo.
func (p *pickle) str(s string) {
	if at, ok := p.strings[s]; ok {
		p.get(at)
		return
	}
	valid := text(s)
	b := binary.LittleEndian.AppendUint32(append(p.scratch[:0], opString), uint32(len(valid)))
	_, _ = p.out.Write(b)
	_, _ = p.out.WriteString(valid)
	p.strings[s] = p.put()
}

// put notes what was written last in the memo. A full memo begins again, because places
// may be overwritten.
func (p *pickle) put() uint32 {
	if p.next == memos {
		clear(p.strings)
		clear(p.frames)
		p.next = 0
	}
	at := p.next
	p.next++
	p.memo(opPut, opLongPut, at)
	return at
}

func (p *pickle) get(at uint32) { p.memo(opGet, opLongGet, at) }

func (p *pickle) memo(short, long byte, at uint32) {
	if at <= math.MaxUint8 {
		p.op(short)
		p.op(byte(at))
		return
	}
	_, _ = p.out.Write(binary.LittleEndian.AppendUint32(append(p.scratch[:0], long), at))
}

// list writes a list: call item before each item, and end after the last.
type list struct {
	p *pickle
	n int
}

func (p *pickle) list() *list {
	p.op(opList)
	return &list{p: p}
}

func (l *list) item() {
	if l.n%batch == 0 {
		if l.n > 0 {
			l.p.op(opAppends)
		}
		l.p.op(opMark)
	}
	l.n++
}

func (l *list) end() {
	if l.n > 0 {
		l.p.op(opAppends)
	}
}

// dict begins a dictionary. Keys and values follow, then endDict.
func (p *pickle) dict() {
	p.op(opDict)
	p.op(opMark)
}

func (p *pickle) endDict() { p.op(opSetItems) }

// words writes a key with a string.
func (p *pickle) words(key, value string) {
	p.str(key)
	p.str(value)
}

// number writes a key with a number.
func (p *pickle) number(key string, value int64) {
	p.str(key)
	p.int(value)
}

// frame describes a holding where the viewer expects a call, which it shows as
// file:line:name.
type frame struct {
	kind                     frameKind
	name                     string
	chunk, layer, microbatch int
}

type frameKind uint8

const (
	noOne frameKind = iota // free memory
	anOwner
	aStorage // a storage that no group saves
	aGroup
)

// stack writes the calls of a frame: in full the first time, then as their place in the
// memo.
func (p *pickle) stack(f frame) {
	p.str("frames")
	if at, ok := p.frames[f]; ok {
		p.get(at)
		return
	}
	l := p.list()
	switch f.kind {
	case anOwner:
		p.call(l, "owner", 0, f.name)
	case aStorage:
		p.call(l, "storage", 0, "no group")
	case aGroup:
		p.call(l, "layer", f.layer, f.name)
		p.call(l, "microbatch", f.microbatch, "chunk "+strconv.Itoa(f.chunk))
	}
	l.end()
	at := p.put()
	p.frames[f] = at
}

func (p *pickle) call(l *list, file string, line int, name string) {
	l.item()
	p.dict()
	p.words("filename", file)
	p.number("line", int64(line))
	p.words("name", name)
	p.endDict()
}
