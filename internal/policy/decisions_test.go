// This file owns decisions beside a golden file: what the solver and the plans for choices
// made by hand do with a few dozen steps, to the byte and the microsecond. Properties say
// that a decision is sound; this table shows that it became neither slower nor larger, nor
// takes a longer search, when code changes.

package policy

import (
	"fmt"
	"math/rand/v2"
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

// inScopes returns a step whose every pass is captured as one scope.
func inScopes(p *Profile) *Profile {
	q := *p
	q.Tape.Ops = nil
	last := schedule.Pass{Chunk: -1}
	border := func(kind residency.OpKind, at time.Duration) {
		q.Tape.Ops = append(q.Tape.Ops, residency.Op{Kind: kind, At: at})
	}
	for _, op := range p.Tape.Ops {
		if op.Kind == residency.OpSave || op.Kind == residency.OpLoad {
			now := schedule.Pass{Chunk: op.Group.Chunk, Microbatch: op.Group.Microbatch, Backward: op.Kind == residency.OpLoad}
			if now != last {
				if last.Chunk >= 0 {
					border(residency.OpEndScope, op.At)
				}
				border(residency.OpBeginScope, op.At)
				last = now
			}
		}
		q.Tape.Ops = append(q.Tape.Ops, op)
	}
	border(residency.OpEndScope, p.Tape.Span)
	return &q
}

// goldenStep is a step of the table with the links that it runs on.
type goldenStep struct {
	name string
	p    *Profile
	l    memory.Links
}

func goldenSteps(t testing.TB) []goldenStep {
	one := schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}
	deep := schedule.Pipeline{Ranks: 3, Chunks: 1, Microbatches: 5}
	interleaved := schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 4}
	fast := memory.Links{Out: 20e3, In: 25e3, Both: 30e3, Latency: ms / 2}
	slow := memory.Links{Out: 2500, In: 2000, Both: 3000, Latency: ms}
	layer := []module{{"attn_norm", 10, ms, 2 * ms}, {"core_attn", 64, 11 * ms, 23 * ms}, {"moe_act", 90, 4 * ms, 7 * ms}}
	plain := func(pipe schedule.Pipeline, rank, layers int, shared bool) *Profile {
		p := recordShared(passes(t, pipe, rank), layers, shared, layer...)
		p.Base = 100
		for u, f := range p.Units {
			f.CanOffload = u.Name != "attn_norm" || u.Layer != 1
			if u.Name == "core_attn" && u.Layer == 0 {
				f.Recompute = 0
			}
			p.Units[u] = f
		}
		return p
	}
	rows := func(sets, more int, pipe schedule.Pipeline) *Profile {
		p := withRows(plain(pipe, 0, 3, false), "moe_act", 8, sets)
		p.Rows.MoreSets, p.Rows.SetBytes = more, 90
		return p
	}
	fixed := rows(2, 0, deep)
	fixed.Rows.Fixed, fixed.Rows.Pages = true, 20
	return []goldenStep{
		{"one pass, fast link", plain(one, 0, 4, false), fast},
		{"one pass, slow link", plain(one, 0, 4, false), slow},
		{"shared inputs", plain(deep, 0, 2, true), slow},
		{"first of three ranks", plain(deep, 0, 2, false), slow},
		{"last of three ranks", plain(deep, 2, 3, false), slow},
		{"two chunks", plain(interleaved, 0, 2, false), fast},
		{"in scopes", inScopes(plain(deep, 0, 2, false)), slow},
		{"rows in one set", rows(1, 2, one), slow},
		{"rows in two sets", rows(2, 1, deep), fast},
		{"rows in few pages", fixed, slow},
	}
}

func us(d time.Duration) string { return fmt.Sprint(d.Round(time.Microsecond)) }

// line describes a decision in one line, with a letter for each unit's choice in the order
// of saving.
func line(d *Decision, err error) string {
	if err != nil {
		return err.Error()
	}
	f := d.Forecast
	var b strings.Builder
	fmt.Fprintf(&b, "step %v of %v, waits %v, busy %v out %v in; ", us(f.Step), us(f.Compute), us(f.Waiting), us(f.OutBusy), us(f.InBusy))
	fmt.Fprintf(&b, "extent %d peak %d host %d; %+v; tried %d; ", f.Extent, f.Peak, f.Host, f.Counts, d.Tried)
	if f.PageBytes > 0 {
		fmt.Fprintf(&b, "pages %d+%d, %d spilled, %d bytes cross, %d sets; ", f.DevicePages, f.HostPages, f.Spilled, f.RowBytes, f.Sets)
	}
	for _, u := range f.Units {
		fmt.Fprintf(&b, "%c", u.Choice.String()[0])
	}
	return b.String()
}

// reloads describes a plan: its window and limit, and where it reloads which groups,
// as name/chunk.layer.microbatch.
func reloads(p *residency.Plan) string {
	if p == nil {
		return "no plan"
	}
	var b strings.Builder
	fmt.Fprintf(&b, "window %d, limit %d, %d groups leave;", p.Window, p.Device, len(p.Offload))
	for at, groups := range p.Prefetch {
		for _, g := range groups {
			fmt.Fprintf(&b, " %d:%s/%d.%d.%d", at, g.Name, g.Chunk, g.Layer, g.Microbatch)
		}
	}
	return b.String()
}

// unitLines describes the units of a decision: those that differ from the one before.
func unitLines(d *Decision) string {
	var b strings.Builder
	last := ""
	for _, u := range d.Reasons {
		s := fmt.Sprintf("%d groups of %d, %d moved, window %v, copies %v, waits %v, again %v, hidden %.2f: %s", u.Groups, u.Bytes, u.Moved, us(u.Window), us(u.Copies), us(u.Waiting), us(u.Again), u.Hidden, u.Why)
		if s != last {
			fmt.Fprintf(&b, "    %v: %s\n", u.Unit, s)
		}
		last = s
	}
	return b.String()
}

// SPEC S5.2 S5.4 S5.5
func TestDecisionsStayGood(t *testing.T) {
	if raceEnabled {
		t.Skip("solves fifty times, which takes long under the race detector")
	}
	var b strings.Builder
	for _, x := range goldenSteps(t) {
		c := residency.Config{Host: noLimit, Align: 4}
		kept, err := Simulate(x.p, nil, nil, x.l, residency.Config{Device: noLimit, Align: 4})
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s: kept %d bytes, %v\n", x.name, kept.Extent, us(kept.Step))
		for _, part := range []memory.Bytes{100, 85, 60, 35, 5} {
			budget := x.p.Base + (kept.Extent-x.p.Base)*part/100
			d, err := solveAny(x.p, x.l, c, budget, everything, 0.05)
			if x.p.Rows != nil && x.p.Rows.MoreSets > 1 && part == 60 {
				d, err = Solve(x.p, x.l, c, budget, everything)
			}
			fmt.Fprintf(&b, "  budget %d%%: %s\n", part, line(d, err))
			if err == nil && part == 60 {
				fmt.Fprintf(&b, "    %s\n%s", reloads(d.Plan), unitLines(d))
			}
		}
		c.Device = noLimit
		for _, follow := range []struct {
			name string
			with func(*Profile, memory.Policy, memory.Links, residency.Config) (*Decision, error)
		}{{"follow", Follow}, {"follow tightly", FollowTight}} {
			d, err := follow.with(x.p, offloadAll(x.p), x.l, c)
			fmt.Fprintf(&b, "  %s: %s\n", follow.name, line(d, err))
			if err == nil {
				fmt.Fprintf(&b, "    %s\n", reloads(d.Plan))
			}
		}
		// With borrowed memory copies in flight count, and a limit makes compute wait for them.
		lent := x.p.Tape
		lent.Ops = slices.Clone(lent.Ops)
		for i := range lent.Ops {
			if lent.Ops[i].Kind == residency.OpTake {
				lent.Ops[i].Kind = residency.OpBorrow
			}
		}
		borrowed, bc := *x.p, c
		borrowed.Tape, bc.Borrowed = lent, true
		d, err := Follow(&borrowed, offloadAll(x.p), x.l, bc)
		fmt.Fprintf(&b, "  borrowed: %s\n", line(d, err))
		if err == nil {
			fmt.Fprintf(&b, "    window %d, limit %d\n", d.Plan.Window, d.Plan.Device)
		}
		h := ByHand{OffloadModules: []string{"core_attn", "moe_act"}, OffloadFraction: 0.7, Margin: 1, DeltaBytes: 70}
		for rank := range 2 {
			pol, err := h.Policy(x.p, rank)
			if err != nil {
				t.Fatal(err)
			}
			units := pol.Units()
			slices.SortFunc(units, memory.Unit.Compare)
			fmt.Fprintf(&b, "  by hand on rank %d:", rank)
			for _, u := range units {
				if pol[u] == memory.Offload {
					fmt.Fprintf(&b, " %v", u)
				}
			}
			fmt.Fprintln(&b)
		}
	}
	golden.Check(t, "decisions.txt", b.String())
}

// Decisions about drawn steps: pipelines, storages of two groups, rows, borrowed memory, host
// memory that is short, and choices that are not allowed. SPEC S5.2 S5.5
func TestDrawnDecisions(t *testing.T) {
	if raceEnabled {
		t.Skip("one goroutine, which the race detector only makes slow")
	}
	type drawn struct {
		p *Profile
		l memory.Links
	}
	gen := rapid.Custom(func(t *rapid.T) drawn { return drawn{drawProfile(t, 9), drawLinks(t)} })
	rng := rand.New(rand.NewPCG(5, 5))
	var b strings.Builder
	for seed := range 90 {
		x := gen.Example(seed)
		c := residency.Config{Host: noLimit, Align: []memory.Bytes{1, 4}[rng.IntN(2)]}
		p := x.p
		if p.Rows == nil && rng.IntN(2) == 0 {
			p, c.Borrowed = borrowed(p), true
		}
		if p.Rows != nil && rng.IntN(2) == 0 {
			p.Rows.MoreSets, p.Rows.SetBytes = 1+rng.IntN(2), 30
		}
		room := c
		room.Device = noLimit
		kept, err := Simulate(p, nil, nil, x.l, room)
		if err != nil {
			t.Fatal(err)
		}
		if rng.IntN(3) == 0 {
			c.Host = kept.Extent / 3
		}
		allowed := everything
		switch rng.IntN(4) {
		case 0:
			allowed.Offload = false
		case 1:
			allowed.Recompute = false
		}
		budget := p.Base + (kept.Extent-p.Base)*memory.Bytes(45+rng.IntN(50))/100
		d, err := Solve(p, x.l, c, budget, allowed)
		fmt.Fprintf(&b, "%d: %d of %d, %+v, host %d, borrowed %v: %s\n", seed, budget, kept.Extent, allowed, c.Host, c.Borrowed, line(d, err))
		if err == nil {
			fmt.Fprintf(&b, "  %s\n", reloads(d.Plan))
			if seed%9 == 0 {
				b.WriteString(unitLines(d))
			}
		}
	}
	golden.Check(t, "drawn.txt", b.String())
}
