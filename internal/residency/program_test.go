// This file owns random steps: programs, plans and limits, run under the clocks.

package residency

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// draw returns a number below n, from rapid or from a seed.
type draw func(n int) int

// program is a step that is legal under every plan.
type program struct {
	tape Tape
	plan *Plan
	cfg  Config
	host []hosts // what the host does before each call, or nil
}

func groupAt(i int) memory.GroupID { return memory.GroupID{Name: "g", Layer: i} }

// author is what a program may use while it is written.
type author struct {
	d             draw
	ops           []Op
	owned         []int // storages
	saved, loaded []int // groups
	items         map[int][]Item
	made, groups  int
	scope         bool
	borrowed      bool // all memory is the caller's
}

func (a *author) add(op Op) { a.ops = append(a.ops, op) }

func (a *author) pick(list *[]int) int {
	k := len(*list) - 1
	if a.d(3) == 0 {
		k = a.d(k + 1)
	}
	v := (*list)[k]
	*list = slices.Delete(*list, k, k+1)
	return v
}

func (a *author) save() {
	from := slices.Clone(a.owned)
	groups := a.loaded
	if a.borrowed { // what was given back and is away, or on the way, may be saved again
		groups = slices.Concat(a.saved, a.loaded)
	}
	for _, g := range groups {
		for _, it := range a.items[g] {
			from = append(from, it.ID)
		}
	}
	var items []Item
	for range a.d(4) {
		if len(from) > 0 {
			items = append(items, Item{from[a.d(len(from))], a.d(8) == 0})
		}
	}
	a.items[a.groups] = items
	a.saved = append(a.saved, a.groups)
	a.add(Op{Kind: OpSave, Group: groupAt(a.groups), Items: items})
	a.groups++
}

func (a *author) step() {
	switch k := a.d(12); {
	case k < 4:
		kind := OpTake
		if k == 3 || a.borrowed {
			kind = OpBorrow
		}
		a.add(Op{Kind: kind, ID: a.made, Bytes: memory.Bytes(1 + a.d(6))})
		a.owned = append(a.owned, a.made)
		a.made++
	case k < 6:
		a.save()
	case k < 8 && len(a.owned) > 0:
		a.add(Op{Kind: OpGive, ID: a.pick(&a.owned)})
	case k == 8 && len(a.saved) > 0:
		g := a.pick(&a.saved)
		a.loaded = append(a.loaded, g)
		a.add(Op{Kind: OpLoad, Group: groupAt(g)})
	case k < 11 && len(a.loaded) > 0:
		a.add(Op{Kind: OpRelease, Group: groupAt(a.pick(&a.loaded))})
	case k == 11 && !a.borrowed && a.d(2) == 0:
		a.toggle()
	}
}

func (a *author) toggle() {
	kind := OpBeginScope
	if a.scope {
		kind = OpEndScope
	}
	a.add(Op{Kind: kind})
	a.scope = !a.scope
}

func write(d draw, steps int) program {
	return compose(&author{d: d, items: map[int][]Item{}}, steps)
}

func compose(a *author, steps int) program {
	d := a.d
	for range steps {
		a.step()
	}
	for len(a.owned) > 0 {
		a.add(Op{Kind: OpGive, ID: a.pick(&a.owned)})
	}
	for len(a.saved) > d(3) { // some groups are never loaded
		g := a.pick(&a.saved)
		a.add(Op{Kind: OpLoad, Group: groupAt(g)})
		a.add(Op{Kind: OpRelease, Group: groupAt(g)})
	}
	if a.scope {
		a.toggle()
	}
	p := program{tape: Tape{Ops: a.ops}}
	p.cfg = Config{Device: memory.Bytes(10 + d(50)), Host: memory.Bytes(d(60)), Align: 1, Window: d(4), Cap: d(4), Least: memory.Bytes(d(3))}
	if d(8) > 0 {
		p.plan = a.planned(&p.tape)
	}
	return p
}

// planned returns a plan for the tape, or for another order.
func (a *author) planned(t *Tape) *Plan {
	s := t.Schedule()
	if a.d(6) == 0 { // the plan is for another step
		s = &schedule.Schedule{}
		s.Save(groupAt(0))
		s.Save(groupAt(a.groups + 1))
	}
	p := &Plan{Schedule: s, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, s.Len())}
	if a.d(8) == 0 {
		p.Schedule = nil
	}
	for g := range a.groups {
		p.Offload[groupAt(g)] = a.d(3) > 0
		if len(p.Prefetch) > 0 && a.d(2) == 0 {
			at := a.d(len(p.Prefetch))
			if load, ok := s.Loaded(groupAt(g)); ok && load > 0 && a.d(3) > 0 {
				at = load - 1 - a.d(min(load, 3))
			}
			p.Prefetch[at] = append(p.Prefetch[at], groupAt(g))
		}
	}
	return p
}

// rig runs a program and does compute's part.
type rig struct {
	x       *clocks
	m       *Machine
	given   map[int]bool
	items   map[memory.GroupID][]Item
	loaded  []memory.GroupID
	stopped bool // there was no room
	again   int  // saves of what is away
	early   int  // bytes left before the end
	flights flights
}

func (r *rig) use(g memory.GroupID) {
	r.x.work(Compute)
	for _, it := range r.items[g] {
		r.x.see(r.m.Storage(it.ID))
	}
}

func (r *rig) give(id int) {
	if !r.given[id] {
		r.given[id] = true
		r.x.work(Compute)
		r.x.see(r.m.Storage(id))
		r.m.Give(id)
	}
}

func (r *rig) release(g memory.GroupID) {
	if i := slices.Index(r.loaded, g); i >= 0 {
		r.loaded = slices.Delete(r.loaded, i, i+1)
		r.use(g)
		r.m.Release(g)
	}
}

// try makes a call. If there is no room, it makes the call again with nothing else in the
// way.
func (r *rig) try(call func() error) bool {
	err := call()
	if err != nil {
		r.full(err)
		for id := range r.m.storages {
			r.give(id)
		}
		for len(r.loaded) > 0 {
			r.release(r.loaded[0])
		}
		err = call()
	}
	if err != nil {
		r.full(err)
		r.stopped = true
	}
	return err == nil
}

func (r *rig) full(err error) {
	var full *Full
	if !errors.As(err, &full) || full.Live > full.Limit {
		r.x.fail("%v", err)
	}
	r.m.Check()
}

func (r *rig) do(op Op) {
	switch op.Kind {
	case OpTake, OpBorrow:
		if r.try(func() error { return r.placing(op, func() error { return r.m.do(op) }) }) {
			r.x.make(r.m.Storage(op.ID))
		}
	case OpGive:
		r.give(op.ID)
	case OpSave:
		r.save(op)
	case OpLoad:
		if r.try(func() error { return r.placing(op, func() error { return r.load(op.Group) }) }) {
			r.loaded = append(r.loaded, op.Group)
			r.use(op.Group)
		}
	case OpRelease:
		r.release(op.Group)
	case OpBeginScope:
		r.x.scope = true
		r.m.BeginScope()
	case OpEndScope:
		r.endScope()
	}
	r.m.Check()
	r.counted()
}

// save ends a forward pass, which has just written what was not saved before.
func (r *rig) save(op Op) {
	items := slices.DeleteFunc(slices.Clone(op.Items), func(it Item) bool { // it was given to make room
		s := r.m.Storage(it.ID)
		return !s.owned && s.loaded == 0 && (!r.m.cfg.Borrowed || s.State == Dead)
	})
	r.x.work(Compute)
	for _, it := range items {
		if s := r.m.Storage(it.ID); s.written == 0 {
			r.x.write(Compute, r.x.onDevice(s), s.ID+1)
		} else if s.owned || s.loaded > 0 {
			r.x.see(s)
		}
		if r.m.Storage(it.ID).State == Away {
			r.again++
		}
		r.x.stay[it.ID] = r.x.stay[it.ID] || it.Stay
	}
	r.items[op.Group] = items
	r.m.Save(op.Group, items...)
}

func (r *rig) endScope() {
	r.x.scope = false
	for i := range r.x.inScope {
		r.x.inScope[i] = false
	}
	r.m.EndScope()
}

func (p program) run(drop int) *rig {
	r := &rig{x: newClocks(p.cfg), given: map[int]bool{}, items: map[memory.GroupID][]Item{}}
	r.x.drop = drop
	r.m = New(p.cfg, r.x, p.plan)
	r.m.Watch = r.watch()
	for i, op := range p.tape.Ops {
		if p.host != nil {
			r.hosts(p.host[i])
		}
		if r.do(op); r.stopped || r.x.wrong != "" {
			break
		}
	}
	if r.x.scope {
		r.endScope()
	}
	for _, n := range r.x.left {
		r.early += n
	}
	r.m.End()
	r.x.end()
	for _, s := range r.m.storages {
		if s.Borrowed && r.x.left[s.ID] != 1+r.x.provided[s.ID] {
			r.x.fail("%v was provided %d times and let go %d times", s, 1+r.x.provided[s.ID], r.x.left[s.ID])
		}
	}
	return r
}

// watch checks that a storage gets a place only if it has none of that kind, and gives
// back the one that it has.
func (r *rig) watch() func(s *Storage, host, taken bool) {
	type where struct {
		id   int
		host bool
	}
	places := map[where]memory.Bytes{}
	return func(s *Storage, host, taken bool) {
		k, at := where{s.ID, host}, s.Device
		if host {
			at = s.Host
		}
		r.x.note("place", s.ID, host, taken, at)
		was, has := places[k]
		if has == taken || has && was != at {
			r.x.fail("%v: at %d, host %v, taken %v, and it was at %d, %v", s, at, host, taken, was, has)
		}
		if places[k] = at; !taken {
			delete(places, k)
		}
	}
}

// SPEC S5.1, S5.3, S4.1: in every step, under every plan and limit, no two users of a
// byte are unordered, and a load returns what was saved.
func TestMachineUnderClocks(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := write(func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "") }, rapid.IntRange(30, 100).Draw(t, "steps"))
		if r := p.run(-1); r.x.wrong != "" {
			t.Fatal(r.x.wrong)
		}
	})
}

// The same holds for many seeds, which reach deeper than shrinkable draws. The programs
// must do what they are for.
func TestMachineManySeeds(t *testing.T) {
	var sum Counts
	var stopped, departed int
	const seeds = 3000
	for seed := range uint64(seeds) {
		p := write(rand.New(rand.NewPCG(seed, 1)).IntN, 20+int(seed%120))
		r := p.run(-1)
		if r.x.wrong != "" {
			t.Fatalf("seed %d: %s", seed, r.x.wrong)
		}
		if r.stopped {
			stopped++
		}
		c := r.m.Counts()
		if c.Departed {
			departed++
		}
		sum.Out, sum.In, sum.Late = sum.Out+c.Out, sum.In+c.In, sum.Late+c.Late
		sum.Evicted, sum.HostFull, sum.Duplicates = sum.Evicted+c.Evicted, sum.HostFull+c.HostFull, sum.Duplicates+c.Duplicates
	}
	t.Logf("%+v, %d stopped, %d departed", sum, stopped, departed)
	if min(sum.Out, sum.In, sum.Late, sum.In-sum.Late, sum.Evicted, sum.HostFull, sum.Duplicates, departed, stopped) < 100 || stopped > seeds/2 {
		t.Fatalf("the programs leave something out: %+v, %d stopped, %d departed", sum, stopped, departed)
	}
}

// SPEC S6.2: every wait that nothing else implies is needed. Each is dropped in turn, and
// the clocks must notice.
func TestEveryWaitIsNeeded(t *testing.T) {
	caught, all := 0, 0
	for seed := range uint64(400) {
		p := write(rand.New(rand.NewPCG(seed, 2)).IntN, 70)
		base := p.run(-1).x
		for _, call := range base.needed {
			all++
			if p.run(call).x.wrong == "" {
				t.Errorf("seed %d: call %d of After was left out, and nobody noticed: %s", seed, call, base.said[call])
				continue
			}
			caught++
		}
	}
	fmt.Printf("residency: caught %d of %d\n", caught, all)
	if all < 1000 {
		t.Errorf("only %d waits", all)
	}
}
