// This file owns tests of how many rows experts can get: buffers are that large.

package layer

import (
	"math"
	"testing"
)

func TestBoundsOfRows(t *testing.T) {
	for _, x := range []struct {
		how                 Dispatch
		ranks, topK         int
		capacity            float64
		sent, worst, padded int
	}{
		// 8 tokens on each of 2 ranks choose 2 of 4 experts, 2 on each rank.
		{AllToAll, 2, 2, 0, 16, 32, 32},
		{AllToAll, 2, 2, 1, 8, 16, 16},  // 4 rows of an expert from each rank
		{AllToAll, 2, 2, 0.5, 4, 8, 8},  // 2 rows
		{AllToAll, 2, 2, 9, 16, 32, 32}, // no limit any more
		{AllToAll, 2, 3, 0, 16, 32, 32}, // a token has at most two rows on a rank
		{Ring, 2, 2, 0, 16, 32, 32},
		{Ring, 2, 2, 1, 8, 16, 16}, // 8 rows of an expert from all ranks
		{Ring, 2, 2, 0.5, 4, 8, 8},
		{AllToAll, 2, 2, 0.6, 6, 12, 12}, // 2.4 rows of an expert from each rank
		{Ring, 2, 2, 0.6, 6, 10, 10},     // 4.8 rows of an expert from all ranks
		{AllToAll, 1, 2, 0.25, 4, 4, 4},  // one rank with all experts, one row of each
	} {
		d := &dispatcher{how: x.how, ranks: x.ranks, experts: 4, topK: x.topK, tokens: 8, capacity: x.capacity}
		if sent, worst, padded := d.mostSent(), d.Worst(), d.Padded(); sent != x.sent || worst != x.worst || padded != x.padded {
			t.Errorf("%+v: %d are sent, %d at worst, %d padded", x, sent, worst, padded)
		}
	}
}

// A capacity that is no whole number of rows is rounded up, every expert has one row, and
// none more than there are tokens.
func TestCapacityIsRoundedUp(t *testing.T) {
	for _, x := range []struct {
		tokens, topK, experts int
		capacity              float64
		want                  int
	}{{8, 2, 3, 1, 6}, {8, 2, 3, 1.2, 7}, {9, 1, 4, 1, 3}, {1, 1, 64, 0.5, 1}, {8, 2, 4, 1, 4}, {8, 2, 4, 0, 0}, {8, 2, 4, math.MaxFloat32, 8}} {
		d := &dispatcher{experts: x.experts, topK: x.topK, capacity: x.capacity}
		if got := d.limit(x.tokens); got != x.want {
			t.Errorf("%+v: %d rows", x, got)
		}
	}
}
