// This file holds the slab against an obvious model: a map of every unit.

package cuda

import (
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// slabModel knows for each unit of device.Align bytes whether it is taken.
type slabModel struct {
	t      *testing.T
	slab   slab
	taken  []bool
	blocks []span // of the sizes asked for
}

// run plays a program: pairs of an operation and its argument.
func (m *slabModel) run(program []byte) {
	for i := 0; i+1 < len(program); i += 2 {
		n := memory.Bytes(program[i+1])
		switch program[i] % 4 {
		case 0, 1:
			m.take(n * 37)
		case 2:
			m.give(int(n))
		case 3:
			m.resize(n * device.Align)
		}
		m.check()
	}
}

func (m *slabModel) take(n memory.Bytes) {
	fits, best, want := memory.Bytes(0), memory.Bytes(0), memory.Bytes(0) // the largest run of free units, the smallest that suffices, and where that is
	run := memory.Bytes(0)
	for u, t := range m.taken {
		if run += device.Align; t {
			run = 0
		}
		fits = max(fits, run)
		if last := u+1 == len(m.taken) || m.taken[u+1]; last && run >= blockSize(n) && (best == 0 || run < best) {
			best, want = run, memory.Bytes(u+1)*device.Align-run
		}
	}
	if m.slab.largest() != fits {
		m.t.Fatalf("the largest hole has %d bytes, want %d", m.slab.largest(), fits)
	}
	off, ok := m.slab.allocate(n)
	if ok && off != want {
		m.t.Fatalf("take(%d) gives %d, want %d: the first of the smallest holes", n, off, want)
	}
	if ok != (blockSize(n) <= fits) {
		m.t.Fatalf("take(%d) says %v, but the largest hole has %d bytes", n, ok, fits)
	}
	if !ok {
		return
	}
	if off%device.Align != 0 {
		m.t.Fatalf("take(%d) gives %d, which is not aligned", n, off)
	}
	m.mark(off, n, true)
	m.blocks = append(m.blocks, span{off, off + n})
}

// mark changes the units of a block, all of which must change.
func (m *slabModel) mark(off, n memory.Bytes, taken bool) {
	for u := off / device.Align; u < (off+blockSize(n))/device.Align; u++ {
		if m.taken[u] == taken {
			m.t.Fatalf("unit %d of the block at %d was in that state already", u, off)
		}
		m.taken[u] = taken
	}
}

func (m *slabModel) give(which int) {
	if len(m.blocks) == 0 {
		return
	}
	i := which % len(m.blocks)
	b := m.blocks[i]
	m.slab.free(b.from, b.to-b.from)
	m.mark(b.from, b.to-b.from, false)
	m.blocks = append(m.blocks[:i], m.blocks[i+1:]...)
}

func (m *slabModel) resize(size memory.Bytes) {
	size = max(size, m.slab.usedEnd())
	m.slab.resize(size)
	for memory.Bytes(len(m.taken))*device.Align < size {
		m.taken = append(m.taken, false)
	}
	m.taken = m.taken[:size/device.Align]
}

// check compares the holes and the law.
func (m *slabModel) check() {
	free := make([]bool, len(m.taken))
	last := memory.Bytes(-1)
	for _, h := range m.slab.holes {
		if h.from <= last || h.to <= h.from || h.to > m.slab.size {
			m.t.Fatalf("holes %v of a slab of %d bytes touch, are empty or lie outside", m.slab.holes, m.slab.size)
		}
		for u := h.from / device.Align; u < h.to/device.Align; u++ {
			free[u] = true
		}
		last = h.to
	}
	used := memory.Bytes(0)
	for u, t := range m.taken {
		if t == free[u] {
			m.t.Fatalf("unit %d: taken %v, free %v", u, t, free[u])
		}
		if t {
			used = memory.Bytes(u+1) * device.Align
		}
	}
	if m.slab.usedEnd() != used || m.slab.size != memory.Bytes(len(m.taken))*device.Align {
		m.t.Fatalf("used %d of %d, want %d of %d units", m.slab.usedEnd(), m.slab.size, used, len(m.taken))
	}
}

func TestSlabAgainstModel(t *testing.T) {
	for seed := range uint64(200) {
		rng := rand.New(rand.NewPCG(seed, 1))
		program := make([]byte, 400)
		for i := range program {
			program[i] = byte(rng.Uint32())
		}
		(&slabModel{t: t}).run(program)
	}
}

func FuzzSlab(f *testing.F) {
	f.Add([]byte{3, 200, 0, 10, 0, 20, 2, 0, 0, 5, 3, 0})
	f.Fuzz(func(t *testing.T, program []byte) { (&slabModel{t: t}).run(program) })
}

// The smallest hole that fits is used, and neighbours become one again.
func TestSlabFitsBest(t *testing.T) {
	var s slab
	s.resize(10 * device.Align)
	var at [5]memory.Bytes
	for i, n := range []memory.Bytes{3, 1, 2, 1, 3} {
		at[i], _ = s.allocate(n * device.Align)
	}
	s.free(at[0], 3*device.Align)
	s.free(at[2], 2*device.Align)
	if off, _ := s.allocate(2*device.Align - 5); off != at[2] {
		t.Errorf("a block of two units went to %d, want the hole at %d", off, at[2])
	}
	s.free(at[1], device.Align)
	if s.largest() != 4*device.Align {
		t.Errorf("the hole of three and the one of one make %v", s.holes)
	}
	for what, fn := range map[string]func(){
		"a block given back twice":  func() { s.free(at[1], device.Align) },
		"a block beyond the end":    func() { s.free(10*device.Align, 1) },
		"shrinking below the block": func() { s.resize(9 * device.Align) },
	} {
		mustPanic(t, what, fn)
	}
}

func mustPanic(t *testing.T, what string, fn func()) {
	t.Helper()
	defer func() {
		if recover() == nil {
			t.Errorf("%s did not panic", what)
		}
	}()
	fn()
}
