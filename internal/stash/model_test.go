// This file owns the store beside a model: random operations on both.

package stash

import (
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// rounds of 300 operations; continuous integration runs many more.
var rounds = flag.Int("rounds", 20, "rounds of random operations for TestStoreAgainstModel")

// openCUDA opens the first GPU, or skips with the reason.
func openCUDA(t testing.TB) device.Device {
	t.Helper()
	d, err := cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy})
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// onDevices runs a test on the CPU and on a GPU.
func onDevices(t *testing.T, f func(t *testing.T, open func(testing.TB) device.Device)) {
	t.Run("cpu", func(t *testing.T) { f(t, openCPU) })
	t.Run("cuda", func(t *testing.T) { f(t, openCUDA) })
}

// model runs random operations on a store beside the obvious: a map from group
// to the bytes that were put in. Stashes go to one stream and restores to
// another, and they run at the same time wherever the store may be used so.
type model struct {
	dev     device.Device
	rng     *rand.Rand
	store   *Store
	out, in device.Stream
	outAt   device.Event // the stash stream's work so far
	inAt    device.Event
	bump    bool
	groups  []*modelGroup
	stack   []*modelGroup // those in the store, oldest first
	pages   [Tiers]schedule.Pages
	checks  int
}

// modelGroup is one record with sets to stash from and to restore into.
type modelGroup struct {
	rec      *Record
	from, to *device.Buffer
	bytes    []byte
	rows     []Rows
	pages    schedule.Pages // of the rows that fit
	wanted   schedule.Pages // of all rows
	live     bool
	missed   bool // the model says it found no pages
}

var modelLayouts = [][]Tensor{
	{{Name: "a", Row: 14336, MaxRows: 9}},
	{{Name: "a", Row: 1000, MaxRows: 40}, {Name: "b", Row: 24, MaxRows: 40}},
	{{Name: "a", Row: 16, MaxRows: 3000}, {Name: "b", Row: 7, MaxRows: 500, Count: 1}, {Name: "c", Row: 4096, MaxRows: 6, Count: 2},
		{Name: "d", Row: 2048, MaxRows: 40, Count: 1}, {Name: "e", Row: 1, MaxRows: 9000, Count: 2}},
	// Many tiny tensors: a page each, in a set that one block serves.
	{{Row: 3, MaxRows: 2}, {Row: 100, MaxRows: 9, Count: 1}, {Row: 16, MaxRows: 50}, {Row: 1, MaxRows: 1, Count: 2}, {Row: 64, MaxRows: 30, Count: 1},
		{Row: 7, MaxRows: 40}, {Row: 5, MaxRows: 5}, {Row: 12, MaxRows: 8, Count: 2}, {Row: 4, MaxRows: 4}, {Row: 900, MaxRows: 3, Count: 1}},
}

func newModel(dev device.Device, rng *rand.Rand) (m *model, err error) {
	m = &model{dev: dev, rng: rng}
	for name, s := range map[string]*device.Stream{"out": &m.out, "in": &m.in} {
		if *s, err = dev.NewStream(name); err != nil {
			return nil, err
		}
	}
	for _, e := range []*device.Event{&m.outAt, &m.inAt} {
		if *e, err = dev.NewEvent(0); err != nil {
			return nil, err
		}
	}
	page := memory.Bytes(4096 << []int{0, 1, 2, 4, 8}[rng.IntN(5)])
	m.pages = [Tiers]schedule.Pages{schedule.Pages(rng.IntN(60)), schedule.Pages(rng.IntN(60))}
	m.store, err = NewStore(dev, m.out, Config{Page: page, Pages: m.pages, Max: [Tiers]schedule.Pages{200, 200}})
	if err != nil {
		return nil, err
	}
	for i := range 12 {
		l, err := NewLayout(modelLayouts[i%len(modelLayouts)]...)
		if err != nil {
			return nil, err
		}
		g := &modelGroup{}
		if g.rec, err = m.store.AddRecord(m.out, l, l, memory.GroupID{Layer: i}); err != nil {
			return nil, err
		}
		for _, b := range []**device.Buffer{&g.from, &g.to} {
			if *b, err = dev.Alloc(memory.Device, l.Size, "set"); err != nil {
				return nil, err
			}
		}
		m.groups = append(m.groups, g)
	}
	return m, m.reset()
}

func (m *model) close() error {
	for _, g := range m.groups {
		m.out.Free(g.from)
		m.out.Free(g.to)
	}
	m.store.Close(m.out)
	return errors.Join(m.out.Close(), m.in.Close(), m.outAt.Close(), m.inAt.Close())
}

// join makes the two streams wait for each other.
func (m *model) join() {
	m.out.Record(m.outAt)
	m.in.Wait(m.outAt)
	m.in.Record(m.inAt)
	m.out.Wait(m.inAt)
}

// reset empties the store, as a stack or with pages, perhaps with more of them.
func (m *model) reset() error {
	m.join()
	for t := range Tiers {
		if m.rng.IntN(4) == 0 {
			m.pages[t] = max(m.pages[t], schedule.Pages(m.rng.IntN(150)))
			if err := m.store.Grow(m.out, t, m.pages[t]); err != nil {
				return err
			}
		}
	}
	m.bump = m.rng.IntN(3) == 0
	m.store.Reset(m.out, m.bump)
	m.join()
	m.stack = nil
	for _, g := range m.groups {
		g.live = false
	}
	return nil
}

// free is the number of free pages by the model.
func (m *model) free() schedule.Pages {
	free := m.pages[Device] + m.pages[Host]
	for _, g := range m.stack {
		if !g.missed {
			free -= g.pages
		}
	}
	return free
}

func (m *model) stash(g *modelGroup) {
	l := g.rec.layout
	g.rows = nil
	for range l.counts {
		g.rows = append(g.rows, Rows(m.rng.IntN(2)*m.rng.IntN(50)))
		if m.rng.IntN(3) == 0 {
			g.rows[len(g.rows)-1] = Rows(m.rng.IntN(9000))
		}
	}
	g.bytes = contents(l, m.rng.Uint64(), g.rows...)
	g.pages, g.wanted = l.Pages(m.store.Page(), g.rows...), 0
	for _, t := range l.Tensors {
		g.wanted += schedule.PagesOf(m.store.Page(), t.Row*memory.Bytes(g.rows[t.Count]))
	}
	g.live, g.missed = true, m.free() < g.pages
	m.stack = append(m.stack, g)
	m.out.Upload(g.from.All(), g.bytes)
	m.store.Stash(m.out, g.rec, g.from.All())
}

// restore brings a group back; with a stack it must be the newest.
func (m *model) restore(g *modelGroup) {
	s := m.in
	if m.bump {
		s = m.out
	} else {
		m.out.Record(m.outAt)
		m.in.Wait(m.outAt)
	}
	s.Fill(g.to.All(), 0xee)
	m.store.Restore(s, g.rec, g.to.All())
	for i, x := range m.stack {
		if x == g {
			m.stack = append(m.stack[:i:i], m.stack[i+1:]...)
		}
	}
	g.live = false
}

// verify compares what came back.
func (m *model) verify(g *modelGroup) error {
	got := make([]byte, g.to.Size())
	s := m.in
	if m.bump {
		s = m.out
	}
	if err := s.Download(got, g.to.All()); err != nil {
		return err
	}
	m.checks++
	l := g.rec.layout
	for _, t := range l.Tensors {
		want := uint64(min(g.rows[t.Count], t.MaxRows))
		// Tensors that share a count may hold fewer rows than it says.
		if n := binary.LittleEndian.Uint64(got[8*t.Count:]); n > uint64(g.rows[t.Count]) || n < want && len(l.Tensors) == 1 {
			return fmt.Errorf("group %d: %d rows came back of %d", g.rec.id, n, g.rows[t.Count])
		}
	}
	if g.missed {
		return nil
	}
	return same(l, g.bytes, got, g.rows...)
}

// run does so many random operations.
func (m *model) run(ops int) error {
	for range ops {
		var idle, live []*modelGroup
		for _, g := range m.groups {
			if g.live {
				live = append(live, g)
			} else {
				idle = append(idle, g)
			}
		}
		if m.bump && len(m.stack) > 0 {
			live = m.stack[len(m.stack)-1:]
		}
		switch k := m.rng.IntN(20); {
		case k == 0:
			if err := m.reset(); err != nil {
				return err
			}
		case k < 11 && len(idle) > 0:
			// The ring hands pages out again once a restore is done, so the
			// model waits where it must know.
			m.in.Record(m.inAt)
			m.out.Wait(m.inAt)
			m.stash(idle[m.rng.IntN(len(idle))])
		case len(live) > 0:
			if err := m.restoreSome(idle, live); err != nil {
				return err
			}
		}
		if m.rng.IntN(8) == 0 {
			if err := m.quiet(); err != nil {
				return err
			}
		}
	}
	return m.quiet()
}

// restoreSome restores a group and, where pages abound, stashes another one at
// the same time.
func (m *model) restoreSome(idle, live []*modelGroup) error {
	g := live[m.rng.IntN(len(live))]
	m.restore(g)
	if !m.bump && len(idle) > 0 && m.free()-g.pages > 150 {
		m.stash(idle[m.rng.IntN(len(idle))])
	}
	return m.verify(g)
}

// quiet waits for both streams and checks the law and the report.
func (m *model) quiet() error {
	m.join()
	if err := m.in.Sync(); err != nil {
		return err
	}
	var live []*Record
	for _, g := range m.stack {
		live = append(live, g.rec)
	}
	if err := m.store.Check(m.out, live...); err != nil {
		return err
	}
	rep, err := m.store.Report(m.out)
	if err != nil {
		return err
	}
	for _, g := range m.stack {
		if need := rep.Need[g.rec.id]; need != g.wanted {
			return fmt.Errorf("group %d needs %d pages, the report says %d", g.rec.id, g.wanted, need)
		}
		if g.missed && rep.Overflows == 0 {
			return fmt.Errorf("group %d cannot have found %d pages, and nothing overflowed", g.rec.id, g.pages)
		}
	}
	return nil
}

// SPEC S1.1, S1.2, S1.4: the store and the model agree over random operations
// with both tiers, spill, overflow, over capacity, reset and growth.
func TestStoreAgainstModel(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		n, ops := *rounds, 300
		if testing.Short() {
			n /= 10
		}
		for seed := range n {
			dev := open(t)
			m, err := newModel(dev, rand.New(rand.NewPCG(uint64(seed), 7)))
			if err != nil {
				t.Fatal(err)
			}
			if err := m.run(ops); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if err := errors.Join(m.close(), dev.Close()); err != nil {
				t.Fatalf("seed %d: %v", seed, err)
			}
			if m.checks == 0 {
				t.Errorf("seed %d restored nothing", seed)
			}
		}
	})
}

// FuzzStore lets the fuzzer choose the operations' seed and the schedule's.
func FuzzStore(f *testing.F) {
	f.Add(uint64(1), uint64(1))
	f.Fuzz(func(t *testing.T, ops, order uint64) {
		p := check.On(cpuDevice, func(dev device.Device) error {
			m, err := newModel(dev, rand.New(rand.NewPCG(ops, 11)))
			if err != nil {
				return err
			}
			return errors.Join(m.run(60), m.close())
		})
		o := check.Options{Schedule: &check.Schedule{Seed: order | 1}}
		if err := check.Explore(o, 1, p); err != nil {
			t.Fatal(err)
		}
	})
}
