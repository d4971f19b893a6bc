// This file owns the plan of a pool: the kinds of pools, the places of buckets, and the
// pool's size beside the smallest that any pool could have.

package bucket

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// PoolKind is a kind of pool.
type PoolKind uint8

const (
	// Dynamic allocates memory for each use, from an allocator that keeps freed
	// blocks for requests of the same size. Addresses are not fixed.
	Dynamic PoolKind = iota
	// Rotary has Live blocks, each as large as the largest FSDP unit. Uses take them in
	// turn.
	Rotary
	// Fixed has Live sets of slots for the most common shape of an FSDP unit. Those of
	// other shapes lie outside the slots.
	Fixed
	// Max has Live sets of slots. The k-th largest slot of a data type is as large
	// as the largest k-th bucket of that type in any FSDP unit.
	Max
	// Arena has blocks for whole FSDP units. Those that are never live at the same time
	// share a block, which is as large as the largest of them. It takes no more than
	// Max with persistent memory for loose FSDP units.
	Arena
	// Recorded gives each FSDP unit an offset that follows from the lifetimes in the
	// recorded order. Its old name, "trace", still selects it.
	Recorded
)

// PoolKinds lists all kinds, usually from the largest to the smallest.
var PoolKinds = [...]PoolKind{Dynamic, Rotary, Fixed, Max, Arena, Recorded}

var kindNames = [...]string{"dynamic", "rotary", "fixed", "max", "arena", "recorded"}

// String returns the name that [ParsePoolKind] accepts.
func (k PoolKind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ParsePoolKind returns the kind with the given name. It accepts "trace", the old name
// of Recorded, and returns an error for names that no kind has.
func ParsePoolKind(s string) (PoolKind, error) {
	if s == "trace" {
		return Recorded, nil
	}
	for k, name := range kindNames {
		if s == name {
			return PoolKind(k), nil
		}
	}
	return 0, fmt.Errorf("expected a pool (%s or %s), got %q", strings.Join(kindNames[:len(kindNames)-1], ", "), Recorded, s)
}

// Use is one use of an FSDP unit. Its memory is live from the beginning of the use Gather to
// the release of the use Last.
type Use struct {
	Unit       int
	Begin, End int // the positions of its beginning and its release in Spec.Order
	// Gather is the index of the use at whose beginning this use is gathered:
	// Prefetch uses earlier, or its own index if it is not prefetched.
	Gather int
	// Last is the index of the use at whose release this use's memory is free again
	// at the latest: Behind uses later, or its own index if Behind is zero.
	Last int
	// Kept reports whether the FSDP unit is still live from its use before. It then keeps
	// its place: nothing is gathered, and the earlier use frees nothing.
	Kept bool
}

// Place says where a bucket lies during a use.
type Place struct {
	Slot   int          // index into Plan.Slots
	Offset memory.Bytes // into the pool's one allocation
	Bytes  memory.Bytes // of the bucket, padded and aligned
	// Dynamic reports whether the bucket lies outside the allocation, in memory that
	// is allocated when the use begins. Slot and Offset have no meaning then.
	Dynamic bool
}

// Slot is a part of the pool that holds one bucket, or the buckets of one FSDP unit,
// at a time.
type Slot struct {
	Name    string
	Type    Type // the zero Type if it holds buckets of any type
	Offset  memory.Bytes
	Bytes   memory.Bytes
	Decides struct{ Unit, Bucket int } // the bucket, or the FSDP unit, that decides the size
}

// Fallback says where a pool with slots places FSDP units that it has no slot for.
type Fallback uint8

const (
	Persistent    Fallback = iota // in memory of their own at a fixed address
	DynamicMemory                 // in memory that is allocated for each use
)

// String returns the name that [ParseFallback] accepts.
func (f Fallback) String() string {
	if f == Persistent {
		return "persistent"
	}
	return "dynamic"
}

// ParseFallback returns the fallback with the given name. It returns an error for other
// names.
func ParseFallback(s string) (Fallback, error) {
	for _, f := range []Fallback{Persistent, DynamicMemory} {
		if s == f.String() {
			return f, nil
		}
	}
	return 0, fmt.Errorf("expected a fallback (persistent or dynamic), got %q", s)
}

// Options holds what a plan depends on beside its Spec.
type Options struct {
	// Fallback places FSDP units that do not fit the slots of Fixed, and loose units,
	// which Rotary, Fixed and Max have no slots for.
	Fallback Fallback
	// Memory limits the size of the pool. Zero means no limit.
	Memory memory.Bytes
}

// Move is a bucket that changes its place: it lies elsewhere in the use After than in
// the use Before.
type Move struct {
	Unit, Bucket  int
	Before, After int // indices into PoolPlan.Uses
}

// PoolPlan says where every bucket lies in every use. Buckets that are live at the same
// time never overlap.
type PoolPlan struct {
	Kind    PoolKind
	Spec    Spec
	Options Options
	Uses    []Use
	Slots   []Slot
	Places  [][]Place // by use and bucket
	// Bytes is the size of the pool: one allocation, and Dynamic beside it.
	Bytes memory.Bytes
	// Dynamic is the part of Bytes that lies outside the one allocation.
	Dynamic memory.Bytes
	// LowerBound is the most bytes that are live at once in the recorded order. No
	// pool can be smaller.
	LowerBound memory.Bytes
	// Live is the most FSDP units that are live at once: Prefetch + Behind + 1 that
	// follow each other, and more if the order nests FSDP units.
	Live  int
	Moves []Move
	// Fallback lists the FSDP units outside the slots. Options.Fallback says where they lie.
	Fallback []int
}

// Waste returns how much larger the pool is than the lower bound: 0.02 means 2 %.
func (p *PoolPlan) Waste() float64 {
	if p.LowerBound == 0 {
		return 0
	}
	return float64(p.Bytes)/float64(p.LowerBound) - 1
}

// NewPoolPlan plans a pool. It returns an error if the spec is invalid, if an FSDP unit or
// the pool exceeds Options.Memory, or if the kind is Max and nothing is prefetched or lags
// behind.
func NewPoolPlan(kind PoolKind, s Spec, o Options) (*PoolPlan, error) {
	t, err := newTimeline(s)
	if err != nil {
		return nil, err
	}
	for i, u := range s.Units {
		if o.Memory != 0 && t.size[i] > o.Memory {
			return nil, fmt.Errorf("bucket: FSDP unit %q needs %v, but only %v are available; divide it into smaller units, or use more ranks of tensor or expert parallelism", u.Name, t.size[i], o.Memory)
		}
	}
	var l *layout
	switch kind {
	case Dynamic:
		l = t.planDynamic()
	case Rotary:
		l = t.planRotary(o)
	case Fixed:
		l = t.planFixed(o)
	case Max:
		if s.Prefetch == 0 && s.Behind == 0 {
			return nil, fmt.Errorf("bucket: the max pool needs two buffers, but prefetch 0 and behind 0 leave only one; set prefetch (parameters) or behind (gradients) to at least 1, or choose another pool")
		}
		l = t.planMax(o)
	case Arena:
		l = t.planArena()
	case Recorded:
		l = t.planRecorded()
	default:
		return nil, fmt.Errorf("bucket: expected a kind of pool, got %v", kind)
	}
	p := &PoolPlan{
		Kind: kind, Spec: s, Options: o, Uses: t.uses, Slots: l.slots, Bytes: l.bytes + l.dynamic, Dynamic: l.dynamic,
		LowerBound: t.lower, Live: t.live, Fallback: l.fallback,
	}
	if o.Memory != 0 && p.Bytes > o.Memory {
		return nil, fmt.Errorf("bucket: the %v pool needs %v, but only %v are available; prefetch less or choose a smaller pool", kind, p.Bytes, o.Memory)
	}
	p.Places = make([][]Place, len(t.uses))
	for i, stay := range t.of {
		p.Places[i] = l.places[stay]
	}
	p.Moves = p.moves()
	return p, nil
}

// moves returns the buckets whose place differs from the one in the use before.
func (p *PoolPlan) moves() (moves []Move) {
	before := make([]int, len(p.Spec.Units)) // by unit: one more than its last use
	for i, u := range p.Uses {
		if was := before[u.Unit] - 1; was >= 0 {
			for b, place := range p.Places[i] {
				if place != p.Places[was][b] {
					moves = append(moves, Move{Unit: u.Unit, Bucket: b, Before: was, After: i})
				}
			}
		}
		before[u.Unit] = i + 1
	}
	return moves
}

// Describe returns a sentence that says which bucket moves, from where and to where.
func (p *PoolPlan) Describe(m Move) string {
	u := p.Spec.Units[m.Unit]
	where := func(use int) string {
		place := p.Places[use][m.Bucket]
		return fmt.Sprintf("%q at offset %d in use %d", p.Slots[place.Slot].Name, place.Offset, use)
	}
	return fmt.Sprintf("bucket %q of FSDP unit %q moves from %s to %s", u.Buckets[m.Bucket].Name, u.Name, where(m.Before), where(m.After))
}
