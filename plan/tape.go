// This file owns the tape: one part of a model as a list of operations with what
// they save, from which follow what stays after the forward pass and the highest
// points of both passes. The arithmetic is autograd's: a saved tensor is freed
// when the backward pass has done the first operation that needs it, a gradient
// when the operation before has used it.

package plan

import (
	"slices"
	"strings"
)

// op is one operation of a tape.
type op struct {
	name string
	// scope is what a captured graph would take it with: "attn", "mlp", ...
	scope string
	// out is the output while it waits for the next operation, where nobody
	// saves it; temp is what the forward pass needs beside it.
	out, temp int64
	// gout is the gradient that backward begins with where no later operation
	// has made one, gin what it makes of it, and work what it needs beside them.
	// hold is a gradient that lives on from here until an operation further to
	// the front releases it: the residual stream's.
	gout, gin, work int64
	hold, release   int64
	// recompute are the modules that are recomputed before the backward pass of the
	// operation: those that end with it.
	recompute []string
}

// saved is a tensor that the forward pass keeps: made by operation at, and freed
// once backward has done operation until. With drop it is not kept, and made
// again before backward of operation again. away says that offloading moves it,
// stashed that it lies in a working set that all layers share and in the stash's
// pages between the passes.
type saved struct {
	SavedTensor
	at, until           int
	mover               string // the module that offloads it, if away
	drop, away, stashed bool
	again               int
}

// tape is one part of the model and one microbatch.
type tape struct {
	name string
	// key is the same for tapes that are equal but for their name.
	key string
	// params is the number of parameters that are gathered for it where they are
	// sharded.
	params int64
	// waiting is what was recomputed together with it and lies there until
	// its turn comes: the layers before it in a unit of several.
	waiting int64
	attends bool // it has attention
	ops     []op
	saved   []saved
}

func (t *tape) op(o op) int {
	t.ops = append(t.ops, o)
	return len(t.ops) - 1
}

// ends says that modules end with an operation.
func (t *tape) ends(i int, modules ...string) {
	t.ops[i].recompute = append(t.ops[i].recompute, modules...)
}

// last is the operation that was appended last.
func (t *tape) last() int { return len(t.ops) - 1 }

// save notes that a tensor made by operation at is needed by operation until.
func (t *tape) save(at, until int, g SavedTensor) {
	if g.Bytes > 0 {
		t.saved = append(t.saved, saved{SavedTensor: g, at: at, until: until})
	}
}

// cost is what follows from a tape.
type cost struct {
	name   string
	params int64
	slots  int64 // inputs of captured graphs, for one microbatch
	// kept stays on the device from forward to backward; groups has the same by
	// group. away and dropped are what moved and what is recomputed.
	kept   int64
	groups []SavedTensor
	// moved are the bytes of away, largest those of its largest group.
	moved, largest int64
	away           []SavedTensor
	drop           []SavedTensor
	stash          []SavedTensor
	// forward is the highest point of the forward pass above what there was
	// before it, backward that of the backward pass above all that was kept.
	forward, backward     int64
	forwardAt, backwardAt string
}

// cost walks both passes.
func (t *tape) cost() cost {
	c, sums := cost{name: t.name}, map[string]int64{}
	for _, s := range t.saved {
		switch {
		case s.drop:
			c.drop = append(c.drop, s.SavedTensor)
		case s.stashed:
			c.stash = append(c.stash, s.SavedTensor)
		case s.away:
			c.away = append(c.away, s.SavedTensor)
			c.moved += s.Bytes
			sums[s.mover] += s.Bytes
			c.largest = max(c.largest, sums[s.mover])
		default:
			c.kept += s.Bytes
			c.groups = append(c.groups, s.SavedTensor)
		}
	}
	t.walkForward(&c)
	t.walkBackward(&c)
	return c
}

// walkForward: a dropped tensor is gone once the operation that needs it has run,
// one that moves a little later, when its copy is done.
func (t *tape) walkForward(c *cost) {
	var before int64
	for i, o := range t.ops {
		var live int64
		for _, s := range t.saved {
			switch {
			case s.at > i || s.stashed:
			case s.drop && i > s.until, s.away && i > t.leaves(s):
			default:
				live += s.Bytes
			}
		}
		if at := live + before + o.out + o.temp; at > c.forward {
			c.forward, c.forwardAt = at, o.name
		}
		before = o.out
	}
}

// leaves is the last operation of the forward pass during which a tensor that
// moves is still there: one more than the one that needs it, because the copy
// takes its time. The residual stream is needed until it is added to.
func (t *tape) leaves(s saved) int {
	if strings.HasSuffix(s.Offload, "_norm") {
		return t.next(s.at, "attn_add", "mlp_add")
	}
	return s.until + 1
}

func (t *tape) walkBackward(c *cost) {
	back := t.returns()
	var live, held, gout int64
	for i, o := range slices.Backward(t.ops) {
		if o.gout > 0 {
			gout = o.gout
		}
		for j, s := range t.saved {
			if s.drop && s.again == i {
				live += s.Bytes
			}
			if s.away && back[j] == i {
				live += s.Bytes
			}
		}
		if at := live + held + gout + o.gin + o.work; at > c.backward {
			c.backward, c.backwardAt = at, o.name
		}
		for _, s := range t.saved {
			if s.until == i && !s.stashed {
				live -= s.Bytes
			}
		}
		held += o.hold - o.release
		gout = o.gin
	}
}

// returns says before the backward pass of which operation each tensor that was
// away is on its way back: its group is asked for when the group that backward
// needs before it is reached, the first one before the pass begins.
func (t *tape) returns() []int {
	need := map[string]int{}
	var names []string
	for _, s := range t.saved {
		if !s.away {
			continue
		}
		if _, ok := need[s.mover]; !ok {
			names = append(names, s.mover)
			need[s.mover] = -1
		}
		need[s.mover] = max(need[s.mover], s.until)
	}
	slices.SortStableFunc(names, func(a, b string) int { return need[b] - need[a] })
	asked := map[string]int{}
	for i, n := range names {
		asked[n] = t.last()
		if i > 0 {
			asked[n] = need[names[i-1]]
		}
	}
	back := make([]int, len(t.saved))
	for i, s := range t.saved {
		back[i] = -1
		if s.away {
			back[i] = asked[s.mover]
		}
	}
	return back
}
