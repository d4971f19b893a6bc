// This file owns a reader of memory snapshots that works as PyTorch's viewer does: it knows
// the same opcodes, and finds out what was alive by going backwards from the end.

package export

import (
	"encoding/binary"
	"errors"
	"fmt"
	"unicode/utf8"
)

type dict = map[string]any

// unpickler is the pickle machine of the viewer.
type unpickler struct {
	rest  []byte
	stack []any
	marks []int
	memo  map[uint32]any
}

// unpickle reads a pickle. It fails on opcodes that the viewer does not know.
func unpickle(data []byte) (value any, err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("a bad pickle: %v", r)
		}
	}()
	u := &unpickler{rest: data, memo: map[uint32]any{}}
	if string(u.take(2)) != "\x80\x02" {
		return nil, errors.New("this is no pickle of protocol 2")
	}
	for {
		op := u.take(1)[0]
		if op == '.' {
			if len(u.rest) > 0 || len(u.stack) != 1 || len(u.marks) > 0 {
				return nil, errors.New("the pickle ends too early")
			}
			return u.stack[0], nil
		}
		if err := u.step(op); err != nil {
			return nil, err
		}
	}
}

func (u *unpickler) take(n int) []byte {
	b := u.rest[:n]
	u.rest = u.rest[n:]
	return b
}

func (u *unpickler) push(v any) { u.stack = append(u.stack, v) }

// unmark pops and returns what was pushed since the last mark.
func (u *unpickler) unmark() []any {
	at := u.marks[len(u.marks)-1]
	u.marks = u.marks[:len(u.marks)-1]
	items := u.stack[at:]
	u.stack = u.stack[:at]
	return items
}

// listing is a list that grows in place.
type listing struct{ items []any }

func (u *unpickler) step(op byte) error {
	switch op {
	case '}':
		u.push(dict{})
	case ']':
		u.push(&listing{})
	case '(':
		u.marks = append(u.marks, len(u.stack))
	case 'u':
		items := u.unmark()
		d := u.stack[len(u.stack)-1].(dict)
		for i := 0; i < len(items); i += 2 {
			d[items[i].(string)] = items[i+1]
		}
	case 'e':
		items := u.unmark()
		if len(items) > 1000 {
			return fmt.Errorf("%d items at once", len(items))
		}
		l := u.stack[len(u.stack)-1].(*listing)
		l.items = append(l.items, items...)
	case 'K':
		u.push(int64(u.take(1)[0]))
	case 'M':
		u.push(int64(binary.LittleEndian.Uint16(u.take(2))))
	case 'J':
		u.push(int64(int32(binary.LittleEndian.Uint32(u.take(4)))))
	case 0x8a:
		if n := u.take(1)[0]; n != 8 {
			return fmt.Errorf("a number of %d bytes", n)
		}
		u.push(int64(binary.LittleEndian.Uint64(u.take(8))))
	case 'X':
		s := u.take(int(binary.LittleEndian.Uint32(u.take(4))))
		if !utf8.Valid(s) {
			return fmt.Errorf("%q is no text", s)
		}
		u.push(string(s))
	case 'q':
		u.memo[uint32(u.take(1)[0])] = u.stack[len(u.stack)-1]
	case 'r':
		u.memo[binary.LittleEndian.Uint32(u.take(4))] = u.stack[len(u.stack)-1]
	case 'h':
		return u.get(uint32(u.take(1)[0]))
	case 'j':
		return u.get(binary.LittleEndian.Uint32(u.take(4)))
	default:
		return fmt.Errorf("opcode %#x", op)
	}
	return nil
}

func (u *unpickler) get(at uint32) error {
	v, ok := u.memo[at]
	if !ok {
		return fmt.Errorf("place %d of the memo is empty", at)
	}
	u.push(v)
	return nil
}

// block is a block or a segment.
type block struct {
	addr, size int64
	name       string // of its first frame
}

// screen holds what the viewer shows of a device: what was alive after each event.
type screen struct {
	actions    []dict
	alive      []map[int64]block
	categories map[string]bool
}

func num(d dict, key string) int64 {
	v, ok := d[key].(int64)
	if !ok {
		panic(fmt.Sprintf("%s is %v", key, d[key]))
	}
	return v
}

func items(d dict, key string) []any { return d[key].(*listing).items }

func blockOf(d dict, addr int64) block {
	b := block{addr: addr, size: num(d, "size")}
	if f := items(d, "frames"); len(f) > 0 {
		first := f[0].(dict)
		_, _ = first["filename"].(string), num(first, "line")
		b.name = first["name"].(string)
	}
	return b
}

// screens reads a snapshot as the viewer does, for every device.
func screens(data []byte) (all []*screen, err error) {
	v, err := unpickle(data)
	if err != nil {
		return nil, err
	}
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("a bad snapshot: %v", r)
		}
	}()
	snapshot := v.(dict)
	for number, events := range items(snapshot, "device_traces") {
		s := &screen{categories: map[string]bool{}}
		for _, e := range events.(*listing).items {
			s.actions = append(s.actions, e.(dict))
			if c, ok := e.(dict)["category"]; ok {
				s.categories[c.(string)] = true
			}
		}
		// The viewer fails if categories lack this one.
		if len(s.categories) > 0 && !s.categories["unknown"] {
			return nil, errors.New("there is no category for what has none")
		}
		segments, blocks, err := final(snapshot, int64(number))
		if err != nil {
			return nil, err
		}
		if err := s.back(segments, blocks); err != nil {
			return nil, fmt.Errorf("device %d: %w", number, err)
		}
		all = append(all, s)
	}
	return all, nil
}

// final returns what is alive on a device at the end.
func final(snapshot dict, number int64) (segments, blocks map[int64]block, err error) {
	segments, blocks = map[int64]block{}, map[int64]block{}
	for _, item := range items(snapshot, "segments") {
		d := item.(dict)
		if num(d, "device") != number {
			continue
		}
		seg := block{addr: num(d, "address"), size: num(d, "total_size")}
		at := seg.addr
		for _, item := range items(d, "blocks") {
			b := item.(dict)
			if num(b, "address") != at {
				return nil, nil, errors.New("blocks do not follow each other")
			}
			if b["state"] == "active_allocated" {
				blocks[at] = blockOf(b, at)
			}
			at += num(b, "size")
		}
		if _, twice := segments[seg.addr]; twice || at != seg.addr+seg.size || seg.size%512 != 0 {
			return nil, nil, errors.New("a segment is there twice, or its blocks do not fill it, or no allocator makes it")
		}
		segments[seg.addr] = seg
	}
	return segments, blocks, nil
}

// back goes through the events from the last to the first, as the viewer does.
func (s *screen) back(segments, blocks map[int64]block) error {
	s.alive = make([]map[int64]block, len(s.actions))
	requested := map[int64]bool{}
	for i := len(s.actions) - 1; i >= 0; i-- {
		if err := inside(segments, blocks); err != nil {
			return fmt.Errorf("after event %d: %w", i, err)
		}
		s.alive[i] = map[int64]block{}
		for a, b := range blocks {
			s.alive[i][a] = b
		}
		e := s.actions[i]
		addr, size := num(e, "addr"), num(e, "size")
		if next := i + 1; next < len(s.actions) && num(e, "time_us") > num(s.actions[next], "time_us") {
			return fmt.Errorf("event %d is later than the next", i)
		}
		_, there := blocks[addr]
		switch e["action"] {
		case "free_completed":
			if there {
				return fmt.Errorf("event %d frees what is used again", i)
			}
			blocks[addr], requested[addr] = blockOf(e, addr), true
		case "free_requested":
			if !there || !requested[addr] {
				return fmt.Errorf("event %d frees what is not freed", i)
			}
			delete(requested, addr)
		case "alloc":
			if !there || requested[addr] || blocks[addr].size != size || blocks[addr].name != blockOf(e, addr).name {
				return fmt.Errorf("event %d allocates %+v of %+v", i, e, blocks[addr])
			}
			delete(blocks, addr)
		case "segment_free":
			if _, there := segments[addr]; there {
				return fmt.Errorf("event %d frees a segment that is there", i)
			}
			segments[addr] = block{addr: addr, size: size}
		case "segment_alloc":
			if segments[addr].size != size {
				return fmt.Errorf("event %d makes a segment that is not there", i)
			}
			delete(segments, addr)
		case "snapshot":
		default:
			return fmt.Errorf("event %d is %v", i, e["action"])
		}
	}
	if len(segments)+len(blocks)+len(requested) > 0 {
		return errors.New("something was there before all events")
	}
	return nil
}

// inside checks that each block lies in a segment and overlaps no other, and that addresses
// are exact as floats.
func inside(segments, blocks map[int64]block) error {
	for _, b := range blocks {
		for _, c := range blocks {
			if b.addr < c.addr && c.addr < b.addr+b.size {
				return fmt.Errorf("block %#x lies on block %#x", c.addr, b.addr)
			}
		}
		found := 0
		for _, s := range segments {
			if s.addr <= b.addr && b.addr+b.size <= s.addr+s.size {
				found++
			}
		}
		if found != 1 || b.addr+b.size > 1<<53 {
			return fmt.Errorf("block %#x lies in %d segments", b.addr, found)
		}
	}
	return nil
}
