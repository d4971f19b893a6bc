// This file owns steps that repeat themselves: microbatch after microbatch with the same
// calls, as gradient accumulation makes them.

package policy

import (
	"slices"
	"time"

	"github.com/stowage-dev/stowage/internal/residency"
)

// section returns the calls of one of the equal parts that a step consists of, or nil if
// there are no such parts. Nothing is held from one part to the next, so the choices for
// one part are those for all. Parts may differ in their times; the one with the median time
// stands for all.
func (p *Profile) section() *Profile {
	if p.Rows != nil {
		return nil
	}
	parts := p.sections()
	if len(parts) < 2 || !slices.ContainsFunc(parts[0].ops, func(op residency.Op) bool { return op.Kind == residency.OpLoad }) {
		return nil
	}
	for _, x := range parts[1:] {
		if !x.like(&parts[0]) {
			return nil
		}
	}
	slices.SortStableFunc(parts, func(a, b section) int { return int(a.span() - b.span()) })
	return &Profile{Tape: parts[len(parts)/2].tape(), Base: p.Base, Units: p.Units, Drag: p.Drag}
}

// section is a part of a tape.
type section struct {
	ops      []residency.Op
	from, to time.Duration
	first    int // number of its first storage
}

func (s *section) span() time.Duration { return s.to - s.from }

// sections cuts a tape wherever nothing is held after a save. It leaves out what comes
// after the last cut, and returns nil if that saves anything.
func (p *Profile) sections() (parts []section) {
	held, saves, storages := 0, 0, 0
	x := section{}
	begin := 0
	for i, op := range p.Tape.Ops {
		switch op.Kind {
		case residency.OpTake, residency.OpBorrow:
			held++
			storages++
		case residency.OpSave:
			held++
			saves++
		case residency.OpGive, residency.OpRelease:
			held--
		case residency.OpLoad:
		default:
			return nil // scopes and rows go across
		}
		if held == 0 && saves > 0 {
			x.ops, x.to = p.Tape.Ops[begin:i+1], op.At
			parts = append(parts, x)
			begin, saves, x = i+1, 0, section{from: op.At, first: storages}
		}
	}
	if saves > 0 {
		return nil
	}
	return parts
}

// like reports whether two parts make the same calls.
func (s *section) like(o *section) bool {
	return slices.EqualFunc(s.ops, o.ops, func(a, b residency.Op) bool {
		if a.Kind != b.Kind || a.Bytes != b.Bytes || a.Group.Unit() != b.Group.Unit() {
			return false
		}
		if a.Kind == residency.OpTake || a.Kind == residency.OpBorrow || a.Kind == residency.OpGive {
			return a.ID-s.first == b.ID-o.first
		}
		return slices.EqualFunc(a.Items, b.Items, func(x, y residency.Item) bool { return x.ID-s.first == y.ID-o.first && x.Stay == y.Stay })
	})
}

// tape returns the part as a step of its own.
func (s *section) tape() residency.Tape {
	t := residency.Tape{Ops: slices.Clone(s.ops), Span: s.span()}
	for i := range t.Ops {
		op := &t.Ops[i]
		op.At -= s.from
		switch op.Kind {
		case residency.OpTake, residency.OpBorrow, residency.OpGive:
			op.ID -= s.first
		case residency.OpSave:
			op.Items = slices.Clone(op.Items)
			for k := range op.Items {
				op.Items[k].ID -= s.first
			}
		}
	}
	return t
}
