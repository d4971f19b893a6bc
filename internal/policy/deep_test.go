// This file tests how far ahead groups come back, and which window a policy made by
// hand is followed with.

package policy

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// ahead is where a plan brings groups back.
func ahead(p *residency.Plan) map[memory.GroupID]int {
	at := map[memory.GroupID]int{}
	for pos, list := range p.Prefetch {
		for _, g := range list {
			at[g] = pos
		}
	}
	return at
}

// Groups that cannot be back in time come when two of the largest are ahead of need:
// group k of equal ones, in the order of loads, when k-2 is loaded, so that while
// compute has one the next is under way and its successor issued.
// SPEC S5.5
func TestDeepOnSlowLinks(t *testing.T) {
	const layers = 8
	p := record(single, layers, module{"core_attn", 100, ms, 2 * ms})
	s := p.step(offloadAll(p))
	out := s.leaving(cfg)
	for _, depth := range []int{0, 2, 4} {
		at := ahead(s.deep(out, slow, safety, depth))
		for k := range layers {
			g := memory.GroupID{Name: "core_attn", Layer: layers - 1 - k}
			saved, _ := s.schedule.Saved(g)
			loaded, _ := s.schedule.Loaded(g)
			n := 2
			if depth > 0 {
				n = int(depth)
			}
			// Loads are at layers, layers+1, ...: the one n before is at layers+k-n.
			want := max(saved+1, layers+k-n)
			if k < n {
				want = saved + 1 // nothing is ahead of need yet
			}
			pos, ok := at[g]
			if want >= loaded {
				if ok {
					t.Errorf("depth %d: group %d comes back at %d, and is loaded at %d", depth, k, pos, loaded)
				}
				continue
			}
			if !ok || pos != want {
				t.Errorf("depth %d: group %d comes back at %d, want %d", depth, k, pos, want)
			}
		}
	}
}

// Whatever the step and the links: a group comes back behind its save and before its
// load, once; and with a depth, what is back ahead of need never exceeds so many of
// the largest group.
// SPEC S5.5
func TestDeepIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, l := drawProfile(t, 12), drawLinks(t)
		pol := memory.Policy{}
		for u, f := range p.Units {
			if f.CanOffload {
				pol[u] = memory.Offload
			}
		}
		s := p.step(pol)
		out := s.leaving(cfg)
		most := memory.Bytes(0)
		for i, g := range s.groups {
			if out[i] && g.load >= 0 {
				most = max(most, g.bytes)
			}
		}
		for _, depth := range depths {
			plan := s.deep(out, l, safety, depth)
			at := ahead(plan)
			listed := 0
			for _, list := range plan.Prefetch {
				listed += len(list)
			}
			if listed != len(at) {
				t.Fatalf("depth %d: %d groups come back %d times", depth, len(at), listed)
			}
			held := make([]memory.Bytes, s.schedule.Len()+1)
			for i, g := range s.groups {
				pos, ok := at[g.GroupID]
				if ok && (!out[i] || pos <= g.save || pos >= g.load) {
					t.Fatalf("depth %d: %v comes back at %d, saved at %d and loaded at %d", depth, g.GroupID, pos, g.save, g.load)
				}
				for k := pos; ok && k < g.load; k++ {
					held[k] += g.bytes
				}
			}
			if depth > 0 && slices.Max(held) > memory.Bytes(depth)*most {
				t.Fatalf("depth %d: %d bytes are ahead of need, of groups of at most %d", depth, slices.Max(held), most)
			}
		}
	})
}

// A large group and four small ones a layer: with a window of one copy, the small one
// behind it takes the memory of the large one while its copy out, 40 ms long, has
// hardly begun, and compute waits. All copies of a layer together take 48 ms of its
// 58: with a larger window nobody waits.
// SPEC S5.5
func TestFollowChoosesAWindow(t *testing.T) {
	small := func(name string) module { return module{name, 2, 12 * ms, 24 * ms} }
	p := record(single, 6, module{"moe_act", 40, 10 * ms, 20 * ms}, small("attn_norm"), small("qkv_linear"), small("core_attn"), small("mlp_norm"))
	tight := cfg
	tight.Window = 1
	one, err := Follow(p, offloadAll(p), slow, tight)
	if err != nil {
		t.Fatal(err)
	}
	d, err := Follow(p, offloadAll(p), slow, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("window 1: step %v, extent %d; window %d: step %v, extent %d; without: %v, %d", one.Forecast.Step, one.Forecast.Extent,
		d.Plan.Window, d.Forecast.Step, d.Forecast.Extent, d.Before.Step, d.Before.Extent)
	if one.Forecast.Step < p.Tape.Span*11/10 {
		t.Errorf("a window of one copy makes a step of %v of one of %v: no case to choose in", one.Forecast.Step, p.Tape.Span)
	}
	if d.Plan.Window < 2 || d.Forecast.Step > p.Tape.Span*103/100 {
		t.Errorf("window %d: a step of %v, without %v", d.Plan.Window, d.Forecast.Step, p.Tape.Span)
	}
	if d.Forecast.Extent*2 > d.Before.Extent || d.Plan.Device > 0 && d.Forecast.Extent > d.Plan.Device {
		t.Errorf("an extent of %d, planned for %d, without %d", d.Forecast.Extent, d.Plan.Device, d.Before.Extent)
	}
	// Where times are not sure memory counts for more, and never takes more of it.
	unsure, err := FollowTight(p, offloadAll(p), slow, cfg)
	if err != nil || unsure.Forecast.Extent > d.Forecast.Extent || unsure.Forecast.Step < d.Forecast.Step {
		t.Errorf("unsure: extent %d and a step of %v, sure: %d and %v (%v)", unsure.Forecast.Extent, unsure.Forecast.Step, d.Forecast.Extent, d.Forecast.Step, err)
	}
}
