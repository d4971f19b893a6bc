// This file owns what the tests of this package share, and the forecast as a
// whole: that its parts add up.

package plan

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

const gib = 1 << 30

// deepSeek is DeepSeek-V3 on 256 GPUs as it is trained.
func deepSeek(t testing.TB) *Setup {
	t.Helper()
	m, err := model.Preset("deepseek-v3")
	if err != nil {
		t.Fatal(err)
	}
	m.MTP = nil
	return &Setup{
		Model:     m,
		Hardware:  &hardware.GPU{Name: "gb200", Generation: 10},
		Layout:    Layout{World: 256, TP: 1, PP: 8, VPP: 4, EP: 32, ETP: 1},
		Batch:     Batch{Micro: 1, Global: 2048, Seq: 4096},
		Optimizer: Optimizer{Distributed: true},
		Kernels:   Kernels{GradFusion: true, Loss: "te", GroupedGEMM: true, PermuteFusion: true, RouterFP32: true, Dispatcher: "alltoall", NoAttentionMask: true},
	}
}

// small returns a random small setup that is valid.
func small(t *rapid.T) *Setup {
	pick := func(name string, of ...int) int { return rapid.SampledFrom(of).Draw(t, name) }
	yes := func(name string) bool { return rapid.Bool().Draw(t, name) }
	m := &model.Model{Hidden: 256 * pick("hidden", 1, 2, 4), Vocab: pick("vocab", 1000, 32000), Tied: yes("tied"), Norm: model.Norm(pick("norm", 0, 1)), Bias: yes("bias")}
	for range pick("layers", 4, 8) {
		var l model.Layer
		switch pick("mixer", 0, 0, 1, 2) {
		case 0:
			l.Attention = &model.Attention{Heads: 8, KVHeads: pick("groups", 8, 4), HeadDim: m.Hidden / 8, QKNorm: yes("qk norm")}
		case 1:
			l.MLA = &model.MLA{Heads: 8, QRank: 96, KVRank: 64, Nope: 32, Rope: 16, V: 32, LatentNorm: true}
		case 2:
			l.Mamba = &model.Mamba{Version: 2, Inner: 2 * m.Hidden, Heads: 8, Groups: 4, State: 64, Conv: 4}
		}
		switch pick("feed-forward", 0, 0, 1, 2) {
		case 0:
			l.Dense = &model.Dense{Width: 4 * m.Hidden, Gated: yes("gated")}
		case 1:
			l.MoE = &model.MoE{Experts: 8, TopK: 2, Width: m.Hidden, Gated: yes("experts gated"), SharedWidth: pick("shared", 0, m.Hidden)}
		}
		m.Layers = append(m.Layers, l)
	}
	s := &Setup{
		Model:    m,
		Hardware: &hardware.GPU{Generation: pick("generation", 8, 9, 10)},
		Layout: Layout{
			World: 16, TP: pick("tp", 1, 2), PP: pick("pp", 1, 2, 4), CP: pick("cp", 1, 2), EP: pick("ep", 1, 2, 4), ETP: 1,
			SequenceParallel: yes("sp"), OverlapEP: yes("overlap"),
		},
		Batch:     Batch{Micro: pick("micro", 1, 2), Seq: 512},
		Optimizer: Optimizer{Distributed: yes("distributed")},
		Kernels: Kernels{
			Attention: rapid.SampledFrom([]string{"", "flash", "fused"}).Draw(t, "attention"), GradFusion: yes("fusion"),
			Loss: rapid.SampledFrom([]string{"", "te", "native-fused"}).Draw(t, "loss"), GroupedGEMM: yes("grouped"), PermuteFusion: yes("permute"),
			Dispatcher: rapid.SampledFrom([]string{"allgather", "alltoall", "hybridep"}).Draw(t, "dispatcher"), Dropout: float64(pick("dropout", 0, 1)) / 10,
		},
	}
	if s.Layout.PP > 1 {
		s.Layout.VPP = pick("vpp", 1, 2)
	}
	if len(m.Layers) == 4 && s.Layout.PP == 4 {
		s.Layout.VPP = 1
	}
	s.Batch.Global = 8 * s.Batch.Micro * s.Layout.World / (s.Layout.TP * s.Layout.PP * s.Layout.CP)
	return s
}

func predicted(t interface{ Fatal(...any) }, s *Setup) *Forecast {
	p, err := Predict(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The items of a rank are what is allocated at its peak, its groups are its
// activations, and no point of the step is higher.
func TestPartsAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := small(t)
		s.Offload.Modules = rapid.SampledFrom([][]string{nil, {"core_attn"}, {"expert_fc1", "moe_act"}}).Draw(t, "offload")
		s.Offload.MinElements = 1
		s.Precision.GradsInBF16 = rapid.Bool().Draw(t, "bf16 gradients")
		s.Graph.Scopes = rapid.SampledFrom([][]string{nil, nil, {"attn"}, {"full_iteration"}}).Draw(t, "graphs")
		for _, r := range predicted(t, s).Ranks {
			var all, acts, groups memory.Bytes
			for _, it := range r.Items {
				all += it.Bytes
				if it.Cause == CauseActivations {
					acts += it.Bytes
				}
				if it.Bytes < 0 && it.Cause != CauseTransient {
					t.Fatalf("rank %d: %s is %d bytes", r.Rank, it.Name, it.Bytes)
				}
			}
			for i, g := range r.Groups {
				groups += g.Total
				if g.Total != r.At.Groups[i] {
					t.Fatalf("rank %d: group %s is %d at the peak and %d on the timeline", r.Rank, g.Name, g.Total, r.At.Groups[i])
				}
			}
			if all != r.Peak.Expected || acts != groups {
				t.Fatalf("rank %d: items are %d bytes, the peak %d; activations %d, groups %d", r.Rank, all, r.Peak.Expected, acts, groups)
			}
			for _, p := range r.Timeline() {
				if p.Bytes() > r.At.Bytes() || p.Bytes() > r.Peak.Expected {
					t.Fatalf("rank %d: %+v is above the peak", r.Rank, p)
				}
			}
			for _, b := range []Band{r.Static, r.Peak, r.Reserved} {
				if !(0 < b.Low && b.Low <= b.Expected && b.Expected <= b.High) {
					t.Fatalf("rank %d: band %+v", r.Rank, b)
				}
			}
			if r.Reserved.Expected < r.Peak.Expected {
				t.Fatalf("rank %d: reserved %d is less than allocated %d", r.Rank, r.Reserved.Expected, r.Peak.Expected)
			}
			last := r.Timeline()[len(r.Timeline())-1]
			if !last.Pass.Backward {
				t.Fatalf("rank %d: the step ends with %+v", r.Rank, last.Pass)
			}
		}
	})
}

// Settings that save memory never raise what is saved, and more work never lowers it.
func TestMonotone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := small(t)
		static := func(s *Setup) (n []memory.Bytes) {
			for _, r := range predicted(t, s).Ranks {
				n = append(n, r.Static.Expected)
			}
			return n
		}
		// The peak may be elsewhere under another policy, so this compares whole layers and
		// not what is live at the peak.
		layers := func(s *Setup) (n memory.Bytes) {
			d := newDims(mustNormalise(t, s))
			for _, l := range s.Model.Layers {
				tape := d.layer(l)
				d.apply(tape, d.s.Recompute.Full)
				n += tape.cost().kept
			}
			return n
		}
		all := layers(s)
		more := *s
		more.Batch.Micro *= 2
		more.Batch.Global *= 2
		if layers(&more) < all {
			t.Fatalf("twice the microbatch saves less: %d after %d", layers(&more), all)
		}
		for _, m := range memory.MegatronModules(memory.Recompute) {
			less := *s
			less.Recompute.Modules = []string{m}
			if n := layers(&less); n > all {
				t.Fatalf("recomputing %s saves %d instead of %d", m, n, all)
			}
		}
		full := *s
		full.Recompute.Full = true
		if n := layers(&full); n > all {
			t.Fatalf("recomputing all saves %d instead of %d", n, all)
		}
		if s.Layout.TP == 1 && s.Layout.ETP == 1 {
			wide := *s
			wide.Layout.TP, wide.Layout.SequenceParallel = 2, true
			wide.Batch.Global = 8 * wide.Batch.Micro * wide.Layout.World / (2 * wide.Layout.PP * wide.Layout.CP)
			if n := layers(&wide); n > all {
				t.Fatalf("dividing tensors and sequence saves %d instead of %d", n, all)
			}
		}
		sharded := *s
		sharded.Optimizer.Distributed = true
		plain := *s
		plain.Optimizer.Distributed = false
		for i, n := range static(&sharded) {
			if n > static(&plain)[i] {
				t.Fatalf("rank %d: sharding the optimiser raises static memory", i)
			}
		}
	})
}

func mustNormalise(t interface{ Fatal(...any) }, s *Setup) *Setup {
	n, err := s.Normalise()
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Offloading moves exactly the named groups: what is missing on the device is on the host,
// to the byte.
func TestOffloadMovesWhatItSays(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := small(t)
		s.Offload.MinElements = int64(rapid.SampledFrom([]int{1, 1 << 16, 1 << 20}).Draw(t, "min"))
		var modules []string
		for _, m := range memory.MegatronModules(memory.Offload) {
			if rapid.Bool().Draw(t, m) && memory.CheckOffload(append(slices.Clone(modules), m)) == nil {
				modules = append(modules, m)
			}
		}
		plain, moved := newDims(mustNormalise(t, s)), *s
		moved.Offload.Modules = modules
		away := newDims(mustNormalise(t, &moved))
		for _, l := range s.Model.Layers {
			var want memory.Bytes
			for _, g := range Activations(plain.s, l) {
				if memory.Including(modules, g.Offload) != "" && g.Elements >= s.Offload.MinElements {
					want += g.Bytes
				}
			}
			before, after := plain.layer(l), away.layer(l)
			away.apply(after, false)
			a, b := before.cost(), after.cost()
			if b.moved != want || a.kept-b.kept != want {
				t.Fatalf("offloading %v moves %d bytes and keeps %d fewer; want %d", modules, b.moved, a.kept-b.kept, want)
			}
		}
	})
}
