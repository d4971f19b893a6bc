package policy

import (
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func simulate(t *testing.T, p *Profile, pol memory.Policy, l memory.Links, cfg residency.Config, leave, ahead []int) Forecast {
	t.Helper()
	s := p.step(pol)
	plan := &residency.Plan{Schedule: s.schedule, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, s.schedule.Len())}
	for i, g := range leave {
		plan.Offload[s.groups[g].GroupID] = true
		if ahead != nil {
			plan.Prefetch[ahead[i]] = append(plan.Prefetch[ahead[i]], s.groups[g].GroupID)
		}
	}
	f, err := Simulate(p, pol, plan, l, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

// Times that a pencil finds too. Two modules a and b of 100 bytes, 10 ms forward
// and 20 ms backward each: a is saved at 10, b at 20 and loaded at once, a at 40.
// SPEC S5.1
func TestSimulateByPencil(t *testing.T) {
	p := record(single, 1, module{"a", 100, 10 * ms, 20 * ms}, module{"b", 100, 10 * ms, 20 * ms})
	for _, c := range []struct {
		name                string
		links               memory.Links
		step, waiting, busy time.Duration
	}{
		// Out 10 to 20, in 20 to 30 of which nobody takes notice.
		{"hidden", memory.Links{Out: 10_000, In: 10_000}, 60 * ms, 0, 20 * ms},
		// Out 10 to 60, in 60 to 110, where compute has been waiting since 40.
		{"late", memory.Links{Out: 2000, In: 2000}, 130 * ms, 70 * ms, 100 * ms},
		{"uneven", memory.Links{Out: 10_000, In: 2000}, 90 * ms, 30 * ms, 60 * ms},
		// A latency of 5 before each: out 10 to 25, in 25 to 40.
		{"latency", memory.Links{Out: 10_000, In: 10_000, Latency: 5 * ms}, 60 * ms, 0, 30 * ms},
		{"more latency", memory.Links{Out: 10_000, In: 10_000, Latency: 6 * ms}, 62 * ms, 2 * ms, 32 * ms},
	} {
		f := simulate(t, p, nil, c.links, cfg, []int{0}, []int{1})
		if f.Step != c.step || f.Waiting != c.waiting || f.OutBusy+f.InBusy != c.busy || f.Compute != 60*ms {
			t.Errorf("%s: step %v, waiting %v, link busy %v+%v; want %v, %v, %v", c.name, f.Step, f.Waiting, f.OutBusy, f.InBusy, c.step, c.waiting, c.busy)
		}
		if a := f.Units[0]; a.Moved != 100 || a.Window != 30*ms || a.Waiting != c.waiting {
			t.Errorf("%s: %+v", c.name, a)
		}
	}
}

// A graph waits for copies where it begins. So a window ends there, and not at a load in the
// graph: both modules are loaded in one that begins at 20.
func TestWindowsOfGraphs(t *testing.T) {
	p := record(single, 1, module{"a", 100, 10 * ms, 20 * ms}, module{"b", 100, 10 * ms, 20 * ms})
	at := slices.IndexFunc(p.Tape.Ops, func(op residency.Op) bool { return op.Kind == residency.OpLoad })
	p.Tape.Ops = slices.Insert(p.Tape.Ops, at, residency.Op{Kind: residency.OpBeginScope, At: 20 * ms})
	p.Tape.Ops = append(p.Tape.Ops, residency.Op{Kind: residency.OpEndScope, At: 60 * ms})
	f, err := Simulate(p, nil, nil, slow, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := f.Units[0].Window, f.Units[1].Window; a != 10*ms || b != 0 {
		t.Errorf("windows of %v and %v", a, b)
	}
	// Also in one that begins with the step, where nothing is done between save and load.
	for i := range p.Tape.Ops {
		if op := &p.Tape.Ops[i]; i <= at {
			op.At = 0
		}
	}
	if f, err = Simulate(p, nil, nil, slow, cfg); err != nil {
		t.Fatal(err)
	}
	if a, b := f.Units[0].Window, f.Units[1].Window; a != 0 || b != 0 {
		t.Errorf("at the beginning: windows of %v and %v", a, b)
	}
}

// A load behind a graph is none of it: its window ends where it is.
func TestWindowBehindAGraph(t *testing.T) {
	p := record(single, 1, module{"a", 100, 10 * ms, 20 * ms}, module{"b", 100, 10 * ms, 20 * ms})
	isLoad := func(op residency.Op) bool { return op.Kind == residency.OpLoad }
	first := slices.IndexFunc(p.Tape.Ops, isLoad)
	last := first + 1 + slices.IndexFunc(p.Tape.Ops[first+1:], isLoad)
	p.Tape.Ops = slices.Insert(p.Tape.Ops, last, residency.Op{Kind: residency.OpEndScope, At: 40 * ms})
	p.Tape.Ops = slices.Insert(p.Tape.Ops, first, residency.Op{Kind: residency.OpBeginScope, At: 20 * ms})
	f, err := Simulate(p, nil, nil, slow, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if a, b := f.Units[0].Window, f.Units[1].Window; a != 30*ms || b != 0 {
		t.Errorf("windows of %v and %v", a, b)
	}
}

// Both directions at once. Microbatch 0's a comes back while microbatch 1's leaves.
// a works 10 ms, saves 100 bytes; order: forward 0, forward 1, backward 0, backward
// 1 of 10 ms each.
//
//	out 0: 10 to 20. Forward 1 ends at 20: out 1 begins, and in 0 begins too.
//	Alone each would take 10 ms; with 15,000 both ways each gets 7,500 and takes
//	13.3 ms: compute waits from 20 to 33.3 for in 0. In 1 needs out 1: 33.3 to 43.3
//	alone. Backward 0 takes until 43.3, so nobody waits; the step ends at 53.3.
func TestSimulateSharing(t *testing.T) {
	p := record([]schedule.Pass{{}, {Microbatch: 1}, {Backward: true}, {Microbatch: 1, Backward: true}}, 1, module{"a", 100, 10 * ms, 10 * ms})
	f := simulate(t, p, nil, memory.Links{Out: 10_000, In: 10_000, Both: 15_000}, residency.Config{Device: 200, Host: 300, Align: 1}, []int{0, 1}, []int{1, 2})
	third := 10 * ms / 3
	if f.Waiting.Round(time.Microsecond) != (10*ms+third).Round(time.Microsecond) || f.Step.Round(time.Microsecond) != (50*ms+third).Round(time.Microsecond) {
		t.Errorf("step %v, waiting %v; want 53.333ms and 13.333ms", f.Step, f.Waiting)
	}
	if want := 2*(10*ms+third) + 20*ms; (f.OutBusy + f.InBusy).Round(time.Microsecond) != want.Round(time.Microsecond) {
		t.Errorf("link busy %v; want %v", f.OutBusy+f.InBusy, want)
	}
}

// SPEC S4.1: what leaves at the end of a scope leaves by plan, and was not driven
// out for want of room.
func TestScopesLeaveByPlan(t *testing.T) {
	p := record(single, 1, module{"a", 100, 10 * ms, 20 * ms}, module{"b", 100, 10 * ms, 20 * ms})
	ops := p.Tape.Ops // a: take, save, give
	end := residency.Op{Kind: residency.OpEndScope, At: ops[2].At}
	p.Tape.Ops = slices.Concat([]residency.Op{{Kind: residency.OpBeginScope}}, ops[:3], []residency.Op{end}, ops[3:])
	s := p.step(offloadAll(p))
	tr := s.try(&residency.Plan{Offload: map[memory.GroupID]bool{s.groups[0].GroupID: true}}, slow, cfg)
	if tr.err != nil || tr.machine.Counts().Out != 1 || len(tr.evicted()) != 0 {
		t.Errorf("%v, %+v, evicted %v", tr.err, tr.machine.Counts(), tr.evicted())
	}
}

// Rows that come back free their device pages, also in a step with many microbatches:
// what the pages hold at once is what counts, and nothing of it crosses the link. With half
// of the pages, about half of the rows do.
func TestPagesAreUsedAgain(t *testing.T) {
	const page, layers, microbatches = 10, 4, 8
	p := withRows(record(passes(t, schedule.Pipeline{Ranks: 2, Chunks: 1, Microbatches: microbatches}, 0), layers,
		module{"core_attn", 5, ms, 2 * ms}, module{"moe_act", 3 * page, 10 * ms, 20 * ms}), "moe_act", page, 2)
	for u, f := range p.Units {
		if !f.Rows {
			p.Units[u] = Facts{}
		}
	}
	pol := memory.Policy{}
	for u, f := range p.Units {
		if f.Rows {
			pol[u] = memory.Stash
		}
	}
	all, err := Simulate(p, pol, nil, slow, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if all.RowBytes != 0 || all.DevicePages < 3*layers || all.DevicePages > 3*2*layers+3*2*layers/spareRows {
		t.Errorf("%d bytes cross the link although %d pages hold the rows of two microbatches", all.RowBytes, all.DevicePages)
	}
	need := p.rowPlan().devicePages(pol)
	p.Rows.Fixed, p.Rows.Pages = true, need/2
	less, err := Simulate(p, pol, nil, slow, cfg)
	if err != nil {
		t.Fatal(err)
	}
	const rows = 3 * page * layers * microbatches
	if less.RowBytes < rows/4 || less.RowBytes > rows*2/3 || less.Spilled != need-need/2 {
		t.Errorf("with %d pages of %d, %d bytes of %d cross the link, and %d pages are missing", need/2, need, less.RowBytes, rows, less.Spilled)
	}
}

// The figures of a unit's rows are those of its largest group, and of all of its groups,
// whichever comes first.
func TestRowsOfUnequalGroups(t *testing.T) {
	const page, microbatches = 10, 3
	for largest := range microbatches {
		p := withRows(record(passes(t, schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: microbatches}, 0), 2,
			module{"core_attn", 5, ms, 2 * ms}, module{"moe_act", page, 10 * ms, 20 * ms}), "moe_act", page, 1)
		pol := memory.Policy{}
		all := map[memory.Unit]memory.Bytes{}
		for g := range p.Rows.Need {
			if p.Rows.Need[g] = 2; g.Microbatch == largest {
				p.Rows.Need[g] = 7
			}
			pol[g.Unit()] = memory.Offload
			all[g.Unit()] += memory.Bytes(p.Rows.Need[g]) * page
		}
		f, err := Simulate(p, pol, nil, slow, cfg)
		if err != nil {
			t.Fatal(err)
		}
		kept := p.rowPlan().plan.Keep
		for _, u := range f.Units {
			if u.Name != "moe_act" {
				continue
			}
			moved := all[u.Unit]
			for g := range kept {
				if g.Unit() == u.Unit {
					moved -= memory.Bytes(p.Rows.Need[g]) * page
				}
			}
			if u.Bytes != 7*page || u.Groups != microbatches || u.Moved != moved || u.Choice != memory.Offload {
				t.Errorf("microbatch %d is the largest: %+v, want %d bytes moved", largest, u, moved)
			}
		}
	}
}

// offloaded returns a step that offloads all it can, and how it goes with memory without limits, or
// nil if it cannot.
func offloaded(p *Profile, l memory.Links) (*step, *trial) {
	pol := offloadAll(p)
	if p.Check(pol) != nil {
		return nil, nil
	}
	s, c := p.step(pol), residency.Config{Device: noLimit, Host: noLimit, Align: 1}
	one := s.try(s.plan(s.leaving(c), l, safety), l, c)
	if one.err != nil {
		return nil, nil
	}
	return s, one
}

// A step with exactly the memory that its forecast names does the same again: what the
// forecast says of host memory is enough for the copies where they lie.
func TestForecastMemoryIsEnough(t *testing.T) {
	fragmented := false
	rapid.Check(t, func(t *rapid.T) {
		p := drawProfile(t, 6)
		p.Rows = nil
		l := drawLinks(t)
		s, one := offloaded(p, l)
		if one == nil {
			return
		}
		f := one.forecast()
		if f.Host != one.machine.Host().Top() || f.Peak != one.machine.Device().Peak()+p.Base || f.Extent != one.machine.Device().Top()+p.Base || f.Counts != one.machine.Counts() {
			t.Fatalf("a forecast of %+v", f)
		}
		fragmented = fragmented || one.machine.Host().Top() > one.machine.Host().Peak()
		again := s.try(one.plan, l, residency.Config{Device: noLimit, Host: f.Host, Align: 1})
		if again.err != nil || again.machine.Counts() != f.Counts {
			t.Fatalf("with %d bytes of host memory: %v, %+v instead of %+v", f.Host, again.err, again.machine.Counts(), f.Counts)
		}
	})
	if !fragmented {
		t.Log("no step left gaps in host memory")
	}
}

// SPEC S4.1: a graph waits for copies where it begins, so compute waits at no other place of a
// captured scope, for rows neither.
func TestNoWaitInsideOfAScope(t *testing.T) {
	waits := 0
	rapid.Check(t, func(t *rapid.T) {
		p := inScopes(drawProfile(t, 6))
		s, one := offloaded(p, drawLinks(t))
		if one == nil {
			return
		}
		for _, w := range one.score.waits {
			from := -1.0
			for _, op := range s.tape.Ops {
				at := op.At.Seconds()
				switch op.Kind {
				case residency.OpBeginScope:
					from = at
				case residency.OpEndScope:
					if from < w.work && w.work < at {
						t.Fatalf("compute waits at %g, in a scope from %g to %g", w.work, from, at)
					}
				}
			}
			waits++
		}
	})
	if waits == 0 {
		t.Error("no step waits")
	}
}
