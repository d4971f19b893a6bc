// This file owns the tests of training on a GPU: every policy gives the same bits there
// too, and the losses of the CPU up to rounding.

package train

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/blas"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// openGPU opens the first GPU for a rank.
func openGPU(int) (device.Device, error) {
	return cuda.Open(cuda.Options{CopyKernel: kernels.GraphCopy, Assist: blas.New})
}

// needGPU skips with the reason where there is none.
func needGPU(t *testing.T) {
	t.Helper()
	d, err := openGPU(0)
	var no *device.Unsupported
	if errors.As(err, &no) {
		t.Skip(err)
	}
	if err == nil {
		err = d.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestPoliciesOnGPU(t *testing.T) { // SPEC S6.3
	needGPU(t)
	odd := smallMoE()
	odd.Name, odd.Vocab = "odd-vocabulary", 261 // no whole vectors of logits
	for _, m := range []*model.Model{smallMoE(), smallDense(), smallHybrid(), smallDeepSeek(), odd} {
		for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
			for _, l := range []Layout{{1, 1, 1, 1}, {2, 1, 1, 2}} {
				c := testConfig(t, m)
				c.Number, c.Layout = number, l
				want := runConfig(t, c, 4)
				c.Device = openGPU
				var first outcome
				for _, name := range Policies {
					t.Run(fmt.Sprintf("%s/%v/%+v/%s", m.Name, numberName(number), l, name), func(t *testing.T) {
						var err error
						if c.Memory, err = NamedMemory(name, 4*budgetFor(name)); err != nil {
							t.Fatal(err)
						}
						got := runConfig(t, c, 4)
						if first.sum == "" {
							first = got
						}
						if got.sum != first.sum || !slices.Equal(got.losses, first.losses) {
							t.Errorf("losses %v, sum %s; want %v, %s", got.losses, got.sum, first.losses, first.sum)
						}
						near := map[kernels.Number]float64{kernels.F32: 1e-4, kernels.BF16: 0.01}[number]
						for i := range want.losses {
							if math.Abs(got.losses[i]-want.losses[i]) > near*want.losses[i] {
								t.Fatalf("losses %v, on the CPU %v", got.losses, want.losses)
							}
						}
					})
				}
			}
		}
	}
}

// Sharded parameters, gathered through pools, train on a GPU as whole ones do.
func TestPoolsOnGPU(t *testing.T) { // SPEC S2.1
	needGPU(t)
	for _, m := range []*model.Model{smallMoE(), smallHybrid(), smallDeepSeek()} {
		c := testConfig(t, m)
		c.Layout, c.Device = Layout{PP: 2, VPP: 1, EP: 1, DP: 2}, openGPU
		whole := runConfig(t, c, 3)
		var first outcome
		for _, k := range []bucket.PoolKind{bucket.Dynamic, bucket.Max, bucket.Arena, bucket.Recorded} {
			t.Run(fmt.Sprintf("%s/%v", m.Name, k), func(t *testing.T) {
				c.Sharding = &Sharding{Pool: k, Prefetch: 1, GradComm: kernels.F32}
				got := runConfig(t, c, 3)
				if first.sum == "" {
					first = got
				}
				if got.sum != first.sum {
					t.Errorf("sum %s, want %s", got.sum, first.sum)
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

// A step that is captured whole, with its stash, is one replay, also of several ranks that
// share the GPU. It gives the bits of the eager one, and so do experts that are captured.
func TestFullIterationOnGPU(t *testing.T) { // SPEC S4.1, S4.6, S7.4
	needGPU(t)
	for _, l := range []Layout{{1, 1, 1, 1}, {1, 1, 2, 2}, {2, 1, 2, 2}} {
		c := testConfig(t, smallMoE())
		c.Layout, c.Device = l, openGPU
		want := runConfig(t, c, 6)
		for _, x := range []struct {
			policy  string
			scope   memory.Scope
			offload []string
		}{
			{"stash", memory.FullIteration, nil},
			{"stash", memory.FullIteration, []string{"core_attn", "attn_proj"}},
			{"static", memory.MoE, nil},
			{"static", memory.MoE, []string{"core_attn", "moe_act"}},
		} {
			var err error
			if c.Memory, err = NamedMemory(x.policy, 0); err != nil {
				t.Fatal(err)
			}
			c.Memory.Scopes, c.Memory.Offload = memory.ScopesOf(x.scope), x.offload
			if got := runConfig(t, c, 6); got.sum != want.sum {
				t.Errorf("%+v, %+v: losses %v, want %v", l, x, got.losses, want.losses)
			}
		}
	}
}

// Shared experts are computed beside the exchange of rows, or in the graph of the router. Both
// give the same bits.
func TestSharedExpertsOnGPU(t *testing.T) { // SPEC S4.1, S7.8
	needGPU(t)
	for _, number := range []kernels.Number{kernels.F32, kernels.BF16} {
		c := testConfig(t, smallDeepSeek())
		c.Number, c.Layout, c.Device = number, Layout{1, 1, 2, 2}, openGPU
		want := runConfig(t, c, 6)
		for _, scope := range []memory.Scope{memory.MoERouter, memory.MoE} {
			var err error
			if c.Memory, err = NamedMemory("static", 0); err != nil {
				t.Fatal(err)
			}
			c.Memory.Scopes = memory.ScopesOf(scope)
			if got := runConfig(t, c, 6); got.sum != want.sum {
				t.Errorf("%v, %v: losses %v, want %v", numberName(number), scope, got.losses, want.losses)
			}
		}
	}
}
