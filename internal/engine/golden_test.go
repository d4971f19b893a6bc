// This file owns what steps do beside a golden file: what a loop moves, keeps, captures,
// recomputes and forecasts, step by step, by a steady clock. Other tests show that results
// are exact and limits are kept; this table shows what costs memory or time and no result.

package engine

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// goldenLoops are the loops of the table.
func goldenLoops() []struct {
	name string
	loopConfig
} {
	redo := change(hand("attn_norm", "expert_fc1"), func(h *policy.ByHand) { h.RecomputeModules = []string{"core_attn", "mlp"} })
	slow := memory.Links{Out: 3e8, In: 2e8, Both: 4e8, Latency: 2 * time.Microsecond}
	fixed := memory.Policy{{Name: "core_attn"}: memory.Offload, {Name: "core_attn", Layer: 1}: memory.Recompute, {Name: "mlp"}: memory.Offload}
	rows := func(c Config, sets int) loopConfig {
		l := on(1, c)
		l.most, l.sets, l.work = 40, sets, 100*time.Microsecond
		return l
	}
	timed := func(l loopConfig) loopConfig { l.work = 50 * time.Microsecond; return l }
	borrowing := func(l loopConfig) loopConfig { l.borrows = true; return l }
	return []struct {
		name string
		loopConfig
	}{
		{"nothing to decide", on(1, Config{})},
		{"by hand, slow link", timed(on(1, Config{ByHand: byHand["all"], Links: slow}))},
		{"by hand, half", timed(on(0, Config{ByHand: byHand["fraction"], Links: slow, MinBytes: 600}))},
		{"by hand, recomputed, borrowed inputs", borrowing(timed(on(2, Config{ByHand: redo})))},
		{"by unit", timed(on(0, Config{Policy: fixed, Links: slow}))},
		{"by name", timed(on(1, Config{GroupChoices: map[string]memory.Choice{"core_attn": memory.Offload, "moe_act": memory.Offload}, Links: slow}))},
		{"by hand in scopes", timed(on(1, Config{ByHand: hand("core_attn", "mlp_norm", "expert_fc1"), Scopes: scopes}))},
		{"by hand, delayed, in scopes", timed(on(0, Config{ByHand: change(hand("core_attn", "moe_act"), func(h *policy.ByHand) { h.Delay = true }), Scopes: scopes}))},
		{"recomputed in scopes", timed(on(1, Config{ByHand: byHand["recompute"], Scopes: scopes}))},
		{"one graph", timed(on(1, Config{ByHand: byHand["all"], Scopes: whole, WarmUp: 1}))},
		{"a limit", timed(on(1, Config{SavedLimit: 30 * memory.KiB, Links: slow, Window: 8}))},
		{"a limit without recomputing", timed(on(1, Config{SavedLimit: 34 * memory.KiB, Links: slow, Window: 4, NoRecompute: true, HostLimit: 64 * memory.KiB}))},
		{"rows under a budget", rowBudget()},
		{"rows by hand", rows(Config{ByHand: hand("expert_fc1", "core_attn"), Stash: store(40, 400), Links: slow}, 2)},
		{"rows that overflow, one graph", rows(Config{Stash: store(4, 400), Scopes: whole}, 2)},
	}
}

// digest is a sink that keeps a sum of the events of a step: all but their times and the
// numbers of the work around them, which leave out waits for what is over already.
type digest struct{ sum uint32 }

func (d *digest) Emit(e trace.Event) {
	if e.Kind.Span() {
		return
	}
	e.Time, e.Took, e.First, e.Last = 0, 0, 0, 0
	h := fnv.New32a()
	fmt.Fprint(h, d.sum, e)
	d.sum = h.Sum32()
}

// state describes what the steps of a loop came to. The table leaves lines out that are
// those of the step before.
func (l *loop) state(b *strings.Builder) {
	s := l.rt.Summary(l.key())
	held, host := l.rt.Held()
	fmt.Fprintf(b, "    %+v, device %d host %d extent %d; held %d and %d, generation %d, %d calls, %d again\n", s.Counts, s.Device, s.Host, s.Extent, held, host, l.rt.generation(), l.calls, l.again)
	if s.Stash != nil {
		fmt.Fprintf(b, "    stash %+v, sets %v\n", *s.Stash, l.rt.stash.Sets())
	}
	if s.Graphs != nil {
		fmt.Fprintf(b, "    graphs %+v\n", *s.Graphs)
	}
	for _, g := range s.Groups {
		var units []string
		for c, n := range g.Units {
			units = append(units, fmt.Sprintf("%v %d", c, n))
		}
		slices.Sort(units)
		fmt.Fprintf(b, "      %s: %d groups of %d, %d moved, %s\n", g.Name, g.Groups, g.Bytes, g.Moved, strings.Join(units, ", "))
	}
	if f := l.rt.Forecast(l.key()); f != nil {
		fmt.Fprintf(b, "    forecast %v of %v, waits %v; extent %d peak %d host %d; pages %d+%d, %d spilled, %d sets\n", f.Step, f.Compute, f.Waiting, f.Extent, f.Peak, f.Host, f.DevicePages, f.HostPages, f.Spilled, f.Sets)
	}
	if d := l.rt.Decision(l.key()); d != nil {
		fmt.Fprintf(b, "    decision on rank %d, budget %d, nothing %v, tried %d, kept %d in %v, %d reasons, notes %q\n", d.Rank, d.Budget, d.Nothing, d.Tried, d.Before.Extent, d.Before.Step, len(d.Reasons), d.Notes)
		var words []string
		for _, r := range d.Reasons {
			if w := fmt.Sprintf("%v, %s", r.Choice, r.Why); !slices.Contains(words, w) {
				words = append(words, w)
			}
		}
		fmt.Fprintf(b, "      because: %s\n", strings.Join(words, "; "))
	}
}

// SPEC S5.1 S5.5 S6.1
func TestStepsStayGood(t *testing.T) {
	if raceEnabled {
		t.Skip("the table is the same, and takes long")
	}
	var b strings.Builder
	for _, x := range goldenLoops() {
		d := &digest{}
		x.Trace, x.Effort = d, 1
		fmt.Fprintf(&b, "%s\n", x.name)
		var log *devicelog.Log
		mustOn(t, func(dev device.Device) device.Device {
			dev, log = devicelog.Wrap(dev)
			log.Overlap, log.Unordered = true, []string{"download compute#1", "copy stash records#1"} // of records, which are in a map
			return dev
		}, x.loopConfig, func(l *loop, rng *rand.Rand) error {
			last := map[string]bool{}
			for n := range 8 {
				if l.extra = 0; n == 5 && l.Scopes == 0 && l.rt.limit() == 0 { // to solve twice takes long
					l.extra = 2 // it departs from its plan, and the next is recorded
				}
				if err := l.one(l.key(), rng); err != nil {
					return err
				}
				fmt.Fprintf(&b, "  step %d: trace %08x, %s, %d of the device\n", n, d.sum, log.Take(), l.dev.Memory().Kind[memory.Device].Current)
				var now strings.Builder
				l.state(&now)
				lines := map[string]bool{}
				for line := range strings.Lines(now.String()) {
					if lines[line] = true; !last[line] {
						b.WriteString(line)
					}
				}
				last = lines
				if n == 3 {
					if err := l.one(memory.Key{Microbatches: l.key().Microbatches, Phase: memory.Evaluate}, rng); err != nil {
						return err
					}
				}
			}
			fmt.Fprintf(&b, "  peaks %d and %d; links %v\n", l.dev.Memory().Kind[memory.Device].Peak, l.dev.Memory().Kind[memory.Host].Peak, l.rt.Links())
			return nil
		})
	}
	golden.Check(t, "steps.txt", b.String())
}
