// This file owns the runs that tests compare: models that train in a moment, and all
// that a run comes to.

package train

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/data"
)

// sample is the text of tests: bytes of a poor generator, so that routing is uneven.
var sample = func() *data.Text {
	b := make([]byte, 4096)
	x := uint32(1)
	for i := range b {
		x = x*1664525 + 1013904223
		b[i] = byte(x>>24) & byte(x>>16) & 63
	}
	return data.NewText("sample", b)
}()

// links spare tests the measurement, and make their plans the same in every run.
var links = memory.Links{Out: 4e9, In: 4e9}

// mixed is a model of two layers with every kind of group that a mixture's rank has:
// shared experts, a router's bias, tied ends.
func mixed() *model.Model {
	a := &model.Attention{Heads: 2, KVHeads: 1, HeadDim: 8, Rotary: true, QKNorm: true}
	moe := &model.MoE{Experts: 4, TopK: 2, Width: 12, Gated: true, SharedWidth: 8, Sigmoid: true, Bias: true}
	return &model.Model{Name: "mixed", Hidden: 16, Vocab: 256, Tied: true, Layers: []model.Layer{{Attention: a, MoE: moe}, {Attention: a, MoE: moe}}}
}

// assorted has the other kinds of layers, and a further head.
func assorted() *model.Model {
	mla := &model.MLA{Heads: 2, QRank: 8, KVRank: 8, Nope: 8, Rope: 4, V: 8, LatentNorm: true}
	moe := &model.MoE{Experts: 4, TopK: 2, Width: 12, Gated: true, SharedWidth: 8, SharedGate: true}
	mamba := &model.Mamba{Version: 2, Inner: 32, Heads: 2, Groups: 1, State: 8, Conv: 4}
	return &model.Model{Name: "assorted", Hidden: 16, Vocab: 256, Layers: []model.Layer{
		{MLA: mla, MoE: moe}, {Mamba: mamba, MoE: moe}, {Mamba: mamba, Dense: &model.Dense{Width: 24, Gated: true}}, {MLA: mla, MoE: moe},
	}, MTP: &model.MTP{Depth: 1, Layers: []model.Layer{{MLA: mla, MoE: moe}}}}
}

// quick is a run of a small model: two stages of two expert ranks.
func quick(t testing.TB, m *model.Model) Config {
	c := testConfig(t, m)
	c.Text, c.Batch, c.Memory.Links = sample, Batch{Micro: 1, Seq: 16, Microbatches: 2}, links
	c.Settings.Routing.BiasRate = 1e-2
	c.Optim.WarmUp = 2
	return c
}

// account is all that a run comes to, whatever its memory policy: metrics without what
// may differ, and a sum over parameters, moments, biases and loads of all ranks.
type account struct {
	steps  []Metrics
	state  [sha256.Size]byte
	reruns int
}

func (a *account) add(m Metrics) {
	a.reruns = m.Reruns
	m.Seconds, m.Reruns, m.Device, m.Host = 0, 0, 0, 0
	a.steps = append(a.steps, m)
}

// differs says in what two runs do, if they do.
func (a account) differs(b account) error {
	if len(a.steps) != len(b.steps) {
		return fmt.Errorf("%d steps and %d", len(a.steps), len(b.steps))
	}
	for i, x := range a.steps {
		y := b.steps[i]
		if !slices.Equal(x.MTPLosses, y.MTPLosses) {
			return fmt.Errorf("further heads' losses %v and %v", x.MTPLosses, y.MTPLosses)
		}
		x.MTPLosses, y.MTPLosses = nil, nil
		if fmt.Sprint(x) != fmt.Sprint(y) {
			return fmt.Errorf("step %+v and %+v", x, y)
		}
	}
	if a.state != b.state {
		return errors.New("parameters, moments, biases or loads differ")
	}
	return nil
}

// state is the sum over what all ranks hold.
func (t *Trainer) state() (sum [sha256.Size]byte, err error) {
	parts := make([][]byte, len(t.ranks))
	err = t.each(func(i int) error {
		h := sha256.New()
		s, err := t.ranks[i].snapshot()
		if err != nil {
			return err
		}
		for _, x := range append(s.model, s.optim...) {
			fmt.Fprintln(h, x.Name, x.Shape)
			h.Write(bytesOf(x.data))
		}
		for _, b := range t.ranks[i].balances {
			load := make([]byte, b.Load.Len)
			if err := t.ranks[i].s.Download(load, b.Load); err != nil {
				return err
			}
			fmt.Fprintln(h, b.name, load)
		}
		parts[i] = h.Sum(nil)
		return nil
	})
	return sha256.Sum256(slices.Concat(parts...)), err
}

// runs makes a run of some steps, and gives everything back.
func runs(c Config, steps int) (a account, err error) {
	tr, err := New(c)
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	err = tr.on(&a, steps)
	return a, err
}

// on continues a run and accounts for it.
func (t *Trainer) on(a *account, steps int) (err error) {
	for range steps {
		m, err := t.Step()
		if err != nil {
			return err
		}
		if err := t.recount(m); err != nil {
			return err
		}
		a.add(m)
	}
	a.state, err = t.state()
	return err
}

// recount wants the metrics of the last step to say what the trainer holds.
func (t *Trainer) recount(m Metrics) error {
	want := m
	want.Step, want.LR, want.Reruns, want.Device, want.Host = t.StepsDone()-1, t.cfg.Optim.rate(t.StepsDone()-1), 0, 0, 0
	c := t.cfg
	want.Tokens = c.Layout.DP * c.Batch.Microbatches * c.Batch.Micro * c.Batch.Seq
	for i, u := range t.Usage() {
		want.Device = max(want.Device, int64(u.Kind[memory.Device].Current))
		want.Host = max(want.Host, int64(u.Kind[memory.Host].Current))
		if s := t.Summaries()[i].Stash; s != nil {
			want.Reruns = max(want.Reruns, s.Reruns)
		}
	}
	if !reflect.DeepEqual(m, want) || m.Seconds <= 0 {
		return fmt.Errorf("the metrics are %+v, and a recount gives %+v", m, want)
	}
	return nil
}

// mustRun is runs for runs that must go well.
func mustRun(t *testing.T, c Config, steps int) account {
	t.Helper()
	a, err := runs(c, steps)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// named returns the memory policy of a name.
func namedMemory(t *testing.T, name string) Memory {
	t.Helper()
	m, err := NamedMemory(name, 0)
	if err != nil {
		t.Fatal(err)
	}
	m.Links = links
	return m
}
