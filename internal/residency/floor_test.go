// This file owns the tests of the floor: the least device memory that a step can run in,
// and which storages leave to reach it.

package residency

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// least returns the most bytes that the calls of a tape need at once: storages that the
// caller owns, that a loaded group has, or that must stay.
func (t *Tape) least() (most memory.Bytes) {
	bytes, owned, stays, held := map[int]memory.Bytes{}, map[int]bool{}, map[int]int{}, map[int]int{}
	groups := map[memory.GroupID][]Item{}
	for _, op := range t.Ops {
		switch op.Kind {
		case OpTake:
			bytes[op.ID], owned[op.ID] = op.Bytes, true
		case OpGive:
			owned[op.ID] = false
		case OpSave:
			groups[op.Group] = op.Items
			for _, it := range op.Items {
				if it.Stay {
					stays[it.ID]++
				}
			}
		case OpLoad:
			for _, it := range groups[op.Group] {
				held[it.ID]++
			}
		case OpRelease:
			for _, it := range groups[op.Group] {
				if held[it.ID]--; it.Stay {
					stays[it.ID]--
				}
			}
		}
		var now memory.Bytes
		for id, n := range bytes {
			if owned[id] || held[id] > 0 || stays[id] > 0 {
				now += n
			}
		}
		most = max(most, now)
	}
	return most
}

// SPEC S5.5: the floor of a budget is minimal. Storages of one size leave no gaps, so a
// step runs in exactly the memory that its calls need at once, with any plan, and in no
// byte less.
func TestFloorIsMinimal(t *testing.T) {
	const size = 8
	for seed := range uint64(300) {
		rng := rand.New(rand.NewPCG(seed, 1))
		p := compose(&author{d: rng.IntN, items: map[int][]Item{}}, 12+rng.IntN(30))
		var tape Tape
		everything := &Plan{Offload: map[memory.GroupID]bool{}}
		for _, op := range p.tape.Ops {
			switch op.Kind {
			case OpBeginScope, OpEndScope: // in which nothing is evicted
				continue
			case OpTake, OpBorrow:
				op.Kind, op.Bytes = OpTake, size
			case OpSave:
				everything.Offload[op.Group] = true
			}
			tape.Ops = append(tape.Ops, op)
		}
		ahead := *everything
		ahead.Schedule = tape.Schedule()
		ahead.Prefetch = make([][]memory.GroupID, ahead.Schedule.Len())
		for i := range ahead.Prefetch {
			for k := i + 1; k < ahead.Schedule.Len() && len(ahead.Prefetch[i]) < 2; k++ {
				if e := ahead.Schedule.At(k); e.Load {
					ahead.Prefetch[i] = append(ahead.Prefetch[i], e.Group)
				}
			}
		}
		for name, plan := range map[string]*Plan{
			"no plan": nil, "an order": {Schedule: tape.Schedule()}, "everything leaves": everything, "everything leaves and comes back early": &ahead,
		} {
			run := func(budget memory.Bytes) error {
				m := New(Config{Device: budget, Host: big, Align: 1, Window: rng.IntN(3), Cap: rng.IntN(3)}, &notes{}, plan)
				return tape.Run(m, func(Op) { m.Check() })
			}
			floor := tape.least()
			if err := run(floor); err != nil {
				t.Fatalf("seed %d, %s: %d bytes would do: %v", seed, name, floor, err)
			}
			if floor > 0 && !errors.As(run(floor-1), new(*Full)) {
				t.Fatalf("seed %d, %s: %d bytes do where %d are needed at once", seed, name, floor-1, floor)
			}
		}
	}
}

// The calls alone decide which storage leaves for lack of room: the one that is needed
// last, and among equals the one that was saved first.
func TestEvictionAmongEquals(t *testing.T) {
	for name, x := range map[string]struct {
		plan *Plan
		want []string
	}{
		"no plan":      {nil, []string{"out 0", "compute after copy out 1", "out 1", "compute after copy out 2", "out 2", "compute after copy out 3"}},
		"never loaded": {&Plan{Schedule: order([]int{0, 1}, nil)}, []string{"out 0", "compute after copy out 1", "out 1", "compute after copy out 2", "out 2", "compute after copy out 3"}},
		"the second is loaded last": {&Plan{Schedule: order([]int{0, 1}, []int{0, 1})},
			[]string{"out 2", "compute after copy out 1", "out 0", "compute after copy out 2", "out 1", "compute after copy out 3"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := begin(t, Config{Device: 30, Host: 100, Least: 10}, x.plan)
			a, b := m.take(10), m.take(10)
			m.Save(groupAt(0), Item{ID: a}, Item{ID: b})
			m.Give(a)
			m.Give(b)
			m.forward(groupAt(1), 10)
			for range 3 {
				m.take(10)
			}
			m.x.said(t, x.want...)
		})
	}
}

// A storage that the host has no room for stays, and a smaller one that is needed sooner
// leaves in its place. Another one of the same size is not tried.
func TestEvictionPassesOverWhatIsTooLarge(t *testing.T) {
	m := begin(t, Config{Device: 70, Host: 15}, nil)
	for i, n := range []memory.Bytes{20, 20, 16, 14} {
		m.forward(groupAt(i), n)
	}
	m.take(14)
	m.x.said(t, "out 3", "compute after copy out 1")
	if c := m.Counts(); c.Evicted != 1 || m.Storage(3).State != Away {
		t.Errorf("%+v, %v", c, m.Storage(3))
	}
	var full *Full
	if _, err := m.Take(14); !errors.As(err, &full) {
		t.Errorf("there was room: %v", err)
	}
	m.Check()
}

// A step that does more than its plan says departs from it, and goes on.
func TestMoreThanThePlan(t *testing.T) {
	p := leaving(0)
	p.Schedule = order([]int{0}, []int{0})
	m := begin(t, Config{Device: 100, Host: 100}, p)
	m.forward(groupAt(0), 10)
	m.backward(groupAt(0))
	if m.Counts().Departed {
		t.Error("it departed from its plan with the last event of it")
	}
	m.forward(groupAt(1), 10)
	if !m.Counts().Departed {
		t.Error("it did more than its plan says, and did not depart")
	}
	m.backward(groupAt(1))
}
