// This file owns what recompute and offload remove from a tape.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/memory"
)

// Rank returns the settings of one pipeline rank: its own fraction as Fraction.
func (o Offload) Rank(r int) Offload {
	if len(o.Fractions) == 0 {
		return o
	}
	o.Fraction, o.Fractions = o.Fractions[r], nil
	if o.Fraction == 0 {
		o.Modules = nil
	}
	return o
}

// OffloadShare returns which part of the offloaded modules' bytes a pipeline rank
// really offloads. It differs from the fraction because whole groups are offloaded.
// The setup must be normalised.
func OffloadShare(s *Setup, rank int) float64 {
	d := newDims(s).ofRank(rank)
	var all, moved memory.Bytes
	for _, st := range d.s.chunks(rank) {
		tapes := d.tapes(st)
		all += awayBytes(tapes)
		d.stayFraction(tapes)
		moved += awayBytes(tapes)
	}
	return shareOf(moved, all)
}

// shareOf returns a part as a fraction of the whole, which may be zero.
func shareOf(part, whole memory.Bytes) float64 {
	if whole == 0 {
		return 0
	}
	return float64(part) / float64(whole)
}

func awayBytes(tapes []*tape) (n memory.Bytes) {
	for _, t := range tapes {
		for _, s := range t.saved {
			if s.away {
				n += s.Bytes
			}
		}
	}
	return n
}

// apply marks the tensors that are not kept. full means that the whole layer is
// recomputed.
func (d *dims) apply(t *tape, full bool) {
	r, o := d.s.Recompute, d.s.Offload
	for i := range t.saved {
		s := &t.saved[i]
		switch {
		case full:
			// The layer is recomputed from its input.
			if i > 0 {
				s.drop, s.again, s.gone = true, t.last(), s.until
			}
			continue
		case slices.ContainsFunc(s.Recompute, func(m string) bool { return slices.Contains(r.Modules, m) }):
			s.drop, s.again = true, t.trigger(*s, r.Modules)
			s.gone = s.until
			if slices.ContainsFunc(s.Recompute, func(m string) bool { return slices.Contains(discarded, m) && slices.Contains(r.Modules, m) }) {
				s.gone = s.again
			}
			if s.Elements >= o.MinElements {
				s.mover = memory.Including(o.Modules, s.Offload)
			}
		case memory.Including(d.s.Stash.Modules, s.Stash) != "":
			s.stashed = true
		case s.Elements >= o.MinElements:
			s.mover = memory.Including(o.Modules, s.Offload)
			s.away = s.mover != ""
		}
	}
}

// discarded are the modules whose outputs are there until their users have run, and are
// recomputed at the same point (CheckpointWithoutOutput). So is layernorm, whose outputs are
// too small to matter. Those of other modules never outlive the operation that needs them.
var discarded = []string{"mla_up_proj", "moe_act"}

// trigger returns the operation before whose backward pass a dropped tensor is
// recomputed: the one that its module marks, or else the one that needs it.
func (t *tape) trigger(s saved, modules []string) int {
	again := s.until
	for _, m := range s.Recompute {
		if !slices.Contains(modules, m) {
			continue
		}
		for i, o := range t.ops[s.at:] {
			if slices.Contains(o.recompute, m) {
				again = max(again, s.at+i)
				break
			}
		}
	}
	return again
}

// next returns the first operation with one of the names, from a given one on.
func (t *tape) next(after int, names ...string) int {
	for i := after; i < len(t.ops); i++ {
		if slices.Contains(names, t.ops[i].name) {
			return i
		}
	}
	return t.last()
}

// stayFraction keeps the last groups of a chunk on the device. Of n groups that would be
// offloaded, the last int((1-x) n) stay, or as many of the last as hold that share of the
// bytes.
func (d *dims) stayFraction(tapes []*tape) {
	o := d.s.Offload
	if o.Fraction >= 1 || len(o.Modules) == 0 {
		return
	}
	type group struct {
		tape  int
		name  string
		bytes memory.Bytes
	}
	var groups []group
	var all memory.Bytes
	for i, t := range tapes {
		for _, s := range t.saved {
			if !s.away {
				continue
			}
			if n := len(groups); n == 0 || groups[n-1].tape != i || groups[n-1].name != s.mover {
				groups = append(groups, group{tape: i, name: s.mover})
			}
			groups[len(groups)-1].bytes += s.Bytes
			all += s.Bytes
		}
	}
	count := int(float64(len(groups)) * (1 - o.Fraction))
	bytes := memory.Bytes(float64(all) * (1 - o.Fraction))
	for i := len(groups) - 1; i >= 0; i-- {
		g := groups[i]
		if !o.ByBytes && count == 0 || o.ByBytes && bytes < g.bytes {
			break
		}
		count--
		bytes -= g.bytes
		tapes[g.tape].keepGroup(g.name)
	}
}

// keepGroup keeps a group of one tape on the device. The tape then differs from others of its
// kind.
func (t *tape) keepGroup(name string) {
	t.key += "/" + name
	t.saved = slices.Clone(t.saved)
	for i := range t.saved {
		if t.saved[i].mover == name {
			t.saved[i].away, t.saved[i].mover = false, ""
		}
	}
}
