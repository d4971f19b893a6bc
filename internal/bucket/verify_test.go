// This file owns the oracle: what must hold for every plan, derived from the recorded order
// position by position without the planner's own functions.

package bucket

import (
	"fmt"
	"reflect"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

// spanOf returns the span of a use by its definition: from the beginning of the use
// Prefetch units before it to the release of the use Behind units after it.
func spanOf(s Spec, uses []Use, i int) (from, to int) {
	from, to = uses[i].Begin, uses[i].End
	if s.Units[uses[i].Unit].Loose {
		return from, to
	}
	left := s.Prefetch
	for j := i - 1; j >= 0 && left > 0; j-- {
		if !s.Units[uses[j].Unit].Loose {
			from = uses[j].Begin
			left--
		}
	}
	left = s.Behind
	last := i
	for j := i + 1; j < len(uses) && left > 0; j++ {
		if !s.Units[uses[j].Unit].Loose {
			last = j
			left--
		}
	}
	return from, max(to, uses[last].End)
}

// verify goes through all positions and looks at everything live there.
func verify(p *PoolPlan) error {
	s := p.Spec
	var lower memory.Bytes
	units := 0
	for at := range s.Order {
		live := map[int]int{} // unit to one of its uses
		var bytes memory.Bytes
		count := 0
		for i, u := range p.Uses {
			if from, to := spanOf(s, p.Uses, i); at < from || at > to {
				continue
			}
			if other, ok := live[u.Unit]; ok {
				if !reflect.DeepEqual(p.Places[i], p.Places[other]) {
					return fmt.Errorf("unit %d is live in two places at position %d", u.Unit, at)
				}
				continue
			}
			live[u.Unit] = i
			for _, b := range s.Units[u.Unit].Buckets {
				bytes += s.Bytes(b)
			}
			if !s.Units[u.Unit].Loose {
				count++
			}
		}
		lower, units = max(lower, bytes), max(units, count)
		if err := disjoint(p, live); err != nil {
			return fmt.Errorf("position %d: %w", at, err)
		}
	}
	switch {
	case p.LowerBound != lower:
		return fmt.Errorf("the lower bound is %d, and %d bytes are live at once", p.LowerBound, lower)
	case p.Bytes < lower:
		return fmt.Errorf("the pool takes %d bytes and %d are live at once", p.Bytes, lower)
	case p.Live < units:
		return fmt.Errorf("%d units are live at once, more than %d", units, p.Live)
	}
	return verifyPlaces(p)
}

// disjoint looks for two live buckets that overlap.
func disjoint(p *PoolPlan, live map[int]int) error {
	var all []Place
	for _, use := range live {
		all = append(all, p.Places[use]...)
	}
	for i, a := range all {
		for _, b := range all[:i] {
			if !a.Dynamic && !b.Dynamic && max(a.Offset, b.Offset) < min(a.Offset+a.Bytes, b.Offset+b.Bytes) {
				return fmt.Errorf("%+v and %+v overlap", a, b)
			}
		}
	}
	return nil
}

// verifyPlaces looks at alignment and padding, slots and moves.
func verifyPlaces(p *PoolPlan) error {
	s := p.Spec
	var dynamic bool
	was := map[[2]int]Place{}
	moves := 0
	for i, u := range p.Uses {
		if len(p.Places[i]) != len(s.Units[u.Unit].Buckets) {
			return fmt.Errorf("use %d has %d places", i, len(p.Places[i]))
		}
		for j, b := range s.Units[u.Unit].Buckets {
			place := p.Places[i][j]
			if n := s.Padded(b); n < b.Elements || n%max(1, s.Multiple) != 0 || place.Bytes < memory.Bytes(n)*b.Type.Size || place.Bytes%max(1, s.Align) != 0 {
				return fmt.Errorf("%d elements are padded to %d and take %d bytes", b.Elements, n, place.Bytes)
			}
			if outside := place.Dynamic || s.Units[u.Unit].Loose || slices.Contains(p.Fallback, u.Unit); !outside {
				want := b.Type
				if p.Kind != Fixed && p.Kind != Max { // whose slots hold whole units
					want = Type{}
				}
				if got := p.Slots[place.Slot].Type; got != want {
					return fmt.Errorf("a bucket of type %q lies in a slot of type %q", b.Type.Name, got.Name)
				}
			}
			if old, ok := was[[2]int{u.Unit, j}]; ok && old != place {
				moves++
			}
			was[[2]int{u.Unit, j}] = place
			if place.Dynamic {
				dynamic = true
				continue
			}
			slot := p.Slots[place.Slot]
			if place.Offset%max(1, s.Align) != 0 || place.Offset < slot.Offset || place.Offset+place.Bytes > slot.Offset+slot.Bytes ||
				slot.Offset+slot.Bytes > p.Bytes-p.Dynamic || slot.Type != (Type{}) && slot.Type != b.Type {
				return fmt.Errorf("%+v does not lie in its slot %+v of a pool of %d bytes", place, slot, p.Bytes)
			}
		}
	}
	switch {
	case moves != len(p.Moves):
		return fmt.Errorf("%d places change and %d moves are listed", moves, len(p.Moves))
	case !dynamic && p.Dynamic != 0:
		return fmt.Errorf("%d bytes are dynamic and no place is", p.Dynamic)
	}
	return verifyDeciders(p)
}

// verifyDeciders checks what decides the sizes of slots: a bucket or a unit of the same
// size, or a bucket that ends where the slot does.
func verifyDeciders(p *PoolPlan) error {
	for _, slot := range p.Slots {
		if slot.Bytes == 0 {
			continue
		}
		unit, b := slot.Decides.Unit, slot.Decides.Bucket
		var whole memory.Bytes
		for _, x := range p.Spec.Units[unit].Buckets {
			whole += p.Spec.Bytes(x)
		}
		ok := whole == slot.Bytes || p.Spec.Bytes(p.Spec.Units[unit].Buckets[b]) == slot.Bytes
		for i, u := range p.Uses {
			ok = ok || u.Unit == unit && p.Places[i][b].Offset+p.Places[i][b].Bytes == slot.Offset+slot.Bytes
		}
		if !ok {
			return fmt.Errorf("bucket %d of unit %d does not decide slot %+v", b, unit, slot)
		}
	}
	return nil
}

var types = []Type{{"bf16", 2}, {"fp32", 4}, {"fp8", 1}, {"int8", 1}}

// anySpec draws a model and an order in which uses nest and overlap.
func anySpec(t *rapid.T) Spec {
	s := Spec{
		Prefetch: rapid.IntRange(0, 3).Draw(t, "prefetch"),
		Behind:   rapid.SampledFrom([]int{0, 0, 1, 2}).Draw(t, "behind"),
		Align:    rapid.SampledFrom([]memory.Bytes{0, 1, 16, 100}).Draw(t, "align"),
		Multiple: rapid.SampledFrom([]int64{0, 1, 8, 12}).Draw(t, "multiple"),
	}
	shape := rapid.Custom(func(t *rapid.T) []Bucket {
		return rapid.SliceOfN(rapid.Custom(func(t *rapid.T) Bucket {
			return Bucket{
				Type:     rapid.SampledFrom(types).Draw(t, "type"),
				Elements: rapid.Int64Range(0, 300).Draw(t, "elements"),
			}
		}), 0, 4).Draw(t, "buckets")
	})
	shapes := rapid.SliceOfN(shape, 1, 5).Draw(t, "shapes")
	for i := range rapid.IntRange(1, 9).Draw(t, "units") {
		s.Units = append(s.Units, FSDPUnit{
			Name: fmt.Sprint("unit ", i), Loose: rapid.IntRange(0, 4).Draw(t, "loose") == 0,
			Buckets: rapid.SampledFrom(shapes).Draw(t, "shape"),
		})
	}
	var open []int
	depth := rapid.IntRange(1, 3).Draw(t, "depth")
	for range rapid.IntRange(1, 25).Draw(t, "uses") {
		for len(open) == depth || len(open) > 0 && rapid.Bool().Draw(t, "release") {
			i := rapid.IntRange(0, len(open)-1).Draw(t, "which")
			s.Order = append(s.Order, OrderEntry{Unit: open[i], Release: true})
			open = append(open[:i], open[i+1:]...)
		}
		unit := rapid.IntRange(0, len(s.Units)-1).Draw(t, "unit")
		if !slices.Contains(open, unit) {
			s.Order, open = append(s.Order, OrderEntry{Unit: unit}), append(open, unit)
		}
	}
	for _, unit := range open {
		s.Order = append(s.Order, OrderEntry{Unit: unit, Release: true})
	}
	return s
}

// thereAndBack returns the order of a forward and a backward pass.
func thereAndBack(n int) (order []OrderEntry) {
	for i := range n {
		order = append(order, OrderEntry{Unit: i}, OrderEntry{Unit: i, Release: true})
	}
	for i := n - 1; i >= 0; i-- {
		order = append(order, OrderEntry{Unit: i}, OrderEntry{Unit: i, Release: true})
	}
	return order
}

// ofSizes returns a model whose units have one bucket of the given size each.
func ofSizes(prefetch int, sizes ...int64) Spec {
	s := Spec{Prefetch: prefetch}
	for i, n := range sizes {
		s.Units = append(s.Units, FSDPUnit{Name: fmt.Sprint("layer ", i), Buckets: []Bucket{{Name: "weights", Type: Type{"fp8", 1}, Elements: n}}})
	}
	s.Order = thereAndBack(len(sizes))
	return s
}

func planned(t testing.TB, kind PoolKind, s Spec, o Options) *PoolPlan {
	t.Helper()
	p, err := NewPoolPlan(kind, s, o)
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(p); err != nil {
		t.Fatalf("%v: %v", kind, err)
	}
	return p
}
