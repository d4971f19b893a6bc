// This file owns the tests of which ranks share a parameter: who adds up its gradients, who
// counts it in norms, and who writes it.

package train

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// splitOf is a communicator of some ranks, which does nothing but split.
type splitOf struct {
	comm.Comm
	ranks []int
}

func (*splitOf) Split(ranks []int) (comm.Comm, error) {
	return &splitOf{ranks: slices.Clone(ranks)}, nil
}

// holders are the ranks that have a parameter, or a rank's part of one.
type holders struct {
	class class
	ranks []int
}

// Gradients of a parameter are added up by exactly those ranks that have it, one of which counts it in
// norms and one of which writes it. The writers of many parameters take turns.
func TestEachParameterHasOneWriter(t *testing.T) {
	for _, l := range []Layout{
		{PP: 1, VPP: 1, EP: 1, DP: 1}, {PP: 1, VPP: 1, EP: 1, DP: 4}, {PP: 1, VPP: 1, EP: 2, DP: 4}, {PP: 1, VPP: 1, EP: 4, DP: 4},
		{PP: 2, VPP: 1, EP: 1, DP: 1}, {PP: 3, VPP: 1, EP: 2, DP: 6}, {PP: 4, VPP: 2, EP: 3, DP: 6},
	} {
		for _, tied := range []bool{false, true} {
			c := &Config{Layout: l, Model: &model.Model{Tied: tied}}
			var ranks []*rank
			for i := range l.Ranks() {
				r := &rank{cfg: c, index: i, pp: i / l.DP, dp: i % l.DP, world: &splitOf{}}
				if err := r.split(); err != nil {
					t.Fatal(err)
				}
				ranks = append(ranks, r)
			}
			at := func(pp, dp int) int { return pp*l.DP + dp }
			turns := map[int]int{}
			check := func(what string, p layer.Param, h holders) {
				t.Helper()
				counts, writes := 0, 0
				for _, i := range h.ranks {
					r := ranks[i]
					if r.class(p) != h.class {
						t.Errorf("%+v, tied %t: %s is of class %d on rank %d, want %d", l, tied, what, r.class(p), i, h.class)
					}
					if r.counts(h.class) {
						counts++
					}
					if r.writes(p) {
						writes++
						turns[i]++
					}
					have := []int{i}
					for n := range r.sharers(h.class) { // each sum adds what the ranks have after the one before
						var next []int
						for _, k := range have {
							if c, ok := ranks[k].sharers(h.class)[n].(*splitOf); ok {
								next = append(next, c.ranks...)
							} else {
								next = append(next, k)
							}
						}
						have = next
					}
					slices.Sort(have)
					if !slices.Equal(have, h.ranks) {
						t.Errorf("%+v, tied %t: %s of ranks %v is added up by %v", l, tied, what, h.ranks, have)
					}
				}
				if counts != 1 || writes != 1 {
					t.Errorf("%+v, tied %t: %s of ranks %v is counted %d times and written %d times", l, tied, what, h.ranks, counts, writes)
				}
			}
			for pp := range l.PP {
				for n := range 40 {
					name := fmt.Sprintf("layers.%d.weight %d", pp, n)
					var all []int
					for dp := range l.DP {
						all = append(all, at(pp, dp))
					}
					check(name, layer.Param{Name: name}, holders{dense, all})
					for part := range l.EP {
						var some []int
						for dp := part; dp < l.DP; dp += l.EP {
							some = append(some, at(pp, dp))
						}
						check(name, layer.Param{Name: name, Expert: true}, holders{expert, some})
					}
				}
			}
			embedding := holders{dense, nil}
			for dp := range l.DP {
				embedding.ranks = append(embedding.ranks, at(0, dp))
			}
			if tied && l.PP > 1 {
				embedding.class = shared
				for dp := range l.DP {
					embedding.ranks = append(embedding.ranks, at(l.PP-1, dp))
				}
			}
			check("the embedding", layer.Param{Name: "embedding.word_embeddings.weight"}, embedding)
			if len(turns) != l.Ranks() {
				t.Errorf("%+v: %d of %d ranks write anything", l, len(turns), l.Ranks())
			}
		}
	}
}
