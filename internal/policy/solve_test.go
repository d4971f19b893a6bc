package policy

import (
	"encoding/json"
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

var everything = Allowed{Offload: true, Recompute: true}

// bruteForce is the least cost over all policies, or infinity.
func bruteForce(p *Profile, l memory.Links, cfg residency.Config, allowed Allowed) float64 {
	v := &solver{p: p, l: l, cfg: cfg, allowed: allowed, steps: map[string]*step{}, seen: map[string]bool{}}
	v.prepare(p.step(nil).try(nil, l, residency.Config{Device: noLimit, Host: noLimit, Align: 1}))
	least := math.Inf(1)
	pol := memory.Policy{}
	var rec func(i int)
	rec = func(i int) {
		if i == len(v.units) {
			if t := v.try(v.mix(pol, 0, 0)); t != nil {
				least = min(least, t.cost(l))
			}
			return
		}
		for c := memory.Keep; c < memory.Choices; c++ {
			if v.can(v.units[i], c) {
				pol[v.units[i]] = c
				rec(i + 1)
			}
		}
		delete(pol, v.units[i])
	}
	rec(0)
	return least
}

// moved counts the units that are not left on the device.
func moved(pol memory.Policy) (n int) {
	for _, c := range pol {
		if c != memory.Stash && c != memory.Keep {
			n++
		}
	}
	return n
}

// The solver never exceeds its budget, says that there is nothing to do exactly
// when all fits, and refuses exactly what is below the floor.
// SPEC S5.5 S6.1
func TestSolve(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, l := drawProfile(t, rapid.SampledFrom([]int{6, 8, 8, 18}).Draw(t, "units")), drawLinks(t)
		c := residency.Config{Host: noLimit, Align: 1, Window: rapid.IntRange(1, 3).Draw(t, "window")}
		if rapid.Bool().Draw(t, "little host") {
			c.Host = memory.Bytes(rapid.Int64Range(0, 200).Draw(t, "host"))
		}
		kept, err := Simulate(p, nil, nil, l, residency.Config{Device: noLimit, Host: 0, Align: 1})
		if err != nil {
			t.Fatal(err)
		}
		budget := p.Base + memory.Bytes(rapid.Int64Range(0, int64(kept.Extent-p.Base+5)).Draw(t, "budget"))
		d, err := Solve(p, l, c, budget, everything)
		c.Device = budget - p.Base
		if budget >= kept.Extent {
			if err != nil || !d.Nothing || moved(d.Policy) > 0 || d.Forecast.Step != p.Tape.Span {
				t.Fatalf("%d bytes fit a budget of %d, and yet: %v, %+v", kept.Extent, budget, err, d)
			}
			return
		}
		var low *memory.BudgetError
		if errors.As(err, &low) {
			if memory.Bytes(low.Need) <= budget || memory.Bytes(low.Budget) != budget {
				t.Fatalf("a floor of %d and a budget of %d", memory.Bytes(low.Need), budget)
			}
			if _, err := Solve(p, l, c, low.Need, everything); err != nil {
				t.Fatalf("at the floor: %v", err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		if d.Nothing || d.Forecast.Extent > budget || p.Check(d.Policy) != nil {
			t.Fatalf("extent %d of a budget of %d, nothing to do: %v", d.Forecast.Extent, budget, d.Nothing)
		}
		same := *p
		if p.Rows != nil { // of the rows of a unit, a part may be in device pages
			rows := *p.Rows
			rows.Fixed, rows.Pages = true, d.Forecast.DevicePages
			same.Rows = &rows
		}
		again, err := Simulate(&same, d.Policy, d.Plan, l, c)
		if err != nil || again.Step != d.Forecast.Step || again.Extent != d.Forecast.Extent {
			t.Fatalf("forecast %+v, and once more %+v, %v", d.Forecast, again, err)
		}
	})
}

// The solver comes close to the best of all policies, whether memory has places or is
// counted. Of a search that holds for most steps and not for all, so the steps are always
// the same ones.
// SPEC S6.1
func TestSolveComesClose(t *testing.T) {
	type example struct {
		p     *Profile
		l     memory.Links
		c     residency.Config
		share float64
	}
	for _, counted := range []bool{false, true} {
		draw := rapid.Custom(func(t *rapid.T) example {
			x := example{l: drawLinks(t), c: residency.Config{Host: noLimit, Align: 1, Borrowed: counted}, share: rapid.Float64Range(0.2, 0.99).Draw(t, "share")}
			if counted {
				x.p = drawBorrowed(t, 7)
				return x
			}
			x.p, x.c.Window = drawProfile(t, 7), rapid.IntRange(1, 3).Draw(t, "window")
			return x
		})
		cases, sum, hasty := 0, 0.0, 0.0
		for seed := range 50 {
			x := draw.Example(seed)
			kept, err := Simulate(x.p, nil, nil, x.l, residency.Config{Device: noLimit, Align: 1, Borrowed: counted})
			if err != nil {
				t.Fatal(err)
			}
			budget := x.p.Base + memory.Bytes(x.share*float64(kept.Extent-x.p.Base))
			d, err := Solve(x.p, x.l, x.c, budget, everything)
			if err != nil || d.Nothing {
				continue
			}
			// With far fewer candidates than there are policies, as with large models.
			quick, err := solve(x.p, x.l, x.c, budget, everything, 0.04)
			if err != nil {
				t.Fatal(err)
			}
			x.c.Device = budget - x.p.Base
			least := bruteForce(x.p, x.l, x.c, everything)
			gap := d.Forecast.paid/least - 1
			cases, sum, hasty = cases+1, sum+max(gap, 0), hasty+max(quick.Forecast.paid/least-1, 0)
			if gap > 0.05 {
				t.Errorf("seed %d, counted %v: step %v is %.1f%% more than the best", seed, counted, d.Forecast.Step, 100*gap)
			}
		}
		t.Logf("counted %v, %d cases: %.2f%% in the mean, in haste %.2f%%", counted, cases, 100*sum/float64(cases), 100*hasty/float64(cases))
		if cases < 15 || hasty > 0.05*float64(cases) {
			t.Errorf("counted %v, %d cases: in haste steps are %.1f%% more than the best in the mean", counted, cases, 100*hasty/float64(cases))
		}
	}
}

func bigStep(t testing.TB, rank, layers int) *Profile {
	pipe := schedule.Pipeline{Ranks: 4, Chunks: 1, Microbatches: 6}
	return record(passes(t, pipe, rank), layers, module{"attn_norm", 10, 1 * ms, 2 * ms}, module{"core_attn", 60, 12 * ms, 24 * ms}, module{"moe_act", 80, 3 * ms, 6 * ms})
}

// More budget is never slower by more than the search leaves; all of it on a step
// that needs both offloading and recomputing before the floor.
// SPEC S5.2 S5.5
func TestSolveMonotone(t *testing.T) {
	p := bigStep(t, 0, 3)
	l := memory.Links{Out: 4000, In: 4000, Both: 6000}
	kept, _ := Simulate(p, nil, nil, l, cfg)
	last := time.Duration(0)
	seen := map[memory.Choice]bool{}
	for i := 10; i > 0; i-- {
		d, err := solve(p, l, cfg, kept.Extent*memory.Bytes(i)/10, everything, 0.2)
		if err != nil {
			t.Fatalf("%d tenths: %v", i, err)
		}
		if float64(d.Forecast.Step) < 0.98*float64(last) {
			t.Errorf("%d tenths: %v, less than the %v of a larger budget", i, d.Forecast.Step, last)
		}
		if d.Nothing != (i == 10) || d.Forecast.Extent > d.Budget {
			t.Errorf("%d tenths: nothing to do %v, extent %d of %d", i, d.Nothing, d.Forecast.Extent, d.Budget)
		}
		last = max(last, d.Forecast.Step)
		for _, c := range d.Policy {
			seen[c] = true
		}
		t.Logf("%d tenths: step %v, extent %d of %d, %d tried", i, d.Forecast.Step, d.Forecast.Extent, d.Budget, d.Tried)
	}
	if !seen[memory.Offload] || !seen[memory.Recompute] {
		t.Errorf("choices made: %v", seen)
	}
}

// Copies that hide are preferred to recomputing, recomputing that costs less to
// copies that do not.
func TestSolvePrefers(t *testing.T) {
	p := record(single, 8, module{"core_attn", 100, 10 * ms, 20 * ms})
	for _, c := range []struct {
		name  string
		links memory.Links
		want  memory.Choice
	}{
		{"a fast link", memory.Links{Out: 100_000, In: 100_000}, memory.Offload},
		{"a slow link", memory.Links{Out: 500, In: 500}, memory.Recompute},
	} {
		d, err := Solve(p, c.links, cfg, 500, everything)
		if err != nil {
			t.Fatal(err)
		}
		if len(d.Policy) == 0 {
			t.Errorf("%s: nothing chosen", c.name)
		}
		for u, got := range d.Policy {
			if got != c.want {
				t.Errorf("%s: %v for %v", c.name, got, u)
			}
		}
		if c.want == memory.Offload && d.Forecast.Step != p.Tape.Span {
			t.Errorf("%s: step %v instead of %v", c.name, d.Forecast.Step, p.Tape.Span)
		}
	}
}

// A budget below the floor names the floor, and what is in the way.
func TestSolveFloor(t *testing.T) {
	p := record(single, 4, module{"a", 100, 10 * ms, 20 * ms})
	p.Base = 50
	_, err := Solve(p, slow, cfg, 149, everything)
	var low *memory.BudgetError
	if !errors.As(err, &low) || memory.Bytes(low.Need) != 150 || low.HostFull || !strings.Contains(err.Error(), "needs 150 B") || !strings.Contains(err.Error(), "raise it to 150 B") {
		t.Errorf("%v", err)
	}
	if _, err = Solve(p, slow, cfg, 20, everything); !errors.As(err, &low) || memory.Bytes(low.Need) != 150 {
		t.Errorf("below what is outside of the arena: %v", err)
	}
	// Without anything allowed all 400 bytes stay.
	if _, err = Solve(p, slow, cfg, 149, Allowed{}); !errors.As(err, &low) || memory.Bytes(low.Need) != 450 {
		t.Errorf("%v", err)
	}
	little := cfg
	little.Host = 100
	if _, err = Solve(p, slow, little, 149, Allowed{Offload: true}); !errors.As(err, &low) || !low.HostFull || !strings.Contains(err.Error(), "host memory") {
		t.Errorf("%v", err)
	}
	if _, err = Solve(p, memory.Links{}, cfg, 149, everything); err == nil || !strings.Contains(err.Error(), "measure") {
		t.Errorf("without links: %v", err)
	}
	if _, err = Plan(p, nil, memory.Links{Out: 1, In: math.NaN()}, cfg); err == nil {
		t.Error("a rate that is no number was accepted")
	}
	p.Units = nil
	if _, err = Plan(p, memory.Policy{{Name: "a", Chunk: 0, Layer: 1}: memory.Offload}, slow, cfg); err == nil || !strings.Contains(err.Error(), "choose keep") {
		t.Errorf("%v", err)
	}
}

// The reasons, printed.
// SPEC S5.4 S5.5 S6.1
func TestDecisionText(t *testing.T) {
	p := record(single, 6, module{"attn_norm", 8 << 20, ms, 2 * ms}, module{"core_attn", 64 << 20, 9 * ms, 18 * ms}, module{"expert_fc1", 200 << 20, 8 * ms, 16 * ms}, module{"moe_act", 96 << 20, ms, 2 * ms})
	p.Base = 1 << 30
	for u, f := range p.Units {
		switch u.Name {
		case "attn_norm":
			p.Units[u] = Facts{}
		case "core_attn":
			f.Recompute = 0
			p.Units[u] = f
		case "expert_fc1":
			p.Units[u] = Facts{CanOffload: true}
		}
	}
	p = withRows(p, "expert_fc1", 2<<20, 2)
	c := residency.Config{Host: 4 << 30, Align: 512}
	l := memory.Links{Out: 5e9, In: 5e9, Both: 8e9, Latency: 10 * time.Microsecond}
	var text strings.Builder
	for r, budget := range []memory.Bytes{4 << 30, 1900 << 20, 1640 << 20} {
		d, err := Solve(p, l, c, memory.Bytes(budget), everything)
		if err != nil {
			t.Fatal(err)
		}
		d.Rank = r
		text.WriteString(d.Text() + "\n")
		out, err := json.Marshal(d)
		if err != nil {
			t.Fatal(err)
		}
		var back Decision
		if err := json.Unmarshal(out, &back); err != nil || len(back.Policy) != len(d.Policy) || back.Forecast.Step != d.Forecast.Step || len(back.Reasons) != 24 || back.Reasons[1].Why == "" {
			t.Errorf("%s becomes %+v, %v", out, back, err)
		}
	}
	golden.Check(t, "reasons.txt", text.String())
}

// A policy that somebody else made is described like one of the solver's.
func TestFollow(t *testing.T) {
	p := record(single, 4, module{"core_attn", 100, 10 * ms, 20 * ms})
	pol := memory.Policy{{Name: "core_attn", Chunk: 0, Layer: 0}: memory.Offload, {Name: "core_attn", Chunk: 0, Layer: 1}: memory.Recompute}
	d, err := Follow(p, pol, memory.Links{Out: 10_000, In: 10_000}, cfg)
	if err != nil {
		t.Fatal(err)
	}
	if d.Forecast.Counts.OutBytes != 100 || d.Forecast.Compute != 130*ms || d.Before.Extent != 400 || d.Forecast.Extent >= 400 {
		t.Errorf("%+v, before %d", d.Forecast, d.Before.Extent)
	}
	if text := d.Text(); strings.Contains(text, "budget") || !strings.Contains(text, "recompute  chosen by hand") || strings.Count(text, "chosen by hand") != 2 {
		t.Error(text)
	}
	if _, err := Follow(p, memory.Policy{{Name: "none", Chunk: 0, Layer: 0}: memory.Offload}, slow, cfg); err == nil {
		t.Error("a unit that is not there was offloaded")
	}
	if _, err := Follow(p, nil, slow, residency.Config{Device: 99, Align: 1}); err == nil {
		t.Error("100 bytes found room in 99")
	}
}

// The ranks of 1F1B hold 4, 3, 2 and 1 microbatches. With one budget for all, the
// first moves the most and the last the least, peaks are equal where anything
// moves, and nobody takes longer than agreed.
// SPEC S4.5 S5.5
func TestBalance(t *testing.T) {
	var ps []*Profile
	var slowest time.Duration
	var most memory.Bytes
	l := memory.Links{Out: 4000, In: 4000, Both: 6000}
	for r := range 4 {
		ps = append(ps, bigStep(t, r, 2))
		kept, _ := Simulate(ps[r], nil, nil, l, cfg)
		slowest, most = max(slowest, kept.Step), max(most, kept.Extent)
	}
	allowed := Allowed{Offload: true}
	budget, shares, err := Balance(ps, l, cfg, allowed, 0.02)
	if err != nil {
		t.Fatal(err)
	}
	if budget*4 > most*3 || len(shares) != 4 {
		t.Errorf("a common peak of %d of %d", budget, most)
	}
	for r, s := range shares {
		t.Logf("rank %d: %d moved, extent %d, step %v", r, s.Moved, s.Decision.Forecast.Extent, s.Decision.Forecast.Step)
		if s.Rank != r || s.Decision.Rank != r || s.Decision.Forecast.Extent > budget || float64(s.Decision.Forecast.Step) > 1.0201*float64(slowest) {
			t.Errorf("rank %d: %+v", r, s.Decision.Forecast)
		}
		if s.Moved != s.Decision.Forecast.Counts.OutBytes {
			t.Errorf("rank %d: %d bytes moved, forecast %+v", r, s.Moved, s.Decision.Forecast.Counts)
		}
		if s.Moved > 0 && s.Decision.Forecast.Extent < budget*9/10 {
			t.Errorf("rank %d moves %d bytes for a peak of %d, where %d were enough", r, s.Moved, s.Decision.Forecast.Extent, budget)
		}
	}
	if shares[0].Moved == 0 || shares[3].Moved > shares[0].Moved {
		t.Errorf("the first rank moves %d bytes, the last %d", shares[0].Moved, shares[3].Moved)
	}
	// With no time to spare and no way to hide a copy, nothing is saved.
	budget, shares, err = Balance(ps[:1], memory.Links{Out: 10, In: 10}, cfg, allowed, 0)
	if err != nil || budget < most*99/100 || shares[0].Moved != 0 {
		t.Errorf("a budget of %d of %d, %v", budget, most, err)
	}
	if _, _, err = Balance(nil, l, cfg, allowed, 0); err == nil {
		t.Error("a pipeline without ranks was accepted")
	}
	if _, _, err = Balance(ps, l, cfg, allowed, math.NaN()); err == nil {
		t.Error("a slack that is no number was accepted")
	}
}

// SPEC S5.5: the solver adds sets if rows cross the link, the sets fit the budget, and the
// step gets shorter. The extent counts them.
func TestSolveAddsSets(t *testing.T) {
	p := withRows(record(single, 6, module{"core_attn", 64 << 20, 9 * ms, 18 * ms}, module{"moe_act", 96 << 20, 8 * ms, 16 * ms}), "moe_act", 2<<20, 1)
	for u, f := range p.Units {
		if !f.Rows {
			p.Units[u] = Facts{}
		}
	}
	p.Base = 1 << 30
	l := memory.Links{Out: 4e9, In: 4e9, Both: 6e9}
	c := residency.Config{Host: 4 << 30, Align: 512}
	const set = 96 << 20
	budget := memory.Bytes(1<<30 + 6*64<<20 + 400<<20) // about four of six groups stay in device pages
	one, err := Solve(p, l, c, memory.Bytes(budget), everything)
	if err != nil || one.Forecast.RowBytes == 0 || one.Forecast.Sets != 0 {
		t.Fatalf("%+v, %v", one, err)
	}
	p.Rows.MoreSets, p.Rows.SetBytes = 2, set
	more, err := Solve(p, l, c, memory.Bytes(budget), everything)
	if err != nil || more.Forecast.Sets == 0 || more.Forecast.Step >= one.Forecast.Step {
		t.Fatalf("with sets to add %v, without %v, %d sets, %v", more.Forecast.Step, one.Forecast.Step, more.Forecast.Sets, err)
	}
	f := more.Forecast
	if f.SetBytes != memory.Bytes(f.Sets)*set || f.Extent > budget || f.Activations(p.Base) != one.Forecast.Activations(p.Base) {
		t.Errorf("extent %d of %d, %d for sets, activations %d, want %d", f.Extent, budget, f.SetBytes, f.Activations(p.Base), one.Forecast.Activations(p.Base))
	}
	if more.Before.Step != one.Before.Step || more.Before.Extent != one.Before.Extent {
		t.Errorf("everything kept takes %v, want %v", more.Before.Step, one.Before.Step)
	}
	p.Rows.SetBytes = memory.Bytes(budget) // too large to fit
	if d, err := Solve(p, l, c, memory.Bytes(budget), everything); err != nil || d.Forecast.Sets != 0 || d.Forecast.Step != one.Forecast.Step {
		t.Errorf("sets that do not fit: %+v, %v", d, err)
	}
}

// Every choice has a reason.
func TestEveryChoiceHasAReason(t *testing.T) {
	l := memory.Links{Out: 1, In: 1}
	for c := range memory.Choice(memory.Choices) {
		if got := why(UnitForecast{Choice: c}, Facts{}, l, false, everything); got == "" {
			t.Errorf("%v has no reason", c)
		}
	}
	defer func() {
		if recover() == nil {
			t.Error("what is not a choice has a reason")
		}
	}()
	why(UnitForecast{Choice: memory.Choices}, Facts{}, l, false, everything)
}

// The window of a unit is that of its microbatch with the shortest, whether the stash or
// the device holds what it saves. Microbatch 0 is saved at 10 and loaded at 20, microbatch 1
// is saved at 20 and loaded at 40.
func TestWindowOfRows(t *testing.T) {
	p := record([]schedule.Pass{{}, {Microbatch: 1}, {Backward: true}, {Microbatch: 1, Backward: true}}, 1, module{"moe_act", 100, 10 * ms, 20 * ms})
	for _, p := range []*Profile{p, withRows(p, "moe_act", 10, 3)} {
		f, err := Simulate(p, nil, nil, slow, cfg)
		if err != nil {
			t.Fatal(err)
		}
		if w := f.Units[0].Window; w != 10*ms || f.Units[0].Groups != 2 {
			t.Errorf("rows in the stash: %v; %d groups with a window of %v", p.Rows != nil, f.Units[0].Groups, w)
		}
	}
}

// SPEC S5.5: of two steps of equal length the solver takes the one that copies fewer rows,
// because the kernels that copy rows slow compute down. A search ends early if rows
// must cross the link in any case and nothing waits for them.
func TestRowsSlowComputeDown(t *testing.T) {
	const bytes, layers = 60, 4
	p := withRows(record(single, layers, module{"core_attn", bytes, 200 * ms, 400 * ms}, module{"moe_act", bytes, 200 * ms, 400 * ms}), "moe_act", 10, 3)
	for u, f := range p.Units {
		f.Recompute = 0
		p.Units[u] = f
	}
	all, err := Solve(p, slow, cfg, noLimit, everything)
	if err != nil || !all.Nothing {
		t.Fatal(all, err)
	}
	for _, x := range []struct {
		less memory.Bytes
		rows bool
	}{{2 * bytes, false}, {5 * bytes, true}} {
		d, err := Solve(p, slow, cfg, all.Forecast.Extent-x.less, everything)
		if err != nil {
			t.Fatal(err)
		}
		f := d.Forecast
		if f.Step != all.Forecast.Step || (f.RowBytes > 0) != x.rows || f.Counts.OutBytes == 0 {
			t.Errorf("%d bytes less: a step of %v, %v with everything kept; %v of rows and %v of others are copied", x.less, f.Step, all.Forecast.Step, f.RowBytes, f.Counts.OutBytes)
		}
		if drag := float64(f.RowBytes)/slow.Out + float64(f.RowBytes)/slow.In; math.Abs(f.paid-f.Step.Seconds()-drag/16) > 1e-6 {
			t.Errorf("%d bytes less: a step of %v counts as %.6f s; copies of rows take %.6f s", x.less, f.Step, f.paid, drag)
		}
	}
	rows := *p.Rows
	rows.Fixed, rows.Pages = true, 3
	p.Rows = &rows
	if d, err := Solve(p, slow, cfg, all.Forecast.Extent-2*bytes, everything); err != nil || d.Forecast.RowBytes == 0 || d.Tried > 100 {
		t.Errorf("with few pages: %v; %v of rows are copied, after %d tries", err, d.Forecast.RowBytes, d.Tried)
	}
}

// A share counts the bytes that leave the device, also of groups that never come back.
func TestSharesCountWhatLeaves(t *testing.T) {
	p := record(single, 4, module{"a", 100, 40 * ms, 80 * ms}, module{"b", 100, 40 * ms, 80 * ms})
	p.Tape.Ops = slices.DeleteFunc(p.Tape.Ops, func(op residency.Op) bool {
		return op.Group.Layer == 0 && (op.Kind == residency.OpLoad || op.Kind == residency.OpRelease)
	})
	_, shares, err := Balance([]*Profile{p}, memory.Links{Out: 10000, In: 10000}, cfg, Allowed{Offload: true}, 0.02)
	if err != nil {
		t.Fatal(err)
	}
	c := shares[0].Decision.Forecast.Counts
	if c.OutBytes == c.InBytes || shares[0].Moved != c.OutBytes {
		t.Errorf("%d bytes moved, %d out and %d in", shares[0].Moved, c.OutBytes, c.InBytes)
	}
}

// A search that must pay ends once it has taken as long as it could save: sooner if steps are
// short, and not at all if they are long. What it finds by then is followed all the same.
func TestSearchPays(t *testing.T) {
	solve := func(scale time.Duration, allowed Allowed) *Decision {
		p := record(passes(t, schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}, 0), 10,
			module{"attn_norm", 10 << 20, scale, 2 * scale}, module{"core_attn", 60 << 20, 4 * scale, 8 * scale}, module{"mlp", 80 << 20, scale, 2 * scale})
		l := memory.Links{Out: 2 << 20 / scale.Seconds(), In: 2 << 20 / scale.Seconds()} // the same waits at every scale
		kept, err := Simulate(p, nil, nil, l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		d, err := Solve(p, l, cfg, kept.Extent/2, allowed)
		if err != nil || d.Forecast.Extent > kept.Extent/2 || d.costsNothing() {
			t.Fatalf("%v, or the copies hide", err)
		}
		return d
	}
	must := everything
	must.PayIn = 10
	for _, x := range []struct {
		scale time.Duration
		cut   bool
	}{{time.Microsecond, true}, {time.Second, false}} {
		whole, d := solve(x.scale, everything), solve(x.scale, must)
		if x.cut != (d.Tried < whole.Tried) || d.Tried > whole.Tried || d.Forecast.Step < whole.Forecast.Step || d.Forecast.Step > 2*whole.Forecast.Step {
			t.Errorf("by the %v: %d candidates and a step of %v, and without an end %d and %v", x.scale, d.Tried, d.Forecast.Step, whole.Tried, whole.Forecast.Step)
		}
	}
}
