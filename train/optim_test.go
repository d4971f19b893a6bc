// This file owns the optimiser beside AdamW as it is written down: every update of a run
// follows from the gradient that its moments show.

package train

import (
	"math"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/layer"
)

// heldTensors returns what all ranks save, each tensor once, by name.
func heldTensors(t *testing.T, tr *Trainer) (weights, moments map[string][]float32) {
	t.Helper()
	weights, moments = map[string][]float32{}, map[string][]float32{}
	snaps := make([]snapshot, len(tr.ranks))
	if err := tr.each(func(i int) (err error) { snaps[i], err = tr.ranks[i].snapshot(); return err }); err != nil {
		t.Fatal(err)
	}
	for _, s := range snaps {
		for _, x := range s.model {
			if weights[x.Name] != nil {
				t.Errorf("two ranks save %s", x.Name)
			}
			weights[x.Name] = x.data
		}
		for _, x := range s.optim {
			moments[x.Name] = x.data
		}
	}
	return weights, moments
}

// decaying returns the names of the parameters that decay.
func decaying(t *testing.T, tr *Trainer) map[string]bool {
	t.Helper()
	names := map[string]bool{}
	for _, r := range tr.ranks {
		if err := r.eachParam(func(_ key, p layer.Param) error {
			for _, q := range pieces(p) {
				names[q.name] = p.Cols > 1
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	return names
}

// In every step of a run m and v become the means of the gradient and of its square, the
// weights move by the rate of the step along m over the root of v, both corrected for how
// few steps they have seen, and matrices decay. The gradient has at most the norm Clip,
// in which every parameter counts once.
func TestUpdatesAreAdamW(t *testing.T) {
	for _, l := range []Layout{{PP: 1, VPP: 1, EP: 1, DP: 1}, {PP: 2, VPP: 1, EP: 2, DP: 2}} {
		if raceEnabled && l.PP > 1 {
			continue // it takes long
		}
		c := testConfig(t, smallMoE())
		c.Layout, c.Batch = l, Batch{Micro: 1, Seq: 16, Microbatches: 2}
		o := Optim{LR: 0.01, MinLR: 0.001, WarmUp: 2, Decay: 5, Beta1: 0.8, Beta2: 0.95, Epsilon: 1e-6, WeightDecay: 0.3, Clip: 0.5}
		c.Optim = o
		tr, err := New(c)
		if err != nil {
			t.Fatal(err)
		}
		decays, clipped := decaying(t, tr), 0
		w0, m0 := heldTensors(t, tr)
		for step := range 5 {
			did, err := tr.Step()
			if err != nil {
				t.Fatal(err)
			}
			w1, m1 := heldTensors(t, tr)
			squares, wrong, n := 0.0, 0, float64(step+1)
			for name, w := range w1 {
				m, v := m1[name+".exp_avg"], m1[name+".exp_avg_sq"]
				if len(m) != len(w) || len(v) != len(w) {
					continue // a bias of a router
				}
				for i := range w {
					g := (float64(m[i]) - o.Beta1*float64(m0[name+".exp_avg"][i])) / (1 - o.Beta1)
					squares += g * g
					want := o.Beta2*float64(m0[name+".exp_avg_sq"][i]) + (1-o.Beta2)*g*g
					move := float64(m[i]) / (1 - math.Pow(o.Beta1, n)) / (math.Sqrt(float64(v[i])/(1-math.Pow(o.Beta2, n))) + o.Epsilon)
					if decays[name] {
						move += o.WeightDecay * float64(w0[name][i])
					}
					to := float64(w0[name][i]) - o.rate(step)*move
					if math.Abs(float64(v[i])-want) > 1e-3*want+1e-9 || math.Abs(float64(w[i])-to) > 1e-5 {
						if wrong++; wrong < 4 {
							t.Errorf("%+v, step %d: %s[%d] is %g with v %g, want %g with v %g", l, step, name, i, w[i], v[i], to, want)
						}
					}
				}
			}
			if norm := math.Sqrt(squares); math.Abs(norm-min(did.Norm, o.Clip)) > 1e-3*norm {
				t.Errorf("%+v, step %d: a gradient of norm %g was used, of one of norm %g with at most %g", l, step, norm, did.Norm, o.Clip)
			}
			if did.LR != o.rate(step) || did.Step != step || did.Tokens != c.Tokens() {
				t.Errorf("%+v, step %d: %+v; want a rate of %g and %d tokens", l, step, did, o.rate(step), c.Tokens())
			}
			if did.Norm > o.Clip {
				clipped++
			}
			w0, m0 = w1, m1
		}
		if clipped == 0 {
			t.Errorf("%+v: no gradient had a norm above %g", l, o.Clip)
		}
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}
}
