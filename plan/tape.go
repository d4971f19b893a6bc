// This file owns the tape: a part of a model as a list of operations and of the tensors
// that they save. From a tape follow what stays after the forward pass and the highest
// points of both passes. The arithmetic is autograd's: a saved tensor is freed once the
// backward pass has run the first operation that needs it, and a gradient once the
// operation before has used it.

package plan

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// op is one operation of a tape.
type op struct {
	name string
	// scope is the scope that captures the operation, such as "attn" or "mlp".
	scope string
	// out is the output until the next operation has read it, unless it is saved. temp is
	// what the forward pass needs in addition.
	out, temp memory.Bytes
	// gout is the gradient that the backward pass begins with if no later operation has
	// made one. gin is the gradient that it makes, and work is what it needs in addition.
	// hold is a gradient that stays until an earlier operation releases it: that of the
	// residual stream.
	gout, gin, work memory.Bytes
	hold, release   memory.Bytes
	// recompute are the modules that are recomputed before the backward pass of the
	// operation: those that end with it.
	recompute []string
}

// saved is a tensor that the forward pass keeps. Operation at makes it, and it is freed
// once the backward pass has run operation until. If drop is set, it is not kept and is
// recomputed before the backward pass of operation again. If away is set, it is offloaded.
// If stashed is set, it lies in a workspace that all layers share, and in pages between the
// passes.
type saved struct {
	SavedTensor
	at, until           int
	copies              int    // operations of the module that save it, if more than one
	mover               string // the module that offloads it, also if it is recomputed
	drop, away, stashed bool
	again, gone         int // gone is the last operation of the forward pass that a dropped tensor sees
}

// reloaded returns how many bytes come back for a tensor. Every operation that saves it inside
// of an offloaded module has a copy of its own, also of a tensor that is recomputed.
func (s *saved) reloaded() memory.Bytes {
	if s.mover == "" {
		return 0
	}
	return s.Bytes * memory.Bytes(max(s.copies, 1))
}

// tape is one part of the model and one microbatch.
type tape struct {
	name string
	// key is equal for tapes that differ only in their name.
	key string
	// params is the number of parameters that are gathered for the tape if they are
	// sharded.
	params int64
	// waiting is the memory that was recomputed together with the tape and waits for its
	// turn: the layers before it in a unit of several.
	waiting memory.Bytes
	attends bool // it has attention
	ops     []op
	saved   []saved
}

func (t *tape) op(o op) int {
	t.ops = append(t.ops, o)
	return len(t.ops) - 1
}

// ends notes that modules end with an operation.
func (t *tape) ends(i int, modules ...string) {
	t.ops[i].recompute = append(t.ops[i].recompute, modules...)
}

// last returns the operation that was appended last.
func (t *tape) last() int { return len(t.ops) - 1 }

// save notes that a tensor made by operation at is needed by operation until.
func (t *tape) save(at, until int, g SavedTensor) {
	if g.Bytes > 0 {
		t.saved = append(t.saved, saved{SavedTensor: g, at: at, until: until})
	}
}

// cost is the memory that follows from a tape.
type cost struct {
	name   string
	params int64
	slots  memory.Bytes // inputs of captured graphs, for one microbatch
	// kept stays on the device from the forward to the backward pass, and groups has the
	// same by group. away is what is offloaded, and drop what is recomputed.
	kept   memory.Bytes
	groups []SavedTensor
	// moved is the size of away, and largest that of its largest group. reloaded is what
	// comes back, which is more if a tensor is copied twice.
	moved, largest, reloaded memory.Bytes
	away                     []SavedTensor
	drop                     []SavedTensor
	stash                    []SavedTensor
	// forward is the highest point of the forward pass above the memory before it. backward
	// is that of the backward pass above everything that was kept. ahead is the same above
	// what was kept and what is on the device again before the pass begins.
	forward, backward, ahead memory.Bytes
	forwardAt, backwardAt    string
}

// cost walks both passes.
func (t *tape) cost() cost {
	c, sums := cost{name: t.name}, map[string]memory.Bytes{}
	for _, s := range t.saved {
		c.reloaded += s.reloaded()
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

// walkForward finds the highest point of the forward pass. A dropped tensor is freed by the
// checkpoint that recomputes it, and an offloaded one at the end of its module. Its
// copy is then under way, but the allocator counts it as freed.
func (t *tape) walkForward(c *cost) {
	var before memory.Bytes
	for i, o := range t.ops {
		var live memory.Bytes
		for _, s := range t.saved {
			switch {
			case s.at > i || s.stashed:
			case s.drop && i > s.gone, s.away && i > t.leaves(s):
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

// leaves returns the last operation of the forward pass during which an offloaded tensor is
// still on the device: the last one of its module that makes or needs a tensor. The residual
// stream is needed until it is added to.
func (t *tape) leaves(s saved) int {
	if strings.HasSuffix(s.Offload, "_norm") {
		return t.next(s.at, "attn_add", "mlp_add")
	}
	last := s.until
	for _, o := range t.saved {
		if o.Offload == s.Offload {
			last = max(last, o.at, o.until)
		}
	}
	return last
}

func (t *tape) walkBackward(c *cost) {
	back := t.returns()
	var live, held, gout, away memory.Bytes
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
				away += s.Bytes
			}
		}
		at := live + held + gout + o.gin + o.work
		if at > c.backward {
			c.backward, c.backwardAt = at, o.name
		}
		c.ahead = max(c.ahead, at-away)
		for _, s := range t.saved {
			if s.until == i && !s.stashed {
				live -= s.Bytes
				if s.away {
					away -= s.Bytes
				}
			}
		}
		held += o.hold - o.release
		gout = o.gin
	}
}

// returns gives, for each offloaded tensor, the operation before whose backward pass its
// reload begins. A group is reloaded when the backward pass reaches the group that it needs
// before, and the first group before the pass begins.
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
