// This file owns the tests of scopes that several ranks capture together: results are
// exact, the host issues one replay, and ranks agree on reruns.

package train

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

var fullIteration = memory.ScopesOf(memory.FullIteration)

// The whole step of all ranks is one graph: stages, replicas and expert ranks, with both
// ways of dispatching, and with stash, offload, recomputation and sharded parameters
// inside. No number changes. SPEC S7.4
func TestExactInOneGraphOfRanks(t *testing.T) {
	at := 0
	for _, l := range []Layout{{1, 1, 2, 2}, {2, 1, 2, 2}, {2, 1, 1, 1}, {1, 1, 1, 2}, {1, 1, 2, 4}} {
		for i, m := range []*model.Model{mixed(), assorted()} {
			c := quick(t, m)
			c.Layout = l
			if i > 0 {
				c.Dispatch = layer.Ring
				if c.Layout.EP == 1 {
					c.Dispatch, c.Layout.VPP = layer.AllToAll, c.Layout.PP
				}
			}
			var want account
			for _, x := range []struct {
				name string
				Memory
			}{
				{"static", Memory{Rows: layer.Padded}},
				{"stash", Memory{Rows: layer.Stashed}},
				{"reruns", Memory{Rows: layer.Stashed, Room: 0.01}},
				{"offload", Memory{Rows: layer.Stashed, Offload: []string{"core_attn", "attn_proj", "mlp_norm", layer.RowsGroup}}},
				{"recompute", Memory{Rows: layer.Stashed, Recompute: []string{"layernorm", "core_attn", "mlp", "moe"}}},
			} {
				if at++; few() && at%7 > 0 {
					continue
				}
				if want.steps == nil {
					want = mustRun(t, c, 5)
				}
				t.Run(fmt.Sprintf("%s, %+v, %s", m.Name, c.Layout, x.name), func(t *testing.T) {
					c := c
					c.Memory = x.Memory
					c.Memory.Scopes, c.Memory.Fraction, c.Memory.Links = fullIteration, 1, links
					got, all, err := summed(c, 5)
					if err != nil {
						t.Fatal(err)
					}
					if err := got.differs(want); err != nil {
						t.Error(err)
					}
					for r, s := range all {
						if g := s.Graphs; g.Replays == 0 || g.Refused > 0 || g.Failed > 0 {
							t.Errorf("rank %d: %+v", r, *g)
						}
					}
				})
			}
		}
	}
}

// Sharded parameters are gathered and their gradients reduced inside the graph.
func TestShardedInOneGraphOfRanks(t *testing.T) {
	for _, pool := range []bucket.PoolKind{bucket.Recorded, bucket.Arena, bucket.Max} {
		c := quick(t, mixed())
		c.Layout = Layout{1, 1, 2, 4}
		c.Sharding = &Sharding{Pool: pool, Prefetch: 1, GradComm: kernels.F32}
		c.Memory = namedMemory(t, "stash")
		want := mustRun(t, c, 5)
		c.Memory.Scopes = fullIteration
		if err := mustRun(t, c, 5).differs(want); err != nil {
			t.Errorf("%v: %v", pool, err)
		}
	}
}

// In a captured step the host issues one replay for all ranks, launches and copies nothing
// else, and each rank reads device memory once. SPEC S7.4
func TestOneReplayAStep(t *testing.T) {
	c := quick(t, mixed())
	c.Layout = Layout{2, 1, 2, 2}
	c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn", "attn_proj"}, Links: links, Scopes: fullIteration}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	}()
	var a account
	if err := tr.on(&a, 6); err != nil {
		t.Fatal(err)
	}
	got := make([]device.Counters, len(tr.ranks))
	reruns := tr.Reruns()
	err = tr.each(func(i int) error {
		r := tr.ranks[i]
		r.upload(tr.loader, tr.step)
		before := r.dev.Counters()
		err := r.run()
		after := r.dev.Counters()
		got[i] = device.Counters{
			Replays: after.Replays - before.Replays, Launches: after.Launches - before.Launches, Copies: after.Copies - before.Copies,
			HostReads: after.HostReads - before.HostReads,
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if tr.Reruns() != reruns {
		t.Fatal("the step was rerun")
	}
	for i, n := range got {
		want := device.Counters{HostReads: 1}
		if i == 0 {
			want.Replays = 1
		}
		if n != want {
			t.Errorf("rank %d: %+v, want %+v", i, n, want)
		}
	}
}

// One expert rank gets all rows until there is a graph, and then another one does, which
// has no room for them. Its overflow is agreed on and rerun by all ranks. Pages grow under the graph; sets that move make all
// ranks capture again. SPEC S7.4
func TestRerunsInOneGraphOfRanks(t *testing.T) {
	for _, l := range []Layout{{1, 1, 2, 2}, {2, 1, 2, 2}} {
		if l.PP > 1 && few() {
			continue
		}
		m := mixed()
		m.Layers = append(m.Layers, m.Layers...) // more than the sets hold
		c := quick(t, m)
		c.Layout, c.Batch.Micro = l, 32 // 64 KiB of rows: several pages
		run := func(c Config) (a account, all []memory.Summary, err error) {
			tr, err := New(c)
			if err != nil {
				return a, nil, err
			}
			defer func() { err = errors.Join(err, tr.Close()) }()
			for _, to := range []int{0, 0, 0, 0, 1, 0, 1} {
				if err := errors.Join(tr.skew(to), tr.on(&a, 1)); err != nil {
					return a, nil, err
				}
			}
			return a, tr.Summaries(), nil
		}
		want, _, err := run(c)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			name string
			Memory
			moves bool
		}{
			{"sets", Memory{Room: 1, Sets: 1}, true},
			{"pages", Memory{Room: 8, Sets: 1}, false},
			{"pages in host memory", Memory{Room: 8, Sets: 1, Offload: []string{layer.RowsGroup}}, false},
		} {
			t.Run(fmt.Sprintf("%+v, %s", l, x.name), func(t *testing.T) {
				c := c
				c.Memory = x.Memory
				c.Memory.Rows, c.Memory.Fraction, c.Memory.Links, c.Memory.Scopes = layer.Stashed, 1, links, fullIteration
				got, all, err := run(c)
				if err != nil {
					t.Fatal(err)
				}
				if err := got.differs(want); err != nil {
					t.Error(err)
				}
				for r, s := range all {
					again := s.Graphs.Captures > 1
					if s.Stash.Reruns < 2 || s.Stash.Reruns != all[0].Stash.Reruns || *s.Graphs != *all[0].Graphs || s.Graphs.Replays < 2 || again != x.moves {
						t.Errorf("rank %d: %+v, %+v", r, *s.Stash, *s.Graphs)
					}
				}
			})
		}
	}
}

// Expert ranks capture the scope moe together, with dispatch and combine inside, while the
// stages of the pipeline replay graphs of their own. No number changes. SPEC S7.4
func TestExactWithCapturedExperts(t *testing.T) {
	for i, l := range []Layout{{1, 1, 2, 2}, {2, 1, 2, 4}, {1, 1, 1, 2}, {1, 1, 1, 1}} {
		for k, m := range []*model.Model{mixed(), assorted()} {
			if few() && i != k {
				continue
			}
			c := quick(t, m)
			c.Layout = l
			if k > 0 && l.EP > 1 {
				c.Dispatch = layer.Ring
			}
			want := mustRun(t, c, 5)
			for name, with := range map[string]Memory{
				"moe":             {},
				"moe and router":  {Scopes: memory.ScopesOf(memory.Attn, memory.MLP, memory.MoERouter)},
				"offload":         {Offload: []string{"core_attn", "expert_fc1", "moe_act"}},
				"recompute":       {Recompute: []string{"layernorm", "moe_act"}},
				"offload and all": {Scopes: memory.ScopesOf(memory.Attn, memory.MLP), Offload: []string{"core_attn", "moe_act"}, Recompute: []string{"shared_experts"}},
			} {
				t.Run(fmt.Sprintf("%s, %+v, %s", m.Name, l, name), func(t *testing.T) {
					c := c
					c.Memory = with
					c.Memory.Rows, c.Memory.Scopes, c.Memory.Fraction, c.Memory.Links = layer.Padded, with.Scopes|memory.ScopesOf(memory.MoE), 1, links
					got, all, err := summed(c, 5)
					if err != nil {
						t.Fatal(err)
					}
					if err := got.differs(want); err != nil {
						t.Error(err)
					}
					for r, s := range all {
						if g := s.Graphs; g.Replays == 0 || g.Refused > 0 || g.Failed > 0 {
							t.Errorf("rank %d: %+v", r, *g)
						}
					}
				})
			}
		}
	}
}

// Under a budget ranks decide for themselves, and record steps again when they choose. All
// of them replay one graph in the end, within the budget. SPEC S7.4
func TestBudgetInOneGraphOfRanks(t *testing.T) {
	c := quick(t, assorted())
	c.Layout = Layout{2, 1, 2, 2}
	want := mustRun(t, c, 8)
	c.Memory = namedMemory(t, "stash")
	c.Memory.Scopes = fullIteration
	peak, err := peakOf(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, less := range []memory.Bytes{-32 * memory.KiB, 0, 8 * memory.KiB} {
		c.Memory.Budget = peak - less
		got, all, err := summed(c, 8)
		var small *memory.BudgetError
		if errors.As(err, &small) && less > 0 {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := got.differs(want); err != nil {
			t.Errorf("%v: %v", c.Memory.Budget, err)
		}
		for r, s := range all {
			if g := s.Graphs; g.Replays == 0 || g.Failed > 0 || g.Refused > 0 {
				t.Errorf("%v: rank %d: %+v", c.Memory.Budget, r, *g)
			}
		}
	}
}

// summed is runs with the summaries of the ranks.
func summed(c Config, steps int) (a account, all []memory.Summary, err error) {
	tr, err := New(c)
	if err != nil {
		return a, nil, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	err = tr.on(&a, steps)
	return a, tr.Summaries(), err
}
