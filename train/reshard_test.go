// This file owns the tests of checkpoints that are loaded on another layout.

package train

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
)

// divided is a way to divide a run of eight sequences a step.
type divided struct {
	Layout
	shard bool
	micro int
}

func (d divided) config(t *testing.T, m *model.Model) Config {
	c := quick(t, m)
	c.Layout, c.Batch = d.Layout, Batch{Micro: d.micro, Seq: 16, Microbatches: 8 / d.DP / d.micro}
	c.Settings.Routing.Balance = 0 // it counts tokens of one microbatch, so that it depends on the layout
	if d.shard {
		c.Sharding = &Sharding{Pool: bucket.Rotary, Prefetch: 1, GradComm: kernels.F32}
	}
	return c
}

// contents returns a checksum for each tensor of a checkpoint.
func contents(t *testing.T, c *checkpoint.Checkpoint) map[string][sha256.Size]byte {
	t.Helper()
	f, err := openFiles(c)
	out := map[string][sha256.Size]byte{}
	for name, parts := range f.of {
		last := parts[len(parts)-1]
		x := make([]float32, last.from+last.n)
		err = errors.Join(err, f.read(name, len(x), 0, x))
		out[name] = sha256.Sum256(bytesOf(x))
	}
	if err = errors.Join(err, f.close()); err != nil {
		t.Fatal(err)
	}
	return out
}

// moved loads a checkpoint, saves it at once, and trains some steps.
func moved(t *testing.T, c Config, from *checkpoint.Checkpoint, steps int) (a account, to *checkpoint.Checkpoint) {
	t.Helper()
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	store, err := checkpoint.Open(checkpoint.Options{Dir: t.TempDir()})
	if err == nil {
		err = errors.Join(tr.Resume(from), tr.Save(store), tr.on(&a, steps), tr.Close(), store.Close())
	}
	if err != nil {
		t.Fatal(err)
	}
	if to, err = store.Latest(); err != nil {
		t.Fatal(err)
	}
	return a, to
}

// A checkpoint of every layout loads on every other one. What is saved there has the same
// bits, and the first layout goes on from it as if nothing had happened. On the other
// layout the losses are the same but for the order of sums.
func TestLoadsOnAnyLayout(t *testing.T) { // SPEC S7.5
	all := []divided{
		{Layout{1, 1, 1, 1}, false, 1}, {Layout{1, 1, 1, 1}, true, 1}, {Layout{1, 1, 1, 1}, false, 4},
		{Layout{2, 1, 1, 1}, false, 1}, {Layout{2, 2, 1, 1}, false, 1}, {Layout{2, 1, 1, 1}, true, 2},
		{Layout{1, 1, 1, 2}, true, 1}, {Layout{1, 1, 2, 2}, false, 2}, {Layout{2, 2, 1, 2}, true, 1}, {Layout{2, 1, 2, 2}, true, 1},
		{Layout{1, 1, 4, 4}, true, 1}, {Layout{2, 1, 2, 4}, false, 1}, {Layout{2, 1, 2, 4}, true, 2},
	}
	tied := assorted()
	tied.Tied = true
	for _, m := range []*model.Model{assorted(), tied} {
		few := m.Tied || few()
		for i, a := range all {
			if few && i%4 != 2 {
				continue
			}
			c := a.config(t, m)
			const first, later = 2, 2
			from := saved(t, c, first)
			want := contents(t, from)
			plain := mustRun(t, c, first+later).tail(first)
			// There and back is two ways, so half of the layouts behind each will do for all pairs.
			for d := range len(all)/2 + 1 {
				j := (i + d) % len(all)
				if few && j%3 != 1 {
					continue
				}
				b := all[j]
				t.Run(fmt.Sprintf("%s, tied %t, from %+v to %+v", m.Name, m.Tied, a, b), func(t *testing.T) {
					got, there := moved(t, b.config(t, m), from, later)
					if !maps.Equal(contents(t, there), want) {
						t.Error("what was loaded and saved again differs")
					}
					back, again := moved(t, c, there, later)
					if !maps.Equal(contents(t, again), want) {
						t.Error("what was loaded back and saved again differs")
					}
					if err := back.differs(plain); err != nil {
						t.Errorf("after going there and back: %v", err)
					}
					for k, x := range got.steps {
						y := plain.steps[k]
						off := math.Abs(x.Loss-y.Loss) / y.Loss
						// The sums of the first loss have the same order if ranks and microbatches do.
						if same := a.DP == b.DP && a.micro == b.micro; x.Step != y.Step || off > 1e-5 || k == 0 && same && off > 0 {
							t.Errorf("loss %v of step %d, want %v", x.Loss, x.Step, y.Loss)
						}
					}
				})
			}
		}
	}
}

// flatStore saves moments as earlier versions did.
type flatStore struct{ *sharded }

func (f flatStore) moments(bool) []momentPart { return f.flat() }

// Sharded checkpoints of earlier versions load on their own layout, and a sentence says so
// on another one.
func TestLoadsShardsOfEarlierVersions(t *testing.T) {
	c := quick(t, mixed())
	c.Layout = Layout{2, 1, 2, 2}
	c.Sharding = &Sharding{Pool: bucket.Max, Prefetch: 1, GradComm: kernels.F32}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	var a account
	err = tr.on(&a, 1)
	for _, r := range tr.ranks {
		r.store = flatStore{r.store.(*sharded)}
	}
	store, open := checkpoint.Open(checkpoint.Options{Dir: t.TempDir()})
	if err = errors.Join(err, open); err == nil {
		err = errors.Join(tr.Save(store), tr.Close(), store.Close())
	}
	from, latest := store.Latest()
	if err = errors.Join(err, latest); err != nil {
		t.Fatal(err)
	}
	names := slices.Collect(maps.Keys(contents(t, from)))
	if !slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(n, "rank3.") }) {
		t.Fatalf("the checkpoint is not of the earlier form: %v", names)
	}
	got, err := resumed(c, from, 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := got.differs(mustRun(t, c, 3).tail(1)); err != nil {
		t.Error(err)
	}
	for _, other := range []Config{func() Config { c := c; c.Sharding = nil; return c }(), func() Config { c := c; c.Layout.EP = 1; return c }()} {
		if _, err := resumed(other, from, 1); err == nil || !strings.Contains(err.Error(), "is of an earlier version and can only be loaded with sharded parameters on pp 2, vpp 1, ep 2, dp 2; ") {
			t.Error(err)
		}
	}
}
