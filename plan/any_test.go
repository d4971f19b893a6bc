// This file owns the property that every combination of settings is refused, or adds up
// without a panic.

package plan

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// Items add up to the peak, and groups to activations. Nothing is negative, and what is
// held between steps does not exceed the peak.
func TestAnySetupAddsUp(t *testing.T) {
	more := []string{"falcon-h1-0.5b", "minimax-text-01", "olmoe-1b-7b", "llama-4-maverick", "phi-3.5-moe"}
	names := append(model.Presets(), more...)
	rapid.Check(t, func(r *rapid.T) {
		pick := func(n string, of ...int) int { return rapid.SampledFrom(of).Draw(r, n) }
		name := rapid.SampledFrom(names).Draw(r, "m")
		m, err := model.Preset(name)
		if slices.Contains(more, name) {
			m, err = published(t, name), nil
		}
		if err != nil {
			r.Fatal(err)
		}
		n := pick("layers", 1, 2, 3, 7, len(m.Layers))
		m.Layers = m.Layers[:min(n, len(m.Layers))]
		s := &Setup{Model: m, Layout: Layout{TP: pick("tp", 1, 2, 4, 8), PP: pick("pp", 1, 2, 3, 8, 16), VPP: pick("vpp", 1, 2, 5), CP: pick("cp", 1, 2), EP: pick("ep", 1, 2, 8), ETP: pick("etp", 0, 1, 2)}, Batch: Batch{Micro: pick("mb", 1, 3), Seq: pick("seq", 64, 4096, 1<<20)}}
		s.Layout.World = pick("world", 0, 64, 1024)
		s.Layout.FSDP = FSDP{Shard: ShardLevel(pick("shard", 0, 1, 2, 3)), Outer: pick("outer", 0, 2), OuterOptimizer: rapid.Bool().Draw(r, "oo"), DoubleBuffer: rapid.Bool().Draw(r, "db")}
		s.Recompute = Recompute{Full: rapid.Bool().Draw(r, "full"), Method: rapid.SampledFrom([]string{"", "block"}).Draw(r, "meth"), Layers: pick("rl", 0, 1, 3)}
		s.Precision = Precision{Compute: Format(pick("fmt", 0, 3, 4, 5)), PlainFirst: pick("pf", 0, 1), PlainLast: pick("pl", 0, 9)}
		s.Offload = Offload{Modules: rapid.SampledFrom([][]string{nil, {"core_attn", "expert_fc1"}, {"moe_act", "attn_norm"}}).Draw(r, "off"), Fraction: rapid.SampledFrom([]float64{0, 0.3}).Draw(r, "fr"), Delta: memory.Bytes(pick("delta", 0, 1e8))}
		s.Stash.Modules = rapid.SampledFrom([][]string{nil, {"expert_fc1", "moe_act"}}).Draw(r, "stash")
		s.Graph.Scopes = rapid.SampledFrom([][]string{nil, {"attn"}, {"full_iteration"}, {"moe"}}).Draw(r, "graph")
		s.Kernels = Kernels{GradFusion: rapid.Bool().Draw(r, "gf"), Local: rapid.Bool().Draw(r, "local"), Dispatcher: rapid.SampledFrom([]string{"", "alltoall", "deepep"}).Draw(r, "disp"), Dropout: 0.1}
		s.Optimizer = Optimizer{Kind: rapid.SampledFrom([]string{"", "sgd", "muon"}).Draw(r, "opt"), LayerwiseSharding: rapid.Bool().Draw(r, "lw"), OffloadFraction: rapid.SampledFrom([]float64{0, 0.5, 1}).Draw(r, "of")}
		p, err := Predict(s)
		if err != nil {
			return
		}
		for i := range p.Ranks {
			k := &p.Ranks[i]
			var sum, gs memory.Bytes
			for _, it := range k.Items {
				sum += it.Bytes
				if it.Bytes < 0 {
					r.Fatalf("rank %d item %+v", i, it)
				}
			}
			for _, g := range k.Groups {
				gs += g.Total
			}
			if sum != k.Peak.Expected || gs != k.Sum(CauseActivations) || k.Host < 0 {
				r.Fatalf("rank %d: %d %d %d", i, sum, k.Peak.Expected, k.Host)
			}
			if k.Static.Expected > k.Peak.Expected {
				r.Fatalf("rank %d static %d above peak %d: %+v", i, k.Static.Expected, k.Peak.Expected, k.Items)
			}
		}
	})
}
