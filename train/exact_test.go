// This file owns the tests that results are exact: whatever is done about memory, and
// however often a step is rerun.

package train

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// memories are policies: the named ones, and each setting alone, with rows of every
// kind. What is said to be refused is no policy.
func memories(t *testing.T, yield func(name string, m Memory)) {
	for _, name := range Policies {
		if name != "budget" {
			yield(name, namedMemory(t, name))
		}
	}
	for _, rows := range []layer.Rows{layer.Exact, layer.Padded, layer.Stashed} {
		at := func(name string, set func(m *Memory)) {
			m := Memory{Rows: rows, Fraction: 1, Links: links}
			set(&m)
			yield(fmt.Sprintf("%s, rows %d", name, rows), m)
		}
		// Padded rows are saved as exact ones are: of those, everything at once will do.
		alone := rows != layer.Padded
		for _, name := range []string{"attn_norm", "qkv_linear", "core_attn", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp"} {
			if !alone {
				break
			}
			at("offload "+name, func(m *Memory) { m.Offload = []string{name} })
		}
		all := []string{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act"}
		at("offload all", func(m *Memory) { m.Offload = all })
		at("offload half", func(m *Memory) { m.Offload, m.Fraction = all, 0.5 })
		at("offload none", func(m *Memory) { m.Offload, m.Fraction = all, 0 })
		for _, name := range []string{"layernorm", "core_attn", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts", "qkv_linear", "attn_proj", "router"} {
			if !alone {
				break
			}
			at("recompute "+name, func(m *Memory) { m.Recompute = []string{name} })
		}
		at("recompute all", func(m *Memory) {
			m.Recompute = []string{"layernorm", "core_attn", "mla_up_proj", "mlp", "moe", "shared_experts"}
		})
		at("both", func(m *Memory) {
			m.Offload, m.Recompute = []string{"attn_norm", "mlp_norm", "core_attn"}, []string{"layernorm", "mlp", "shared_experts"}
		})
		if rows == layer.Exact {
			continue
		}
		for _, s := range []memory.Scopes{memory.ScopesOf(memory.Attn), memory.ScopesOf(memory.MLP), memory.ScopesOf(memory.MoERouter), memory.ScopesOf(memory.Attn, memory.MLP, memory.MoERouter)} {
			at("graph "+s.String(), func(m *Memory) { m.Scopes = s })
			at("graph and offload "+s.String(), func(m *Memory) { m.Scopes, m.Offload = s, []string{"core_attn", "mlp_norm"} })
			at("graph and recompute "+s.String(), func(m *Memory) { m.Scopes, m.Recompute = s, []string{"layernorm", "core_attn"} })
		}
	}
	for sets := 1; sets <= 3; sets++ {
		for _, room := range []float64{0.01, 1, 4} {
			yield(fmt.Sprintf("%d sets of room %g", sets, room), Memory{Rows: layer.Stashed, Fraction: 1, Sets: sets, Room: room})
		}
	}
}

// Every policy gives the numbers of none, on several layouts, with both ways of
// dispatching, with and without tokens dropped, from several seeds.
func TestExactWhateverThePolicy(t *testing.T) { // SPEC S1.6, S3.4, S4.6, S5.1, S5.2
	var runs []Config
	want := map[int]account{}
	for i, m := range []*model.Model{mixed(), assorted()} {
		for _, d := range []layer.Dispatch{layer.AllToAll, layer.Ring} {
			for _, capacity := range []float64{0, 0.75} {
				c := quick(t, m)
				c.Dispatch, c.Settings.Routing.Capacity, c.Seed = d, capacity, uint64(len(runs))
				c.Layout = []Layout{{2, 1, 2, 2}, {1, 1, 2, 2}, {2, 1, 1, 1}, {1, 1, 2, 4}}[(len(runs)+i)%4]
				if c.Layout.EP == 1 {
					c.Layout.VPP, c.Dispatch = i+1, layer.AllToAll
				}
				runs = append(runs, c)
			}
		}
	}
	at := 0
	memories(t, func(name string, with Memory) {
		at++
		i := at % len(runs)
		c := runs[i]
		c.Memory = with
		every := 1
		switch {
		case testing.Short() || raceEnabled:
			every = 9
		case few():
			every = 3
		}
		if at%every == 0 {
			if _, ok := want[i]; !ok {
				want[i] = mustRun(t, runs[i], 4)
			}
			t.Run(fmt.Sprintf("%s, %+v, %v, capacity %g, %s", c.Model.Name, c.Layout, c.Dispatch, c.Settings.Routing.Capacity, name), func(t *testing.T) {
				if err := mustRun(t, c, 4).differs(want[i]); err != nil {
					t.Error(err)
				}
			})
		}
	})
}

// On one rank the whole step may be captured, and parameters may be sharded; neither
// changes a number, nor does what else is chosen.
func TestExactInOneGraph(t *testing.T) { // SPEC S4.1, S4.6
	for i, m := range []*model.Model{mixed(), assorted()} {
		if i > 0 && raceEnabled {
			continue
		}
		c := quick(t, m)
		c.Layout = Layout{1, 1, 1, 1}
		want := mustRun(t, c, 5)
		for name, with := range map[string]Memory{
			"static":    {Rows: layer.Padded},
			"stash":     {Rows: layer.Stashed},
			"reruns":    {Rows: layer.Stashed, Room: 0.01},
			"offload":   {Rows: layer.Stashed, Offload: []string{"core_attn", "attn_proj", "mlp_norm", layer.RowsGroup}},
			"recompute": {Rows: layer.Stashed, Recompute: []string{"layernorm", "core_attn", "mlp", "moe"}},
		} {
			t.Run(m.Name+", "+name, func(t *testing.T) {
				c := c
				c.Memory = with
				c.Memory.Scopes, c.Memory.Fraction, c.Memory.Links = memory.ScopesOf(memory.FullIteration), 1, links
				if err := mustRun(t, c, 5).differs(want); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// Sharded parameters give the same bits under every policy.
func TestExactWhenSharded(t *testing.T) { // SPEC S2.1
	for i, m := range []*model.Model{mixed(), assorted()} {
		if i > 0 && few() {
			continue
		}
		c := quick(t, m)
		c.Layout = Layout{2, 1, 2, 4}
		c.Sharding = &Sharding{Pool: bucket.Recorded, Prefetch: 1, GradComm: kernels.Number(i)} // fp32, bf16
		var want account
		for _, name := range Policies {
			c.Memory = namedMemory(t, "stash")
			if name == "budget" {
				peak, err := peakOf(c)
				if err != nil {
					t.Fatal(err)
				}
				c.Memory.Budget = peak + 32*memory.KiB
			} else {
				c.Memory = namedMemory(t, name)
			}
			t.Run(m.Name+", "+name, func(t *testing.T) {
				got, used, err := within(c)
				if err != nil {
					t.Fatal(err)
				}
				if want.steps == nil {
					want = got
				}
				if err := got.differs(want); err != nil {
					t.Error(err)
				}
				if b := c.Memory.Budget; b > 0 && used > b {
					t.Errorf("%v used of %v", used, b)
				}
			})
		}
	}
}

// skew makes all tokens of a step choose the experts of one expert rank.
func (t *Trainer) skew(to int) error {
	return t.each(func(i int) error {
		r := t.ranks[i]
		for _, b := range r.balances {
			bias := make([]float32, b.experts)
			for e := range bias {
				if e*r.cfg.Layout.EP/b.experts == to {
					bias[e] = 10
				}
			}
			r.s.Upload(b.Bias, bytesOf(bias))
		}
		return r.s.Sync()
	})
}

// skewed is a run in which the expert ranks take turns at receiving everything.
func skewed(c Config, steps int) (a account, s memory.StashCounts, err error) {
	tr, err := New(c)
	if err != nil {
		return a, s, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	for i := range steps {
		if err := tr.skew(i % c.Layout.EP); err != nil {
			return a, s, err
		}
		if err := tr.on(&a, 1); err != nil {
			return a, s, err
		}
	}
	for _, x := range tr.Summaries() {
		if x.Stash != nil {
			s.Reruns, s.Spilled, s.Growths = max(s.Reruns, x.Stash.Reruns), s.Spilled+x.Stash.Spilled, s.Growths+x.Stash.Growths
		}
	}
	return a, s, nil
}

// Steps that find too few pages, or too small a buffer, are rerun and come to the same.
func TestRerunsAreExact(t *testing.T) { // SPEC S1.4, S1.6
	for _, l := range []Layout{{1, 1, 2, 2}, {2, 1, 2, 2}} {
		if l.PP > 1 && few() {
			continue
		}
		c := quick(t, mixed())
		c.Layout, c.Batch.Micro = l, 32 // 64 KiB of rows: several pages
		want, _, err := skewed(c, 5)
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range []struct {
			name string
			Memory
			reruns int
		}{
			{"over budget", Memory{Room: 1}, 2},
			{"over budget from nothing", Memory{Room: 0.001, Sets: 1}, 2},
			{"pages", Memory{Room: 8}, 1},
			{"pages in host memory", Memory{Room: 8, Offload: []string{layer.RowsGroup}}, 1},
			{"both", Memory{Room: 1, Offload: []string{layer.RowsGroup}}, 2},
			{"in graphs", Memory{Room: 1, Scopes: memory.ScopesOf(memory.Attn, memory.MoERouter)}, 2},
			{"recomputing", Memory{Room: 1, Recompute: []string{"layernorm", "moe"}, Offload: []string{"core_attn"}}, 2},
		} {
			if raceEnabled && x.name != "both" && x.name != "recomputing" {
				continue
			}
			t.Run(fmt.Sprintf("%+v, %s", l, x.name), func(t *testing.T) {
				c := c
				c.Memory = x.Memory
				c.Memory.Rows, c.Memory.Fraction, c.Memory.Links = layer.Stashed, 1, links
				got, s, err := skewed(c, 5)
				if err != nil {
					t.Fatal(err)
				}
				if err := got.differs(want); err != nil {
					t.Error(err)
				}
				t.Logf("%+v", s)
				if s.Reruns < x.reruns {
					t.Errorf("%d reruns, want at least %d: %+v", s.Reruns, x.reruns, s)
				}
			})
		}
	}
}

// A budget is kept, to the byte of the device's ledger, or refused in a sentence; where
// it is kept, the numbers are those of none.
func TestBudgets(t *testing.T) { // SPEC S5.5
	kept, refused := 0, 0
	for _, m := range []*model.Model{mixed(), assorted()} {
		for _, rows := range []layer.Rows{layer.Stashed, layer.Exact} {
			if rows == layer.Exact && raceEnabled {
				continue
			}
			c := quick(t, m)
			c.Layout, c.Batch = Layout{2, 1, 1, 1}, Batch{Micro: 1, Seq: 32, Microbatches: 4}
			want := mustRun(t, c, 4)
			peak, err := peakOf(c)
			if err != nil {
				t.Fatal(err)
			}
			// From above what none takes to below the parameters: the floor lies between.
			for part := 48; part > 14; part -= 3 {
				c.Memory = Memory{Rows: rows, Fraction: 1, Links: links, Budget: peak * memory.Bytes(part) / 32}
				if few() && part%9 != 3 {
					continue
				}
				t.Run(fmt.Sprintf("%s, rows %d, %v of %v", m.Name, rows, c.Memory.Budget, peak), func(t *testing.T) {
					got, used, err := within(c)
					if err != nil {
						refused++
						if text := err.Error(); strings.Contains(text, "\n") || !strings.Contains(text, "budget") {
							t.Errorf("no sentence about the budget: %v", err)
						}
						t.Log(err)
						return
					}
					kept++
					if err := got.differs(want); err != nil {
						t.Error(err)
					}
					if used > c.Memory.Budget {
						t.Errorf("%v used of %v", used, c.Memory.Budget)
					}
				})
			}
		}
	}
	if kept == 0 || refused == 0 {
		t.Errorf("%d budgets kept and %d refused; want some of both", kept, refused)
	}
}

// within is a run of four steps, and what its fullest device ever held.
func within(c Config) (a account, used memory.Bytes, err error) {
	tr, err := New(c)
	if err != nil {
		return a, 0, err
	}
	defer func() { err = errors.Join(err, tr.Close()) }()
	if err = tr.on(&a, 4); err != nil {
		return a, 0, err
	}
	for _, u := range tr.Usage() {
		used = max(used, u.Kind[memory.Device].Peak)
	}
	return a, used, nil
}

func peakOf(c Config) (memory.Bytes, error) {
	_, used, err := within(c)
	return used, err
}

// Storing gradients in the first pass and adding those of later ones gives what adding all to zeros
// gives, whatever an earlier step left where the first pass stores.
func TestFirstGradientsAreStored(t *testing.T) { // SPEC S1.6
	for _, m := range []*model.Model{smallMoE(), smallDense(), smallDeepSeek(), smallHybrid()} {
		for _, l := range []Layout{{PP: 1, VPP: 1, EP: 1, DP: 1}, {PP: 2, VPP: 1, EP: 1, DP: 1}} {
			t.Run(fmt.Sprintf("%s on %d stages", m.Name, l.PP), func(t *testing.T) {
				c := testConfig(t, m)
				c.Layout = l
				run := func(add bool, leave byte) string {
					tr, err := New(c)
					if err != nil {
						t.Fatal(err)
					}
					defer func() {
						if err := tr.Close(); err != nil {
							t.Error(err)
						}
					}()
					for range 2 {
						for _, r := range tr.ranks {
							w := r.store.(*whole)
							for _, u := range w.units {
								u.Once = u.Once && !add
							}
							for k := range w.at {
								w.r.s.Fill(w.grads().Slice(w.at[k], w.place(k).Len), leave)
							}
						}
						if _, err := tr.Step(); err != nil {
							t.Fatal(err)
						}
					}
					sum, err := tr.Digest()
					if err != nil {
						t.Fatal(err)
					}
					return sum
				}
				want := run(true, 0)
				for _, leave := range []byte{0, 0xff} {
					if got := run(false, leave); got != want {
						t.Errorf("with %#x left over, the parameters are %s, want %s", leave, got, want)
					}
				}
			})
		}
	}
}
