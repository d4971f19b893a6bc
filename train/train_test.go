// This file owns the tests of whole runs: every policy, layout and model gives the same
// numbers.

package train

import (
	"errors"
	"math"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// smallMoE is a mixture that trains in milliseconds.
func smallMoE() *model.Model {
	l := model.Layer{
		Attention: &model.Attention{Heads: 4, KVHeads: 2, HeadDim: 16, Rotary: true},
		MoE:       &model.MoE{Experts: 8, TopK: 2, Width: 48, Gated: true},
	}
	return &model.Model{Name: "small-moe", Hidden: 64, Vocab: 256, MaxPositions: 1024, Layers: []model.Layer{l, l, l, l}}
}

func testConfig(t testing.TB, m *model.Model) Config {
	t.Helper()
	text, err := data.Open("")
	if err != nil {
		t.Fatal(err)
	}
	return Config{
		Model: m, Settings: layer.DefaultSettings(), Number: kernels.F32, Layout: Layout{PP: 2, VPP: 1, EP: 2, DP: 2},
		Batch: Batch{Micro: 2, Seq: 32, Microbatches: 4}, Optim: DefaultOptim(), Memory: Memory{Fraction: 1}, Seed: 7, Text: text,
		Effort: 0.05, // few tests are about how good a decision is
		Device: func(int) (device.Device, error) { return cpu.Open(cpu.Options{}) },
	}
}

// outcome is what must not depend on a policy.
type outcome struct {
	losses []float64
	sum    string
}

func runConfig(t *testing.T, c Config, steps int) (out outcome) {
	t.Helper()
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range steps {
		m, err := tr.Step()
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%+v", m)
		out.losses = append(out.losses, m.Loss)
	}
	if out.sum, err = tr.Digest(); err != nil {
		t.Fatal(errors.Join(err))
	}
	return out
}

// The learning rate rises to LR over the warm-up, falls to MinLR along half a cosine until
// the step Decay, and stays there.
func TestLearningRate(t *testing.T) {
	o := Optim{LR: 1, MinLR: 0.2, WarmUp: 10, Decay: 110}
	for step, want := range map[int]float64{0: 0.1, 4: 0.5, 9: 1, 10: 1, 60: 0.6, 109: 0.2, 110: 0.2, 500: 0.2} {
		if got := o.rate(step); math.Abs(got-want) > 1e-3 {
			t.Errorf("step %d: %g, want %g", step, got, want)
		}
	}
	o.Decay = 0
	if got := o.rate(500); got != 1 {
		t.Errorf("a rate that does not decay is %g", got)
	}
}

// The policies of the default command give the same bits.
func TestPoliciesGiveTheSameBits(t *testing.T) { // SPEC S1.6, S4.6, S5.2
	var want outcome
	for _, name := range Policies {
		t.Run(name, func(t *testing.T) {
			c := testConfig(t, smallMoE())
			var err error
			if c.Memory, err = NamedMemory(name, budgetFor(name)); err != nil {
				t.Fatal(err)
			}
			got := runConfig(t, c, 6)
			if want.sum == "" {
				want = got
			}
			if got.sum != want.sum || !slices.Equal(got.losses, want.losses) {
				t.Errorf("losses %v, sum %s; want %v, %s", got.losses, got.sum, want.losses, want.sum)
			}
		})
	}
}

// A rank with all experts gets the same rows whatever the routing. They stay where they were
// computed: nothing is copied in any step, unless modules to stash are named.
func TestRowsOfOneRankStay(t *testing.T) { // SPEC S1.1
	for _, m := range []*model.Model{smallMoE(), smallDeepSeek()} {
		for _, l := range []Layout{{1, 1, 1, 1}, {2, 2, 1, 1}, {1, 1, 2, 2}, {}} {
			c, asked := testConfig(t, m), l == Layout{}
			if asked {
				l = Layout{1, 1, 1, 1}
			}
			c.Layout = l
			var err error
			if c.Memory, err = NamedMemory("stash", 0); err != nil {
				t.Fatal(err)
			}
			if asked {
				c.Memory.Stash = []string{"expert_fc1"}
			}
			tr, err := New(c)
			if err != nil {
				t.Fatal(err)
			}
			for range 3 {
				if _, err := tr.Step(); err != nil {
					t.Fatal(err)
				}
			}
			for _, s := range tr.Summaries() {
				stay := l.EP == 1 && !asked
				if s.Stash == nil || (s.Stash.Stashed == 0) != stay || s.Stash.Reruns > 0 && stay {
					t.Errorf("%s on %+v: %+v", m.Name, l, s.Stash)
				}
			}
			if err := tr.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

func budgetFor(name string) memory.Bytes {
	if name == "budget" {
		return 3 << 20
	}
	return 0
}
