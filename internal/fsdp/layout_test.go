package fsdp

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
)

// seat is a rank of so many, of whom nobody asks anything else.
type seat struct {
	comm.Comm
	rank, size int
}

func (s seat) Rank() int { return s.rank }
func (s seat) Size() int { return s.size }

// SPEC S2.1: whatever the units and the sizes of groups, each element of a
// parameter lies in exactly one shard, where the gathered bucket has it; shards are
// equal and aligned, and only padding lies beside them.
func TestLayout(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := []int{rapid.IntRange(1, 7).Draw(t, "dense"), rapid.IntRange(1, 7).Draw(t, "experts")}
		units := anyUnits(t)
		l, err := newLayout(units, []RankGroup{{Comm: seat{size: sizes[0]}}, {Comm: seat{size: sizes[1]}}})
		if err != nil {
			t.Fatal(err)
		}
		end, narrow := int64(0), int64(0)
		for u := range units {
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
						if at.block != b || at.first%grain != 0 || p.At < 0 || p.At+p.Elements > k.shard || at.first+p.From != int64(rank)*k.shard+p.At {
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
