// This file owns the walk through a rank's step: what is live in every pass, and the
// highest point.

package plan

import (
	"fmt"
	"strconv"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// chunk is one virtual stage of a rank: costs in forward order.
type chunk struct {
	units []cost
	// eager has the same units as they run before graphs are captured. It is nil if nothing
	// is captured.
	eager []cost
	// captured has the same units with only what graphs hold. It is nil if nothing is
	// captured.
	captured []cost
	// movable is what one microbatch could offload, and moved is what it offloads.
	movable, moved memory.Bytes
}

// tapes returns the tapes of a stage, before stayFraction keeps some groups.
func (d *dims) tapes(st Stage) (tapes []*tape) {
	if st.Embedding {
		tapes = append(tapes, d.embedding())
	}
	tapes = append(tapes, d.layers(st)...)
	mtp := d.m.MTP
	if st.MTP && mtp != nil {
		for k := range mtp.Depth {
			// A depth of MTP is recomputed as a whole, from both inputs of its norms. The
			// method block does not recompute it.
			full := d.s.Recompute.Full && d.s.Recompute.Method == "uniform"
			for i, t := range d.mtp(k) {
				d.apply(t, full)
				if full && i > 0 {
					t.saved[0].drop, t.saved[0].again, t.saved[0].gone = true, t.last(), t.saved[0].until
					t.behind(tapes[len(tapes)-1])
				}
				if i == 0 {
					held := d.shareOf(d.m.MTPParams(k), "mtp")
					t.params = held.dense + held.expert
				}
				tapes = append(tapes, t)
			}
		}
	}
	if st.Loss {
		if mtp != nil {
			for k := range mtp.Depth {
				t := d.loss()
				t.name = fmt.Sprintf("mtp %d loss", k)
				tapes = append(tapes, t)
			}
		}
		tapes = append(tapes, d.loss())
	}
	return tapes
}

// chunk returns the costs of a stage.
func (d *dims) chunk(st Stage) chunk {
	tapes := d.tapes(st)
	c := chunk{movable: awayBytes(tapes)}
	d.stayFraction(tapes)
	c.moved = awayBytes(tapes)
	scopes := d.s.Graph.Scopes
	type costs struct{ unit, eager, captured cost }
	seen := map[string]costs{} // tapes with the same key cost the same
	for _, t := range tapes {
		u, ok := seen[t.key]
		if !ok || t.key == "" {
			if u.eager = t.cost(); len(scopes) == 0 {
				u.unit = u.eager
			} else {
				g := t.only(scopes)
				u.unit, u.captured = t.without(scopes).cost(), g.cost()
				u.captured.slots = g.slots(d)
			}
			seen[t.key] = u
		}
		for _, x := range []*cost{&u.unit, &u.eager, &u.captured} {
			x.name, x.params = t.name, t.params
			x.backward += t.waiting
		}
		c.units = append(c.units, u.unit)
		if len(scopes) > 0 {
			c.eager, c.captured = append(c.eager, u.eager), append(c.captured, u.captured)
		}
	}
	return c
}

// layers returns the tapes of a stage's decoder layers with recompute and offload applied.
// Equal layers share a key, so each kind is costed once.
func (d *dims) layers(st Stage) []*tape {
	r := d.s.Recompute
	var tapes []*tape
	type variant struct {
		kind             model.Kind
		full, first, low bool
	}
	kinds := map[variant]*tape{}
	for i := st.First; i < st.Last; i++ {
		at := i - st.First
		full := r.Full && (r.Method == "uniform" || at < r.Layers)
		first := !full || r.Method != "uniform" || at%r.Layers == 0
		own := d.ofLayer(i)
		key := variant{model.KindOf(d.m.Layers[i]), full, first, own.lowPrecision()}
		t := kinds[key]
		if t == nil {
			t = own.layerTape(d.m.Layers[i])
			t.key = strconv.Itoa(len(kinds))
			held := d.layerShare(d.m.Layers[i])
			t.params = held.dense + held.expert
			d.apply(t, full)
			if !first {
				// A unit of several layers keeps only its first input.
				t.saved[0].drop, t.saved[0].again, t.saved[0].gone = true, t.last(), t.saved[0].until
			}
			kinds[key] = t
		}
		u := *t
		u.name = fmt.Sprintf("layer %d", i)
		if !first {
			u.behind(tapes[len(tapes)-1])
		}
		tapes = append(tapes, &u)
	}
	return tapes
}

// behind notes that a layer is recomputed together with the one before it.
func (t *tape) behind(before *tape) {
	t.waiting = before.waiting
	for _, s := range before.saved {
		if s.drop {
			t.waiting += s.Bytes
		}
	}
}

// walk is one rank's step.
type walk struct {
	chunks []chunk
	passes []schedule.Pass
	// base is allocated throughout the step. margin is what offloading keeps on the device
	// to even out pipeline ranks.
	base, margin memory.Bytes
	shards       *sharded // nil unless parameters are sharded
	// sentForward and sentBackward are what pipeline communication holds in each kind of
	// pass.
	sentForward, sentBackward memory.Bytes
	brief                     bool  // only the highest point is asked for
	older                     bool  // as Megatron-LM before January 2026
	lasts                     []int // what lastMoved returned, by chunk
}

// point is the highest point of a pass.
type point struct {
	pass      int
	unit      int
	live, top memory.Bytes // live before the unit, and what it adds
	empty     bool         // no unit of the pass needs anything
}

// what names the unit and the operation of a point.
func (w *walk) what(p point) string {
	if p.empty {
		return ""
	}
	pass := w.passes[p.pass]
	u := &w.chunks[pass.Chunk].units[p.unit]
	if pass.Backward {
		return u.name + ", " + u.backwardAt
	}
	return u.name + ", " + u.forwardAt
}

// highest returns the highest of the points, without its groups.
func (w *walk) highest(points []point) Point {
	at := points[0]
	for _, p := range points[1:] {
		if p.live+p.top > at.live+at.top {
			at = p
		}
	}
	return Point{Pass: w.passes[at.pass], Static: w.base, Live: at.live, Transient: at.top}
}

// run walks through all passes and returns the highest point of each. The last offloaded
// unit of a chunk stays on the device if its backward pass is the next one of all chunks
// that offload. Units come back one ahead: while the backward pass runs one of them, the
// unit that it needs next returns, also that of another chunk if its forward pass is over.
func (w *walk) run() []point {
	points := make([]point, len(w.passes))
	live := w.margin
	staying := map[chunkPass]bool{}
	back := false // the unit that the next backward pass begins with is on the device
	for i, p := range w.passes {
		c := w.chunks[p.Chunk]
		at := point{pass: i, live: live, empty: true}
		key := chunkPass{p.Chunk, p.Microbatch}
		if !p.Backward {
			stays := w.stays(i)
			staying[key] = stays >= 0
			for j := range c.units {
				u := &c.units[j]
				if top := u.forward + w.sentForward + w.shards.forward(c.units, j); live+top > at.live+at.top {
					at = point{pass: i, unit: j, live: live, top: top}
				}
				live += u.kept
				if j == stays {
					live += u.moved
				}
			}
		} else {
			last, stays := w.lastMoved(p.Chunk), staying[key]
			for j := len(c.units) - 1; j >= 0; j-- {
				u := &c.units[j]
				var here memory.Bytes // what is on the device before the unit begins
				needs := u.backward
				switch {
				case u.moved == 0:
				case j == last && stays:
					here, needs = u.moved, u.ahead
				case back:
					here, needs = u.reloaded, u.ahead
				}
				top := needs + w.sentBackward + w.shards.backward(c.units, j)
				if live+top > at.live+at.top {
					at = point{pass: i, unit: j, live: live, top: top}
				}
				live -= u.kept + here
				if u.moved > 0 && !w.older {
					var next *cost
					if next = w.nextMoved(i, j); next != nil {
						live += next.reloaded
					}
					back = next != nil
				}
			}
		}
		points[i] = at
	}
	return points
}

// chunkPass is one microbatch of a chunk.
type chunkPass struct{ chunk, microbatch int }

// nextMoved returns the unit that comes back while the backward pass runs another one, or
// nil. It is the one before in the same chunk, or else the last of the chunk whose backward
// pass is next, if its forward pass is over and it is not on the device anyway.
func (w *walk) nextMoved(pass, unit int) *cost {
	p := w.passes[pass]
	for j := unit - 1; j >= 0; j-- {
		if u := &w.chunks[p.Chunk].units[j]; u.moved > 0 {
			return u
		}
	}
	next := w.nextBackward(pass)
	if next < 0 {
		return nil
	}
	q := w.passes[next]
	for i := next; i > pass; i-- {
		if f := w.passes[i]; !f.Backward && f.Chunk == q.Chunk && f.Microbatch == q.Microbatch {
			return nil // its forward pass comes later
		}
	}
	return &w.chunks[q.Chunk].units[w.lastMoved(q.Chunk)]
}

// nextBackward returns the next backward pass of a chunk that offloads, or -1.
func (w *walk) nextBackward(pass int) int {
	for i, q := range w.passes[pass+1:] {
		if q.Backward && w.lastMoved(q.Chunk) >= 0 {
			return pass + 1 + i
		}
	}
	return -1
}

// stays returns the unit of a forward pass whose offloaded groups stay until its backward
// pass, because that is the next one of all chunks that offload, or -1. In warm-up this
// keeps a unit of the first microbatch. Megatron-LM before January 2026 kept one only if
// its backward pass followed at once.
func (w *walk) stays(pass int) int {
	p := w.passes[pass]
	last := w.lastMoved(p.Chunk)
	if last < 0 {
		return -1
	}
	next := w.nextBackward(pass)
	if next < 0 || w.older && next > pass+1 {
		return -1
	}
	if q := w.passes[next]; q.Chunk != p.Chunk || q.Microbatch != p.Microbatch {
		return -1
	}
	return last
}

// lastMoved returns the last unit of a chunk that offloads anything, or -1.
func (w *walk) lastMoved(chunk int) int {
	if w.lasts == nil {
		for _, c := range w.chunks {
			j := len(c.units) - 1
			for j >= 0 && c.units[j].moved == 0 {
				j--
			}
			w.lasts = append(w.lasts, j)
		}
	}
	return w.lasts[chunk]
}

// keeps returns how many offloaded bytes a rank keeps on its device if it must keep the
// given number: at most those that are away at once.
func (w *walk) keeps(bytes memory.Bytes) memory.Bytes {
	if bytes == 0 {
		return 0
	}
	return min(bytes, w.mostAway(func(u *cost) memory.Bytes { return u.moved }))
}

// copied returns the size of the largest group that is offloaded. While it is copied, the
// allocator cannot give its memory to others, although it counts it as freed.
func (w *walk) copied() (most memory.Bytes) {
	for _, c := range w.chunks {
		for i := range c.units {
			most = max(most, c.units[i].largest)
		}
	}
	return most
}

// mostAway returns the most bytes that are offloaded at once, if size is what a unit
// offloads. A group that stays because its backward pass comes next is not offloaded.
func (w *walk) mostAway(size func(u *cost) memory.Bytes) (most memory.Bytes) {
	left := map[chunkPass]memory.Bytes{}
	var now memory.Bytes
	for i, p := range w.passes {
		key := chunkPass{p.Chunk, p.Microbatch}
		if p.Backward {
			now -= left[key]
			continue
		}
		var n memory.Bytes
		units := w.chunks[p.Chunk].units
		for j := range units {
			n += size(&units[j])
		}
		if j := w.stays(i); j >= 0 {
			n -= size(&units[j])
		}
		left[key] = n
		now += n
		most = max(most, now)
	}
	return most
}
