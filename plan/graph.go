// This file owns captured graphs. A graph keeps its inputs forever. What its operations
// save lies in a private pool, which the allocator's counters include only during the
// capture. The highest point is therefore in one of three places: in a step that replays,
// without the captured parts; in the capture, with the captured parts alone; or in a step
// before it, with everything.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// mark sets the scope of operations.
func (t *tape) mark(from, to int, scope string) {
	for i := from; i < to; i++ {
		t.ops[i].scope = scope
	}
}

// captures reports whether a scope is among those captured.
func captures(scopes []string, scope string) bool {
	if scope == "" {
		return slices.Contains(scopes, "full_iteration")
	}
	if scope == "moe_router" && slices.Contains(scopes, "moe") {
		return true
	}
	return slices.Contains(scopes, scope) || slices.Contains(scopes, "full_iteration")
}

// without returns the tape without what graphs hold.
func (t *tape) without(scopes []string) *tape {
	return t.filter(func(scope string) bool { return !captures(scopes, scope) })
}

func (t *tape) only(scopes []string) *tape {
	return t.filter(func(scope string) bool { return captures(scopes, scope) })
}

// filter keeps operations in their places and empties the others.
func (t *tape) filter(want func(scope string) bool) *tape {
	f := *t
	f.ops, f.saved = slices.Clone(t.ops), nil
	for i := range f.ops {
		if !want(f.ops[i].scope) {
			f.ops[i] = op{name: f.ops[i].name, scope: f.ops[i].scope, recompute: f.ops[i].recompute}
		}
	}
	for _, s := range t.saved {
		if want(t.ops[s.until].scope) {
			f.saved = append(f.saved, s)
		}
	}
	return &f
}

// slots returns the size of the inputs that the graphs of one layer and microbatch keep: a
// tensor of the residual stream if anything is captured, and a mask with a byte for each
// pair of positions if attention is captured, even if batches have no mask. Outputs and
// gradients lie in the pool of the graphs. Megatron-LM's own graphs and a graph of the
// whole step keep no inputs that count.
func (t *tape) slots(d *dims) memory.Bytes {
	g := d.s.Graph
	if len(t.saved) == 0 || g.Local || slices.Contains(g.Scopes, "full_iteration") {
		return 0
	}
	n := d.residual()
	if t.attends && captures(g.Scopes, "attn") {
		n += memory.Bytes(d.tokens * int64(d.s.Batch.Seq))
	}
	return n
}

// graphs returns what captured graphs cost a rank: buffers that exist forever, the highest
// point of the capture above static memory, and the pool that replays use, which only the
// device counts. Any layer can reuse a buffer once its microbatch is done, so the moment
// with most microbatches counts.
func (w *walk) graphs() (buffers, capture, pool memory.Bytes) {
	if !w.captures() {
		return 0, 0, 0
	}
	c := &walk{passes: w.passes}
	each := make([]memory.Bytes, len(w.chunks))
	for i, x := range w.chunks {
		c.chunks = append(c.chunks, chunk{units: x.captured})
		for _, u := range x.captured {
			each[i] += u.slots
		}
	}
	var now memory.Bytes
	for _, p := range w.passes {
		if p.Backward {
			now -= each[p.Chunk]
		} else {
			now += each[p.Chunk]
		}
		buffers = max(buffers, now)
	}
	for _, p := range c.run() {
		capture = max(capture, p.live+p.top)
	}
	return buffers, capture, capture
}

// captures reports whether anything on the rank is captured. Chunks may be empty.
func (w *walk) captures() bool {
	return slices.ContainsFunc(w.chunks, func(c chunk) bool { return c.captured != nil })
}

// early is a highest point before graphs are replayed, above the static memory at that
// time.
type early struct {
	name  string
	above memory.Bytes
}

// beforeReplay returns the highest points before graphs are replayed. Steps that warm up
// run without graphs and their buffers. The first step makes the moments at its end, so
// neither it nor an earlier capture has them. Megatron-LM captures its own graphs at the
// end of the first step.
func (d *dims) beforeReplay(w *walk, rank *Rank, buffers, capture memory.Bytes) []early {
	if !w.captures() {
		return nil
	}
	g := d.s.Graph
	moments := d.moments(rank.Items)
	points := []early{{"the capture of graphs", capture}}
	if g.Warmup < 0 && !g.Local {
		points[0].above -= moments
		return points
	}
	e := &walk{passes: w.passes, margin: w.margin, shards: w.shards, sentForward: w.sentForward, sentBackward: w.sentBackward}
	for _, x := range w.chunks {
		e.chunks = append(e.chunks, chunk{units: x.eager})
	}
	step := early{"a step before graphs are captured", -buffers}
	var most memory.Bytes
	for _, p := range e.run() {
		most = max(most, p.live+p.top)
	}
	step.above += most
	if g.Local || g.Warmup == 1 {
		step.above -= moments
	}
	return append(points, step)
}

// moments returns the part of the optimiser's state on the device that its first step
// makes.
func (d *dims) moments(items []Item) (n memory.Bytes) {
	main, moments := d.stateBytes()
	for _, it := range items {
		if it.Cause == CauseOptimizer && it.Static {
			n += it.Bytes / (main + moments) * moments
		}
	}
	return n
}
