// This file owns the order of a rank's work: its passes and its transfers between them.
// It depends on no device.

package train

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
)

// verb says what an action does.
type verb uint8

const (
	receive verb = iota
	send
	compute
)

// action is one entry of a rank's program. A transfer carries the output of a pass:
// activations after a forward pass, gradients after a backward pass.
type action struct {
	verb verb
	pass schedule.Pass // this rank's pass to compute, or to receive the input or send the output of
	peer int           // the pipeline rank at the other end of a transfer
}

// moment is an action with its time. A forward pass takes one unit of time and a
// backward pass takes two.
type moment struct {
	action
	at   int
	rank int
	id   int // the transfer's number, the same at both ends
}

// programs returns the programs of all pipeline ranks. A transfer waits on the host for
// its other end. Ranks cannot deadlock, because all do their transfers in one shared
// order: by the time at which the sender can send.
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
	// At one time, passes end first, then transfers run, then passes begin.
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

// stage identifies a pass by its place in the whole pipeline.
type stage struct {
	index, microbatch int
	backward          bool
}

// next returns the pass that needs the output of s. Its index may be outside the
// pipeline.
func (s stage) next() stage {
	if s.backward {
		s.index--
	} else {
		s.index++
	}
	return s
}

// clock returns the time at which each pass ends, and a moment for its beginning.
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
			panic("train: the passes of the pipeline deadlock")
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

// ready returns the time at which the input of a pass is available, and whether that
// time is known yet.
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
