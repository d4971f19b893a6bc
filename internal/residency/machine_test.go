package residency

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// notes is an executor that records its calls.
type notes struct {
	log    []string
	marks  []place
	copies [Lanes]int
	waits  int // all that it was told
	after  [Lanes][Lanes]int
}

// place is a point after some copies of a lane.
type place struct {
	lane   Lane
	copies int
}

func (x *notes) say(format string, args ...any) { x.log = append(x.log, fmt.Sprintf(format, args...)) }

func (x *notes) Record(l Lane) Mark {
	x.marks = append(x.marks, place{l, x.copies[l]})
	return Mark(len(x.marks))
}

// After does not record what a lane waited for before, nor waits for compute, which other
// tests check.
func (x *notes) After(l Lane, m Mark) {
	k := x.marks[m-1]
	x.waits++
	if k.lane != l && k.copies > x.after[l][k.lane] {
		x.after[l][k.lane] = k.copies
		x.say("%v after %v %d", l, k.lane, k.copies)
	}
}

func (x *notes) Out(s *Storage)           { x.copies[Out]++; x.say("out %d", s.ID) }
func (x *notes) In(s *Storage)            { x.copies[In]++; x.say("in %d", s.ID) }
func (x *notes) ReturnMemory(s *Storage)  { x.say("left %d", s.ID) }
func (x *notes) ProvideMemory(s *Storage) { x.say("provide %d", s.ID) }

func (x *notes) said(t *testing.T, want ...string) {
	t.Helper()
	if !slices.Equal(x.log, want) {
		t.Errorf("the machine said\n\t%s\nwant\n\t%s", strings.Join(x.log, "\n\t"), strings.Join(want, "\n\t"))
	}
	x.log = nil
}

// stepper makes calls that must succeed.
type stepper struct {
	*Machine
	t *testing.T
	x *notes
}

func begin(t *testing.T, cfg Config, plan *Plan) stepper {
	x := &notes{}
	cfg.Align = max(cfg.Align, 1)
	return stepper{New(cfg, x, plan), t, x}
}

func (s stepper) take(n memory.Bytes) int {
	s.t.Helper()
	st, err := s.Take(n)
	if err != nil {
		s.t.Fatal(err)
	}
	return st.ID
}

// forward runs a layer that saves one new storage and does not need it afterwards.
func (s stepper) forward(g memory.GroupID, n memory.Bytes) int {
	s.t.Helper()
	id := s.take(n)
	s.Save(g, Item{ID: id})
	s.Give(id)
	s.Check()
	return id
}

func (s stepper) backward(g memory.GroupID) {
	s.t.Helper()
	if err := s.Load(g); err != nil {
		s.t.Fatal(err)
	}
	s.Check()
	s.Release(g)
	s.Check()
}

func leaving(groups ...int) *Plan {
	p := &Plan{Offload: map[memory.GroupID]bool{}}
	for _, g := range groups {
		p.Offload[groupAt(g)] = true
	}
	return p
}

const big = 1 << 40

// SPEC S5.1, S4.6: offloaded storages take no device memory. In a step of 24 layers that
// are all offloaded and reloaded one ahead of need, at most two layers are live, and with
// a window of w copies the extent is that of w+1 layers. Nothing is late.
func TestSavedBytesAreExact(t *testing.T) {
	const layers, size = 24, 1000
	tape := &Tape{}
	for i := range layers {
		tape.Ops = append(tape.Ops, Op{Kind: OpTake, ID: i, Bytes: size}, Op{Kind: OpSave, Group: groupAt(i), Items: []Item{{ID: i}}}, Op{Kind: OpGive, ID: i})
	}
	for i := layers - 1; i >= 0; i-- {
		tape.Ops = append(tape.Ops, Op{Kind: OpLoad, Group: groupAt(i)}, Op{Kind: OpRelease, Group: groupAt(i)})
	}
	run := func(window int, plan *Plan) *Machine {
		m := New(Config{Device: big, Host: big, Align: 1, Window: window}, &notes{}, plan)
		if err := tape.Run(m, func(Op) { m.Check() }); err != nil {
			t.Fatal(err)
		}
		return m
	}
	without := run(1, nil)
	if without.Device().Top() != layers*size || without.Counts() != (Counts{}) {
		t.Fatalf("without a plan: extent %d, %+v", without.Device().Top(), without.Counts())
	}
	for window := 1; window <= 4; window++ {
		m := run(window, every(tape, 1, func(memory.GroupID) bool { return true }))
		want := Counts{Out: layers, In: layers, OutBytes: layers * size, InBytes: layers * size, Late: 1} // the last layer, loaded at once
		if m.Counts() != want {
			t.Errorf("window %d: %+v, want %+v", window, m.Counts(), want)
		}
		if saved := without.Device().Peak() - m.Device().Peak(); saved != (layers-2)*size {
			t.Errorf("window %d: %d bytes saved, want %d", window, saved, (layers-2)*size)
		}
		if saved := without.Device().Top() - m.Device().Top(); saved != memory.Bytes(layers-max(window+1, 2))*size {
			t.Errorf("window %d: %d bytes of the extent saved, want %d", window, saved, (layers-window-1)*size)
		}
		if m.Device().Live() != 0 || m.Host().Live() != 0 || m.Host().Peak() != layers*size {
			t.Errorf("window %d: %d and %d bytes are left, %d were on the host", window, m.Device().Live(), m.Host().Live(), m.Host().Peak())
		}
	}
}

// SPEC S5.1: on a rank of a pipeline (1F1B) all groups are offloaded and reloaded in
// another order, ahead of need except for the first.
func TestPipelineOrder(t *testing.T) {
	groups := map[string][]memory.Bytes{"attn": {200, 50}, "mlp": {400}}
	tape := training(t, schedule.Pipeline{Ranks: 4, Chunks: 2, Microbatches: 8}, 3, groups, "attn", "mlp")
	m := New(Config{Device: big, Host: big, Align: 1}, &notes{}, every(tape, 1, func(memory.GroupID) bool { return true }))
	if err := tape.Run(m, func(Op) { m.Check() }); err != nil {
		t.Fatal(err)
	}
	const layers = 2 * 8 * 3
	c := m.Counts()
	if c.Out != 3*layers || c.OutBytes != 650*layers || c.In != c.Out || c.InBytes != c.OutBytes || c.Late != 1 || c.Departed || c.Evicted != 0 {
		t.Errorf("%+v", c)
	}
	if m.Host().Live() != 0 || m.Device().Live() != 0 {
		t.Errorf("%d and %d bytes are left", m.Device().Live(), m.Host().Live())
	}
}

// Under a budget without a plan, the storage that was saved first leaves first, because
// the backward pass runs in reverse order. With a plan, the one that the plan needs last
// leaves first.
func TestEvictionOrder(t *testing.T) {
	s := &schedule.Schedule{}
	for i := range 4 {
		s.Save(groupAt(i))
	}
	for _, i := range []int{0, 3, 1} { // 2 is never loaded
		s.Load(groupAt(i))
	}
	for name, c := range map[string]struct {
		plan *Plan
		want []string
	}{
		"no plan": {nil, []string{"out 0", "compute after copy out 1", "out 1", "compute after copy out 2", "out 2", "compute after copy out 3"}},
		"a plan":  {&Plan{Schedule: s}, []string{"out 2", "compute after copy out 1", "out 1", "compute after copy out 2", "out 3", "compute after copy out 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := begin(t, Config{Device: 40, Host: 100}, c.plan)
			for i := range 4 {
				m.forward(groupAt(i), 10)
			}
			m.x.said(t)
			for range 3 {
				m.take(10)
			}
			m.x.said(t, c.want...)
			if m.Counts().Evicted != 3 {
				t.Errorf("%+v", m.Counts())
			}
		})
	}
}

// SPEC S5.3: small storages and those that must stay never leave, neither by plan nor for
// lack of room.
func TestWhatStays(t *testing.T) {
	m := begin(t, Config{Device: 30, Host: 100, Least: 8}, leaving(0, 1, 2))
	m.forward(groupAt(0), 7)
	id := m.take(10)
	m.Save(groupAt(1), Item{ID: id}, Item{ID: id, Stay: true})
	m.Give(id)
	m.forward(groupAt(2), 8)
	m.x.said(t, "out 2")
	if _, err := m.Take(20); err == nil {
		t.Error("there was room")
	}
	m.x.said(t)
}

// SPEC S5.3: with a cap of two, compute waits for a copy when two began after it.
func TestCap(t *testing.T) {
	m := begin(t, Config{Device: 1000, Host: 1000, Cap: 2, Window: 9}, leaving(0, 1, 2, 3))
	for i := range 4 {
		m.forward(groupAt(i), 10)
	}
	m.x.said(t, "out 0", "out 1", "out 2", "compute after copy out 1", "out 3", "compute after copy out 2")
}

// Storages stay if the host has no room.
func TestHostFull(t *testing.T) {
	m := begin(t, Config{Device: 1000, Host: 25}, leaving(0, 1, 2))
	for i := range 3 {
		m.forward(groupAt(i), 10)
	}
	m.x.said(t, "out 0", "out 1")
	if m.Counts().HostFull != 1 || m.Storage(2).State != Resident {
		t.Errorf("%+v", m.Counts())
	}
}

// A group of a scope that the host has no room for stays, and is not tried again at the end
// of the next scope, although there is room then.
func TestHostFullInAScope(t *testing.T) {
	m := begin(t, Config{Device: 1000, Host: 15}, leaving(0, 1))
	m.BeginScope()
	for i := range 2 {
		m.forward(groupAt(i), 10)
	}
	m.EndScope()
	m.x.said(t, "out 0")
	m.backward(groupAt(0)) // the host is empty again
	m.x.log = nil
	for range 2 {
		m.BeginScope()
		m.EndScope()
	}
	m.x.said(t)
	if m.Counts().HostFull != 1 || m.Storage(1).State != Resident {
		t.Errorf("%+v", m.Counts())
	}
}

// Borrowed bytes are returned when compute comes after the last use: a window of copies
// later, with the load, with the release, or at the end.
func TestBorrow(t *testing.T) {
	m := begin(t, Config{Device: 1000, Host: 1000, Window: 2}, leaving(0, 1, 2, 3))
	for i := range 5 {
		s, _ := m.Borrow(10)
		id := s.ID
		m.Save(groupAt(i), Item{ID: id})
		m.Give(id)
		m.Check()
	}
	m.x.said(t, "out 0", "out 1", "out 2", "compute after copy out 1", "left 0", "out 3", "compute after copy out 2", "left 1")
	m.backward(groupAt(4))
	m.x.said(t, "left 4")
	m.backward(groupAt(2))
	m.x.said(t, "copy in after copy out 3", "in 2", "compute after copy in 1", "left 2")
	if m.Device().Top() != 10 {
		t.Errorf("an extent of %d", m.Device().Top())
	}
	_, _ = m.Borrow(1)
	m.End()
	m.x.said(t, "compute after copy out 4", "left 3", "left 5")
}

// A step that departs from its plan still offloads groups, and reloads them when they are
// needed.
func TestDepartedPlan(t *testing.T) {
	s := &schedule.Schedule{}
	for i := range 3 {
		s.Save(groupAt(i))
	}
	s.Load(groupAt(2))
	s.Load(groupAt(1))
	p := leaving(0, 1, 2)
	p.Schedule, p.Prefetch = s, [][]memory.GroupID{3: {groupAt(1)}}
	m := begin(t, Config{Device: 100, Host: 100}, p)
	for i := range 3 {
		m.forward(groupAt(i), 10)
	}
	m.x.log = nil
	m.backward(groupAt(2))
	m.x.said(t, "copy in after copy out 1", "copy in after copy out 3", "in 2", "compute after copy in 1", "in 1")
	if m.Storage(1).State != Returning || m.Counts().Departed {
		t.Errorf("%v", m.Storage(1))
	}
	m.backward(groupAt(0))
	if !m.Counts().Departed || m.Counts().Late != 2 {
		t.Errorf("%+v", m.Counts())
	}
	m.backward(groupAt(1))
}

// SPEC S4.1, S4.2: in a scope only what Load needs is copied. When the scope ends, groups
// are offloaded and prefetched.
func TestScopeHoldsCopiesBack(t *testing.T) {
	s := &schedule.Schedule{}
	for i := range 3 {
		s.Save(groupAt(i))
	}
	s.Load(groupAt(0))
	p := leaving(0, 1, 2)
	p.Schedule, p.Prefetch = s, [][]memory.GroupID{2: {groupAt(0), groupAt(1)}} // the first is over when the scope ends
	m := begin(t, Config{Device: 1000, Host: 1000, Cap: 1}, p)
	m.forward(groupAt(0), 10)
	m.forward(groupAt(1), 10)
	m.x.said(t, "out 0", "out 1", "compute after copy out 1")
	m.BeginScope()
	m.forward(groupAt(2), 10)
	m.backward(groupAt(0))
	m.x.said(t, "copy in after copy out 1", "in 0", "compute after copy in 1")
	m.EndScope()
	m.x.said(t, "out 2", "compute after copy out 2", "copy in after copy out 2", "in 1")
	m.Check()
}

// SPEC S5.5: a storage that does not fit is an error, and the group that was to be loaded
// stays as it was.
func TestFull(t *testing.T) {
	m := begin(t, Config{Device: 64, Host: 1000, Align: 8}, leaving(0))
	a, b := m.take(30), m.take(20)
	m.Save(groupAt(0), Item{ID: a}, Item{ID: b})
	m.Give(a)
	m.Give(b)
	hold := m.take(40)
	err := m.Load(groupAt(0))
	var full *Full
	if !errors.As(err, &full) || *full != (Full{In, 30, 40, 64, 24}) {
		t.Fatalf("%v", err)
	}
	want := "30 bytes do not fit beside the 40 in use of a budget of 64, of which at most 24 are free in one run; raise the budget, or offload or recompute more groups"
	if err.Error() != want {
		t.Errorf("%q", err)
	}
	m.Check()
	m.Give(hold)
	m.backward(groupAt(0))
	if m.Device().Live()+m.Host().Live() != 0 {
		t.Error("something is left")
	}
}

func TestMachinePanics(t *testing.T) {
	for want, f := range map[string]func(m stepper){
		"given back twice":            func(m stepper) { m.Give(0) },
		"saved twice":                 func(m stepper) { m.Save(groupAt(0)) },
		"which was given back":        func(m stepper) { m.Save(groupAt(1), Item{ID: 0}) },
		"loaded but not saved":        func(m stepper) { _ = m.Load(groupAt(1)) },
		"loaded before":               func(m stepper) { _ = m.Load(groupAt(0)); _ = m.Load(groupAt(0)) },
		"released but not loaded":     func(m stepper) { m.Release(groupAt(0)) },
		"released before":             func(m stepper) { m.backward(groupAt(0)); m.Release(groupAt(0)) },
		"begins inside of another":    func(m stepper) { m.BeginScope(); m.BeginScope() },
		"ends that did not begin":     func(m stepper) { m.EndScope() },
		"a tape with a call of kind":  func(m stepper) { _ = m.do(Op{Kind: 99}) },
		"bytes belong to no storage":  func(m stepper) { m.device.Take(Compute, 1); m.Check() },
		"resident is at -1 on the de": func(m stepper) { m.storages[0].Device = None; m.Check() },
	} {
		t.Run(want, func(t *testing.T) {
			m := begin(t, Config{Device: 100, Host: 100}, nil)
			m.forward(groupAt(0), 10)
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, want) {
					t.Errorf("panicked with %q", got)
				}
			}()
			f(m)
		})
	}
}
