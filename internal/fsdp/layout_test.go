package fsdp

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
)

// seat is a communicator that only knows its rank and the number of ranks.
type seat struct {
	comm.Comm
	rank, size int
}

func (s seat) Rank() int { return s.rank }
func (s seat) Size() int { return s.size }

// SPEC S2.1: for all units and sizes of groups, each element of a parameter lies in
// exactly one shard, at its place in the gathered bucket. Shards are equal and aligned,
// and only padding lies beside them.
func TestLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := []int{rapid.IntRange(1, 7).Draw(t, "dense"), rapid.IntRange(1, 7).Draw(t, "experts")}
		units := anyUnits(t)
		l, err := newLayout(units, []RankGroup{{Comm: seat{size: sizes[0]}}, {Comm: seat{size: sizes[1]}}})
		if err != nil {
			t.Fatal(err)
		}
		for n := int64(grain); n < l.multiple; n += grain {
			if n/grain%int64(sizes[0]) == 0 && n/grain%int64(sizes[1]) == 0 {
				t.Fatalf("buckets of a multiple of %d elements, where %d divide too", l.multiple, n)
			}
		}
		end, narrow := int64(0), int64(0)
		for u := range units {
			type sort struct {
				t     bucket.Type
				group int
			}
			sorts := map[sort]bool{}
			for _, p := range units[u].Params {
				sorts[sort{p.Type, p.Group}] = true
			}
			if len(l.blocks[u]) != len(sorts) {
				t.Fatalf("%d buckets for parameters of %d types and groups", len(l.blocks[u]), len(sorts))
			}
			seen := map[[2]int64]bool{}
			for b, k := range l.blocks[u] {
				size := sizes[k.group]
				if k.shard*int64(size) != k.Elements || k.shard%grain != 0 || k.at%shardAlign != 0 {
					t.Fatalf("%d elements in %d shards of %d, at %d", k.Elements, size, k.shard, k.at)
				}
				end += roundUp(k.shard, int64(device.Align)/2)
				if k.Type == BF16 {
					narrow += roundUp(k.shard, int64(device.Align)/2)
				}
				for rank := range size {
					for _, p := range l.pieces(u, b, rank) {
						at := l.spots[u][p.Param]
						if at.block != b || at.first%grain != 0 || p.At < 0 || p.Elements < 1 || p.At+p.Elements > k.shard || at.first+p.From != int64(rank)*k.shard+p.At {
							t.Fatalf("piece %+v on rank %d of bucket %+v", p, rank, k)
						}
						for e := range p.Elements {
							if which := [2]int64{int64(p.Param), p.From + e}; seen[which] {
								t.Fatalf("element %v lies in two shards", which)
							} else {
								seen[which] = true
							}
						}
					}
				}
			}
			all := int64(0)
			for _, p := range units[u].Params {
				all += p.Elements()
			}
			if int64(len(seen)) != all {
				t.Fatalf("%d elements of %d lie in a shard", len(seen), all)
			}
		}
		if l.elements != end || l.narrow != narrow {
			t.Fatalf("the shards take %d elements, of which %d are bf16; want %d and %d", l.elements, l.narrow, end, narrow)
		}
	})
}

// Shapes of up to 2^40 elements are valid, even if other products of their sizes would
// overflow.
func TestShapes(t *testing.T) {
	const most = 1 << 40
	for _, c := range []struct {
		shape []int64
		ok    bool
	}{
		{nil, true}, {[]int64{1}, true}, {[]int64{most}, true}, {[]int64{1 << 20, 1 << 20}, true}, {[]int64{most, 1}, true}, {[]int64{3, 1, most / 3}, true},
		{[]int64{0}, false}, {[]int64{-1}, false}, {[]int64{5, 0}, false}, {[]int64{most + 1}, false}, {[]int64{most, 2}, false},
		{[]int64{1 << 20, 1<<20 + 1}, false}, {[]int64{1 << 32, 1 << 32}, false}, {[]int64{1 << 62, 4}, false},
	} {
		if validShape(c.shape) != c.ok {
			t.Errorf("%v: valid is %v", c.shape, !c.ok)
		}
	}
}
