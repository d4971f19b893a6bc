// This file owns the tests of programs.

package train

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/internal/schedule"
)

// Every program is run with ranks that wait for each other at every transfer: none
// waits for ever, every pass finds its input, and nothing is left over.
func TestProgramsNeverWaitInACircle(t *testing.T) {
	for _, p := range []schedule.Pipeline{
		{Ranks: 1, Chunks: 1, Microbatches: 3}, {Ranks: 2, Chunks: 1, Microbatches: 4}, {Ranks: 4, Chunks: 1, Microbatches: 2},
		{Ranks: 4, Chunks: 1, Microbatches: 8}, {Ranks: 2, Chunks: 2, Microbatches: 4}, {Ranks: 4, Chunks: 3, Microbatches: 8},
		{Ranks: 3, Chunks: 2, Microbatches: 6}, {Ranks: 8, Chunks: 2, Microbatches: 16},
	} {
		t.Run(fmt.Sprintf("pp%d vpp%d mb%d", p.Ranks, p.Chunks, p.Microbatches), func(t *testing.T) {
			progs, err := programs(p)
			if err != nil {
				t.Fatal(err)
			}
			rendezvous(t, p, progs)
		})
	}
}

func rendezvous(t *testing.T, p schedule.Pipeline, progs [][]action) {
	have := map[stage]bool{} // inputs that are there
	for m := range p.Microbatches {
		have[stage{0, m, false}] = true
	}
	done := map[stage]bool{}
	of := func(rank int, q schedule.Pass) stage { return stage{q.Chunk*p.Ranks + rank, q.Microbatch, q.Backward} }
	at := make([]int, p.Ranks)
	for moved := true; moved; {
		moved = false
		for r := range progs {
			for at[r] < len(progs[r]) {
				a := progs[r][at[r]]
				if a.verb != compute {
					peer := progs[a.peer]
					if at[a.peer] == len(peer) {
						t.Fatalf("rank %d: %+v, and rank %d has ended", r, a, a.peer)
					}
					b := peer[at[a.peer]]
					if b.verb == compute || b.verb == a.verb || b.peer != r {
						break // not there yet
					}
					s, d := of(r, a.pass), of(a.peer, b.pass)
					if a.verb == receive {
						s, d = d, s
					}
					if s.next() != d || !done[s] {
						t.Fatalf("ranks %d and %d meet in %+v and %+v", r, a.peer, a, b)
					}
					have[d] = true
					at[r]++
					at[a.peer]++
					moved = true
					continue
				}
				s := of(r, a.pass)
				last := s.backward && s.index == p.Ranks*p.Chunks-1 && done[stage{s.index, s.microbatch, false}]
				if !have[s] && !last {
					t.Fatalf("rank %d: %+v without its input", r, a)
				}
				if s.backward && !done[stage{s.index, s.microbatch, false}] {
					t.Fatalf("rank %d: %+v before its forward pass", r, a)
				}
				done[s] = true
				if n := s.next(); n.index >= 0 && n.index%p.Ranks == r {
					have[n] = true // stays on the rank
				}
				at[r]++
				moved = true
			}
		}
	}
	for r := range progs {
		if at[r] != len(progs[r]) {
			t.Fatalf("rank %d waits for ever at %+v", r, progs[r][at[r]])
		}
	}
	if want := 2 * p.Ranks * p.Chunks * p.Microbatches; len(done) != want {
		t.Errorf("%d passes, want %d", len(done), want)
	}
}
