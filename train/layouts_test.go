// This file owns the tests of layouts, models and formats: each trains, and each gives
// the same bits under every policy.

package train

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

func attn() *model.Attention {
	return &model.Attention{Heads: 4, KVHeads: 2, HeadDim: 16, Rotary: true}
}

func smallDense() *model.Model {
	l := model.Layer{Attention: attn(), Dense: &model.Dense{Width: 96, Gated: true}}
	return &model.Model{Name: "small-dense", Hidden: 64, Vocab: 256, Tied: true, Layers: []model.Layer{l, l, l, l}}
}

func smallHybrid() *model.Model {
	moe := &model.MoE{Experts: 4, TopK: 2, Width: 32, Gated: true}
	mamba := &model.Mamba{Version: 2, Inner: 128, Heads: 4, Groups: 1, State: 16, Conv: 4}
	return &model.Model{Name: "small-hybrid", Hidden: 64, Vocab: 256, Layers: []model.Layer{
		{Mamba: mamba, MoE: moe}, {Attention: attn(), Dense: &model.Dense{Width: 96, Gated: true}},
		{Mamba: mamba}, {MoE: moe},
	}}
}

func smallDeepSeek() *model.Model {
	mla := &model.MLA{Heads: 4, QRank: 32, KVRank: 24, Nope: 16, Rope: 8, V: 16, LatentNorm: true}
	moe := &model.MoE{Experts: 8, TopK: 2, Width: 32, Gated: true, SharedWidth: 32, Sigmoid: true, Bias: true}
	first := model.Layer{MLA: mla, Dense: &model.Dense{Width: 96, Gated: true}}
	rest := model.Layer{MLA: mla, MoE: moe}
	return &model.Model{
		Name: "small-deepseek", Hidden: 64, Vocab: 256, Layers: []model.Layer{first, rest, rest, rest},
		MTP: &model.MTP{Depth: 1, Layers: []model.Layer{rest}},
	}
}

func TestLayoutsTrainAlike(t *testing.T) { // SPEC S3.4, S5.1
	for _, m := range []*model.Model{smallMoE(), smallDense(), smallHybrid(), smallDeepSeek()} {
		var first []float64
		for _, l := range []Layout{{1, 1, 1, 1}, {2, 1, 1, 1}, {3, 1, 1, 1}, {2, 2, 1, 1}, {1, 1, 1, 2}, {1, 1, 2, 2}, {2, 1, 2, 4}} {
			for _, how := range []layer.Dispatch{layer.AllToAll, layer.Ring} {
				if l.EP > 1 && m.Name == "small-dense" || how == layer.Ring && l.EP == 1 {
					continue
				}
				if raceEnabled && l.Ranks() < 4 { // the detector makes kernels slow; more ranks have more to find
					continue
				}
				t.Run(fmt.Sprintf("%s/%+v/%v", m.Name, l, how), func(t *testing.T) {
					c := testConfig(t, m)
					c.Layout, c.Dispatch = l, how
					c.Batch = Batch{Micro: 1, Seq: 32, Microbatches: 8 / l.DP}
					c.Settings.Routing.BiasRate = 1e-3
					c.Settings.Routing.Balance = 0 // it counts tokens of one rank, so that it depends on the layout
					got := runConfig(t, c, 4)
					if first == nil {
						first = got.losses
					}
					for i := range first {
						// Sums are taken in another order.
						if math.Abs(got.losses[i]-first[i]) > 2e-4*first[i] {
							t.Fatalf("losses %v, want about %v", got.losses, first)
						}
					}
				})
			}
		}
	}
}

// With experts divided over ranks, every gradient is that of one rank that has them all:
// after one step the first moments are gradients times one number.
func TestGradientsOfDividedExperts(t *testing.T) { // SPEC S3.4
	moments := func(c Config) map[string][]float32 {
		out := map[string][]float32{}
		tr, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		_, err = tr.Step()
		for _, r := range tr.ranks {
			s, e := r.snapshot()
			err = errors.Join(err, e)
			for _, x := range s.optim {
				if strings.HasSuffix(x.Name, ".exp_avg") {
					out[x.Name] = x.data
				}
			}
		}
		if err = errors.Join(err, tr.Close()); err != nil {
			t.Fatal(err)
		}
		return out
	}
	for _, m := range []*model.Model{mixed(), assorted()} {
		c := quick(t, m)
		c.Layout = Layout{1, 1, 1, 4}
		want := moments(c)
		for _, ep := range []int{2, 4} {
			for _, how := range []layer.Dispatch{layer.AllToAll, layer.Ring} {
				c.Layout.EP, c.Dispatch, c.Memory = ep, how, namedMemory(t, "stash")
				got := moments(c)
				if len(got) != len(want) {
					t.Errorf("%s, ep %d, %v: %d gradients, want %d", m.Name, ep, how, len(got), len(want))
				}
				for name, g := range want {
					var most, off float64
					for i, v := range g {
						most, off = max(most, math.Abs(float64(v))), max(off, math.Abs(float64(v-got[name][i])))
					}
					if most == 0 && strings.Contains(name, "linear") || off > 1e-5*most {
						t.Errorf("%s, ep %d, %v: %s is off by %g of %g", m.Name, ep, how, name, off, most)
					}
				}
			}
		}
	}
}

// Under every pool, sharded parameters train as whole ones do; pools among themselves
// give the same bits.
func TestPoolsTrainAlike(t *testing.T) { // SPEC S2.1, S2.6
	for _, m := range []*model.Model{smallMoE(), smallDense(), smallHybrid(), smallDeepSeek()} {
		c := testConfig(t, m)
		c.Layout = Layout{PP: 2, VPP: 1, EP: 1, DP: 2}
		c.Batch = Batch{Micro: 1, Seq: 32, Microbatches: 2}
		whole := runConfig(t, c, 3)
		var want outcome
		for _, k := range []bucket.PoolKind{bucket.Dynamic, bucket.Rotary, bucket.Fixed, bucket.Max, bucket.Arena, bucket.Recorded} {
			if raceEnabled && k != bucket.Dynamic && k != bucket.Recorded {
				continue
			}
			t.Run(fmt.Sprintf("%s/%v", m.Name, k), func(t *testing.T) {
				c.Sharding = &Sharding{Pool: k, Prefetch: 1, GradComm: kernels.F32}
				got := runConfig(t, c, 3)
				if want.sum == "" {
					want = got
				}
				if got.sum != want.sum || !slices.Equal(got.losses, want.losses) {
					t.Errorf("losses %v, want %v", got.losses, want.losses)
				}
				for i := range whole.losses {
					if math.Abs(got.losses[i]-whole.losses[i]) > 2e-4*whole.losses[i] {
						t.Fatalf("losses %v, want about %v", got.losses, whole.losses)
					}
				}
			})
		}
	}
}

// bf16 trains near fp32, and gives the same bits under every policy.
func TestBF16(t *testing.T) {
	c := testConfig(t, smallMoE())
	exact := runConfig(t, c, 4)
	c.Number = kernels.BF16
	var want outcome
	for _, name := range []string{"none", "static", "stash", "offload+recompute", "graphs"} {
		m, err := NamedMemory(name, 0)
		if err != nil {
			t.Fatal(err)
		}
		c.Memory = m
		got := runConfig(t, c, 4)
		if want.sum == "" {
			want = got
		}
		if got.sum != want.sum {
			t.Errorf("%s: another sum", name)
		}
		for i := range exact.losses {
			if math.Abs(got.losses[i]-exact.losses[i]) > 0.02*exact.losses[i] {
				t.Fatalf("%s: losses %v, want about %v", name, got.losses, exact.losses)
			}
		}
	}
}
