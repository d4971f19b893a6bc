// This file owns the tape of a rank in a pipeline, and the benchmark of a machine that
// runs it.

package residency

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// silent is an executor that does nothing.
type silent struct{ marks Mark }

func (x *silent) Record(Lane) Mark       { x.marks++; return x.marks }
func (x *silent) After(Lane, Mark)       {}
func (x *silent) Out(*Storage)           {}
func (x *silent) In(*Storage)            {}
func (x *silent) ReturnMemory(*Storage)  {}
func (x *silent) ProvideMemory(*Storage) {}

// training returns the tape of one rank. In each layer of each pass six temporaries come
// and go. The forward pass saves groups of storages of the given sizes, and the backward
// pass releases them.
func training(t testing.TB, p schedule.Pipeline, layers int, groups map[string][]memory.Bytes, names ...string) *Tape {
	passes, err := p.Passes(0)
	if err != nil {
		t.Fatal(err)
	}
	tape, made := &Tape{}, 0
	take := func(n memory.Bytes) int {
		tape.Ops = append(tape.Ops, Op{Kind: OpTake, ID: made, Bytes: n})
		made++
		return made - 1
	}
	give := func(id int) { tape.Ops = append(tape.Ops, Op{Kind: OpGive, ID: id}) }
	s := schedule.Expand(passes, layers, names...)
	for i := range s.Len() {
		e := s.At(i)
		if e.Load {
			tape.Ops = append(tape.Ops, Op{Kind: OpLoad, Group: e.Group})
		}
		for k := range 3 {
			a, b := take(memory.Bytes(100+k)), take(memory.Bytes(30*k+7))
			give(a)
			give(b)
		}
		if e.Load {
			tape.Ops = append(tape.Ops, Op{Kind: OpRelease, Group: e.Group})
			continue
		}
		var items []Item
		for _, n := range groups[e.Group.Name] {
			items = append(items, Item{ID: take(n)})
		}
		tape.Ops = append(tape.Ops, Op{Kind: OpSave, Group: e.Group, Items: items})
		for _, it := range items {
			give(it.ID)
		}
	}
	return tape
}

// every returns a plan that offloads groups and reloads them the given number of loads
// ahead.
func every(t *Tape, ahead int, leave func(memory.GroupID) bool) *Plan {
	s := t.Schedule()
	p := &Plan{Schedule: s, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, s.Len())}
	var loads []int
	for i := range s.Len() {
		e := s.At(i)
		p.Offload[e.Group] = leave(e.Group)
		if e.Load {
			loads = append(loads, i)
			if k := len(loads) - 1 - ahead; k >= 0 {
				p.Prefetch[loads[k]] = append(p.Prefetch[loads[k]], e.Group)
			}
		}
	}
	return p
}

// The solver simulates hundreds of plans, so a tape of 100,000 calls should take well
// under 100 ms.
func BenchmarkTape(b *testing.B) {
	tape := training(b, schedule.Pipeline{Ranks: 8, Chunks: 1, Microbatches: 60}, 24,
		map[string][]memory.Bytes{"attn": {200, 50, 50, 100}, "mlp": {400, 400, 100}}, "attn", "mlp")
	all := func(memory.GroupID) bool { return true }
	none := func(memory.GroupID) bool { return false }
	half := func(g memory.GroupID) bool { return g.Layer%2 == 0 }
	for _, c := range []struct {
		name   string
		plan   *Plan
		device memory.Bytes
	}{
		{"stay", every(tape, 1, none), 1 << 30},
		{"half", every(tape, 2, half), 1 << 30},
		{"leave", every(tape, 2, all), 1 << 30},
		{"tight", every(tape, 2, half), 120_000},
		{"evict", nil, 150_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			var m *Machine
			most := 0
			for b.Loop() {
				m = New(Config{Device: c.device, Host: 1 << 30, Align: 1}, &silent{}, c.plan)
				if err := tape.Run(m, func(Op) { most = max(most, len(m.device.free)) }); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(float64(len(tape.Ops)), "calls")
			b.ReportMetric(float64(most), "segments")
			b.ReportMetric(float64(m.Device().Top()), "extent")
			b.ReportMetric(float64(m.Counts().Evicted), "evicted")
		})
	}
}
