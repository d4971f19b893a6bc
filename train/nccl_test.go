// This file tests runs whose ranks live in several processes and exchange data over NCCL. A
// simulated library takes its place, so none of it needs a GPU.

package train

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/nccl"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// overNCCL runs work in processes of one rank each, and returns their libraries.
func overNCCL(t *testing.T, c Config, work func(process int, c Config) error) []*nccltest.Library {
	t.Helper()
	libs := nccltest.Libraries(c.Layout.Ranks(), 1)
	inProcesses(t, c, eachAlone(c), func(i int, c Config) error {
		p := *c.Process
		hosts := p.Join
		p.Join = func(rank int, dev device.Device) (comm.Comm, error) {
			host, err := cpu.Open(cpu.Options{})
			if err != nil {
				return nil, err
			}
			t.Cleanup(func() {
				if err := host.Close(); err != nil {
					t.Error(err)
				}
			})
			h, err := hosts(rank, host)
			if err != nil {
				return nil, err
			}
			return nccl.Open(libs[rank], dev, nccl.Options{Host: h, HostDevice: host})
		}
		c.Process = &p
		return work(i, c)
	})
	return libs
}

// trainersOverNCCL is overNCCL with a trainer in each process.
func trainersOverNCCL(t *testing.T, c Config, work func(i int, tr *Trainer) error) {
	overNCCL(t, c, func(i int, c Config) error {
		tr, err := New(c)
		if err != nil {
			return err
		}
		return errors.Join(work(i, tr), tr.Close())
	})
}

// All policies give the same bits over NCCL, eager and captured: the experts alone, and the
// whole step with its stash and what is offloaded inside. SPEC S7.3
func TestPoliciesOverNCCL(t *testing.T) {
	for _, l := range []Layout{{1, 1, 2, 2}, {2, 1, 2, 2}} {
		if l.PP > 1 && few() {
			continue
		}
		var first string
		for _, x := range []struct {
			name, policy string
			scopes       memory.Scopes
			offload      []string
		}{
			{name: "none", policy: "none"}, {name: "static", policy: "static"}, {name: "stash", policy: "stash"},
			{name: "offload", policy: "stash", offload: []string{"core_attn", "moe_act"}},
			{name: "whole", policy: "stash", scopes: fullIteration},
			{name: "whole with offload", policy: "stash", scopes: fullIteration, offload: []string{"core_attn", "attn_proj"}},
			{name: "experts", policy: "static", scopes: memory.ScopesOf(memory.MoE)},
		} {
			t.Run(fmt.Sprintf("%+v/%s", l, x.name), func(t *testing.T) {
				c := quick(t, mixed())
				c.Layout, c.Memory = l, namedMemory(t, x.policy)
				c.Memory.Links, c.Memory.Scopes, c.Memory.Offload = links, x.scopes, x.offload
				var err error
				if c.Text, c.HeldOut, err = c.Text.Split(0.2); err != nil {
					t.Fatal(err)
				}
				digests := make([]string, l.Ranks())
				overNCCL(t, c, func(i int, c Config) error {
					got, err := resultsOf(c, 5)
					digests[i] = got.digest
					return err
				})
				for i, d := range digests {
					if first == "" {
						first = d
					}
					if d != first {
						t.Errorf("process %d has parameters %s, want %s", i, d, first)
					}
				}
			})
		}
	}
}

// Ranks issue their calls of all communicators in one order in every layout, with stages,
// chunks, tied ends, replicas, the ring and shards. Otherwise the engine names them. SPEC S7.2
func TestLayoutsOverNCCL(t *testing.T) {
	for _, l := range []Layout{{4, 1, 1, 1}, {2, 2, 1, 1}, {2, 1, 1, 2}, {2, 2, 2, 2}, {1, 1, 2, 4}, {4, 1, 2, 2}} {
		for i, m := range []*model.Model{assorted(), longer(mixed())} {
			if l.Ranks() > 2 && few() {
				continue
			}
			for _, sharded := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, %+v, sharded %v", m.Name, l, sharded), func(t *testing.T) {
					c := quick(t, m)
					c.Layout, c.Dispatch, c.Batch.Microbatches = l, layer.Dispatch(i), 4
					if sharded {
						c.Sharding = &Sharding{Pool: bucket.Arena, Prefetch: 1}
					}
					overNCCL(t, c, func(_ int, c Config) error {
						_, err := runs(c, 2)
						return err
					})
				})
			}
		}
	}
}

// longer has every layer twice.
func longer(m *model.Model) *model.Model {
	m.Layers = append(m.Layers, m.Layers...)
	return m
}

// Gradients that replicas add up, and what gathers of sharded parameters read and write, are
// registered with NCCL before the first step, and deregistered before they are freed (the engine
// panics otherwise). Scattered sums, whose parts lie apart, and those of the two stages that hold
// the embedding, where it lies in different places, are not registered. SPEC S7.2
func TestRegisteredOverNCCL(t *testing.T) {
	for _, x := range []struct {
		name     string
		layout   Layout
		sharding *Sharding
		kind     string // of calls whose memory is registered
	}{
		{"whole", Layout{1, 1, 2, 2}, nil, "allReduce"},
		{"sharded", Layout{1, 1, 2, 2}, &Sharding{Pool: bucket.Arena, Prefetch: 1}, "allGather"},
		{"ends", Layout{2, 1, 1, 1}, nil, ""},
	} {
		t.Run(x.name, func(t *testing.T) {
			c := quick(t, mixed())
			c.Layout, c.Sharding = x.layout, x.sharding
			libs := overNCCL(t, c, func(_ int, c Config) error {
				_, err := runs(c, 3)
				return err
			})
			for r, l := range libs {
				all := strings.Join(l.Calls(), ",")
				began, ended := strings.Count(all, ",register"), strings.Count(all, ",deregister")
				if began != ended || (began > 0) != (x.kind != "") {
					t.Errorf("rank %d registers %d times and deregisters %d times", r, began, ended)
				}
				for _, kind := range []string{"allReduce", "allGather", "reduceScatter"} {
					if l.Reached(kind) != (kind == x.kind) {
						t.Errorf("rank %d: registered memory in a call of %s: %v", r, kind, l.Reached(kind))
					}
				}
			}
		})
	}
}

// asked counts how often a communicator and those split from it are asked for errors.
type asked struct {
	comm.Capturer
	times *atomic.Int64
}

func (c asked) Err() error {
	c.times.Add(1)
	return c.Capturer.Err()
}

func (c asked) Split(ranks []int) (comm.Comm, error) {
	x, err := c.Capturer.Split(ranks)
	if err != nil {
		return nil, err
	}
	return asked{x.(comm.Capturer), c.times}, nil
}

// A rank issues a whole eager step, with exchanges of experts, without waiting for the
// hosts of others: over NCCL it waits for them if it asks a communicator for its error. SPEC S7.2
func TestEagerStepWaitsForNoHost(t *testing.T) {
	for _, how := range []layer.Dispatch{layer.AllToAll, layer.Ring} {
		c := quick(t, mixed())
		c.Layout, c.Dispatch = Layout{1, 1, 2, 2}, how
		c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn"}, Links: links}
		times := [2]atomic.Int64{}
		overNCCL(t, c, func(i int, c Config) error {
			p := *c.Process
			join := p.Join
			p.Join = func(rank int, dev device.Device) (comm.Comm, error) {
				x, err := join(rank, dev)
				if err != nil {
					return nil, err
				}
				return asked{x.(comm.Capturer), &times[rank]}, nil
			}
			c.Process = &p
			tr, err := New(c)
			if err != nil {
				return err
			}
			var a account
			err = tr.on(&a, 3)
			if err == nil {
				err = tr.each(func(int) error {
					r := tr.ranks[0]
					r.upload(tr.loader, tr.step)
					return r.rt.Step(r.key(), func(s *engine.Step) error {
						before := times[i].Load()
						err := r.issue(s, false)
						if n := times[i].Load() - before; n != 0 {
							t.Errorf("%v: process %d asks for errors %d times while it issues a step", how, i, n)
						}
						return err
					})
				})
			}
			return errors.Join(err, tr.Close())
		})
	}
}

// In a captured step each process issues one replay, and launches and copies nothing else. SPEC S7.4
func TestOneReplayAStepOverNCCL(t *testing.T) {
	c := quick(t, mixed())
	c.Layout = Layout{1, 1, 2, 2}
	c.Memory = Memory{Rows: layer.Stashed, Fraction: 1, Offload: []string{"core_attn", "attn_proj"}, Links: links, Scopes: fullIteration}
	trainersOverNCCL(t, c, func(i int, tr *Trainer) error {
		var a account
		if err := tr.on(&a, 6); err != nil {
			return err
		}
		return tr.each(func(int) error {
			r := tr.ranks[0]
			r.upload(tr.loader, tr.step)
			before := r.dev.Counters()
			err := r.run()
			after := r.dev.Counters()
			if after.Replays-before.Replays != 1 || after.Launches != before.Launches || after.Copies != before.Copies || after.HostReads-before.HostReads != 1 {
				t.Errorf("process %d: %+v, then %+v", i, before, after)
			}
			return err
		})
	})
}

// One expert rank gets all rows until there is a graph, and then another one does, which has
// no room for them. Its overflow is agreed on and rerun by all processes. SPEC S7.4
func TestRerunsOverNCCL(t *testing.T) {
	m := longer(mixed()) // more than the sets hold
	c := quick(t, m)
	c.Layout, c.Batch.Micro = Layout{1, 1, 2, 2}, 32
	for _, x := range []struct {
		name string
		Memory
	}{{"sets", Memory{Room: 1, Sets: 1}}, {"pages", Memory{Room: 8, Sets: 1}}} {
		t.Run(x.name, func(t *testing.T) {
			c := c
			c.Memory = x.Memory
			c.Memory.Rows, c.Memory.Fraction, c.Memory.Links, c.Memory.Scopes = layer.Stashed, 1, links, fullIteration
			trainersOverNCCL(t, c, func(i int, tr *Trainer) error {
				var a account
				for _, to := range []int{0, 0, 0, 0, 1, 0, 1} {
					if err := tr.skew(to); err != nil {
						return err
					}
					if err := tr.on(&a, 1); err != nil {
						return err
					}
				}
				for r, s := range tr.Summaries() {
					if s.Stash.Reruns < 2 || s.Graphs.Replays < 2 {
						t.Errorf("process %d, rank %d: %+v, %+v", i, r, *s.Stash, *s.Graphs)
					}
				}
				return nil
			})
		})
	}
}
