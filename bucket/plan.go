// This file owns what a plan is: the kinds of pools, the places that buckets
// get, and what a pool takes beside the least that any pool could.

package bucket

import (
	"fmt"
	"strings"
)

// Kind is a kind of pool.
type Kind uint8

const (
	// Dynamic takes memory for each use on its own, from an allocator that keeps
	// what was freed for requests of the same size. Addresses are not fixed.
	Dynamic Kind = iota
	// Rotary has Live blocks, each as large as the largest unit, taken in turn.
	Rotary
	// Fixed has Live sets of slots for the most common shape of a unit; units of
	// other shapes are served outside of the slots.
	Fixed
	// Max has Live sets of slots. Over all units, the k-th largest slot of a data
	// type is as large as the largest k-th bucket of that type.
	Max
	// Arena has blocks for whole units, which units that are never live at the
	// same time share; a block is as large as the largest of its units. It takes
	// no more than Max with persistent memory for loose modules.
	Arena
	// Trace gives each unit an offset by the lifetimes that follow from the
	// recorded order.
	Trace
)

// Kinds are all kinds, from the oldest to the smallest.
var Kinds = [...]Kind{Dynamic, Rotary, Fixed, Max, Arena, Trace}

var kindNames = [...]string{"dynamic", "rotary", "fixed", "max", "arena", "trace"}

func (k Kind) String() string {
	if int(k) < len(kindNames) {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ParseKind is the inverse of String.
func ParseKind(s string) (Kind, error) {
	for k, name := range kindNames {
		if s == name {
			return Kind(k), nil
		}
	}
	return 0, fmt.Errorf("bucket: no pool is called %q; choose %s or %s", s, strings.Join(kindNames[:len(kindNames)-1], ", "), Trace)
}

// Use is one use of a unit. Its memory is live from the beginning of the use
// Gather to the release of the use Last.
type Use struct {
	Unit       int
	Begin, End int // positions in Spec.Order of its beginning and its release
	// Gather is the use at whose beginning its gather is issued at the earliest:
	// Prefetch uses of units before, and its own index where it is not prefetched.
	Gather int
	// Last is the use at whose release its memory is given back at the latest:
	// Behind uses of units later, and its own index where nothing lags.
	Last int
	// Kept says that the unit is still live from its use before: it keeps its
	// place, nothing is gathered, and that other use gives nothing back.
	Kept bool
}

// Place is where a bucket lies during a use.
type Place struct {
	Slot   int   // index into Plan.Slots
	Offset int64 // into the pool's one allocation
	Bytes  int64 // of the bucket, padded and aligned
	// Dynamic says that the bucket lies outside of the allocation, at an address
	// that its use gets when it begins; Slot and Offset mean nothing then.
	Dynamic bool
}

// Slot is a part of the pool that holds one bucket, or the buckets of one unit,
// at a time.
type Slot struct {
	Name    string
	Type    Type // the zero Type where it holds buckets of any
	Offset  int64
	Bytes   int64
	Decides struct{ Unit, Bucket int } // the bucket, or the unit, that decides the size
}

// Fallback is how a pool of slots serves what is outside of them.
type Fallback uint8

const (
	Persistent    Fallback = iota // memory of its own, at a fixed address, always
	DynamicMemory                 // memory taken for each use and given back
)

func (f Fallback) String() string {
	if f == Persistent {
		return "persistent"
	}
	return "dynamic"
}

// ParseFallback is the inverse of String.
func ParseFallback(s string) (Fallback, error) {
	for _, f := range []Fallback{Persistent, DynamicMemory} {
		if s == f.String() {
			return f, nil
		}
	}
	return 0, fmt.Errorf("bucket: no fallback is called %q; choose persistent or dynamic", s)
}

// Options are what a plan depends on beside its Spec.
type Options struct {
	// Fallback serves units that do not fit the slots of Fixed, and loose
	// modules, which Rotary, Fixed and Max have no slots for.
	Fallback Fallback
	// Memory is what there is for the pool; zero stands for no limit.
	Memory int64
}

// Move is a breach of strict assignment: a bucket that lies elsewhere at the
// use After than at the use Before.
type Move struct {
	Unit, Bucket  int
	Before, After int // indices into Plan.Uses
}

// Plan is one pool. Buckets that are live at the same time never overlap.
type Plan struct {
	Kind    Kind
	Spec    Spec
	Options Options
	Uses    []Use
	Slots   []Slot
	Places  [][]Place // by use and bucket
	// Bytes is what the pool takes: one allocation, and Dynamic beside it.
	Bytes int64
	// Dynamic is the part of Bytes that lies outside of the one allocation.
	Dynamic int64
	// LowerBound is the largest set of buckets that are live at once along the
	// recorded order. No pool can be smaller.
	LowerBound int64
	// Live is how many units are live at once along the order: Prefetch + Behind
	// + 1 that follow each other, and more where the order nests units.
	Live  int
	Moves []Move
	// Fallback are the units served outside of the slots, as Options.Fallback says.
	Fallback []int
}

// Waste is how much more than the lower bound the pool takes: 0.02 is 2 %.
func (p *Plan) Waste() float64 {
	if p.LowerBound == 0 {
		return 0
	}
	return float64(p.Bytes)/float64(p.LowerBound) - 1
}

// New plans a pool.
func New(kind Kind, s Spec, o Options) (*Plan, error) {
	t, err := newTimeline(s)
	if err != nil {
		return nil, err
	}
	for i, u := range s.Units {
		if o.Memory != 0 && t.size[i] > o.Memory {
			return nil, fmt.Errorf("bucket: unit %q takes %d bytes and there are %d; divide it into smaller units, or shard it over more ranks of tensor or expert parallelism", u.Name, t.size[i], o.Memory)
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
			return nil, fmt.Errorf("bucket: the max pool is a double buffer and prefetch 0 leaves one; write --fsdp-double-buffer, which is a prefetch of 1")
		}
		l = t.planMax(o)
	case Arena:
		l = t.planArena()
	case Trace:
		l = t.planTrace()
	default:
		return nil, fmt.Errorf("bucket: %v is no kind of pool", kind)
	}
	p := &Plan{
		Kind: kind, Spec: s, Options: o, Uses: t.uses, Slots: l.slots, Bytes: l.bytes + l.dynamic, Dynamic: l.dynamic,
		LowerBound: t.lower, Live: t.live, Fallback: l.fallback,
	}
	if o.Memory != 0 && p.Bytes > o.Memory {
		return nil, fmt.Errorf("bucket: the %v pool takes %d bytes and there are %d; prefetch less or choose a smaller pool", kind, p.Bytes, o.Memory)
	}
	p.Places = make([][]Place, len(t.uses))
	for i, stay := range t.of {
		p.Places[i] = l.places[stay]
	}
	p.Moves = p.moves()
	return p, nil
}

// moves finds the buckets whose place is not the one they had before.
func (p *Plan) moves() (moves []Move) {
	before := make([]int, len(p.Spec.Units)) // one more than the last use of a unit
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

// Describe says what moves, in one sentence.
func (p *Plan) Describe(m Move) string {
	u := p.Spec.Units[m.Unit]
	where := func(use int) string {
		place := p.Places[use][m.Bucket]
		return fmt.Sprintf("%q at offset %d in use %d", p.Slots[place.Slot].Name, place.Offset, use)
	}
	return fmt.Sprintf("bucket %q of unit %q lies in %s, and in %s", u.Buckets[m.Bucket].Name, u.Name, where(m.Before), where(m.After))
}
