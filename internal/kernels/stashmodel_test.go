// This file holds the stash kernels' twins against an obvious model.

package kernels

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// stashModel is a store as lists: the free pages of each tier in the order in which they are
// taken, and what each group holds.
type stashModel struct {
	bump   bool
	free   [StashTiers][]uint32
	low    [StashTiers]uint64
	report StashReport
}

// take takes pages of the device before those of the host, or none.
func (m *stashModel) take(id, need uint64) (pages []uint32, held [StashTiers]uint64, missed bool) {
	all := uint64(len(m.free[0]) + len(m.free[1]))
	if need > all {
		if m.report.Overflows++; m.report.Overflows == 1 {
			m.report.OverflowID, m.report.OverflowAsked, m.report.OverflowFree = id, need, all
		}
		return nil, held, true
	}
	for tier := range m.free {
		for need > 0 && len(m.free[tier]) > 0 {
			p := m.free[tier][0]
			m.free[tier] = m.free[tier][1:]
			if tier == StashHost {
				p |= 1 << 31
				m.report.Spilled++
			}
			m.report.Stashed++
			pages = append(pages, p)
			held[tier]++
			need--
		}
		m.low[tier] = min(m.low[tier], uint64(len(m.free[tier])))
	}
	return pages, held, false
}

// giveBack frees pages: behind those that are free, or, on a stack, before them.
func (m *stashModel) giveBack(pages []uint32) {
	var back [StashTiers][]uint32
	for _, p := range pages {
		back[p>>31] = append(back[p>>31], p&^(1<<31))
	}
	for tier := range back {
		if m.bump {
			m.free[tier] = append(back[tier], m.free[tier]...)
		} else {
			m.free[tier] = append(m.free[tier], back[tier]...)
		}
	}
}

// stashBench is a store in Go's memory with groups of tensors.
type stashBench struct {
	t       *testing.T
	memory  []byte
	at      int
	control *StashControl
	m       StashMemory
	needs   device.Range
	groups  []*stashGroup
}

// stashGroup is a group: its record, its set, and what the model knows of it.
type stashGroup struct {
	record, set, need device.Range
	tensors           []StashTensor
	pages             []uint32
	content           [][]byte
	stashed           bool
}

func (b *stashBench) take(n int) device.Range {
	r := rangeOf(b.t, b.memory, b.at, n)
	b.at += (n + 63) &^ 63
	return r
}

func sliceOf[T any](r device.Range) []T {
	var x T
	return device.Slice[T](uint64(r.Addr()), int(uintptr(r.Len)/unsafe.Sizeof(x)))
}

const benchPage = 64

// newStashBench makes a store of so many pages with groups of one to three tensors.
func newStashBench(t *testing.T, rng *rand.Rand, grown [StashTiers]int) *stashBench {
	b := &stashBench{t: t, memory: make([]byte, 1<<17)}
	b.at = int(-uintptr(unsafe.Pointer(&b.memory[0])) % 64)
	b.m.Control = b.take(int(StashControlBytes))
	b.control = &sliceOf[StashControl](b.m.Control)[0]
	b.m.Rings = b.take(2 * 64 * 4)
	b.m.Units = 3
	b.control.Page, b.control.Generation = benchPage, 7
	for i := range b.control.Tier {
		b.m.Pool[i] = b.take(grown[i] * benchPage)
		b.control.Tier[i] = StashTier{Pool: uint64(b.m.Pool[i].Addr()), Ring: uint64(b.m.Rings.Addr()) + uint64(i*64*4), Mask: 63, Grown: uint64(grown[i])}
	}
	b.needs = b.take(8 * 8)
	for id := range 4 {
		g := &stashGroup{}
		g.need = b.needs.Buf.Slice(b.needs.Off+memory.Bytes(8*id), 8)
		set := 0
		for range 1 + rng.IntN(3) {
			x := StashTensor{RowBytes: uint64(8 * (1 + rng.IntN(5))), MaxRows: uint64(rng.IntN(12))}
			x.RowsAt, x.Offset = uint64(set), uint64(set+8)
			set += 8 + int(x.RowBytes*x.MaxRows)
			g.tensors = append(g.tensors, x)
		}
		g.set = b.take(set)
		g.record = b.take(int(StashRecordSize(len(g.tensors), 64)))
		rec := device.Slice[StashRecord](uint64(g.record.Addr()), 1)
		rec[0] = StashRecord{ID: uint64(100 + id), Tensors: uint64(len(g.tensors)), MaxPages: 64, Need: uint64(g.need.Addr())}
		copy(device.Slice[StashTensor](uint64(g.record.Addr())+uint64(StashRecordBytes), len(g.tensors)), g.tensors)
		b.groups = append(b.groups, g)
	}
	return b
}

// fill draws row counts, one more than the buffer holds at times, and rows. It returns the counts.
func (g *stashGroup) fill(rng *rand.Rand) (asked []uint64) {
	set := sliceOf[byte](g.set)
	for i := range set {
		set[i] = byte(rng.Uint32())
	}
	for _, x := range g.tensors {
		n := uint64(rng.IntN(int(x.MaxRows) + 2))
		device.Slice[uint64](uint64(g.set.Addr())+x.RowsAt, 1)[0] = n
		asked = append(asked, n)
	}
	return asked
}

func (g *stashGroup) rows(i int) []byte {
	x := g.tensors[i]
	rows := min(device.Slice[uint64](uint64(g.set.Addr())+x.RowsAt, 1)[0], x.MaxRows)
	return device.Slice[byte](uint64(g.set.Addr())+x.Offset, int(rows*x.RowBytes))
}

// Whatever is stashed, noted and restored in whatever order, pages, counts, reports and rows
// are those of the model.
func TestStashModel(t *testing.T) {
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 4))
		grown := [StashTiers]int{rng.IntN(14), rng.IntN(8)}
		b := newStashBench(t, rng, grown)
		m := &stashModel{}
		var seq uint64
		reset := func() {
			m.bump = rng.IntN(2) == 0
			m.report = StashReport{}
			seq = 0
			for tier, n := range grown {
				m.free[tier], m.low[tier] = nil, uint64(n)
				for p := range n {
					m.free[tier] = append(m.free[tier], uint32(p))
				}
			}
			for _, g := range b.groups {
				g.stashed = false
			}
			run(ResetLaunch(&b.m, b.needs, m.bump, 7))
		}
		reset()
		var order []*stashGroup
		for step := range 30 {
			g := b.groups[rng.IntN(len(b.groups))]
			shape := StashShape(len(g.tensors), benchPage, m.bump)
			what := ""
			switch act := rng.IntN(12); {
			case act == 0:
				what = "reset"
				reset()
				order = nil
				if slices.ContainsFunc(sliceOf[uint64](b.needs), func(n uint64) bool { return n != 0 }) {
					t.Fatalf("seed %d, step %d: needs are left", seed, step)
				}
			case act == 1 && !g.stashed:
				what = "note"
				for i, n := range g.fill(rng) {
					m.over(g, i, n, b)
				}
				run(NoteLaunch(&b.m, g.record, g.set, shape))
			case !g.stashed:
				what = "stash"
				b.stash(m, g, g.fill(rng), seq, shape)
				if seq++; g.stashed {
					order = append(order, g)
				}
			case m.bump: // the last that was stashed is the first to come back
				what = "restore the last"
				g = order[len(order)-1]
				order = order[:len(order)-1]
				b.restore(m, g, seq, StashShape(len(g.tensors), benchPage, true))
				seq++
			default:
				what = "restore"
				order = slices.DeleteFunc(order, func(x *stashGroup) bool { return x == g })
				b.restore(m, g, seq, shape)
			}
			if diff := b.compare(m, seq); diff != "" {
				t.Fatalf("seed %d, step %d: %s: %s", seed, step, what, diff)
			}
		}
	}
}

// over counts rows that a buffer cannot hold.
func (m *stashModel) over(g *stashGroup, i int, asked uint64, b *stashBench) {
	if most := g.tensors[i].MaxRows; asked > most {
		if m.report.OverCapacity++; m.report.OverCapacity == 1 {
			m.report.OverID, m.report.OverRows, m.report.OverLimit = 100+uint64(slices.Index(b.groups, g)), asked, most
		}
	}
}

func (b *stashBench) stash(m *stashModel, g *stashGroup, asked []uint64, seq, shape uint64) {
	t := b.t
	var need, wanted uint64
	var firsts []uint64
	g.content = nil
	for i, x := range g.tensors {
		m.over(g, i, asked[i], b)
		firsts = append(firsts, need)
		need += (min(asked[i], x.MaxRows)*x.RowBytes + benchPage - 1) / benchPage
		wanted += (asked[i]*x.RowBytes + benchPage - 1) / benchPage
		g.content = append(g.content, bytes.Clone(g.rows(i)))
	}
	id := 100 + uint64(slices.Index(b.groups, g))
	pages, held, missed := m.take(id, need)
	g.pages, g.stashed = pages, !missed
	l := StashLaunch(&b.m, g.record, g.need, g.set, seq, shape)
	run(l)
	r := device.Slice[StashRecord](uint64(g.record.Addr()), 1)[0]
	if r.Pages != held || (r.Missed != 0) != missed || sliceOf[uint64](g.need)[0] != wanted {
		t.Errorf("the record is %+v with a need of %d, want pages %v, missed %t, a need of %d", r, sliceOf[uint64](g.need)[0], held, missed, wanted)
	}
	tensors := device.Slice[StashTensor](uint64(g.record.Addr())+uint64(StashRecordBytes), len(g.tensors))
	for i, x := range tensors {
		if x.Asked != asked[i] || x.Rows != min(asked[i], x.MaxRows) || x.First != firsts[i] {
			t.Errorf("tensor %d is %+v, want %d rows from page %d", i, x, asked[i], firsts[i])
		}
	}
	got := device.Slice[uint32](uint64(g.record.Addr())+uint64(StashRecordBytes)+uint64(len(tensors))*uint64(StashTensorBytes), len(pages))
	if !slices.Equal(got, pages) {
		t.Errorf("pages %x, want %x", got, pages)
	}
	if n := hostPages(&l); n != memory.Bytes(held[StashHost]*benchPage) {
		t.Errorf("%d bytes in host pages of %v", n, held)
	}
}

func (b *stashBench) restore(m *stashModel, g *stashGroup, seq, shape uint64) {
	rubbish := sliceOf[byte](g.set)
	for i := range rubbish {
		rubbish[i] = 0xEE
	}
	run(RestoreLaunch(&b.m, g.record, g.set, seq, shape))
	for i := range g.tensors {
		if got := g.rows(i); !bytes.Equal(got, g.content[i]) {
			b.t.Errorf("tensor %d comes back as %d bytes, want %d", i, len(got), len(g.content[i]))
		}
	}
	if r := device.Slice[StashRecord](uint64(g.record.Addr()), 1)[0]; r.Pages != [StashTiers]uint64{} {
		b.t.Errorf("pages %v are kept", r.Pages)
	}
	m.giveBack(g.pages)
	g.pages, g.stashed = nil, false
}

// compare compares the store with the model.
func (b *stashBench) compare(m *stashModel, seq uint64) string {
	c := b.control
	if b.t.Failed() {
		return "see above"
	}
	if c.Seq != seq {
		return fmt.Sprintf("%d launches are counted, want %d", c.Seq, seq)
	}
	if c.StashReport != m.report {
		return fmt.Sprintf("the report is %+v, want %+v", c.StashReport, m.report)
	}
	for tier := range c.Tier {
		state := c.State[c.Seq%2]
		if got := c.free(tier, state.Head[tier], c.Tier[tier].Tail); got != uint64(len(m.free[tier])) || c.Tier[tier].Low != m.low[tier] {
			return fmt.Sprintf("tier %d has %d pages and had %d at least, want %d and %d", tier, got, c.Tier[tier].Low, len(m.free[tier]), m.low[tier])
		}
	}
	return ""
}

// A reset of another generation makes everything after it idle.
func TestStaleStash(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 4))
	b := newStashBench(t, rng, [StashTiers]int{8, 8})
	run(ResetLaunch(&b.m, b.needs, false, 8))
	g := b.groups[0]
	g.fill(rng)
	before := bytes.Clone(b.memory)
	l := StashLaunch(&b.m, g.record, g.need, g.set, 0, 0)
	run(l)
	run(NoteLaunch(&b.m, g.record, g.set, 0))
	run(RestoreLaunch(&b.m, g.record, g.set, 0, 0))
	if b.control.Stale != 1 || hostPages(&l) != 0 || !bytes.Equal(b.memory, before) {
		t.Errorf("stale %d, %d bytes in host pages, the memory changed: %t", b.control.Stale, hostPages(&l), !bytes.Equal(b.memory, before))
	}
}

// The launches declare all memory that they use, and pass what the kernels read.
func TestStashLaunches(t *testing.T) {
	buffer := func(name string, at uintptr) device.Range {
		return device.NewBuffer(memory.Device, at<<20, 1<<16, 1<<16, name).All()
	}
	m := &StashMemory{Control: buffer("control", 1), Rings: buffer("rings", 2), Units: 1}
	m.Pool[StashDevice], m.Pool[StashHost] = buffer("pool", 3), buffer("host pool", 4)
	record, need, set, needs := buffer("record", 5), buffer("need", 6), buffer("set", 7), buffer("needs", 8)
	shape := StashShape(5, 4096, true)
	if plain := StashShape(5, 4096, false); shape != plain|1<<16 || plain != 5|12<<8|8<<24 {
		t.Errorf("shapes %#x, %#x", shape, plain)
	}
	for _, x := range []struct {
		l      device.Launch
		blocks uint32
		args   []uint64
		want   string
	}{
		{StashLaunch(m, record, need, set, 11, shape), 2, []uint64{1 << 20, 5 << 20, 7 << 20, 11, shape}, "atomic access control, write record, read set, write need, atomic access rings, atomic access pool, atomic access host pool"},
		{NoteLaunch(m, record, set, shape), 1, []uint64{1 << 20, 5 << 20, 7 << 20, shape}, "atomic access control, write record, read set"},
		{RestoreLaunch(m, record, set, 12, shape), 2, []uint64{1 << 20, 5 << 20, 7 << 20, 12, shape}, "atomic access control, write record, write set, atomic access rings, atomic access pool, atomic access host pool"},
		{ResetLaunch(m, needs, true, 13), 64, []uint64{1 << 20, 8 << 20, 1 << 13, 13, 1}, "write control, write needs, write rings"},
		{ResetLaunch(m, needs, false, 13), 64, []uint64{1 << 20, 8 << 20, 1 << 13, 13, 0}, "write control, write needs, write rings"},
	} {
		var got []string
		for a := range x.l.Accesses {
			got = append(got, fmt.Sprintf("%v %s", a.Mode, a.Buf.Owner()))
		}
		if s := strings.Join(got, ", "); s != x.want || !slices.Equal(x.l.Args(), x.args) || x.l.Grid != [3]uint32{x.blocks, 1, 1} {
			t.Errorf("%s declares %s with %v in %v blocks, want %s with %v", x.l.Kernel.Name, s, x.l.Args(), x.l.Grid, x.want, x.args)
		}
	}
	m.Units = 0
	if l := StashLaunch(m, record, need, set, 11, shape); l.Grid[0] != 2 {
		t.Errorf("without units: %d blocks", l.Grid[0])
	}
	m.Pool[StashHost].Len = 0
	if l := RestoreLaunch(m, record, set, 12, shape); len(slices.Collect(l.Accesses)) != 5 {
		t.Error("a pool without pages is declared")
	}
}
