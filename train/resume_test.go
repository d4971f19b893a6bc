// This file owns the tests of runs that are saved and resumed: they go on bit for bit,
// or say why not.

package train

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/leak"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
	"github.com/stowage-dev/stowage/train/internal/checkpoint/safetensors"
	"github.com/stowage-dev/stowage/train/internal/data"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// saved runs some steps and saves, in a folder of its own.
func saved(t *testing.T, c Config, steps int) *checkpoint.Checkpoint {
	t.Helper()
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	var a account
	err = tr.on(&a, steps)
	to, open := checkpoint.Open(checkpoint.Options{Dir: t.TempDir()})
	if err = errors.Join(err, open); err == nil {
		err = errors.Join(tr.Save(to), to.Close())
	}
	if err = errors.Join(err, tr.Close()); err != nil {
		t.Fatal(err)
	}
	from, err := to.Latest()
	if err != nil {
		t.Fatal(err)
	}
	if from.Step != steps {
		t.Fatalf("step %d was saved, want %d", from.Step, steps)
	}
	return from
}

// resumed runs some steps from a checkpoint on.
func resumed(c Config, from *checkpoint.Checkpoint, steps int) (a account, err error) {
	tr, err := New(c)
	if err != nil {
		return a, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it closes files
	before := leak.Files()
	if err = tr.Resume(from); err != nil {
		return a, err
	}
	if left := leak.Since(before); len(left) > 0 {
		return a, fmt.Errorf("files stay open: %v", left)
	}
	err = tr.on(&a, steps)
	return a, err
}

// tail is what a run came to from a step on.
func (a account) tail(step int) account {
	a.steps = a.steps[step:]
	return a
}

// A run that was saved and resumed comes to what it would have without, whole and
// sharded, on every layout, and under another memory policy too.
func TestResumeIsExact(t *testing.T) {
	for i, x := range []struct {
		m      *model.Model
		layout Layout
		pool   bucket.PoolKind
		shard  bool
		number kernels.Number
		how    layer.Dispatch
	}{
		{m: mixed(), layout: Layout{1, 1, 1, 1}},
		{m: mixed(), layout: Layout{2, 1, 2, 2}, how: layer.Ring},
		{m: mixed(), layout: Layout{1, 1, 2, 4}, number: kernels.BF16},
		{m: assorted(), layout: Layout{2, 2, 1, 1}},
		{m: assorted(), layout: Layout{2, 1, 2, 2}},
		{m: mixed(), layout: Layout{1, 1, 1, 2}, shard: true, pool: bucket.Max},
		{m: mixed(), layout: Layout{2, 1, 2, 4}, shard: true, pool: bucket.Recorded},
		{m: assorted(), layout: Layout{2, 1, 2, 2}, shard: true, pool: bucket.Arena, number: kernels.BF16},
	} {
		if few() && i%3 != 1 {
			continue
		}
		c := quick(t, x.m)
		c.Layout, c.Number, c.Dispatch, c.Memory = x.layout, x.number, x.how, namedMemory(t, "stash")
		if x.shard {
			c.Sharding = &Sharding{Pool: x.pool, Prefetch: 1, GradComm: kernels.F32}
		}
		t.Run(fmt.Sprintf("%s, %+v, sharded %t, %v, %s", x.m.Name, x.layout, x.shard, x.how, numberName(x.number)), func(t *testing.T) {
			const all, first = 5, 2
			want := mustRun(t, c, all).tail(first)
			from := saved(t, c, first)
			for _, name := range []string{"stash", "none", "offload+recompute", "graphs"} {
				c := c
				c.Memory = namedMemory(t, name)
				if x.shard {
					c.Sharding = &Sharding{Pool: bucket.Rotary, Prefetch: 0, GradComm: kernels.F32}
				}
				got, err := resumed(c, from, all-first)
				if err != nil {
					t.Fatal(err)
				}
				if err := got.differs(want); err != nil {
					t.Errorf("resumed under %s: %v", name, err)
				}
			}
		})
	}
}

// What would change the numbers is refused, in a sentence that names it; the trainer
// that refused is as it was.
func TestResumeRefuses(t *testing.T) {
	c := quick(t, mixed())
	c.Layout = Layout{1, 1, 2, 2}
	from := saved(t, c, 1)
	sharded := c
	sharded.Sharding = &Sharding{Pool: bucket.Max, Prefetch: 1, GradComm: kernels.F32}
	shards := saved(t, sharded, 1)
	other := mixed()
	other.Layers[0].Attention.Heads = 4
	for _, x := range []struct {
		name string
		from *checkpoint.Checkpoint
		base Config
		set  func(c *Config)
		want string
	}{
		{"model", from, c, func(c *Config) { c.Model = other }, "has other sizes than the run's model"},
		{"number", from, c, func(c *Config) { c.Number = kernels.BF16 }, "Number differs: this run has bf16, and the one to resume fp32; "},
		{"settings", from, c, func(c *Config) { c.Settings.Routing.Capacity = 2 }, "Capacity 2 differs from the run's 0; "},
		{"batch", from, c, func(c *Config) { c.Batch.Seq = 8 }, "Seq 8 differs from the run's 16; "},
		{"optimiser", from, c, func(c *Config) { c.Optim.Beta2 = 0.9 }, "Beta2 0.9 differs from the run's 0.95; "},
		{"seed", from, c, func(c *Config) { c.Seed++ }, "Seed 8 differs from the run's 7; "},
		{"dispatch", from, c, func(c *Config) { c.Dispatch = layer.Ring }, "Dispatch ring differs from the run's alltoall; "},
		{"replicas", from, c, func(c *Config) { c.Layout.DP = 4 }, "DP 4 makes 8 sequences a step, but the run has 4; choose dp, microbatches and micro with the product 4"},
		{"microbatches", from, c, func(c *Config) { c.Batch.Microbatches = 3 }, "Microbatches 3 makes 6 sequences a step, but the run has 4; "},
		{"text", from, c, func(c *Config) { c.Text = data.NewText("another", make([]byte, 4096)) }, "text"},
		{"gradients in another format", shards, sharded, func(c *Config) {
			c.Sharding = &Sharding{Pool: bucket.Max, Prefetch: 1, GradComm: kernels.BF16}
		}, "GradComm bf16 differs from the run's fp32; "},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := x.base
			x.set(&c)
			tr, err := New(c)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := tr.Close(); err != nil {
					t.Error(err)
				}
			}()
			err = tr.Resume(x.from)
			if err == nil || strings.Contains(err.Error(), "\n") || !strings.Contains(err.Error(), x.want) {
				t.Fatalf("%v", err)
			}
			t.Log(err)
			var got account
			if err := tr.on(&got, 1); err != nil {
				t.Fatal(err)
			}
			if err := got.differs(mustRun(t, c, 1)); err != nil {
				t.Errorf("after a refusal %v", err)
			}
		})
	}
}

// A checkpoint that turns out to be damaged while it is loaded leaves parameters of two
// runs behind: nothing goes on with them.
func TestNothingAfterHalfAResume(t *testing.T) {
	c := quick(t, mixed())
	c.Layout, c.HeldOut = Layout{1, 1, 1, 1}, c.Text
	from := saved(t, c, 1)
	// All parameters are read before a moment is missing.
	path := filepath.Join(from.Path, "optim-00001-of-00001.safetensors")
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, bytes.ReplaceAll(text, []byte(".exp_avg"), []byte(".exp_new")), 0o644); err != nil {
		t.Fatal(err)
	}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	failed := tr.Resume(from)
	if failed == nil || !strings.Contains(failed.Error(), "has no tensor") {
		t.Errorf("Resume returned %v", failed)
	}
	_, step := tr.Step()
	_, _, evaluate := tr.Evaluate(1)
	to, err := checkpoint.Open(checkpoint.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{"Step": step, "Evaluate": evaluate, "Save": tr.Save(to)} {
		if err == nil || failed == nil || err.Error() != failed.Error() {
			t.Errorf("%s returned %v, want %v", name, err, failed)
		}
	}
	if err := errors.Join(to.Close(), tr.Close()); err != nil {
		t.Error(err)
	}
}

// Settings that only one of two runs has are told apart from those that differ, at any depth.
func TestSettingsOfOneRun(t *testing.T) {
	type settings = map[string]any
	for _, x := range []struct {
		saved, mine any
		want        string
	}{
		{settings{"a": settings{"b": "1"}}, settings{"a": settings{"b": "1"}}, ""},
		{settings{"a": settings{"b": "1", "lr": "2"}}, settings{"a": settings{"b": "1"}}, "LR is known only to the version that saved the run"},
		{settings{"a": settings{"b": "1"}}, settings{"a": settings{"b": "1", "min_lr": "2"}}, "MinLR is not known to the version that saved the run"},
		{settings{"a": settings{"b": "1"}}, settings{"a": settings{"b": "3"}}, "B 3 differs from the run's 1"},
	} {
		err := differs("x", x.saved, x.mine)
		if (err == nil) != (x.want == "") || err != nil && !strings.Contains(err.Error(), x.want) {
			t.Errorf("%v and %v: %v, want %q", x.saved, x.mine, err, x.want)
		}
	}
}

// later is a target that leaves writing to the test.
type later struct{ ranks []checkpoint.Rank }

func (l *later) Save(_ checkpoint.Meta, ranks []checkpoint.Rank) error {
	l.ranks = ranks
	return nil
}

// text returns what the shards of all ranks write.
func (l *later) text(t *testing.T, of func(checkpoint.Rank) checkpoint.Shard) []byte {
	t.Helper()
	var b bytes.Buffer
	for _, r := range l.ranks {
		s := of(r)
		w, err := safetensors.NewWriter(&b, safetensors.NewLayout(nil, s.Tensors))
		if err == nil {
			err = s.Write(w)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// What is saved stays as it is until all of it is written, though the next save begins before. One
// save was written already, whose memory is used again.
func TestNextSaveLeavesTheLast(t *testing.T) {
	params := func(r checkpoint.Rank) checkpoint.Shard { return r.Model }
	moments := func(r checkpoint.Rank) checkpoint.Shard { return r.Optim }
	var got [2][]byte
	for i := range got {
		tr, err := New(quick(t, smallMoE()))
		if err != nil {
			t.Fatal(err)
		}
		var a account
		var written, first, second later
		err = tr.Save(&written)
		written.text(t, params)
		written.text(t, moments)
		err = errors.Join(err, tr.on(&a, 1), tr.Save(&first))
		first.text(t, params)
		if i > 0 {
			err = errors.Join(err, tr.on(&a, 1), tr.Save(&second))
		}
		got[i] = first.text(t, moments)
		if err = errors.Join(err, tr.Close()); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(got[0], got[1]) {
		t.Error("a save changed what the one before had not written yet")
	}
}
