// This file owns the format of figures in sentences.

package search

import (
	"fmt"
	"math"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/cost"
)

func gibibytes(n memory.Bytes) string { return fmt.Sprintf("%.1f GiB", float64(n)/float64(memory.GiB)) }

// enough formats a size that must not be rounded down, because a user may give exactly that
// much.
func enough(n memory.Bytes) string {
	return fmt.Sprintf("%.1f GiB", math.Ceil(float64(n)/float64(memory.GiB)*10)/10)
}

func mebibytes(n memory.Bytes) string {
	if n >= 10*memory.GiB {
		return gibibytes(n)
	}
	if n > 0 && n < 10*memory.MiB {
		return fmt.Sprintf("%.1f MiB", float64(n)/float64(memory.MiB))
	}
	return fmt.Sprintf("%.0f MiB", float64(n)/float64(memory.MiB))
}

func duration(t cost.Seconds) string {
	switch {
	case t >= 10:
		return fmt.Sprintf("%.0f s", t)
	case t >= 1:
		return fmt.Sprintf("%.2f s", t)
	case t >= 0.1:
		return fmt.Sprintf("%.0f ms", t*1e3)
	}
	return fmt.Sprintf("%.1f ms", t*1e3)
}

func percent(x float64) string { return fmt.Sprintf("%.1f %%", 100*x) }

// fractions says what each rank offloads, and groups ranks with the same fraction.
func fractions(list []int) string {
	var out []string
	for r := 0; r < len(list); {
		to := r
		for to+1 < len(list) && list[to+1] == list[r] {
			to++
		}
		where := fmt.Sprintf("rank %d", r)
		if to > r {
			where = fmt.Sprintf("ranks %d to %d", r, to)
		}
		share := "nothing"
		if list[r] > 0 {
			share = fmt.Sprintf("%.0f %%", 100*float64(list[r])/parts)
		}
		out = append(out, share+" on "+where)
		r = to + 1
	}
	return strings.Join(out, ", ")
}
