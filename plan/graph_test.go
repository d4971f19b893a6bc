package plan

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// Graphs keep a residual tensor and a mask of seq x seq bytes for each layer and microbatch
// of the moment with most microbatches. Rank 2 of 8 with 4 chunks holds 11 + 8 + 8 + 8
// microbatches of two layers each.
func TestGraphInputs(t *testing.T) {
	const residual, mask = 2 * 4096 * 7168, 4096 * 4096
	for _, c := range []struct {
		graph Graph
		want  memory.Bytes
	}{
		{Graph{Scopes: []string{"attn"}}, 70 * (residual + mask)},
		{Graph{Scopes: []string{"moe_router"}}, 70 * residual},
		{Graph{Scopes: []string{"attn"}, Local: true}, 0},
		{Graph{Scopes: []string{"full_iteration"}}, 0},
	} {
		s := deepSeek(t)
		s.Graph = c.graph
		if got := predicted(t, s).Ranks[2].Sum(CauseGraphs); got != c.want {
			t.Errorf("%+v: inputs of %d bytes, want %d", c.graph, got, c.want)
		}
	}
}

// Steps before the capture run without graphs: with two or more, one of them has
// the moments, and the peak is at least that of a job without graphs; the only
// one, and the step that Megatron's own graphs record, lack them: 8 bytes a
// parameter of the rank's share. A capture before the first step adds nothing.
func TestGraphWarmup(t *testing.T) {
	s := deepSeek(t)
	s.Layout.World, s.Batch.Global = 2048, 16384 // fewer moments than attention saves
	plain := predicted(t, s).Ranks[2]
	moments := plain.Sum(CauseOptimizer) / 12 * 8
	peak := func(g Graph) memory.Bytes {
		s.Graph = g
		return predicted(t, s).Ranks[2].Peak.Expected
	}
	scopes := []string{"attn"}
	if got := peak(Graph{Scopes: scopes}); got != plain.Peak.Expected {
		t.Errorf("three steps: a peak of %d, want %d as without graphs", got, plain.Peak.Expected)
	}
	if a, b := peak(Graph{Scopes: scopes, Warmup: 2}), peak(Graph{Scopes: scopes}); a != b {
		t.Errorf("two steps: a peak of %d, three have %d", a, b)
	}
	for _, g := range []Graph{{Scopes: scopes, Warmup: 1}, {Scopes: scopes, Local: true}} {
		if got := peak(g); got != plain.Peak.Expected-moments {
			t.Errorf("%+v: a peak of %d, want %d less the moments of %d", g, got, plain.Peak.Expected, moments)
		}
	}
	if got := peak(Graph{Scopes: scopes, Warmup: -1}); got >= plain.Peak.Expected-moments {
		t.Errorf("no step before the capture: a peak of %d, yet one step without moments has %d", got, plain.Peak.Expected-moments)
	}
}

// Unfused attention has two matrices of scores at once: the product's, and what
// the softmax makes of it.
func TestUnfusedTransient(t *testing.T) {
	s := mustNormalise(t, &Setup{
		Model:  &model.Model{Hidden: 512, Vocab: 1000, Layers: []model.Layer{{Attention: &model.Attention{Heads: 8, KVHeads: 8, HeadDim: 64}}}},
		Layout: Layout{World: 1}, Batch: Batch{Micro: 1, Global: 1, Seq: 4096}, Kernels: Kernels{Attention: "unfused"},
	})
	scores := memory.Bytes(2 * 8 * 4096 * 4096)
	c := newDims(s).layer(s.Model.Layers[0]).cost()
	if n := float64(c.forward) / float64(scores); n < 2 || n > 2.3 {
		t.Errorf("the forward pass needs %.2f matrices of scores, want 2 and little else", n)
	}
}

// If a chunk has only the loss, the chunk before it keeps the groups of its last layer
// until its backward pass, whatever forward passes lie between.
func TestStaysBehindTheLoss(t *testing.T) {
	layout := func(loss bool) *Setup {
		s := deepSeek(t)
		s.Layout.PP, s.Layout.VPP, s.Layout.World = 2, 2, 64
		s.Model.Layers = s.Model.Layers[53:]
		s.Offload.Modules = []string{"moe_act"}
		s.Layout.Stages = []Stage{{Embedding: true, First: 0, Last: 2}, {First: 2, Last: 4}, {First: 4, Last: 6}, {First: 6, Last: 8, Loss: true}}
		if loss {
			s.Layout.Stages[1].Last, s.Layout.Stages[2], s.Layout.Stages[3] = 5, Stage{First: 5, Last: 8}, Stage{First: 8, Last: 8, Loss: true}
		}
		return mustNormalise(t, s)
	}
	for _, loss := range []bool{false, true} {
		d := newDims(layout(loss))
		passes, err := schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 8}.Passes(1)
		if err != nil {
			t.Fatal(err)
		}
		w := &walk{passes: passes}
		for _, st := range d.s.chunks(1) {
			w.chunks = append(w.chunks, d.chunk(st))
		}
		stay, immediate := 0, 0
		for i, p := range w.passes[:len(w.passes)-1] {
			if p.Backward || w.stays(i) < 0 {
				continue
			}
			stay++
			if q := w.passes[i+1]; q.Backward && q.Chunk == p.Chunk && q.Microbatch == p.Microbatch {
				immediate++
			}
		}
		if stay == 0 || (stay == immediate) == loss {
			t.Errorf("loss alone %v: groups stay %d times, %d of them with the backward pass next", loss, stay, immediate)
		}
	}
}

// Layers at the ends that compute in bf16 save inputs of two bytes and have no narrow
// copies.
func TestPlainEnds(t *testing.T) {
	s := deepSeek(t)
	s.Precision = Precision{Compute: MXFP8}
	s.Layout.PP, s.Layout.VPP = 1, 1
	s.Batch.Global = 256
	narrow := predicted(t, s).Ranks[0]
	s.Precision.PlainFirst, s.Precision.PlainLast = 0, 58 // all but the dense ones
	ends := predicted(t, s).Ranks[0]
	s.Precision = Precision{}
	plain := predicted(t, s).Ranks[0]
	for _, c := range []Cause{CauseWeights, CauseActivations} {
		n, e, p := narrow.Sum(c), ends.Sum(c), plain.Sum(c)
		// 58 of 61 layers are as in bf16, and have nearly all of the difference.
		if share := float64(n-e) / float64(n-p); share < 0.9 || share >= 1 {
			t.Errorf("%v: %d narrow, %d with ends in bf16, %d in bf16", c, n, e, p)
		}
	}
}

// A captured scope holds its own operations, a mixture its router too, and a whole step
// everything.
func TestCaptures(t *testing.T) {
	for scopes, want := range map[string]string{
		"attn": "attn", "mlp": "mlp", "moe_router": "moe_router", "moe": "moe moe_router", "attn moe": "attn moe moe_router",
		"full_iteration": "attn mlp moe moe_router mamba none", "": "",
	} {
		var got []string
		for _, scope := range []string{"attn", "mlp", "moe", "moe_router", "mamba", "none"} {
			name := scope
			if scope == "none" {
				scope = "" // of operations outside of all scopes
			}
			if captures(strings.Fields(scopes), scope) {
				got = append(got, name)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%q captures %q, want %q", scopes, got, want)
		}
	}
}
