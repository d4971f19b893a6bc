// This file owns plans: which groups leave, and at which point of the step each is
// brought back.

package policy

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// Plan says which groups of the offloaded units leave and when they come back.
//
// A group stays if its copies out and back would not fit between its save and its
// load behind the copies of the others, as far as memory allows: what has to make
// room then leaves by plan and not by surprise. A group comes back as late as is
// safe: going backwards over the loads, each copy ends when the copy of the next
// load begins or when its own load comes, whichever is earlier, and takes safety
// times what the links need. Its place in the plan is the last save or load at or
// before its beginning, whatever pass that belongs to; so the copies for a
// backward pass begin before it.
func Plan(p *Profile, pol Policy, l Links, cfg residency.Config) (*residency.Plan, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	if err := p.Check(pol); err != nil {
		return nil, err
	}
	t := p.step(pol).best(l, cfg, safety)
	return t.plan, t.err
}

// safety is what copies are planned to take, in terms of what they need alone:
// measured times of compute differ by some per cent between steps, and a copy
// that is early by a quarter of its length costs that much memory for that long.
const safety = 1.25

// rounds bounds how often groups are added that have to leave.
const rounds = 4

// best is a plan that lets groups stay which cannot be hidden, and the one that
// lets all leave if that is faster or all that fits.
func (s *step) best(l Links, cfg residency.Config, safe float64) *trial {
	out := s.leaving(cfg)
	some := slices.Clone(out)
	s.margin(some, l, safe)
	all := slices.Equal(out, some)
	t := s.try(s.plan(some, l, safe), l, cfg)
	if t.err == nil && (all || t.machine.Counts().Evicted == 0) {
		return t
	}
	for range rounds {
		more := false
		for _, g := range t.evicted() {
			if out[g] && !some[g] {
				some[g], more = true, true
			}
		}
		if !more {
			break
		}
		if u := s.try(s.plan(some, l, safe), l, cfg); better(u, t, l) {
			t = u
		} else {
			break
		}
	}
	if u := s.try(s.plan(out, l, safe), l, cfg); t.err != nil || better(u, t, l) {
		t = u
	}
	if t.err == nil {
		return t
	}
	// What comes back early takes memory early: the floor is where nothing does, and
	// so does not depend on times.
	late := *t.plan
	late.Ahead = nil
	return s.try(&late, l, cfg)
}

// better compares trials of the same step.
func better(a, b *trial, l Links) bool {
	if a.err != nil || b.err != nil {
		return a.err == nil
	}
	return a.cost(l) < b.cost(l)
}

// leaving are the groups that may leave: by group, those of offloaded units that
// save something which may move and which no group of another unit keeps.
func (s *step) leaving(cfg residency.Config) []bool {
	kept := make([]bool, len(s.sizes))
	for _, g := range s.groups {
		for _, it := range g.storages {
			kept[it.ID] = kept[it.ID] || it.Stay || s.sizes[it.ID] < cfg.Least || s.pol[s.units[g.unit]] != Offload
		}
	}
	out := make([]bool, len(s.groups))
	for i, g := range s.groups {
		for _, it := range g.storages {
			out[i] = out[i] || !kept[it.ID]
		}
	}
	return out
}

// margin takes groups back that cannot leave and return in time. Where copies
// queue up the one with the shortest window goes first, because it gains the
// least time for the others' memory; several go at once, so that few passes do.
func (s *step) margin(out []bool, l Links, safe float64) {
	for {
		begin, end := s.copies(out, l, safe)
		var late []int
		for i, g := range s.groups {
			if out[i] && g.load >= 0 && end[i] > begin[i] {
				late = append(late, i)
			}
		}
		if len(late) == 0 {
			return
		}
		slices.SortStableFunc(late, func(a, b int) int {
			x, y := s.groups[a].to-s.groups[a].from, s.groups[b].to-s.groups[b].from
			switch {
			case x < y:
				return -1
			case x > y:
				return 1
			}
			return b - a
		})
		for _, i := range late[:(len(late)+3)/4] {
			out[i] = false
		}
	}
}

// copies are when groups' copies in must begin, and when their copies out end, in
// compute's own work.
func (s *step) copies(out []bool, l Links, safe float64) (begin, end []float64) {
	begin, end = make([]float64, len(s.groups)), make([]float64, len(s.groups))
	var busy []span // the copies out
	last := 0.0
	for i, g := range s.groups {
		if out[i] {
			from := max(last, g.from)
			last = from + safe*(float64(g.out)/l.Out+l.Latency.Seconds())
			end[i] = last
			busy = append(busy, span{from, last})
		}
	}
	next := s.tape.Span.Seconds()
	for _, i := range s.byLoad() {
		if g := s.groups[i]; out[i] {
			next, busy = l.back(min(next, g.to), safe*float64(g.in), busy)
			next -= safe * l.Latency.Seconds()
			begin[i] = next
		}
	}
	return begin, end
}

// byLoad are the groups that are loaded, the last first.
func (s *step) byLoad() []int {
	order := make([]int, 0, len(s.groups))
	for i, g := range s.groups {
		if g.load >= 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return s.groups[b].load - s.groups[a].load })
	return order
}

type span struct{ from, to float64 }

// back is when a copy in of so many bytes must begin to end at a time, beside
// copies out that are under way in the given spans; those behind its beginning are
// taken off the list.
func (l Links) back(t, bytes float64, busy []span) (float64, []span) {
	_, slow := l.shared()
	for {
		for len(busy) > 0 && busy[len(busy)-1].from >= t {
			busy = busy[:len(busy)-1]
		}
		rate, until := l.In, t-bytes/l.In
		if n := len(busy); n > 0 {
			if b := busy[n-1]; b.to < t {
				until = max(until, b.to)
			} else {
				rate, until = slow, max(t-bytes/slow, b.from)
			}
		}
		bytes -= rate * (t - until)
		if bytes <= 1e-3 || until == t { // the rest is shorter than a clock can tell
			return until, busy
		}
		t = until
	}
}

// plan brings the groups back that leave, as late as is safe.
func (s *step) plan(out []bool, l Links, safe float64) *residency.Plan {
	return s.deep(out, l, safe, 0)
}

// deep is plan with at most so much memory ahead of need, in largest groups; zero is
// no limit. A group that is needed before it could be back comes when two largest
// groups are ahead of need, without a limit too: then the copy in of the next is
// always under way, and compute waits for the link alone.
func (s *step) deep(out []bool, l Links, safe float64, depth int64) *residency.Plan {
	p := &residency.Plan{Schedule: s.schedule, Leave: map[schedule.Group]bool{}, Ahead: make([][]schedule.Group, s.schedule.Len())}
	begin, _ := s.copies(out, l, safe)
	var order []int // that leave and come back, the first load first
	most := int64(0)
	for _, i := range slices.Backward(s.byLoad()) {
		if out[i] {
			order = append(order, i)
			most = max(most, s.groups[i].bytes)
		}
	}
	at, ahead, bytes := 0, 0, int64(0)
	for k, i := range order {
		g := s.groups[i]
		for at+1 < len(s.when) && s.when[at+1] <= begin[i] {
			at++
		}
		for bytes += g.bytes; bytes > cmp.Or(depth, 2)*most; ahead++ { // groups behind the one at ahead
			bytes -= s.groups[order[ahead]].bytes
		}
		first := g.save + 1
		if ahead > 0 && ahead <= k {
			first = max(first, s.groups[order[ahead-1]].load)
		}
		pos := min(at, g.load-1)
		if pos <= g.save || depth > 0 {
			pos = max(pos, first)
		}
		if pos < g.load {
			p.Ahead[pos] = append(p.Ahead[pos], g.Group)
		}
	}
	for i, g := range s.groups {
		if out[i] {
			p.Leave[g.Group] = true
		}
	}
	return p
}
