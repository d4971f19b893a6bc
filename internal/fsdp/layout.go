// This file owns the layout: which bucket each parameter lies in, at which offset, and
// which of its elements each rank keeps.

package fsdp

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// The number formats that parameters and gradients may have.
var (
	FP32 = bucket.Type{Name: "fp32", Size: 4}
	BF16 = bucket.Type{Name: "bf16", Size: 2}
)

// supported reports whether parameters and gradients may have this type.
func supported(t bucket.Type) bool { return t == FP32 || t == BF16 }

// kernelType returns the type as kernels name it.
func kernelType(t bucket.Type) kernels.Number {
	if t == BF16 {
		return kernels.BF16
	}
	return kernels.F32
}

// commType returns the type as collectives name it.
func commType(t bucket.Type) comm.Type {
	if t == BF16 {
		return comm.BF16
	}
	return comm.F32
}

// Param is one parameter tensor.
type Param struct {
	Name  string
	Shape []int64
	Type  bucket.Type // BF16 or FP32, of the gathered parameter
	// Group is an index into Config.Groups: the ranks that each hold a shard of the
	// parameter and reduce its gradient. Dense parameters have one group of ranks,
	// experts another.
	Group int
}

// Elements returns the number of elements of the tensor.
func (p Param) Elements() int64 {
	n := int64(1)
	for _, d := range p.Shape {
		n *= d
	}
	return n
}

// FSDPUnit is a part of a model whose parameters are gathered and released together,
// usually a layer.
type FSDPUnit struct {
	Name   string
	Params []Param
	// Loose marks parameters that are used inside and between the uses of other
	// units: an embedding tied to the output layer, or a projection of an MTP head.
	// A loose unit never causes a prefetch.
	Loose bool
}

// Piece is a run of a parameter's elements that lies in one rank's shard.
type Piece struct {
	Param    int   // index into FSDPUnit.Params
	From     int64 // the first element, counted in the parameter
	At       int64 // the same element, counted in the shard
	Elements int64
}

// block is a bucket: the parameters of a unit that have one type and one group of
// ranks. Parameters, weights and gradients have the same elements in the same order.
type block struct {
	bucket.Bucket
	group int
	shard int64 // elements of each rank
	at    int64 // the first element among all of the rank's shards
}

// spot says where a parameter begins: in which bucket and at which element.
type spot struct {
	block int
	first int64
}

// layout holds the buckets of a model. It is the same on every rank.
type layout struct {
	units    []FSDPUnit
	blocks   [][]block // by unit
	spots    [][]spot  // by unit and parameter
	multiple int64
	elements int64 // of all shards of a rank, with gaps
	narrow   int64 // of them, the ones at the beginning that are not fp32
	largest  int64 // of the largest shard
}

const (
	// Parameters and shards begin at multiples of 8 elements of a bucket: 16 bytes of
	// the narrowest type, which a kernel moves at once.
	grain = 8
	// A bucket's shard begins at a multiple of 128 elements among the rank's shards:
	// 256 bytes of the narrowest type, as device.Align requires.
	shardAlign = int64(device.Align) / 2
)

func newLayout(units []FSDPUnit, groups []RankGroup) (*layout, error) {
	l := &layout{units: units, multiple: 1}
	for _, g := range groups {
		l.multiple = l.multiple / gcd(l.multiple, int64(g.Comm.Size())) * int64(g.Comm.Size())
	}
	l.multiple *= grain
	names := map[string]bool{}
	for _, u := range units {
		if names[u.Name] {
			return nil, fmt.Errorf("fsdp: two FSDP units are named %q; give each a name of its own", u.Name)
		}
		names[u.Name] = true
		if err := l.addUnit(u, groups); err != nil {
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
				b.at, l.elements = l.elements, l.elements+roundUp(b.shard, shardAlign)
				l.largest = max(l.largest, b.shard)
			}
		}
		if !wide {
			l.narrow = l.elements
		}
	}
	return l, nil
}

// addUnit puts the parameters of a unit into buckets, in the order in which they are
// listed.
func (l *layout) addUnit(u FSDPUnit, groups []RankGroup) error {
	var blocks []block
	var spots []spot
	names := map[string]bool{}
	for _, p := range u.Params {
		switch {
		case !supported(p.Type):
			return fmt.Errorf("fsdp: parameter %q of FSDP unit %q has the type %q; expected fsdp.BF16 or fsdp.FP32", p.Name, u.Name, p.Type.Name)
		case p.Group < 0 || p.Group >= len(groups):
			return fmt.Errorf("fsdp: parameter %q of FSDP unit %q belongs to group %d, but Config.Groups has only %d; expected an index into Config.Groups", p.Name, u.Name, p.Group, len(groups))
		case names[p.Name]:
			return fmt.Errorf("fsdp: two parameters of FSDP unit %q are named %q; give each a name of its own", u.Name, p.Name)
		case !validShape(p.Shape):
			return fmt.Errorf("fsdp: parameter %q of FSDP unit %q has the shape %v; expected positive dimensions and at most 2^40 elements", p.Name, u.Name, p.Shape)
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

// validShape reports whether all dimensions are positive and their product is at most
// 2^40, without computing a product that overflows.
func validShape(shape []int64) bool {
	n := int64(1)
	for _, d := range shape {
		if d <= 0 || d > 1<<40/n {
			return false
		}
		n *= d
	}
	return true
}

// pieces returns the parts of a unit's parameters that lie in a rank's shard of a bucket.
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

// spec returns what the pools are planned for, without an order. All buckets have the
// given type, or the types of their parameters if it is nil.
func (l *layout) spec(all *bucket.Type) bucket.Spec {
	s := bucket.Spec{Align: device.Align, Multiple: l.multiple}
	for i, u := range l.units {
		unit := bucket.FSDPUnit{Name: u.Name, Loose: u.Loose}
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
