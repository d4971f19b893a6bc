// This file owns the tests of orders and pipelines.

package schedule

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

func passes(t testing.TB, p Pipeline, rank int) []Pass {
	t.Helper()
	ps, err := p.Passes(rank)
	if err != nil {
		t.Fatal(err)
	}
	return ps
}

// inFlight returns how many microbatches of each chunk are between their forward and
// their backward pass, at the moment when the sum is largest.
func inFlight(ps []Pass, chunks int) []int {
	now, best, most := make([]int, chunks), make([]int, chunks), 0
	total := 0
	for _, p := range ps {
		if p.Backward {
			now[p.Chunk]--
			total--
			continue
		}
		now[p.Chunk]++
		if total++; total > most {
			most = total
			copy(best, now)
		}
	}
	return best
}

// SPEC S1.5: every pass happens once, forward before backward.
func TestPassesAreComplete(t *testing.T) {
	for _, p := range []Pipeline{
		{Ranks: 1, Chunks: 1, Microbatches: 3},
		{Ranks: 4, Chunks: 1, Microbatches: 2},
		{Ranks: 4, Chunks: 1, Microbatches: 9},
		{Ranks: 2, Chunks: 3, Microbatches: 4},
		{Ranks: 4, Chunks: 2, Microbatches: 10}, // the last group is short
		{Ranks: 4, Chunks: 2, Microbatches: 8, GroupSize: 6},
	} {
		for rank := range p.Ranks {
			seen := map[Pass]bool{}
			for _, x := range passes(t, p, rank) {
				if seen[x] || x.Backward && !seen[Pass{x.Chunk, x.Microbatch, false}] {
					t.Fatalf("%+v rank %d: %+v comes twice or before its forward pass", p, rank, x)
				}
				seen[x] = true
			}
			if len(seen) != 2*p.Chunks*p.Microbatches {
				t.Errorf("%+v rank %d has %d passes", p, rank, len(seen))
			}
		}
	}
}

// The microbatches in flight follow the planner's formulas: min(PP-r, M) for 1F1B. With
// PP 8 and VPP 4, rank 0 holds 15,8,8,8 and rank 7 holds 8,8,8,1.
func TestInFlight(t *testing.T) {
	for rank := range 4 {
		got := inFlight(passes(t, Pipeline{Ranks: 4, Chunks: 1, Microbatches: 8}, rank), 1)
		if got[0] != 4-rank {
			t.Errorf("1F1B rank %d holds %v microbatches, want %d", rank, got, 4-rank)
		}
	}
	p := Pipeline{Ranks: 8, Chunks: 4, Microbatches: 32}
	for rank, want := range map[int][]int{0: {15, 8, 8, 8}, 1: {13, 8, 8, 8}, 7: {8, 8, 8, 1}} {
		if got := inFlight(passes(t, p, rank), 4); !slices.Equal(got, want) {
			t.Errorf("rank %d of PP 8, VPP 4 holds %v, want %v", rank, got, want)
		}
	}
}

func TestPipelineRefuses(t *testing.T) {
	for _, p := range []Pipeline{{}, {Ranks: 1, Chunks: 2, Microbatches: 1}, {Ranks: 2, Chunks: 1, Microbatches: -1}} {
		if _, err := p.Passes(0); err == nil {
			t.Errorf("%+v was accepted", p)
		}
	}
	if _, err := (Pipeline{Ranks: 2, Chunks: 1, Microbatches: 1}).Passes(2); err == nil {
		t.Error("rank 2 of 2 was accepted")
	}
}

func plan(s *Schedule, depth, room int) *Moves {
	return s.Moves(depth, func(memory.GroupID) (int, int) { return 0, room })
}

// SPEC S1.3: without a pipeline a stack is enough; interleaved schedules need pages. SPEC
// S1.5: the last group that is saved before the backward pass begins is kept.
func TestStackAndKept(t *testing.T) {
	one := plan(Expand(passes(t, Pipeline{Ranks: 1, Chunks: 1, Microbatches: 3}, 0), 4, "expert_fc1", "moe_act"), 1, 0)
	if !one.Stack {
		t.Error("PP 1 needs no pages")
	}
	if len(one.Keep) != 3 || !one.Keep[memory.GroupID{Name: "moe_act", Chunk: 0, Layer: 3, Microbatch: 1}] {
		t.Errorf("without room exactly the last group of a microbatch is kept, not %v", one.Keep)
	}
	if first := plan(Expand(passes(t, Pipeline{Ranks: 4, Chunks: 1, Microbatches: 8}, 0), 2, "moe_act"), 1, 1); first.Stack {
		t.Error("1F1B on the first rank is no stack: microbatch 0 comes back before 1")
	}
	if end := plan(Expand(passes(t, Pipeline{Ranks: 4, Chunks: 1, Microbatches: 8}, 3), 2, "moe_act"), 1, 1); !end.Stack {
		t.Error("1F1B on the last rank is a stack")
	}
	// With room for one more group and a depth of one, the last two layers stay, because
	// the load of the second-last layer is one load away.
	two := plan(Expand(passes(t, Pipeline{Ranks: 1, Chunks: 1, Microbatches: 1}, 0), 4, "moe_act"), 1, 1)
	if !two.Keep[memory.GroupID{Name: "moe_act", Chunk: 0, Layer: 3, Microbatch: 0}] || !two.Keep[memory.GroupID{Name: "moe_act", Chunk: 0, Layer: 2, Microbatch: 0}] || len(two.Keep) != 2 {
		t.Errorf("kept %v", two.Keep)
	}
}

// Restores are issued ahead of need, after the save, and together with the groups
// that stay never occupy more buffers than there is room for.
func TestAhead(t *testing.T) {
	for _, p := range []Pipeline{
		{Ranks: 1, Chunks: 1, Microbatches: 2},
		{Ranks: 4, Chunks: 1, Microbatches: 6},
		{Ranks: 2, Chunks: 2, Microbatches: 4},
	} {
		for _, room := range []int{0, 1, 2, 3} {
			s := Expand(passes(t, p, 0), 3, "expert_fc1", "moe_act")
			x := plan(s, 2, room)
			held, here, ahead := 0, map[memory.GroupID]bool{}, 0
			for i := range s.Len() {
				e := s.At(i)
				if e.Load && here[e.Group] {
					held--
				}
				if !e.Load && x.Keep[e.Group] && !s.next(e.Group) {
					here[e.Group] = true
					held++
				}
				for _, g := range x.Ahead[i] {
					saved, _ := s.Saved(g)
					if saved >= i || s.load[g] <= i || x.Keep[g] || here[g] {
						t.Fatalf("%v, saved at %d and needed at %d, is restored at %d", g, saved, s.load[g], i)
					}
					here[g] = true
					held++
					ahead++
				}
				if held > room {
					t.Fatalf("room %d: %d buffers are occupied at position %d", room, held, i)
				}
			}
			if (room > 0) != (ahead > 0) {
				t.Errorf("%+v, room %d: %d groups are restored ahead of need", p, room, ahead)
			}
		}
	}
}

// The same in any order: every load, in turn, occupies a buffer as early as the room that the
// loads before it leave, the depth and its save allow. Only a group whose load is the very
// next event stays without room.
func TestMovesInAnyOrder(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	alone := 0
	for range 2000 {
		s := &Schedule{}
		var out []memory.GroupID
		for i := range 2 + rng.IntN(16) {
			if k := len(out); k == 0 || rng.IntN(2) == 0 {
				g := memory.GroupID{Name: "moe_act", Layer: i}
				s.Save(g)
				out = append(out, g)
			} else {
				j := rng.IntN(k)
				s.Load(out[j])
				out = slices.Delete(out, j, j+1)
			}
		}
		depth, room := 1+rng.IntN(3), rng.IntN(3)
		x := plan(s, depth, room)
		held := make([]int, s.Len())
		for j := range s.Len() {
			e := s.At(j)
			if !e.Load {
				continue
			}
			saved, _ := s.Saved(e.Group)
			if saved == j-1 {
				if alone++; !x.Keep[e.Group] {
					t.Fatalf("%+v: the group of event %d does not stay until the next", s.events, saved)
				}
				continue
			}
			first, loads := j, 0
			for first > saved && held[first-1] < room {
				if s.At(first - 1).Load {
					loads++
				}
				if loads > depth {
					break
				}
				first--
				held[first]++
			}
			if x.Keep[e.Group] != (first == saved) {
				t.Fatalf("%+v, depth %d, room %d: the group of event %d stays %v", s.events, depth, room, saved, x.Keep[e.Group])
			}
			for at, list := range x.Ahead {
				if slices.Contains(list, e.Group) != (at == first && first != saved && first < j) {
					t.Fatalf("%+v, depth %d, room %d: the group of event %d is restored at %d, want %d", s.events, depth, room, saved, at, first)
				}
			}
		}
	}
	if alone == 0 {
		t.Error("no group was loaded at once")
	}
}

func TestScheduleRefuses(t *testing.T) {
	g := memory.GroupID{Name: "moe_act"}
	for name, f := range map[string]func(*Schedule){
		"saved twice":         func(s *Schedule) { s.Save(g); s.Save(g) },
		"loaded, never saved": func(s *Schedule) { s.Load(g) },
		"loaded twice":        func(s *Schedule) { s.Save(g); s.Load(g); s.Load(g) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: no panic", name)
				}
			}()
			f(&Schedule{})
		}()
	}
}

// The groups that are not kept are a stack if each that is saved after another, and before that
// one's load, is loaded before it.
func TestStackByPairs(t *testing.T) {
	rng := rand.New(rand.NewPCG(76, 80))
	seen := map[bool]int{}
	for range 2000 {
		var s Schedule
		keep, save, load := map[memory.GroupID]bool{}, map[memory.GroupID]int{}, map[memory.GroupID]int{}
		var open []memory.GroupID
		for i := range 10 {
			if k := rng.IntN(len(open) + 1); rng.IntN(2) == 0 && k < len(open) {
				if rng.IntN(3) > 0 {
					k = len(open) - 1 // mostly the last one
				}
				s.Load(open[k])
				load[open[k]] = i
				open = slices.Delete(open, k, k+1)
				continue
			}
			g := memory.GroupID{Name: "g", Layer: i}
			s.Save(g)
			save[g], open = i, append(open, g)
			if rng.IntN(4) == 0 {
				keep[g] = true
			}
		}
		want := true
		for a, from := range save {
			to, loaded := load[a]
			if keep[a] || !loaded {
				continue
			}
			for b, at := range save {
				if end, ends := load[b]; !keep[b] && at > from && at < to && !(ends && end < to) {
					want = false
				}
			}
		}
		seen[want]++
		if got := s.stack(keep); got != want {
			t.Fatalf("%+v without %v is a stack: %v", s.events, keep, got)
		}
	}
	if seen[true] < 100 || seen[false] < 100 {
		t.Errorf("%v", seen)
	}
}
