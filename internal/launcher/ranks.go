// This file owns how lists of ranks read.

package launcher

import (
	"fmt"
	"slices"
	"strings"
)

// mostParts is how many ranks or runs of ranks are written out.
const mostParts = 16

// Ranks returns "rank 3", "ranks 0 and 2", "ranks 0 to 6 and 9" or "ranks 0 to 12 in steps of
// 4". It leaves out the end of a long list.
func Ranks(ranks []int) string {
	ranks = slices.Sorted(slices.Values(ranks))
	if step := steps(ranks); step > 1 {
		return fmt.Sprintf("ranks %d to %d in steps of %d", ranks[0], ranks[len(ranks)-1], step)
	}
	var parts []string
	for i := 0; i < len(ranks); {
		if len(parts) == mostParts {
			parts = append(parts, fmt.Sprintf("%d others", len(ranks)-i))
			break
		}
		last := i
		for last+1 < len(ranks) && ranks[last+1] == ranks[last]+1 {
			last++
		}
		if last-i < 2 {
			parts, i = append(parts, fmt.Sprint(ranks[i])), i+1
		} else {
			parts, i = append(parts, fmt.Sprintf("%d to %d", ranks[i], ranks[last])), last+1
		}
	}
	word := "ranks "
	if len(ranks) == 1 {
		word = "rank "
	}
	if len(parts) > 1 {
		end := len(parts) - 1
		parts = []string{strings.Join(parts[:end], ", ") + " and " + parts[end]}
	}
	return word + strings.Join(parts, "")
}

// steps returns the distance between ranks of which all have the same, if there are more than
// three, and else 0.
func steps(ranks []int) int {
	if len(ranks) <= 3 {
		return 0
	}
	step := ranks[1] - ranks[0]
	for i, r := range ranks {
		if r != ranks[0]+i*step {
			return 0
		}
	}
	return step
}
