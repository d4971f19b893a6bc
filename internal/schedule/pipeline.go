// This file owns the order of forward and backward passes on one rank of a pipeline.

package schedule

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Pass is the forward or the backward pass of a chunk over a microbatch.
type Pass struct {
	Chunk, Microbatch int
	Backward          bool
}

// Pipeline is the shape of a pipeline.
type Pipeline struct {
	Ranks        int // PP
	Chunks       int // VPP: chunks on each rank; one without interleaving
	Microbatches int
	// GroupSize is the number of microbatches that a chunk works on before the next
	// chunk does; zero means Ranks.
	GroupSize int
}

func (p Pipeline) check(rank int) error {
	switch {
	case p.Ranks < 1 || p.Chunks < 1 || p.Microbatches < 1 || p.GroupSize < 0:
		return fmt.Errorf("schedule: expected at least one rank, chunk and microbatch, got %d, %d and %d", p.Ranks, p.Chunks, p.Microbatches)
	case rank < 0 || rank >= p.Ranks:
		return fmt.Errorf("schedule: rank %d does not exist in a pipeline of %d ranks", rank, p.Ranks)
	case p.Chunks > 1 && p.Ranks == 1:
		return fmt.Errorf("schedule: %d chunks on one pipeline rank; interleaving needs at least two ranks", p.Chunks)
	}
	return nil
}

// Passes returns the order of one rank: forward passes until the last rank begins its
// backward pass (warm-up), then one forward and one backward pass in turn (1F1B), then
// the remaining backward passes. It returns an error if the shape is impossible.
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

// order returns the order of forward passes: all chunks in turn over the first
// GroupSize microbatches, then over the next.
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

// Expand returns the schedule of a rank whose chunks have a number of layers, each of
// which saves groups of the given names in forward order.
func Expand(passes []Pass, layers int, names ...string) *Schedule {
	s := &Schedule{}
	for _, p := range passes {
		for i := range layers {
			layer := i
			if p.Backward {
				layer = layers - 1 - i
			}
			for j := range names {
				g := memory.GroupID{Chunk: p.Chunk, Layer: layer, Microbatch: p.Microbatch}
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
