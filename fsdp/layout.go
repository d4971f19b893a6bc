// This file owns the pure part: which parameters lie in which bucket, where, and
// which of their elements a rank keeps.

package fsdp

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/comm"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// The number formats of parameters and gradients.
var (
	FP32 = bucket.Type{Name: "fp32", Size: 4}
	BF16 = bucket.Type{Name: "bf16", Size: 2}
)

func known(t bucket.Type) bool { return t == FP32 || t == BF16 }

// number is a format as kernels know it, and reduced as collectives do.
func number(t bucket.Type) kernels.Number {
	if t == BF16 {
		return kernels.BF16
	}
	return kernels.F32
}

func reduced(t bucket.Type) comm.Type {
	if t == BF16 {
		return comm.BF16
	}
	return comm.F32
}

// Param is one parameter tensor.
type Param struct {
	Name  string
	Shape []int64
	Type  bucket.Type // of the gathered parameter: BF16 or FP32
	// Group is the ranks that hold a shard of it each, and reduce its gradient:
	// an index into Config.Groups. Dense parameters have one group, experts
	// another.
	Group int
}

// Elements is the size of the tensor.
func (p Param) Elements() int64 {
	n := int64(1)
	for _, d := range p.Shape {
		n *= d
	}
	return n
}

// Unit is a module whose parameters are gathered and released together.
type Unit struct {
	Name   string
	Params []Param
	// Loose marks a module that is no unit: an embedding tied to the output
	// layer, a projection of an MTP head. It is used inside and between units
	// and never causes a prefetch.
	Loose bool
}

// Piece is a run of a parameter's elements that lies in one rank's shard.
type Piece struct {
	Param    int   // index into Unit.Params
	From     int64 // first element, in the parameter
	At       int64 // and in the shard
	Elements int64
}

// block is a bucket: the parameters of a unit that have one type and one group.
// The same elements serve parameters, weights and gradients.
type block struct {
	bucket.Bucket
	group int
	shard int64 // elements of each rank
	at    int64 // first element among all of the rank's shards
}

// spot is where a parameter begins.
type spot struct {
	block int
	first int64
}

// layout is the buckets of a model, the same on every rank.
type layout struct {
	units    []Unit
	blocks   [][]block // by unit
	spots    [][]spot  // by unit and parameter
	multiple int64
	elements int64 // of all shards of a rank, with gaps
	narrow   int64 // of them, those at the beginning that are not fp32
	largest  int64 // of one shard
}

// Parameters begin, and the shards of a bucket are cut, at multiples of 8
// elements: 16 bytes of the narrowest type, which is what kernels move at once.
// A bucket's shard begins at a multiple of 128 elements among the rank's shards:
// 256 bytes, as device.Align wants it.
const (
	grain   = 8
	between = int64(device.Align) / 2
)

func newLayout(units []Unit, groups []Group) (*layout, error) {
	l := &layout{units: units, multiple: 1}
	for _, g := range groups {
		l.multiple = l.multiple / gcd(l.multiple, int64(g.Comm.Size())) * int64(g.Comm.Size())
	}
	l.multiple *= grain
	names := map[string]bool{}
	for _, u := range units {
		if names[u.Name] {
			return nil, fmt.Errorf("fsdp: two units are called %q; give each a name of its own", u.Name)
		}
		names[u.Name] = true
		if err := l.lay(u, groups); err != nil {
			return nil, err
		}
	}
	for _, wide := range []bool{false, true} {
		for _, blocks := range l.blocks {
			for i := range blocks {
				b := &blocks[i]
				if (b.Type == FP32) != wide {
					continue
				}
				b.shard = b.Elements / int64(groups[b.group].Comm.Size())
				b.at, l.elements = l.elements, l.elements+roundUp(b.shard, between)
				l.largest = max(l.largest, b.shard)
			}
		}
		if !wide {
			l.narrow = l.elements
		}
	}
	return l, nil
}

// lay puts the parameters of a unit into buckets, in the order in which they are
// listed.
func (l *layout) lay(u Unit, groups []Group) error {
	var blocks []block
	var spots []spot
	names := map[string]bool{}
	for _, p := range u.Params {
		switch {
		case !known(p.Type):
			return fmt.Errorf("fsdp: parameter %q of unit %q has the type %q; write fsdp.BF16 or fsdp.FP32", p.Name, u.Name, p.Type.Name)
		case p.Group < 0 || p.Group >= len(groups):
			return fmt.Errorf("fsdp: parameter %q of unit %q belongs to group %d and Config.Groups has %d", p.Name, u.Name, p.Group, len(groups))
		case names[p.Name]:
			return fmt.Errorf("fsdp: two parameters of unit %q are called %q; give each a name of its own", u.Name, p.Name)
		case !countable(p.Shape):
			return fmt.Errorf("fsdp: parameter %q of unit %q has the shape %v; all of it must be positive, and at most 2^40 elements", p.Name, u.Name, p.Shape)
		}
		names[p.Name] = true
		b := slices.IndexFunc(blocks, func(b block) bool { return b.Type == p.Type && b.group == p.Group })
		if b < 0 {
			b = len(blocks)
			name := cmp.Or(groups[p.Group].Name, fmt.Sprint("group ", p.Group)) + " " + p.Type.Name
			blocks = append(blocks, block{Bucket: bucket.Bucket{Name: name, Type: p.Type}, group: p.Group})
		}
		spots = append(spots, spot{b, blocks[b].Elements})
		blocks[b].Elements += roundUp(p.Elements(), grain)
	}
	for i := range blocks {
		blocks[i].Elements = roundUp(blocks[i].Elements, l.multiple)
	}
	l.blocks, l.spots = append(l.blocks, blocks), append(l.spots, spots)
	return nil
}

// countable tells whether a shape makes sense. Its product must not wrap round.
func countable(shape []int64) bool {
	n := int64(1)
	for _, d := range shape {
		if d <= 0 || d > 1<<40/n {
			return false
		}
		n *= d
	}
	return true
}

// pieces are the parts of a unit's parameters that lie in a rank's shard.
func (l *layout) pieces(unit, b, rank int) (ps []Piece) {
	k := l.blocks[unit][b]
	lo, hi := int64(rank)*k.shard, int64(rank+1)*k.shard
	for i, s := range l.spots[unit] {
		if s.block != b {
			continue
		}
		from, to := max(lo, s.first), min(hi, s.first+l.units[unit].Params[i].Elements())
		if from < to {
			ps = append(ps, Piece{Param: i, From: from - s.first, At: from - lo, Elements: to - from})
		}
	}
	return ps
}

// spec is what the pools are planned for: as the parameters' types are, or all
// of one type.
func (l *layout) spec(all *bucket.Type) bucket.Spec {
	s := bucket.Spec{Align: int64(device.Align), Multiple: l.multiple}
	for i, u := range l.units {
		unit := bucket.Unit{Name: u.Name, Loose: u.Loose}
		for _, b := range l.blocks[i] {
			if all != nil {
				b.Type = *all
			}
			unit.Buckets = append(unit.Buckets, b.Bucket)
		}
		s.Units = append(s.Units, unit)
	}
	return s
}

func gcd(a, b int64) int64 {
	for b != 0 {
		a, b = b, a%b
	}
	return a
}

func roundUp(n, multiple int64) int64 { return (n + multiple - 1) / multiple * multiple }
