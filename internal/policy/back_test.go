// This file owns copies that take less time than a clock can tell.

package policy

import (
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// SPEC S5.5: links however fast make a plan. Late in a step, the time of a copy is
// less than the least difference of two times.
func TestBackOnFastLinks(t *testing.T) {
	for _, rate := range []float64{1e9, 1e15, 1e18, 1e30} {
		l := memory.Links{Out: rate, In: rate}
		for _, busy := range [][]span{nil, {{0, 1}}, {{999, 1001}}} {
			if at, _ := back(l, 1000, 1<<20, busy); at > 1000 || at < 999 {
				t.Errorf("a copy at %g bytes/s that ends at 1000 begins at %g", rate, at)
			}
		}
	}
}
