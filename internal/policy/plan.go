// This file owns plans: which groups are offloaded, and at which point of the step each is
// reloaded.

package policy

import (
	"cmp"
	"slices"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Plan returns which groups of the offloaded units are offloaded and when they are
// reloaded. It returns an error if the step does not fit cfg or a choice is not allowed.
//
// A group stays if its offload and reload would not fit between its save and its load
// after the copies of the others, as far as memory allows. Groups that must make room are
// offloaded by the plan, so that nothing is evicted.
//
// A group is reloaded as late as is safe. Going backwards over the loads, each copy ends
// when the copy of the next load begins or at its own load, whichever is earlier. It takes
// safety times as long as the links need. The plan issues it at the last save or load
// before it begins, in whatever pass that is. The copies for a backward pass therefore
// begin before that pass.
func Plan(p *Profile, pol memory.Policy, l memory.Links, cfg residency.Config) (*residency.Plan, error) {
	if err := l.Check(); err != nil {
		return nil, err
	}
	if err := p.Check(pol); err != nil {
		return nil, err
	}
	t := p.step(pol).best(l, cfg, safety)
	return t.plan, t.err
}

// safety is the planned time of a copy divided by the time that it needs alone. Measured
// times of compute differ by some per cent between steps. A copy that is early by a
// quarter of its length costs its memory for that time.
const safety = 1.25

// rounds limits how often best adds groups that must be offloaded.
const rounds = 4

// best tries a plan that keeps groups whose copies cannot be hidden, and a plan that
// offloads all groups. It returns the second if that is faster or the only one that fits.
func (s *step) best(l memory.Links, cfg residency.Config, safe float64) *trial {
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
	// A prefetch takes memory early. Without any, the step takes the least memory, which
	// does not depend on times.
	late := *t.plan
	late.Prefetch = nil
	return s.try(&late, l, cfg)
}

// better reports whether a is better than b, a trial of the same step.
func better(a, b *trial, l memory.Links) bool {
	if a.err != nil || b.err != nil {
		return a.err == nil
	}
	return a.cost(l) < b.cost(l)
}

// leaving reports for each group whether it may be offloaded: its unit is offloaded, and it
// saves a storage that may move and that no group of another unit keeps.
func (s *step) leaving(cfg residency.Config) []bool {
	kept := make([]bool, len(s.sizes))
	for _, g := range s.groups {
		for _, it := range g.storages {
			kept[it.ID] = kept[it.ID] || it.Stay || s.sizes[it.ID] < cfg.Least || s.pol[s.units[g.unit]] != memory.Offload
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

// margin clears the groups in out that cannot be offloaded and reloaded in time. If copies
// queue up, it clears the group with the shortest window first, because offloading that
// group frees memory for the shortest time. It clears several in each pass to need few
// passes.
func (s *step) margin(out []bool, l memory.Links, safe float64) {
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

// copies returns when the reload of each group must begin and when its offload ends, in
// seconds of compute's own work.
func (s *step) copies(out []bool, l memory.Links, safe float64) (begin, end []float64) {
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
	for _, i := range s.byLoad {
		if g := s.groups[i]; out[i] {
			next, busy = back(l, min(next, g.to), safe*float64(g.in), busy)
			next -= safe * l.Latency.Seconds()
			begin[i] = next
		}
	}
	return begin, end
}

// sortLoads sets the groups that are loaded, with the last load first.
func (s *step) sortLoads() {
	order := make([]int, 0, len(s.groups))
	for i, g := range s.groups {
		if g.load >= 0 {
			order = append(order, i)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return s.groups[b].load - s.groups[a].load })
	s.byLoad = order
}

type span struct{ from, to float64 }

// back returns when a reload must begin to end at time t while offloads run in the spans
// of busy. It also returns busy without the spans after that beginning.
func back(l memory.Links, t, bytes float64, busy []span) (float64, []span) {
	_, slow := l.Shared()
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

// plan returns the plan that offloads the groups in out and reloads them as late as is
// safe.
func (s *step) plan(out []bool, l memory.Links, safe float64) *residency.Plan {
	return s.deep(out, l, safe, 0)
}

// deep is like plan with at most depth times the largest group's memory ahead of need.
// Zero sets no limit. A group that is needed before it could be reloaded is reloaded when
// twice the largest group's memory is ahead of need, even without a limit. The reload of
// the next group is then always in flight, and compute waits only for the link.
func (s *step) deep(out []bool, l memory.Links, safe float64, depth int) *residency.Plan {
	p := &residency.Plan{Schedule: s.schedule, Offload: map[memory.GroupID]bool{}, Prefetch: make([][]memory.GroupID, s.schedule.Len())}
	begin, _ := s.copies(out, l, safe)
	var order []int // groups that are offloaded and reloaded, with the first load first
	most := memory.Bytes(0)
	for _, i := range slices.Backward(s.byLoad) {
		if out[i] {
			order = append(order, i)
			most = max(most, s.groups[i].bytes)
		}
	}
	at, ahead, bytes := 0, 0, memory.Bytes(0)
	for k, i := range order {
		g := s.groups[i]
		for at+1 < len(s.when) && s.when[at+1] <= begin[i] {
			at++
		}
		for bytes += g.bytes; bytes > memory.Bytes(cmp.Or(depth, 2))*most; ahead++ { // groups behind the one at ahead
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
			p.Prefetch[pos] = append(p.Prefetch[pos], g.GroupID)
		}
	}
	for i, g := range s.groups {
		if out[i] {
			p.Offload[g.GroupID] = true
		}
	}
	return p
}
