// This file owns pools beside a golden file: how large every pool is for a few models, what
// decides the size of its slots, what moves, and where buckets lie. Properties say that a
// plan is sound; this table shows that it became no larger when code changes.

package bucket

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// anyModel returns a model whose units have one of a few shapes, some of them loose, used
// forwards and backwards. Every third order nests units.
func anyModel(seed uint64) Spec {
	r := rand.New(rand.NewPCG(seed, 7))
	s := Spec{Prefetch: r.IntN(3), Behind: r.IntN(2), Align: 16, Multiple: 4}
	s.Prefetch += 1 - min(1, s.Prefetch+s.Behind)
	var shapes [][]Bucket
	for range 3 {
		var shape []Bucket
		for b := range 1 + r.IntN(3) {
			shape = append(shape, Bucket{Name: fmt.Sprintf("bucket %d", b), Type: types[r.IntN(len(types))], Elements: r.Int64N(200)})
		}
		shapes = append(shapes, shape)
	}
	n := 4 + r.IntN(8)
	for i := range n {
		s.Units = append(s.Units, FSDPUnit{Name: fmt.Sprintf("unit %d", i), Buckets: shapes[r.IntN(len(shapes))], Loose: r.IntN(6) == 0})
	}
	use := func(i int, release bool) { s.Order = append(s.Order, OrderEntry{Unit: i, Release: release}) }
	for i := range 2 * n {
		u := min(i, 2*n-1-i)
		use(u, false)
		if inner := (u + 2) % n; seed%3 == 0 && inner != u && i%3 == 1 {
			use(inner, false)
			use(inner, true)
		}
		use(u, true)
	}
	return s
}

// SPEC S2.2 S2.7
func TestPoolsStaySmall(t *testing.T) {
	var b strings.Builder
	for seed := range uint64(20) {
		s := anyModel(seed)
		fmt.Fprintf(&b, "model %d: %d units, %d uses, prefetch %d, behind %d\n", seed, len(s.Units), len(s.Order)/2, s.Prefetch, s.Behind)
		for _, kind := range PoolKinds {
			for _, how := range []Fallback{Persistent, DynamicMemory} {
				p, err := NewPoolPlan(kind, s, Options{Fallback: how})
				if err != nil {
					t.Fatal(err)
				}
				if err := verify(p); err != nil {
					t.Fatalf("%v: %v", kind, err)
				}
				if how == DynamicMemory && len(p.Fallback) == 0 {
					continue
				}
				places, kept := fnv.New32a(), 0
				for i, u := range p.Uses {
					fmt.Fprint(places, u, p.Places[i])
					if u.Kept {
						kept++
					}
				}
				fmt.Fprintf(&b, "  %-8v of %d bytes, %d dynamic, at least %d; %d live, %d kept, %d moves, outside %v; places %08x; slots", kind, p.Bytes, p.Dynamic, p.LowerBound, p.Live, kept, len(p.Moves), p.Fallback, places.Sum32())
				for _, slot := range p.Slots {
					fmt.Fprintf(&b, " %d:%d.%d", slot.Bytes, slot.Decides.Unit, slot.Decides.Bucket)
				}
				fmt.Fprintln(&b)
			}
		}
	}
	golden.Check(t, "pools.txt", b.String())
}
