// This file owns time: what a machine does on its three lanes is written down,
// and then played with a link that both directions of copies share.

package policy

import (
	"math"

	"github.com/stowage-dev/stowage/residency"
)

// point is a mark: a place in a lane's work.
type point struct {
	lane  residency.Lane
	index int     // copies of the lane before it, or waits of compute before it
	work  float64 // compute: its own work before it, in seconds
}

// wait is compute's, at a place in its work.
type wait struct {
	work float64
	on   point
}

// transfer is one copy.
type transfer struct {
	storage int
	bytes   float64
	after   []point
	planned bool // it goes out because the plan says so

	begin, end float64 // when it was played
}

// score is an Executor that writes down what it is told.
type score struct {
	now     float64 // compute's own work so far, in seconds
	points  []point // by mark, less one
	waits   []wait
	copies  [residency.Lanes][]transfer // of the lanes Out and In
	pending [residency.Lanes][]point
	after   []point // of all copies, one after the other
	planned bool
	scope   bool    // one is open,
	from    float64 // since this much of compute's work
	inside  []int   // and these points of compute lie in it

	resumed []float64 // by wait: when compute went on behind it
	held    []float64 // and how long it had stood
}

func (s *score) at(lane residency.Lane) point {
	if lane == residency.Compute {
		return point{lane, len(s.waits), s.now}
	}
	return point{lane: lane, index: len(s.copies[lane])}
}

// begin opens a scope: compute's waits in it come before all of its work.
func (s *score) begin() { s.scope, s.from = true, s.now }

// endScope closes it: its points come behind its waits.
func (s *score) endScope() {
	for _, i := range s.inside {
		s.points[i].index = len(s.waits)
	}
	s.scope, s.inside = false, s.inside[:0]
}

// Record is a mark of the lane's work so far.
func (s *score) Record(l residency.Lane) residency.Mark {
	if s.scope && l == residency.Compute {
		s.inside = append(s.inside, len(s.points))
	}
	s.points = append(s.points, s.at(l))
	return residency.Mark(len(s.points))
}

// After makes the lane's next work come after a mark.
func (s *score) After(l residency.Lane, m residency.Mark) {
	if m == 0 {
		return
	}
	p := s.points[m-1]
	switch {
	case p.lane == l: // a lane is in order
	case l == residency.Compute && s.scope:
		s.waits = append(s.waits, wait{s.from, p})
	case l == residency.Compute:
		s.waits = append(s.waits, wait{s.now, p})
	default:
		s.pending[l] = append(s.pending[l], p)
	}
}

// Out copies a storage to the host.
func (s *score) Out(x *residency.Storage) { s.copy(residency.Out, x) }

// In copies it back.
func (s *score) In(x *residency.Storage) { s.copy(residency.In, x) }

// Left is nothing to a clock: the wait that comes with it was written down.
func (s *score) Left(*residency.Storage) {}
func (s *score) Lend(*residency.Storage) {}

func (s *score) copy(l residency.Lane, x *residency.Storage) {
	n := len(s.after)
	s.after = append(s.after, s.pending[l]...)
	s.copies[l] = append(s.copies[l], transfer{storage: x.ID, bytes: float64(x.Bytes), after: s.after[n:len(s.after):len(s.after)], planned: s.planned})
	s.pending[l] = s.pending[l][:0]
}

// player is the playing of a score. It goes from one event to the next: a copy
// begins to move bytes, or has moved them all. Between events rates are constant,
// so the times are exact.
type player struct {
	*score
	links Links
	now   float64
	lanes [residency.Lanes]struct {
		next  int     // the copy under way or waited for
		ready bool    // what it comes after is known
		from  float64 // when its bytes begin to move
		left  float64 // bytes
	}
}

// shared are the rates while both directions are busy.
func (l Links) shared() (out, in float64) {
	if l.Both == 0 {
		return l.Out, l.In
	}
	f := min(l.Both/(l.Out+l.In), 1)
	return f * l.Out, f * l.In
}

// play fills in the times, and is when the last lane ends.
func (s *score) play(l Links, span float64) (end float64) {
	p := player{score: s, links: l}
	s.resumed, s.held = make([]float64, 0, len(s.waits)), make([]float64, 0, len(s.waits))
	for {
		p.compute()
		p.ready(residency.Out)
		p.ready(residency.In)
		if !p.step() {
			break
		}
	}
	if len(s.resumed) < len(s.waits) || p.lanes[residency.Out].next < len(s.copies[residency.Out]) || p.lanes[residency.In].next < len(s.copies[residency.In]) {
		panic("policy: lanes wait for each other in a circle")
	}
	end, _ = p.when(point{residency.Compute, len(s.waits), span})
	for _, lane := range []residency.Lane{residency.Out, residency.In} {
		if n := len(s.copies[lane]); n > 0 {
			end = max(end, s.copies[lane][n-1].end)
		}
	}
	return end
}

// when is the time of a point, if it is known.
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

// compute lets compute run until a wait for what has not happened.
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

// ready finds when a lane's next copy begins.
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

// step goes to the next event.
func (p *player) step() bool {
	moving := func(l residency.Lane) bool { return p.lanes[l].ready && p.lanes[l].from <= p.now }
	var rate [residency.Lanes]float64
	rate[residency.Out], rate[residency.In] = p.links.Out, p.links.In
	if moving(residency.Out) && moving(residency.In) {
		rate[residency.Out], rate[residency.In] = p.links.shared()
	}
	next, first := math.Inf(1), residency.Out
	for l := residency.Out; l <= residency.In; l++ {
		x := &p.lanes[l]
		t := x.from
		if moving(l) {
			t = p.now + x.left/rate[l]
		}
		if x.ready && t < next {
			next, first = t, l
		}
	}
	if math.IsInf(next, 1) {
		return false
	}
	for l := residency.Out; l <= residency.In; l++ {
		x := &p.lanes[l]
		if !moving(l) {
			continue
		}
		x.left = max(x.left-rate[l]*(next-p.now), 0)
		// Bytes are whole: a thousandth of one is rounding.
		if l == first || x.left < 1e-3 {
			p.copies[l][x.next].end = next
			x.next, x.ready = x.next+1, false
		}
	}
	p.now = next
	return true
}
