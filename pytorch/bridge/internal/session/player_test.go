// This file owns a caller that does what PyTorch does. Its allocator poisons freed memory
// and gives it to the next who asks. It holds storages by number, provides and frees memory
// as the session asks, and compares every byte that is reloaded.

package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
)

// heap is the caller's allocator. It checks that nobody wrote to a block between its free
// and its next use.
type heap struct {
	t    testing.TB
	live map[*byte]bool
	free map[int][][]byte
}

const poison = 0xdb

func address(b []byte) uint64 { return uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }

func (h *heap) take(n int) []byte {
	list := h.free[n]
	b := make([]byte, n)
	if k := len(list); k > 0 {
		b, h.free[n] = list[k-1], list[:k-1]
		h.look(b)
	}
	h.live[&b[0]] = true
	return b
}

func (h *heap) look(b []byte) {
	for i, x := range b {
		if x != poison {
			h.t.Fatalf("byte %d of %d was written after it was freed", i, len(b))
		}
	}
}

func (h *heap) give(b []byte) {
	if !h.live[&b[0]] {
		h.t.Fatal("memory is freed twice")
	}
	delete(h.live, &b[0])
	for i := range b {
		b[i] = poison
	}
	h.free[len(b)] = append(h.free[len(b)], b)
}

// record is a storage of a step.
type record struct {
	id     uint64
	want   []byte // what it holds
	mem    []byte // or nil: it was returned
	before [][]byte
	row    int // bytes, or zero
	rows   int // that are live
	count  []byte
	groups int // that saved it and were not released
}

// saved is a group of a step.
type saved struct {
	n       uint64
	records []*record
	loaded  bool
}

// player is the caller.
type player struct {
	t        testing.TB
	rng      *rand.Rand
	s        *Session
	heap     *heap
	records  map[uint64]*record
	ids      uint64
	open     []*saved // not released
	borrowed map[uint64]int
	returned map[uint64]int
	none     int // calls until there is no memory to provide; negative is never
	spoiled  bool
	total    struct{ provided, again, anew, held, overflow, failed, early, floor, stashed int }
}

func newPlayer(t testing.TB, rng *rand.Rand, cfg Config) *player {
	p := &player{t: t, rng: rng, none: -1, heap: &heap{t, map[*byte]bool{}, map[int][][]byte{}}}
	s, err := Open(cfg, p.provide)
	if err != nil {
		t.Fatal(err)
	}
	p.s = s
	return p
}

func (p *player) ok(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *player) provide(id, n uint64) uint64 {
	if p.none == 0 {
		return 0
	}
	p.none--
	r := p.records[id]
	if r == nil || uint64(len(r.want)) != n {
		p.t.Errorf("the session asks for %d bytes for storage %d, which is %v", n, id, r)
		return 0
	}
	if r.mem != nil {
		r.before = append(r.before, r.mem)
	}
	r.mem = p.heap.take(int(n))
	p.borrowed[id]++
	p.total.provided++
	return address(r.mem)
}

// free frees memory that was returned, the oldest of a storage first.
func (p *player) free(ids []uint64) {
	for _, id := range ids {
		if p.returned[id]++; p.returned[id] > p.borrowed[id] {
			p.t.Fatalf("storage %d is returned more often than it was borrowed", id)
		}
		r := p.records[id]
		switch {
		case r == nil: // only its groups held it, or it is freed already
		case len(r.before) > 0:
			p.heap.give(r.before[0])
			r.before = r.before[1:]
		case r.mem != nil:
			p.heap.give(r.mem)
			r.mem = nil
		}
	}
}

// fresh makes a storage, or one for a number that all groups have released.
func (p *player) fresh(id uint64, n, row int) *record {
	if id == 0 {
		p.ids++
		id = p.ids
	}
	r := &record{id: id, want: make([]byte, n), mem: p.heap.take(n), row: row, count: make([]byte, 8)}
	for i := range r.want {
		r.want[i] = byte(p.rng.Uint32())
	}
	copy(r.mem, r.want)
	p.records[id] = r
	p.borrowed[id]++
	return r
}

func (p *player) begin(key string) {
	p.records, p.borrowed, p.returned, p.open, p.ids, p.spoiled = map[uint64]*record{}, map[uint64]int{}, map[uint64]int{}, nil, 0, false
	p.ok(p.s.Begin(key, 0))
}

// save saves a group of records.
func (p *player) save(name string, records []*record, stay bool) error {
	var all []Storage
	for _, r := range records {
		x := Storage{ID: r.id, Address: 1 << 40, Bytes: uint64(len(r.want)), Stay: stay} // of one that was saved before only the id is looked at
		if r.mem != nil && r.groups == 0 {
			x.Address = address(r.mem)
		}
		if r.row > 0 && (r.groups == 0 || p.rng.IntN(2) == 0) {
			binary.LittleEndian.PutUint64(r.count, uint64(r.rows))
			x.Rows, x.RowBytes = address(r.count), uint64(r.row)
		}
		all = append(all, x)
	}
	n, returned, err := p.s.Save(name, all)
	for _, r := range records {
		copy(r.count, "the next") // it was read
	}
	p.free(returned)
	if err != nil {
		return err
	}
	for _, r := range records {
		r.groups++
	}
	p.open = append(p.open, &saved{n: n, records: records})
	return nil
}

// load loads a group and looks at all of its bytes.
func (p *player) load(g *saved) error {
	held, returned, err := p.s.Load(g.n)
	p.free(returned)
	if err != nil {
		return err
	}
	g.loaded = true
	for _, r := range g.records {
		live := len(r.want)
		if r.row > 0 {
			live = r.rows * r.row
		}
		mem, err := p.where(r)
		if err != nil {
			return err
		}
		switch {
		case bytes.Equal(mem[:live], r.want[:live]) && (r.mem != nil || len(bytes.Trim(mem[live:], "\x00")) == 0):
		case r.row > 0:
			p.spoiled = true // the check must say so
		default:
			return fmt.Errorf("storage %d of %d bytes came back changed", r.id, live)
		}
	}
	p.total.held += len(held)
	for _, r := range g.records { // they are freed when the caller likes: with the group
		if p.records[r.id] == r && len(r.before) == 0 && !slices.Contains(held, r.id) {
			delete(p.records, r.id)
		}
	}
	return nil
}

// where returns a storage's memory: rows that were returned are in their berth.
func (p *player) where(r *record) ([]byte, error) {
	if r.mem != nil {
		return r.mem, nil
	}
	if r.row == 0 {
		return nil, fmt.Errorf("storage %d did not come back", r.id)
	}
	at, err := p.s.Rows(r.id)
	if err == nil && at == 0 {
		err = fmt.Errorf("the rows of storage %d are nowhere", r.id)
	}
	if err != nil {
		return nil, err
	}
	p.total.stashed++
	return device.Slice[byte](at, len(r.want)), nil
}

// release releases a group, and frees what nobody holds any more.
func (p *player) release(g *saved) error {
	p.open = slices.DeleteFunc(p.open, func(x *saved) bool { return x == g })
	returned, err := p.s.Release(g.n)
	p.free(returned)
	for _, r := range g.records {
		if r.groups--; r.groups == 0 && p.records[r.id] != r && r.mem != nil {
			p.heap.give(r.mem)
			r.mem = nil
		}
	}
	return err
}

// end ends the step; all memory is returned, once for each time it was borrowed.
func (p *player) end(failed bool) error {
	returned, err := p.s.End(failed)
	p.free(returned)
	for id, n := range p.borrowed {
		if p.returned[id] != n {
			p.t.Fatalf("storage %d was borrowed %d times and returned %d times", id, n, p.returned[id])
		}
	}
	for _, r := range p.records {
		if r.mem != nil || len(r.before) > 0 {
			p.t.Fatalf("storage %d has memory that was not returned", r.id)
		}
	}
	for _, g := range p.open {
		for _, r := range g.records {
			if p.records[r.id] != r && r.mem != nil {
				p.heap.give(r.mem)
				r.mem = nil
			}
		}
	}
	if len(p.heap.live) > 0 {
		p.t.Fatalf("%d blocks are left behind", len(p.heap.live))
	}
	return err
}

// check asks whether there was room for all rows.
func (p *player) check() bool {
	err := p.s.Check(0)
	over := errors.As(err, new(*Overflow))
	switch {
	case over:
		p.total.overflow++
	case err != nil:
		p.t.Fatal(err)
	case p.spoiled:
		p.t.Fatal("rows came back changed, and nobody says so")
	}
	return !over
}

// close closes the session, which has then nothing.
func (p *player) close() {
	p.ok(p.s.Close())
	for _, list := range p.heap.free {
		for _, b := range list {
			p.heap.look(b)
		}
	}
	for k, u := range p.s.dev.Memory().Kind {
		if u.Current != 0 {
			p.t.Fatalf("%v of memory of kind %d is left behind", u.Current, k)
		}
	}
}
