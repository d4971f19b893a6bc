// This file owns the oracle for absolute numbers: losses, norms and gradients that
// PyTorch computed in float64, which no layout of ranks and no way of keeping parameters
// may differ from. That all of them agree would hide an error that they share.

package train

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/fsdp"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// oracle is what a run comes to in PyTorch. A gradient is its norm and a product with
// fixed numbers, so that an element in the wrong place shows.
type oracle struct {
	Torch  string // the version
	Digest string // of the parameters that both begin with
	Steps  []struct {
		Loss     float64
		MTP      []float64
		Aux      float64
		GradNorm float64 `json:"grad_norm"`
	}
	Grads map[string][2]float64
}

const oracleSteps = 3

// tied is a mixture of four layers whose first and last stage share the embedding.
func tied() *model.Model {
	m := mixed()
	m.Name, m.Layers = "tied", append(m.Layers, m.Layers...)
	return m
}

// oracleConfig is a run of eight microbatches a step, on whichever layout.
func oracleConfig(t *testing.T, m *model.Model, l Layout) Config {
	c := testConfig(t, m)
	c.Layout, c.Batch = l, Batch{Micro: 1, Seq: 16, Microbatches: 8 / l.DP}
	c.Settings.Routing.BiasRate = 1e-2
	c.Optim.LR, c.Optim.WarmUp = 3e-4, 2
	c.Memory.Links = links
	return c
}

func oracleFile(m *model.Model) string { return filepath.Join("testdata", "pytorch-"+m.Name+".json") }

// consult reads what PyTorch said of a model. If STOWAGE_ORACLE names a Python that has
// PyTorch, it asks, and writes the answer.
func consult(t *testing.T, m *model.Model) (o oracle) {
	t.Helper()
	c := oracleConfig(t, m, Layout{1, 1, 1, 1})
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	digest, err := tr.Digest()
	if python := os.Getenv("STOWAGE_ORACLE"); python != "" {
		err = errors.Join(err, tr.ask(t, python, digest))
	}
	if err := errors.Join(err, tr.Close()); err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(oracleFile(m))
	if err == nil {
		err = json.Unmarshal(raw, &o)
	}
	if err != nil {
		t.Fatal(err)
	}
	if o.Digest != digest {
		t.Fatal("a run of this seed begins with other parameters than PyTorch did; run this test with STOWAGE_ORACLE=/usr/bin/python3, or another Python that has PyTorch, and look at what changes")
	}
	return o
}

// ask makes PyTorch train from the parameters of a trainer that has not begun.
func (tr *Trainer) ask(t *testing.T, python, digest string) error {
	run := t.TempDir()
	to, err := checkpoint.Open(checkpoint.Options{Dir: run})
	if err != nil {
		return err
	}
	if err := errors.Join(tr.Save(to), to.Close()); err != nil {
		return err
	}
	cmd := exec.Command(python, filepath.Join("..", "pytorch", "bench", "torch_train.py"), "--golden", run, "--steps", fmt.Sprint(oracleSteps))
	cmd.Stderr = os.Stderr
	raw, err := cmd.Output()
	if err != nil {
		return err
	}
	var answer map[string]any
	if err := json.Unmarshal(raw, &answer); err != nil {
		return err
	}
	answer["digest"] = digest
	if raw, err = json.MarshalIndent(answer, "", " "); err != nil {
		return err
	}
	return os.WriteFile(oracleFile(tr.cfg.Model), append(raw, '\n'), 0o666)
}

// gradients returns the gradients of the step before, by the name that the parameter or
// the expert's part of it has in a checkpoint. Those that several ranks hold must agree.
func (t *Trainer) gradients() (map[string][]float32, error) {
	ranks := make([]map[string][]float32, len(t.ranks))
	err := t.each(func(i int) error {
		r := t.ranks[i]
		ranks[i] = map[string][]float32{}
		return r.eachParam(func(k key, p layer.Param) error {
			var x []float32
			var err error
			switch s := r.store.(type) {
			case *whole:
				x = make([]float32, p.Elements())
				err = r.s.Download(bytesOf(x), s.grads().Slice(s.at[k], s.place(k).Len))
			case *sharded:
				x, err = s.pipe.Read(k.unit, k.param, fsdp.Grads)
			}
			for _, q := range pieces(p) {
				ranks[i][q.name] = x[q.from : q.from+q.n]
			}
			return err
		})
	})
	all := map[string][]float32{}
	for i, grads := range ranks {
		for name, g := range grads {
			if o, ok := all[name]; ok && distance(g, o) > 1e-6*norm(o) {
				err = errors.Join(err, fmt.Errorf("rank %d has another gradient of %s than a rank before", i, name))
			}
			all[name] = g
		}
	}
	return all, err
}

func norm(x []float32) float64 { return distance(x, make([]float32, len(x))) }

func distance(x, y []float32) (d float64) {
	for i := range x {
		d += (float64(x[i]) - float64(y[i])) * (float64(x[i]) - float64(y[i]))
	}
	return math.Sqrt(d)
}

// weigh is how PyTorch's side weighs the elements of a gradient.
func weigh(x []float32) (sum float64) {
	for i, v := range x {
		sum += float64(v) * (float64(i*7919%1009)/1009 - 0.5)
	}
	return sum
}

// agrees compares a run with the oracle.
func (o *oracle) agrees(c Config) (err error) {
	tr, err := New(c)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	near := func(got, want float64) bool { return math.Abs(got-want) <= 2e-5*max(1e-2, math.Abs(want)) } // fp32 here
	for i, want := range o.Steps {
		m, err := tr.Step()
		if err != nil {
			return err
		}
		if !near(m.Loss, want.Loss) || !near(m.Aux, want.Aux) || !near(m.Norm, want.GradNorm) || len(m.MTPLosses) != len(want.MTP) {
			return fmt.Errorf("step %d: loss %v, auxiliary %v, norm %v; want %+v", i, m.Loss, m.Aux, m.Norm, want)
		}
		for k, l := range m.MTPLosses {
			if !near(l, want.MTP[k]) {
				return fmt.Errorf("step %d: the losses of further heads are %v, want %v", i, m.MTPLosses, want.MTP)
			}
		}
		grads, err := tr.gradients()
		if err != nil {
			return err
		}
		if err := o.compare(grads, m.Norm, i == 0); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	return nil
}

// compare compares the norm of all gradients with the gradients themselves, and if these
// are those of the first step, each of them with the oracle's.
func (o *oracle) compare(grads map[string][]float32, total float64, first bool) error {
	var squares float64
	for name, g := range grads {
		n := norm(g)
		squares += n * n
		want, ok := o.Grads[name]
		if off := math.Abs(weigh(g) - want[1]); !ok || first && (math.Abs(n-want[0]) > 1e-4*want[0] || off > 1e-4*want[0]) {
			return fmt.Errorf("the gradient of %s has the norm %v and the sum %v, want %v (known: %v)", name, n, weigh(g), want, ok)
		}
	}
	if len(grads) != len(o.Grads) {
		return fmt.Errorf("%d parameters have gradients, want %d", len(grads), len(o.Grads))
	}
	if got := math.Sqrt(squares); math.Abs(got-total) > 1e-5*got {
		return fmt.Errorf("the norm of all gradients is %v, and its metric %v", got, total)
	}
	return nil
}

// SPEC S2.1, S3.4, S5.1: losses, gradients and their norm are PyTorch's, on every layout,
// whole and sharded, with every way of dispatching and some policies.
func TestAgainstPyTorch(t *testing.T) {
	for _, m := range []*model.Model{tied(), assorted()} {
		o := consult(t, m)
		for i, l := range []Layout{{1, 1, 1, 1}, {1, 1, 1, 4}, {1, 1, 2, 2}, {1, 1, 4, 4}, {2, 1, 1, 1}, {2, 2, 1, 1}, {2, 2, 2, 2}, {4, 1, 1, 2}, {2, 1, 2, 4}} {
			for _, pool := range []string{"whole", "recorded", "max"} {
				c := oracleConfig(t, m, l)
				switch pool {
				case "recorded":
					c.Sharding = &Sharding{Pool: bucket.Recorded, Prefetch: 1, GradComm: kernels.F32}
				case "max":
					c.Sharding = &Sharding{Pool: bucket.Max, Prefetch: 1, GradComm: kernels.F32}
				}
				if few() && (pool == "max" || i%4 != 0) {
					continue
				}
				if pool == "max" {
					c.Memory = namedMemory(t, "stash")
				}
				if l.EP > 1 && pool == "recorded" {
					c.Dispatch = layer.Ring
				}
				t.Run(fmt.Sprintf("%s/%+v/%s", m.Name, l, pool), func(t *testing.T) {
					if err := o.agrees(c); err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}
