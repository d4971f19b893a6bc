// This file owns simulated time. A score notes what a machine does on its three lanes, and
// the stash on two more. A player then computes the times, with a link that all copies
// share.

package policy

import (
	"math"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// The stash copies rows on streams of its own, beside the machine's copies.
const (
	rowsOut = residency.Lane(residency.Lanes) + iota
	rowsIn
	lanes
)

// point is a place in a lane's work, which a mark stands for.
type point struct {
	lane  residency.Lane
	index int     // number of the lane's copies, or of compute's waits, before it
	work  float64 // for compute: its own work before it, in seconds
}

// wait is a wait of compute at a place in its work.
type wait struct {
	work float64
	on   point
}

// transfer is one copy.
type transfer struct {
	storage int            // or -1 for rows
	group   memory.GroupID // the group of the rows
	bytes   float64
	after   []point
	planned bool // the plan offloads it; else it is evicted

	begin, end float64 // the times that play sets
}

// score is a residency.Executor that notes its calls.
type score struct {
	now     float64 // compute's own work so far, in seconds
	points  []point // indexed by mark - 1
	waits   []wait
	copies  [lanes][]transfer // of every lane but Compute
	pending [residency.Lanes][]point
	after   []point // the points that copies wait for, of all copies in order
	planned bool
	scope   bool    // whether a scope is open
	from    float64 // compute's work at the beginning of the scope
	inside  []int   // the points of compute in the scope

	resumed []float64 // for each wait, when compute continued
	held    []float64 // for each wait, how long compute waited
}

func (s *score) at(lane residency.Lane) point {
	if lane == residency.Compute {
		return point{lane, len(s.waits), s.now}
	}
	return point{lane: lane, index: len(s.copies[lane])}
}

// begin opens a scope. Compute's waits in a scope come before all of its work.
func (s *score) begin() { s.scope, s.from = true, s.now }

// endScope closes the scope. Its points come after its waits.
func (s *score) endScope() {
	for _, i := range s.inside {
		s.points[i].index = len(s.waits)
	}
	s.scope, s.inside = false, s.inside[:0]
}

// Record returns a mark after the lane's work so far.
func (s *score) Record(l residency.Lane) residency.Mark {
	if s.scope && l == residency.Compute {
		s.inside = append(s.inside, len(s.points))
	}
	s.points = append(s.points, s.at(l))
	return residency.Mark(len(s.points))
}

// After makes the lane's next work wait for a mark.
func (s *score) After(l residency.Lane, m residency.Mark) {
	if m == 0 {
		return
	}
	p := s.points[m-1]
	switch {
	case p.lane == l: // the work of a lane runs in order
	case l == residency.Compute && s.scope:
		s.waits = append(s.waits, wait{s.from, p})
	case l == residency.Compute:
		s.waits = append(s.waits, wait{s.now, p})
	default:
		s.pending[l] = append(s.pending[l], p)
	}
}

// Out notes the offload of a storage.
func (s *score) Out(x *residency.Storage) { s.copy(residency.Out, x) }

// In notes the reload of a storage.
func (s *score) In(x *residency.Storage) { s.copy(residency.In, x) }

// ReturnMemory does nothing: it takes no time, and its wait was noted.
func (s *score) ReturnMemory(*residency.Storage) {}

// ProvideMemory does nothing, because it takes no time.
func (s *score) ProvideMemory(*residency.Storage) {}

func (s *score) copy(l residency.Lane, x *residency.Storage) {
	n := len(s.after)
	s.after = append(s.after, s.pending[l]...)
	s.copies[l] = append(s.copies[l], transfer{storage: x.ID, bytes: float64(x.Bytes), after: s.after[n:len(s.after):len(s.after)], planned: s.planned})
	s.pending[l] = s.pending[l][:0]
}

// player computes the times of a score. It goes from one event to the next. In an event a
// copy begins to move bytes or has moved all of them. Rates are constant between events,
// so the times are exact.
type player struct {
	*score
	links memory.Links
	now   float64
	lanes [lanes]struct {
		next  int     // the copy that is in flight or that comes next
		ready bool    // the time that it may begin at is known
		from  float64 // when its bytes begin to move
		left  float64 // bytes
	}
}

// play sets the times and returns when the last lane ends.
func (s *score) play(l memory.Links, span float64) (end float64) {
	p := player{score: s, links: l}
	s.resumed, s.held = make([]float64, 0, len(s.waits)), make([]float64, 0, len(s.waits))
	for {
		p.compute()
		for l := residency.Out; l < lanes; l++ {
			p.ready(l)
		}
		if !p.step() {
			break
		}
	}
	end, known := p.when(point{residency.Compute, len(s.waits), span})
	for l := residency.Out; l < lanes; l++ {
		if n := len(s.copies[l]); n > 0 {
			known = known && p.lanes[l].next == n
			end = max(end, s.copies[l][n-1].end)
		}
	}
	if !known {
		panic("policy: the simulated lanes deadlock")
	}
	return end
}

// when returns the time of a point, and whether it is known yet.
func (p *player) when(x point) (float64, bool) {
	switch {
	case x.index == 0:
		return x.work, true
	case x.lane != residency.Compute:
		return p.copies[x.lane][x.index-1].end, x.index <= p.lanes[x.lane].next
	case x.index > len(p.resumed):
		return 0, false
	}
	return p.resumed[x.index-1] + x.work - p.waits[x.index-1].work, true
}

// compute runs compute up to a wait for something that has not happened yet.
func (p *player) compute() {
	for len(p.resumed) < len(p.waits) {
		w := p.waits[len(p.resumed)]
		met, known := p.when(w.on)
		if !known {
			return
		}
		come, _ := p.when(point{residency.Compute, len(p.resumed), w.work})
		p.resumed = append(p.resumed, max(come, met))
		p.held = append(p.held, max(met-come, 0))
	}
}

// ready sets when a lane's next copy begins, if that is known.
func (p *player) ready(l residency.Lane) {
	x := &p.lanes[l]
	if x.ready || x.next == len(p.copies[l]) {
		return
	}
	c := &p.copies[l][x.next]
	from, _ := p.when(point{lane: l, index: x.next})
	for _, a := range c.after {
		t, known := p.when(a)
		if !known {
			return
		}
		from = max(from, t)
	}
	c.begin = from
	x.ready, x.from, x.left = true, from+p.links.Latency.Seconds(), c.bytes
}

// rates returns the bytes per second of every lane. The lanes of one direction share its
// rate equally.
func (p *player) rates() (rate [lanes]float64) {
	out := []residency.Lane{residency.Out, rowsOut}
	in := []residency.Lane{residency.In, rowsIn}
	outs, ins := p.moving(out...), p.moving(in...)
	rateOut, rateIn := p.links.Out, p.links.In
	if outs > 0 && ins > 0 {
		rateOut, rateIn = p.links.Shared()
	}
	for i := range out {
		rate[out[i]], rate[in[i]] = rateOut/float64(max(outs, 1)), rateIn/float64(max(ins, 1))
	}
	return rate
}

// moving returns how many of the lanes move bytes.
func (p *player) moving(list ...residency.Lane) (n int) {
	for _, l := range list {
		if p.lanes[l].ready && p.lanes[l].from <= p.now {
			n++
		}
	}
	return n
}

// step advances to the next event and reports whether there was one.
func (p *player) step() bool {
	rate := p.rates()
	next, first := math.Inf(1), residency.Out
	for l := residency.Out; l < lanes; l++ {
		x := &p.lanes[l]
		t := x.from
		if p.moving(l) > 0 {
			t = p.now + x.left/rate[l]
		}
		if x.ready && t < next {
			next, first = t, l
		}
	}
	if math.IsInf(next, 1) {
		return false
	}
	for l := residency.Out; l < lanes; l++ {
		x := &p.lanes[l]
		if p.moving(l) == 0 {
			continue
		}
		x.left = max(x.left-rate[l]*(next-p.now), 0)
		// Less than a thousandth of a byte is a rounding error.
		if l == first || x.left < 1e-3 {
			p.copies[l][x.next].end = next
			x.next, x.ready = x.next+1, false
		}
	}
	p.now = next
	return true
}

// busy returns how long at least one copy of two lanes was in flight.
func (s *score) busy(a, b residency.Lane) (total float64) {
	x, y := s.copies[a], s.copies[b]
	until := 0.0
	for len(x)+len(y) > 0 {
		if len(x) == 0 || len(y) > 0 && y[0].begin < x[0].begin {
			x, y = y, x
		}
		total += max(x[0].end-max(x[0].begin, until), 0)
		until = max(until, x[0].end)
		x = x[1:]
	}
	return total
}
