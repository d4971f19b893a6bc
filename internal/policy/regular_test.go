// This file tests the search by numbers and bounds, for memory that is counted.

package policy

import (
	"errors"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// borrowed is a step whose storages are the caller's.
func borrowed(p *Profile) *Profile {
	q := *p
	q.Tape.Ops = slices.Clone(p.Tape.Ops)
	for i := range q.Tape.Ops {
		if op := &q.Tape.Ops[i]; op.Kind == residency.OpTake {
			op.Kind = residency.OpBorrow
		}
	}
	return &q
}

// drawBorrowed is a small step of any shape without rows.
func drawBorrowed(t *rapid.T, most int) *Profile {
	p := drawProfile(t, most)
	for p.Rows != nil {
		p = drawProfile(t, most)
	}
	return borrowed(p)
}

// If memory is counted, the solver keeps to its limit too, and refuses exactly what is
// below the floor.
// SPEC S5.5 S6.1
func TestSolveCounted(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, l := drawBorrowed(t, rapid.SampledFrom([]int{6, 7, 7, 18}).Draw(t, "units")), drawLinks(t)
		c := residency.Config{Host: noLimit, Align: 1, Borrowed: true}
		kept, err := Simulate(p, nil, nil, l, residency.Config{Device: noLimit, Align: 1, Borrowed: true})
		if err != nil {
			t.Fatal(err)
		}
		budget := p.Base + memory.Bytes(rapid.Int64Range(0, int64(kept.Peak-p.Base-1)).Draw(t, "budget"))
		d, err := Solve(p, l, c, budget, everything)
		c.Device = budget - p.Base
		var low *memory.BudgetError
		if errors.As(err, &low) {
			if low.Need <= budget {
				t.Fatalf("a floor of %d and a budget of %d", low.Need, budget)
			}
			if _, err := Solve(p, l, c, low.Need, everything); err != nil {
				t.Fatalf("at the floor: %v", err)
			}
			return
		}
		if err != nil || d.Nothing || d.Forecast.Peak > budget || p.Check(d.Policy) != nil {
			t.Fatalf("a budget of %d: %v, %+v", budget, err, d)
		}
		again, err := Simulate(p, d.Policy, d.Plan, l, c)
		if err != nil || again.Step != d.Forecast.Step || again.Peak != d.Forecast.Peak {
			t.Fatalf("forecast %+v, and once more %+v, %v", d.Forecast, again, err)
		}
	})
}

// No step takes less memory or time than its bounds, whatever is chosen; with everything
// kept both are exact.
func TestBounds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, l := drawBorrowed(t, 12), drawLinks(t)
		c := residency.Config{Device: noLimit, Host: noLimit, Align: 1, Borrowed: true, Least: memory.Bytes(rapid.Int64Range(0, 20).Draw(t, "least"))}
		b := newBounds(p, c)
		pol := memory.Policy{}
		list, _ := p.units()
		for _, u := range list {
			if choice := rapid.SampledFrom([]memory.Choice{memory.Keep, memory.Offload, memory.Recompute}).Draw(t, "choice"); p.Units[u].can(choice) {
				pol[u] = choice
			}
		}
		for _, pol := range []memory.Policy{nil, pol} {
			x := p.step(pol).best(l, c, safety)
			if x.err != nil {
				t.Fatal(x.err)
			}
			bytes, took := b.memory(pol), b.time(pol)
			if peak := x.machine.Device().Peak(); bytes > peak || pol == nil && bytes != peak {
				t.Fatalf("a peak of %d, and a bound of %d", peak, bytes)
			}
			if took != x.tape.Span || took > seconds(x.end) {
				t.Fatalf("a step of %v with %v of work, and a bound of %v", seconds(x.end), x.tape.Span, took)
			}
		}
	})
}

// repeated is a step of equal microbatches, one after the other.
func repeated(microbatches, layers int, modules ...module) *Profile {
	var list []schedule.Pass
	for i := range microbatches {
		list = append(list, schedule.Pass{Microbatch: i}, schedule.Pass{Microbatch: i, Backward: true})
	}
	return borrowed(record(list, layers, modules...))
}

// A step of equal microbatches is a section several times over; one whose microbatches
// differ or overlap is not.
func TestSection(t *testing.T) {
	modules := []module{{"core_attn", 60, 12 * ms, 24 * ms}, {"moe_act", 80, 3 * ms, 6 * ms}}
	one, many := repeated(1, 3, modules...), repeated(4, 3, modules...)
	got := many.section()
	if got == nil || got.Tape.Span != one.Tape.Span || len(got.Tape.Ops) != len(one.Tape.Ops) {
		t.Fatalf("%+v", got)
	}
	for i, op := range got.Tape.Ops {
		want := one.Tape.Ops[i]
		if op.Kind != want.Kind || op.At != want.At || op.ID != want.ID || !slices.Equal(op.Items, want.Items) || op.Group.Unit() != want.Group.Unit() {
			t.Errorf("call %d: %+v, want %+v", i, op, want)
		}
	}
	other := repeated(4, 3, modules...)
	for i := len(other.Tape.Ops) - 1; ; i-- {
		if op := &other.Tape.Ops[i]; op.Kind == residency.OpBorrow {
			op.Bytes++
			break
		}
	}
	overlap := borrowed(record([]schedule.Pass{{}, {Microbatch: 1}, {Backward: true}, {Microbatch: 1, Backward: true}}, 2, modules...))
	unfinished := repeated(2, 1, modules...)
	unfinished.Tape.Ops = unfinished.Tape.Ops[:len(unfinished.Tape.Ops)-1]
	more, scope := repeated(2, 1, modules...), repeated(2, 1, modules...)
	for _, op := range one.Tape.Ops { // what is behind the last cut, and is never loaded
		if more.Tape.Ops = append(more.Tape.Ops, op); op.Kind == residency.OpSave {
			break
		}
	}
	each, border := len(scope.Tape.Ops)/2, []residency.Op{{Kind: residency.OpBeginScope}, {Kind: residency.OpEndScope}}
	scope.Tape.Ops = slices.Concat(border, scope.Tape.Ops[:each], border, scope.Tape.Ops[each:])
	for what, p := range map[string]*Profile{"one": one, "another size": other, "overlap": overlap, "unfinished": unfinished, "a save more": more, "a scope": scope} {
		if p.section() != nil {
			t.Errorf("%s: there is a section", what)
		}
	}
}

// Microbatches one after the other take as long as each of them, and the smallest limit is
// that of one.
func TestSolveSections(t *testing.T) {
	modules := []module{{"attn_norm", 10, 1 * ms, 2 * ms}, {"core_attn", 60, 12 * ms, 24 * ms}, {"moe_act", 80, 3 * ms, 6 * ms}}
	one, many := repeated(1, 8, modules...), repeated(5, 8, modules...)
	l := memory.Links{Out: 4000, In: 4000, Both: 6000}
	c := residency.Config{Host: noLimit, Align: 1, Borrowed: true}
	for _, budget := range []memory.Bytes{1000, 700, 400, 250} {
		a, err := Solve(one, l, c, budget, everything)
		if err != nil {
			t.Fatal(err)
		}
		b, err := Solve(many, l, c, budget, everything)
		if err != nil || b.Forecast.Peak > budget {
			t.Fatal(err, b)
		}
		if each := b.Forecast.Step / 5; each > a.Forecast.Step+a.Forecast.Step/50 || each < one.Tape.Span {
			t.Errorf("%d bytes: %v in each of five microbatches, %v in one", budget, each, a.Forecast.Step)
		}
	}
	var low [2]*memory.BudgetError
	for i, p := range []*Profile{one, many} {
		if _, err := Solve(p, l, c, 20, everything); !errors.As(err, &low[i]) {
			t.Fatal(err)
		}
	}
	if low[0].Need != low[1].Need || low[1].Budget != 20 {
		t.Errorf("%v and %v", low[0], low[1])
	}
	if _, err := Solve(many, l, c, low[1].Need, everything); err != nil {
		t.Error(err)
	}
}

// A class has the units of one name in the order of saving, and shares are what a policy
// says: the first are offloaded, the next recomputed, the last kept.
func TestShares(t *testing.T) {
	p := repeated(1, 6, module{"a", 30, 3 * ms, 6 * ms}, module{"b", 10, 1 * time.Microsecond, 2 * ms})
	v := &solver{p: p, l: slow, cfg: residency.Config{Device: 100, Host: noLimit, Align: 1, Borrowed: true}, allowed: everything, steps: map[string]*step{}, seen: map[string]bool{}}
	v.prepare(p.step(nil).try(nil, slow, cfg))
	v.bounds = newBounds(p, v.cfg)
	list := v.classes()
	if len(list) != 2 || len(list[0].units) != 6 || list[1].price >= list[0].price {
		t.Fatalf("%+v", list)
	}
	want := []share{{2, 3}, {1, 0}}
	pol, ok := v.with(list, want)
	if got := shares(list, pol); !ok || !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	for i, c := range []memory.Choice{memory.Offload, memory.Offload, memory.Recompute, memory.Recompute, memory.Recompute, memory.Keep} {
		if got := pol[memory.Unit{Name: "a", Layer: i}]; got != c {
			t.Errorf("layer %d: %v, want %v", i, got, c)
		}
	}
	for _, all := range [][]share{{{4, 3}, {}}, {{-1, 0}, {}}, {{}, {0, 7}}} {
		if _, ok := v.with(list, all); ok {
			t.Errorf("there are %v units", all)
		}
	}
	// Seven recomputed units are all of b, which is cheaper, and one of a, behind those that
	// are offloaded.
	pol = v.beside([]*class{list[1], list[0]}, 7, 2)
	if got := shares(list, pol); !slices.Equal(got, []share{{2, 1}, {0, 6}}) || pol[list[0].units[0]] != memory.Offload || pol[list[0].units[2]] != memory.Recompute {
		t.Errorf("%v of %v", got, pol)
	}
}
