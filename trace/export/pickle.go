// This file owns the pickle: protocol 2, and of it only what the viewer of PyTorch's
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

	batch = 1000    // of items at once: the viewer passes them as arguments
	memos = 1 << 15 // of things that are remembered
)

// pickle writes one. The writer keeps its first error, and Flush tells it.
type pickle struct {
	out     *bufio.Writer
	strings map[string]uint32 // by their places in the memo
	frames  map[frame]uint32
	next    uint32
	scratch [16]byte
}

func newPickle(out *bufio.Writer) *pickle {
	return &pickle{out: out, strings: map[string]uint32{}, frames: map[frame]uint32{}}
}

func (p *pickle) op(op byte) { _ = p.out.WriteByte(op) }

// int writes a number in the fewest bytes.
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

// str writes a string: in full once, and after that by its place in the memo.
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

// put remembers what was written last. When the memo is full it begins anew: places
// may be written again.
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

// list is a list under way: item before each, end after the last.
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

// dict begins a dictionary; keys and values follow, and endDict.
func (p *pickle) dict() {
	p.op(opDict)
	p.op(opMark)
}

func (p *pickle) endDict() { p.op(opSetItems) }

// words and number write a key with its value.
func (p *pickle) words(key, value string) {
	p.str(key)
	p.str(value)
}

func (p *pickle) number(key string, value int64) {
	p.str(key)
	p.int(value)
}

// frame is what stands in place of calls, which the viewer shows as file:line:name.
type frame struct {
	kind                     frameKind
	name                     string
	chunk, layer, microbatch int
}

type frameKind uint8

const (
	noOne frameKind = iota // it is free
	anOwner
	aStorage // that no group saves
	aGroup
)

// stack writes a list of calls, once for all that have the same.
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
