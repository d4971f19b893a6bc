package plan

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Each chunk holds the expected microbatches at the point of a rank with most of them, for
// 8 ranks with 4 chunks each.
func TestInFlight(t *testing.T) {
	for rank, want := range map[int][]int{0: {15, 8, 8, 8}, 1: {13, 8, 8, 8}, 7: {8, 8, 8, 1}} {
		passes, err := schedule.Pipeline{Ranks: 8, Chunks: 4, Microbatches: 64}.Passes(rank)
		if err != nil {
			t.Fatal(err)
		}
		live, most, at := make([]int, 4), 0, []int(nil)
		for _, p := range passes {
			if p.Backward {
				live[p.Chunk]--
				continue
			}
			live[p.Chunk]++
			if n := live[0] + live[1] + live[2] + live[3]; n > most {
				most, at = n, slices.Clone(live)
			}
		}
		if !slices.Equal(at, want) {
			t.Errorf("rank %d holds %v, want %v", rank, at, want)
		}
	}
}

// The forecast finds the heaviest rank: dense layers in the first stages make a rank in the
// middle the heaviest. SPEC S6.1
func TestHeaviestRank(t *testing.T) {
	p := predicted(t, deepSeek(t))
	if p.Heaviest != 2 {
		t.Errorf("rank %d is the heaviest; with one dense layer on rank 0 and two on rank 1 it is rank 2", p.Heaviest)
	}
	for _, r := range p.Ranks {
		if r.Peak.Expected > p.Peak.Expected {
			t.Errorf("rank %d has %d, more than the heaviest's %d", r.Rank, r.Peak.Expected, p.Peak.Expected)
		}
	}
	// Rank 2 holds 11 + 8 + 8 + 8 microbatches of two MoE layers each; at the
	// peak in a backward pass one of them is partly done.
	for _, g := range p.Ranks[2].Groups {
		if g.Name == "moe_act" && (g.Live < 68 || g.Live > 70) {
			t.Errorf("%d layers and microbatches of moe_act are live, want about 70", g.Live)
		}
	}
}

// Full recompute keeps one input a unit. A unit of two layers keeps half as many, and
// recomputing only some layers keeps the others whole.
func TestFullRecomputation(t *testing.T) {
	kept := func(r Recompute) memory.Bytes {
		s := deepSeek(t)
		s.Layout = Layout{World: 32, EP: 32, ETP: 1}
		s.Batch.Global = 32
		s.Recompute = r
		d := newDims(mustNormalise(t, s))
		var n memory.Bytes
		for _, u := range d.chunk(d.s.Layout.Stages[0]).units {
			if u.name != "embedding" && u.name != "loss" {
				n += u.kept
			}
		}
		return n
	}
	input := memory.Bytes(2 * 4096 * 7168)
	if got := kept(Recompute{Full: true, Method: "uniform", Layers: 1}); got != 61*input {
		t.Errorf("61 layers keep %d bytes, want %d", got, 61*input)
	}
	if got := kept(Recompute{Full: true, Method: "uniform", Layers: 2}); got != 31*input {
		t.Errorf("31 units keep %d bytes, want %d", got, 31*input)
	}
	all, none := kept(Recompute{}), kept(Recompute{Full: true, Method: "uniform", Layers: 1})
	if got := kept(Recompute{Full: true, Method: "block", Layers: 30}); got <= none || got >= all {
		t.Errorf("30 of 61 layers recomputed keep %d bytes; all keep %d, none %d", got, all, none)
	}
}

// The offloaded share of groups is as set, by count and by bytes, and so is what ranks
// keep.
func TestOffloadAmounts(t *testing.T) {
	host := func(set func(*Offload)) []memory.Bytes {
		s := deepSeek(t)
		s.Offload.Modules = []string{"moe_act"}
		if set != nil {
			set(&s.Offload)
		}
		var n []memory.Bytes
		for _, r := range predicted(t, s).Ranks {
			n = append(n, r.Host)
		}
		return n
	}
	all := host(nil)
	group := memory.Bytes(2 * 4096 * 8 * 2 * 2048)
	if want := 70 * group; all[2] != want {
		t.Errorf("rank 2 moves %d bytes, want 70 groups, %d", all[2], want)
	}
	half := host(func(o *Offload) { o.Fraction = 0.5 })
	if half[2] != all[2]/2 {
		t.Errorf("half of the groups are %d bytes, want %d", half[2], all[2]/2)
	}
	delta := host(func(o *Offload) { o.Delta = group })
	for r := range all {
		if want := max(all[r]-memory.Bytes(r)*group, 0); delta[r] != want {
			t.Errorf("rank %d moves %d bytes with a delta, want %d", r, delta[r], want)
		}
	}
	if small := host(func(o *Offload) { o.MinElements = 1 << 40 }); slices.Max(small) != 0 {
		t.Errorf("nothing is large enough, yet %v bytes move", small)
	}
}

// A module that covers others moves their tensors, as one group of each layer.
func TestOffloadByCoveringModule(t *testing.T) {
	host := func(fraction float64, modules ...string) []memory.Bytes {
		s := deepSeek(t)
		s.Offload.Modules, s.Offload.Fraction = modules, fraction
		var n []memory.Bytes
		for _, r := range predicted(t, s).Ranks {
			n = append(n, r.Host)
		}
		return n
	}
	for _, m := range memory.Modules() {
		if len(m.Covers) == 0 {
			continue
		}
		parts, whole := host(1, m.Covers...), host(1, m.Name)
		if !slices.Equal(parts, whole) || slices.Max(whole) == 0 {
			t.Errorf("%s moves %v bytes by rank, and %v move %v", m.Name, whole, m.Covers, parts)
		}
		// Rank 2 has 14 layers, so half of its groups are seven whole layers.
		if half := host(0.5, m.Name); half[2] != whole[2]/2 {
			t.Errorf("half of the groups of %s are %d bytes, want %d", m.Name, half[2], whole[2]/2)
		}
	}
}

// The work of a forecast grows with the microbatches and not faster: a search makes
// thousands of forecasts. Allocations stand for work, because they do not depend on the
// machine. SPEC S6.1
func TestWorkOfAForecast(t *testing.T) {
	allocations := func(microbatches int) float64 {
		s := deepSeek(t)
		s.Layout.PP, s.Layout.VPP, s.Layout.EP, s.Layout.World = 16, 1, 16, 256
		s.Batch.Global = microbatches * 16
		return testing.AllocsPerRun(1, func() { predicted(t, s) })
	}
	few, many := allocations(64), allocations(128)
	t.Logf("61 layers, 16 ranks: %.0f allocations for 64 microbatches, %.0f for 128", few, many)
	if many > 2*few {
		t.Errorf("128 microbatches take %.0f allocations, more than twice the %.0f of 64", many, few)
	}
}

func BenchmarkPredict(b *testing.B) {
	s := deepSeek(b)
	for b.Loop() {
		predicted(b, s)
	}
}

// A rank keeps the last layer of the first microbatch, and in each backward pass the last
// layer of the next microbatch comes back, which is there during the forward pass between
// them. Of each layer 20 bytes leave, and 30 come back because some are copied twice.
func TestReloadsAhead(t *testing.T) {
	unit := cost{kept: 100, moved: 20, reloaded: 30, forward: 200, backward: 1000, ahead: 900}
	for _, x := range []struct {
		name      string
		rank      int
		older     bool
		live, top []memory.Bytes
	}{
		// Passes: F0 F1 B0 F2 B1 B2.
		{"first rank", 0, false,
			[]memory.Bytes{100, 320, 420, 330, 430, 230},
			[]memory.Bytes{200, 200, 900, 200, 900, 900}},
		{"first rank, older", 0, true,
			[]memory.Bytes{100, 300, 400, 300, 400, 200},
			[]memory.Bytes{200, 200, 1000, 200, 1000, 1000}},
		// Passes: F0 B0 F1 B1 F2 B2. Nothing can come back before its forward pass.
		{"last rank", 1, false,
			[]memory.Bytes{100, 220, 100, 220, 100, 220},
			[]memory.Bytes{200, 900, 200, 900, 200, 900}},
		{"last rank, older", 1, true,
			[]memory.Bytes{100, 220, 100, 220, 100, 220},
			[]memory.Bytes{200, 900, 200, 900, 200, 900}},
	} {
		passes, err := schedule.Pipeline{Ranks: 2, Chunks: 1, Microbatches: 3}.Passes(x.rank)
		if err != nil {
			t.Fatal(err)
		}
		w := &walk{passes: passes, older: x.older, chunks: []chunk{{units: []cost{unit, unit}}}}
		for i, p := range w.run() {
			if p.live != x.live[i] || p.top != x.top[i] {
				t.Errorf("%s: pass %d holds %d and needs %d, want %d and %d", x.name, i, p.live, p.top, x.live[i], x.top[i])
			}
		}
	}
}

// Attention that is not fused saves its probabilities twice inside of an offloaded module,
// and both copies come back. Queries, keys and values come back although they are recomputed.
func TestCopiedTwice(t *testing.T) {
	s := deepSeek(t)
	s.Kernels.Attention = "unfused"
	s.Offload.Modules = []string{"core_attn"}
	reloaded := func() (moved, back memory.Bytes) {
		d := newDims(mustNormalise(t, s))
		for _, u := range d.chunk(d.s.Layout.Stages[3]).units {
			moved, back = moved+u.moved, back+u.reloaded
		}
		return moved, back
	}
	moved, back := reloaded()
	layers := memory.Bytes(2)
	probs, qkv := layers*2*128*4096*4096, layers*2*4096*128*(2*192+128)
	if moved != probs+qkv || back != 2*probs+qkv {
		t.Errorf("%d bytes leave and %d come back, want %d and %d", moved, back, probs+qkv, 2*probs+qkv)
	}
	s.Recompute.Modules = []string{"mla_up_proj"}
	if moved, back = reloaded(); moved != probs || back != 2*probs+qkv {
		t.Errorf("with mla_up_proj %d bytes leave and %d come back, want %d and %d", moved, back, probs, 2*probs+qkv)
	}
}

// Of very many microbatches some are left out, in whole groups: the passes that are walked hold as much at their peak as all of them,
// whatever the chunks of a rank hold, and so does the end, where a last group may lack microbatches.
func TestVeryManyMicrobatches(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 1))
	incomplete := false // the last group decided
	for _, l := range []Layout{{PP: 2, VPP: 2, GroupSize: 4}, {PP: 5, VPP: 3, GroupSize: 8}, {PP: 4, VPP: 1}} {
		group := max(l.GroupSize, l.PP)
		for _, n := range []int{mostMicrobatches + 1, 2*mostMicrobatches - 1} {
			l.World, l.TP, l.CP = l.PP, 1, 1
			walked := (&dims{s: &Setup{Layout: l, Batch: Batch{Global: n, Micro: 1}}}).walked()
			if walked > min(n, mostMicrobatches+group) || walked%group != n%group {
				t.Errorf("%+v: %d of %d microbatches are walked", l, walked, n)
			}
			weights := make([]float64, l.VPP) // what a microbatch of each chunk holds
			for i := range weights {
				weights[i] = float64(i) + rng.Float64()
			}
			peak := func(rank, microbatches int) (most float64) {
				passes, err := schedule.Pipeline{Ranks: l.PP, Chunks: l.VPP, Microbatches: microbatches, GroupSize: l.GroupSize}.Passes(rank)
				if err != nil {
					t.Fatal(err)
				}
				held := 0.0
				for _, p := range passes {
					if p.Backward {
						held -= weights[p.Chunk]
					} else {
						held += weights[p.Chunk]
					}
					most = max(most, held)
				}
				return most
			}
			for _, r := range []int{0, l.PP - 1} {
				all := peak(r, n)
				if got := peak(r, walked); math.Abs(got-all) > 1e-6 {
					t.Errorf("%+v: on rank %d %d microbatches hold %v, and %d hold %v", l, r, n, all, walked, got)
				}
				incomplete = incomplete || walked < n && math.Abs(peak(r, walked-walked%group)-all) > 1e-6
			}
		}
	}
	if !incomplete {
		t.Error("no last group decides; the test says nothing")
	}
}
