// This file owns the order in which a rank works: its passes, and between them what it
// sends and receives. It is pure.

package train

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/schedule"
)

// verb is what an action does.
type verb uint8

const (
	receive verb = iota
	send
	compute
)

// action is one entry of a rank's program. What is sent and received is what the pass
// gave: the activations of a forward pass, the gradients of a backward one.
type action struct {
	verb verb
	pass schedule.Pass // of this rank: that computes, or whose input or output it is
	peer int           // pipeline rank, where something is sent or received
}

// moment is when an action comes, in steps of a clock on which a forward pass takes one
// and a backward pass two.
type moment struct {
	action
	at   int
	rank int
	id   int // of the transfer, the same at both ends
}

// programs are the programs of all pipeline ranks. A transfer waits on the host for its
// other end; ranks never wait for each other in a circle, because each does its
// transfers in one order that all share: by the time at which the sender could send.
func programs(p schedule.Pipeline) ([][]action, error) {
	ends, moments, err := clock(p)
	if err != nil {
		return nil, err
	}
	stages := p.Ranks * p.Chunks
	id := 0
	for _, m := range moments {
		if m.verb != compute {
			continue
		}
		from := stage{m.pass.Chunk*p.Ranks + m.rank, m.pass.Microbatch, m.pass.Backward}
		to := from.next()
		peer := (to.index + p.Ranks) % p.Ranks
		if to.index < 0 || to.index == stages || peer == m.rank {
			continue
		}
		there := schedule.Pass{Chunk: to.index / p.Ranks, Microbatch: m.pass.Microbatch, Backward: m.pass.Backward}
		moments = append(moments,
			moment{action{send, m.pass, peer}, ends[from], m.rank, id},
			moment{action{receive, there, m.rank}, ends[from], peer, id})
		id++
	}
	// A pass begins behind the transfers of its time, and ends before them.
	slices.SortStableFunc(moments, func(a, b moment) int {
		kind := func(m moment) int {
			if m.verb == compute {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(kind(a), kind(b)), cmp.Compare(a.id, b.id))
	})
	out := make([][]action, p.Ranks)
	for _, m := range moments {
		out[m.rank] = append(out[m.rank], m.action)
	}
	return out, nil
}

// stage is a pass by its place in the whole pipeline.
type stage struct {
	index, microbatch int
	backward          bool
}

// next is the pass that needs its output; its index may lie outside of the pipeline.
func (s stage) next() stage {
	if s.backward {
		s.index--
	} else {
		s.index++
	}
	return s
}

// clock says when each pass ends, and when each begins.
func clock(p schedule.Pipeline) (ends map[stage]int, moments []moment, err error) {
	passes := make([][]schedule.Pass, p.Ranks)
	for r := range passes {
		if passes[r], err = p.Passes(r); err != nil {
			return nil, nil, err
		}
	}
	ends = map[stage]int{}
	free, next := make([]int, p.Ranks), make([]int, p.Ranks)
	for left := p.Ranks * len(passes[0]); left > 0; left-- {
		best, start := -1, 0
		for r := range passes {
			if next[r] == len(passes[r]) {
				continue
			}
			at, ok := ready(p, ends, r, passes[r][next[r]])
			if at = max(at, free[r]); ok && (best < 0 || at < start) {
				best, start = r, at
			}
		}
		if best < 0 {
			panic("train: the passes of a pipeline wait for each other")
		}
		pass := passes[best][next[best]]
		took := 1
		if pass.Backward {
			took = 2
		}
		moments = append(moments, moment{action{compute, pass, 0}, start, best, 0})
		free[best] = start + took
		ends[stage{pass.Chunk*p.Ranks + best, pass.Microbatch, pass.Backward}] = free[best]
		next[best]++
	}
	return ends, moments, nil
}

// ready is when the input of a pass is there, if it is known.
func ready(p schedule.Pipeline, ends map[stage]int, rank int, pass schedule.Pass) (int, bool) {
	s := stage{pass.Chunk*p.Ranks + rank, pass.Microbatch, pass.Backward}
	switch {
	case !s.backward && s.index == 0:
		return 0, true
	case !s.backward:
		s.index--
	case s.index == p.Ranks*p.Chunks-1:
		s.backward = false
	default:
		s.index++
	}
	at, ok := ends[s]
	return at, ok
}
