package policy

import (
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func offloadAll(p *Profile) memory.Policy {
	pol := memory.Policy{}
	for u, f := range p.Units {
		if f.CanOffload {
			pol[u] = memory.Offload
		}
	}
	return pol
}

// What recomputing and stashing make of a tape, written out.
// SPEC S5.2
func TestUnder(t *testing.T) {
	p := record(single, 1, module{"a", 100, 10 * ms, 20 * ms}, module{"b", 50, 5 * ms, 10 * ms})
	a, b := memory.GroupID{Name: "a"}, memory.GroupID{Name: "b"}
	ops := func(list ...residency.Op) []residency.Op { return list }
	check := func(name string, got residency.Tape, span time.Duration, want []residency.Op) {
		t.Helper()
		if got.Span != span || len(got.Ops) != len(want) {
			t.Fatalf("%s: %d calls in %v, want %d in %v", name, len(got.Ops), got.Span, len(want), span)
		}
		for i := range want {
			if !reflect.DeepEqual(got.Ops[i], want[i]) {
				t.Errorf("%s: call %d is %+v, want %+v", name, i, got.Ops[i], want[i])
			}
		}
	}
	item := func(id int, stay bool) []residency.Item { return []residency.Item{{ID: id, Stay: stay}} }
	check("recompute", p.Under(memory.Policy{a.Unit(): memory.Recompute}), 55*ms, ops(
		residency.Op{Kind: residency.OpTake, ID: 0, Bytes: 100},
		residency.Op{Kind: residency.OpGive, ID: 0, At: 10 * ms},
		residency.Op{Kind: residency.OpTake, ID: 1, Bytes: 50, At: 10 * ms},
		residency.Op{Kind: residency.OpSave, Group: b, Items: item(1, false), At: 15 * ms},
		residency.Op{Kind: residency.OpGive, ID: 1, At: 15 * ms},
		residency.Op{Kind: residency.OpLoad, Group: b, At: 15 * ms},
		residency.Op{Kind: residency.OpRelease, Group: b, At: 25 * ms},
		residency.Op{Kind: residency.OpTake, ID: 2, Bytes: 100, At: 25 * ms},
		residency.Op{Kind: residency.OpSave, Group: a, Items: item(2, false), At: 35 * ms},
		residency.Op{Kind: residency.OpLoad, Group: a, At: 35 * ms},
		residency.Op{Kind: residency.OpGive, ID: 2, At: 35 * ms},
		residency.Op{Kind: residency.OpRelease, Group: a, At: 55 * ms},
	))
	if got := p.Under(nil); !reflect.DeepEqual(got, p.Tape) {
		t.Errorf("nothing chosen changes the step: %+v", got)
	}
}

// A storage that two groups save leaves once if both leave, with the first, and
// comes back once, for the first that needs it; if one keeps it nothing comes back.
// SPEC S5.3
func TestPlanShared(t *testing.T) {
	p := recordShared(single, 4, true, module{"a", 100, 10 * ms, 10 * ms}, module{"b", 10, 10 * ms, 10 * ms})
	l := memory.Links{Out: 100_000, In: 100_000}
	for _, c := range []struct {
		pol   memory.Policy
		moved memory.Bytes
	}{
		{memory.Policy{{Name: "a", Chunk: 0, Layer: 0}: memory.Offload, {Name: "b", Chunk: 0, Layer: 0}: memory.Offload}, 110},
		{memory.Policy{{Name: "a", Chunk: 0, Layer: 0}: memory.Offload}, 0},
		{memory.Policy{{Name: "b", Chunk: 0, Layer: 0}: memory.Offload}, 10},
	} {
		plan, err := Plan(p, c.pol, l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		f, err := Simulate(p, c.pol, plan, l, cfg)
		if err != nil || f.Counts.OutBytes < c.moved || f.Counts.InBytes != c.moved || f.Counts.Late > 0 || f.Waiting > 0 {
			t.Errorf("%v: %+v, waiting %v, %v", c.pol, f.Counts, f.Waiting, err)
		}
	}
}

// Six layers of 100 bytes, 10 ms forward and 10 ms backward; copies of 10 ms each
// way. Layer i is saved at 10(i+1) and loaded at 60 + 10(5-i): windows of 0, 20,
// 40, 60, 80, 100 ms. With a safety of 1.25 copies count 12.5 ms: layer 5's never
// fit, layer 4's 25 do not either, the others' do.
// SPEC S5.3
func TestPlanMargin(t *testing.T) {
	p := record(single, 6, module{"a", 100, 10 * ms, 10 * ms})
	l := memory.Links{Out: 10_000, In: 10_000}
	plan, err := Plan(p, offloadAll(p), l, cfg)
	if err != nil {
		t.Fatal(err)
	}
	for layer := range 6 {
		if got := plan.Offload[memory.GroupID{Name: "a", Layer: layer}]; got != (layer < 4) {
			t.Errorf("layer %d leaves: %v", layer, got)
		}
	}
	f, err := Simulate(p, offloadAll(p), plan, l, cfg)
	if err != nil || f.Waiting != 0 || f.Counts.Late != 0 {
		t.Errorf("waiting %v, %d late, %v", f.Waiting, f.Counts.Late, err)
	}
	// Where there is no room for them they leave all the same.
	tight := cfg
	tight.Device = 200
	plan, err = Plan(p, offloadAll(p), l, tight)
	if err != nil {
		t.Fatal(err)
	}
	f, err = Simulate(p, offloadAll(p), plan, l, tight)
	if err != nil || f.Extent > 200 || f.Waiting == 0 {
		t.Errorf("extent %d of 200, waiting %v, %v", f.Extent, f.Waiting, err)
	}
}

// Copies back are placed by time: as late as is safe, in the order of need, before
// the backward pass where they must be, and not one step ahead by habit.
func TestPlanPositions(t *testing.T) {
	p := record(single, 8, module{"a", 100, 10 * ms, 10 * ms})
	s := p.step(offloadAll(p))
	// 20 ms a copy back, 25 with safety: layer 0, loaded at 150, must begin at 125,
	// layer 1 at 100, layer 2 at 75: in the forward pass, behind the save at 70.
	plan := s.plan([]bool{true, true, true, false, false, false, false, false}, memory.Links{Out: 100_000, In: 5000}, safety)
	want := map[int]int{} // layer to position
	for pos, list := range plan.Prefetch {
		for _, g := range list {
			want[g.Layer] = pos
		}
	}
	// Saves are at positions 0 to 7 (10 to 80 ms), loads at 8 to 15 (80 to 150 ms).
	if !reflect.DeepEqual(want, map[int]int{0: 12, 1: 10, 2: 6}) {
		t.Errorf("positions by layer: %v", want)
	}
	// Beside copies out that take half of the link, coming back takes twice as long.
	slow, _ := back(memory.Links{Out: 1000, In: 1000, Both: 1000}, 0.2, 100, []span{{0, 0.15}})
	if fast, _ := back(memory.Links{Out: 1000, In: 1000}, 0.2, 100, []span{{0, 0.15}}); fast < 0.0999 || fast > 0.1001 || slow < 0.0499 || slow > 0.0501 {
		t.Errorf("100 bytes by 0.2 s: from %g alone, from %g beside; want 0.1 and 0.05", fast, slow)
	}
}

// On every kind of schedule a plan's forecast is what a step takes: nothing ever
// exceeds its extent, and where the link is fast enough nobody waits.
// SPEC S5.1 S4.5
func TestPlanSchedules(t *testing.T) {
	for _, c := range []struct {
		name string
		pipe schedule.Pipeline
		rank int
	}{
		{"one rank", schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 3}, 0},
		{"1F1B first", schedule.Pipeline{Ranks: 4, Chunks: 1, Microbatches: 8}, 0},
		{"1F1B last", schedule.Pipeline{Ranks: 4, Chunks: 1, Microbatches: 8}, 3},
		{"interleaved first", schedule.Pipeline{Ranks: 4, Chunks: 2, Microbatches: 8}, 0},
		{"interleaved last", schedule.Pipeline{Ranks: 4, Chunks: 2, Microbatches: 8}, 3},
	} {
		list := passes(t, c.pipe, c.rank)
		p := record(list, 4, module{"core_attn", 100, 10 * ms, 20 * ms}, module{"moe_act", 60, 6 * ms, 12 * ms})
		if s := p.step(nil).schedule; !s.Equal(schedule.Expand(list, 4, "core_attn", "moe_act")) {
			t.Fatalf("%s: not the schedule that the pipeline prescribes", c.name)
		}
		l := memory.Links{Out: 40_000, In: 40_000, Both: 60_000}
		kept, _ := Simulate(p, nil, nil, l, cfg)
		plan, err := Plan(p, offloadAll(p), l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		f, err := Simulate(p, offloadAll(p), plan, l, cfg)
		if err != nil {
			t.Fatal(err)
		}
		// Besides what is in use: what is on its way in both directions, and what
		// stays because it is needed again at once.
		if f.Waiting > 0 || f.Counts.Late > 0 || f.Extent > 900 || f.Extent*2 > kept.Extent+640 {
			t.Errorf("%s: waiting %v, %d late, extent %d of %d", c.name, f.Waiting, f.Counts.Late, f.Extent, kept.Extent)
		}
		// Coming back in the order of leaving reversed would be wrong for pipelines.
		lifo := true
		var last int
		for _, group := range plan.Prefetch {
			for _, g := range group {
				at, _ := plan.Schedule.Saved(g)
				lifo = lifo && (last == 0 || at < last)
				last = at
			}
		}
		if lifo {
			t.Errorf("%s: groups come back last in, first out", c.name)
		}
		t.Logf("%s: extent %d of %d, %d of %d moved", c.name, f.Extent, kept.Extent, f.Counts.Out, len(f.Units))
	}
}

// Any mix of choices on any step, under any limit that it fits: nobody exceeds it,
// no time is lost or made up, and nothing comes back that has not left.
func TestSimulateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, l := drawProfile(t, 18), drawLinks(t)
		pol := memory.Policy{}
		for _, u := range p.step(nil).units {
			if c := memory.Choice(rapid.IntRange(0, memory.Choices-1).Draw(t, "choice")); p.Units[u].can(c) {
				pol[u] = c
			}
		}
		c := cfg
		if rapid.Bool().Draw(t, "limit") {
			c.Device = memory.Bytes(rapid.Int64Range(40, 400).Draw(t, "device"))
		}
		plan, err := Plan(p, pol, l, c)
		if err != nil {
			return
		}
		f, err := Simulate(p, pol, plan, l, c)
		if err != nil {
			t.Fatal(err)
		}
		var again, waiting time.Duration
		var moved memory.Bytes
		for _, u := range f.Units {
			again += u.Again
			waiting += u.Waiting
			moved += u.Moved
		}
		near := func(a, b time.Duration) bool { return (a - b).Abs() < time.Microsecond }
		if f.Compute != p.Tape.Span+again || !near(f.Step, f.Compute+f.Waiting) || !near(waiting, f.Waiting) {
			t.Fatalf("step %v, compute %v of which %v again, waiting %v (units' %v)", f.Step, f.Compute, again, f.Waiting, waiting)
		}
		if f.Extent-p.Base > c.Device || f.Peak > f.Extent || moved != f.Counts.OutBytes+f.RowBytes || f.Counts.OutBytes < f.Counts.InBytes {
			t.Fatalf("extent %d, peak %d of %d; %d bytes out, %d in, units' %d", f.Extent, f.Peak, c.Device, f.Counts.OutBytes, f.Counts.InBytes, moved)
		}
		if f.Counts.Departed {
			t.Fatal("the step departs from its own plan")
		}
	})
}

// A tape of 20,000 calls.
func BenchmarkSimulate(b *testing.B) {
	p := record(passes(b, schedule.Pipeline{Ranks: 8, Chunks: 1, Microbatches: 32}, 0), 15, module{"attn_norm", 10 << 20, ms, 2 * ms},
		module{"qkv_linear", 20 << 20, ms, 2 * ms}, module{"core_attn", 60 << 20, 4 * ms, 8 * ms}, module{"mlp_norm", 10 << 20, ms, 2 * ms},
		module{"expert_fc1", 80 << 20, ms, 2 * ms}, module{"moe_act", 80 << 20, ms, 2 * ms}, module{"attn_proj", 20 << 20, ms, 2 * ms}, module{"x", 20 << 20, ms, 2 * ms})
	pol := offloadAll(p)
	l := memory.Links{Out: 50e9, In: 50e9, Both: 80e9}
	b.Logf("%d calls", len(p.Tape.Ops))
	b.Run("Plan", func(b *testing.B) {
		for b.Loop() {
			if _, err := Plan(p, pol, l, cfg); err != nil {
				b.Fatal(err)
			}
		}
	})
	plan, _ := Plan(p, pol, l, cfg)
	b.Run("Simulate", func(b *testing.B) {
		for b.Loop() {
			if _, err := Simulate(p, pol, plan, l, cfg); err != nil {
				b.Fatal(err)
			}
		}
	})
	kept, _ := Simulate(p, nil, nil, l, cfg)
	b.Run("Solve", func(b *testing.B) {
		for b.Loop() {
			if _, err := Solve(p, l, cfg, kept.Extent/2, Allowed{Offload: true, Recompute: true}); err != nil {
				b.Fatal(err)
			}
		}
	})
}

// A unit without facts can be kept, and nothing else.
func TestUnknownChoice(t *testing.T) {
	for c := memory.Keep; c <= memory.Choices; c++ {
		if got := (Facts{}).can(c); got != (c == memory.Keep) {
			t.Errorf("%v: %v", c, got)
		}
	}
	if (Facts{CanOffload: true, Recompute: 1}).can(memory.Choices) {
		t.Error("a choice that does not exist is possible")
	}
}

// Times are rounded to what people read, and the shortest keep their digits.
func TestShort(t *testing.T) {
	for d, want := range map[time.Duration]string{
		5*time.Minute + 13*time.Second + 530480*time.Microsecond: "5m14s", 83456789 * time.Microsecond: "1m23s",
		12345678 * time.Microsecond: "12.3s", 1234567 * time.Microsecond: "1.23s", 123456 * time.Microsecond: "123.46ms", 340 * time.Microsecond: "340µs", 0: "0s",
	} {
		if got := short(d).String(); got != want {
			t.Errorf("%d ns: %s, want %s", d, got, want)
		}
	}
}
