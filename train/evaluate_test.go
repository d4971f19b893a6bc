// This file owns the tests of evaluation: its loss is that of training on the same
// batch, and training goes on as if it had not been.

package train

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// evaluated trains, and evaluates before each step on the first step's batch.
func evaluated(t *testing.T, c Config, steps int) (out outcome) {
	t.Helper()
	c.HeldOut = c.Text
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}()
	for i := range steps {
		loss, further, err := tr.Evaluate(1)
		if err != nil {
			t.Fatal(err)
		}
		m, err := tr.Step()
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 && (loss != m.Loss || !slices.Equal(further, m.MTPLosses)) {
			t.Errorf("evaluation gives %v and %v, the step over the same batch %v and %v", loss, further, m.Loss, m.MTPLosses)
		}
		if i > 0 && loss >= out.losses[0] {
			t.Errorf("after %d steps the first batch has a loss of %v, and had %v", i, loss, out.losses[0])
		}
		out.losses = append(out.losses, m.Loss)
	}
	var again [3]float64
	var heads [3][]float64
	for i, batches := range []int{1, 2, 1} {
		if again[i], heads[i], err = tr.Evaluate(batches); err != nil {
			t.Fatal(err)
		}
	}
	// Batches of one text have losses that differ little, and that of two is their mean.
	for i, first := range append([]float64{again[0]}, heads[0]...) {
		if two := append([]float64{again[1]}, heads[1]...)[i]; !(two > 0.7*first && two < 1.4*first) {
			t.Errorf("head %d: the loss of one batch is %v, and that of two %v", i, first, two)
		}
	}
	if again[0] != again[2] || again[0] == again[1] {
		t.Errorf("of one batch, two and one again the losses are %v", again)
	}
	for _, r := range tr.ranks {
		k := r.key()
		k.Phase = memory.Evaluate
		if s := r.rt.Summary(k); len(s.Groups) > 0 {
			t.Errorf("evaluation saved %v", s.Groups)
		}
	}
	if out.sum, err = tr.Digest(); err != nil {
		t.Fatal(err)
	}
	return out
}

func TestEvaluationDisturbsNothing(t *testing.T) { // SPEC S4.3
	few := few()
	for _, m := range []*model.Model{mixed(), assorted()} {
		if few && m.Name == "assorted" {
			continue
		}
		plain := quick(t, m)
		want := runConfig(t, plain, 5)
		for _, name := range Policies {
			if m.Name == "assorted" && name != "graphs" {
				continue // what else layers differ in, the others below have
			}
			if few && name != "graphs" && name != "budget" {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s", m.Name, name), func(t *testing.T) {
				c := plain
				if c.Memory = namedMemory(t, "stash"); name == "budget" {
					c.Memory.Budget = 188 << 10 // of mixed: a little has to leave
				} else {
					c.Memory = namedMemory(t, name)
				}
				if got := evaluated(t, c, 5); got.sum != want.sum || !slices.Equal(got.losses, want.losses) {
					t.Errorf("losses %v, want %v", got.losses, want.losses)
				}
			})
		}
		for name, change := range map[string]func(c *Config){
			"sharded":     func(c *Config) { c.Sharding = &Sharding{Pool: bucket.Arena, Prefetch: 1} },
			"interleaved": func(c *Config) { c.Layout = Layout{PP: 2, VPP: len(m.Layers) / 2, EP: 1, DP: 1} },
			"full_iteration": func(c *Config) {
				c.Layout = Layout{1, 1, 1, 1}
				c.Memory.Scopes = fullIteration
			},
			"full_iteration of ranks": func(c *Config) { c.Memory.Scopes = fullIteration },
		} {
			t.Run(fmt.Sprintf("%s/%s", m.Name, name), func(t *testing.T) {
				c := plain
				c.Memory = namedMemory(t, "stash")
				change(&c)
				want := runConfig(t, c, 5)
				if got := evaluated(t, c, 5); got.sum != want.sum || !slices.Equal(got.losses, want.losses) {
					t.Errorf("losses %v, want %v", got.losses, want.losses)
				}
			})
		}
	}
}

// Without a text that was held out, or without a batch, there is nothing to evaluate.
func TestEvaluationNeedsText(t *testing.T) {
	c := testConfig(t, smallDense())
	c.Layout = Layout{1, 1, 1, 1}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if _, _, err := tr.Evaluate(1); err == nil {
		t.Error("evaluated on nothing")
	}
	if _, err := tr.Step(); err != nil {
		t.Errorf("the run cannot go on: %v", err)
	}
}
