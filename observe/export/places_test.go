// This file owns the tests of addresses in a snapshot.

package export

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/observe/trace"
)

// Segments that are alive never overlap, whatever their sizes, and those that were given back
// are used again: there are never more addresses than those of each size that were alive at
// once.
func TestSegmentsAreUsedAgain(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 20 {
		m := newPlaces(1<<20, &trace.Trace{}, 0)
		var alive []*holding
		now, most := map[int64]int64{}, map[int64]int64{}
		for range 400 {
			if n := len(alive); n > 0 && r.IntN(2) == 0 {
				i := r.IntN(n)
				m.give(alive[i])
				now[rounded(alive[i].Bytes)]--
				alive = slices.Delete(alive, i, i+1)
				continue
			}
			h := &holding{Event: trace.Event{Kind: trace.Alloc, Bytes: 1 + r.Int64N(5*align)}}
			m.take(h)
			size := rounded(h.Bytes)
			now[size]++
			most[size] = max(most[size], now[size])
			for _, o := range alive {
				if h.addr < o.addr+rounded(o.Bytes) && o.addr < h.addr+size {
					t.Fatalf("%d bytes at %d and %d at %d overlap", h.Bytes, h.addr, o.Bytes, o.addr)
				}
			}
			alive = append(alive, h)
		}
		want := m.base
		for size, n := range most {
			want += size * n
		}
		if m.next != want {
			t.Errorf("addresses end at %d, want %d", m.next, want)
		}
	}
}

// No block ends beyond the highest address.
func TestHighestAddress(t *testing.T) {
	for size, want := range map[int64]bool{1: true, 512: true, 513: false, 1024: false} {
		m := &places{next: highest - 512, free: map[int64][]int64{}}
		h := &holding{Event: trace.Event{Bytes: size}}
		if m.take(h); (h.addr != 0) != want || h.own != want {
			t.Errorf("%d bytes are at %d", size, h.addr)
		}
	}
}

// Slices nest as deeply as the viewer shows, and no deeper.
func TestDepth(t *testing.T) {
	for n, want := range map[int]bool{0: true, 1: true, depth - 1: true, depth: false} {
		l := &lane{}
		for range n {
			l.ends = append(l.ends, 10)
		}
		if l.fits(1, 9) != want {
			t.Errorf("inside of %d slices: %v", n, !want)
		}
	}
}
