// This file owns the orders of forward and backward passes that pipeline
// parallelism prescribes on one rank.

package schedule

import "fmt"

// Pass is one forward or backward pass of a model chunk over a microbatch.
type Pass struct {
	Chunk, Microbatch int
	Backward          bool
}

// Pipeline is the shape of a pipeline.
type Pipeline struct {
	Ranks        int // PP
	Chunks       int // VPP: model chunks a rank, one without interleaving
	Microbatches int
	// GroupSize is how many microbatches a chunk takes before the next chunk
	// takes them; zero stands for Ranks.
	GroupSize int
}

func (p Pipeline) check(rank int) error {
	switch {
	case p.Ranks < 1 || p.Chunks < 1 || p.Microbatches < 1 || p.GroupSize < 0:
		return fmt.Errorf("schedule: a pipeline of %d ranks, %d chunks and %d microbatches; all must be at least one", p.Ranks, p.Chunks, p.Microbatches)
	case rank < 0 || rank >= p.Ranks:
		return fmt.Errorf("schedule: rank %d of a pipeline of %d ranks", rank, p.Ranks)
	case p.Chunks > 1 && p.Ranks == 1:
		return fmt.Errorf("schedule: %d chunks on one pipeline rank; interleaving needs at least two ranks", p.Chunks)
	}
	return nil
}

// Passes is the order of one rank: as many forward passes as it takes for the
// last rank to begin backward (warm-up), then one forward and one backward pass
// in turn (1F1B), then the backward passes that are left.
func (p Pipeline) Passes(rank int) ([]Pass, error) {
	if err := p.check(rank); err != nil {
		return nil, err
	}
	if p.GroupSize == 0 {
		p.GroupSize = p.Ranks
	}
	forward := p.order()
	// The backward passes come in the same order with the chunks reversed.
	backward := make([]Pass, len(forward))
	for i, f := range forward {
		backward[i] = Pass{p.Chunks - 1 - f.Chunk, f.Microbatch, true}
	}
	warm := p.Ranks - rank - 1
	if p.Chunks > 1 {
		warm = 2*warm + (p.Chunks-1)*p.GroupSize
	}
	warm = min(warm, len(forward))
	passes := append([]Pass(nil), forward[:warm]...)
	for i, f := range forward[warm:] {
		passes = append(passes, f, backward[i])
	}
	return append(passes, backward[len(forward)-warm:]...), nil
}

// order is the order of forward passes: chunk 0 for a group of microbatches,
// chunk 1 for the same, and so on; then the next group.
func (p Pipeline) order() []Pass {
	var passes []Pass
	for from := 0; from < p.Microbatches; from += p.GroupSize {
		to := min(from+p.GroupSize, p.Microbatches)
		for c := range p.Chunks {
			for m := from; m < to; m++ {
				passes = append(passes, Pass{Chunk: c, Microbatch: m})
			}
		}
	}
	return passes
}

// Expand is the schedule of a rank whose chunks save the given groups (names in
// forward order) in each of so many layers.
func Expand(passes []Pass, layers int, names ...string) *Schedule {
	s := &Schedule{}
	for _, p := range passes {
		for i := range layers {
			layer := i
			if p.Backward {
				layer = layers - 1 - i
			}
			for j := range names {
				g := Group{Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
				if p.Backward {
					g.Name = names[len(names)-1-j]
					s.Load(g)
				} else {
					g.Name = names[j]
					s.Save(g)
				}
			}
		}
	}
	return s
}
