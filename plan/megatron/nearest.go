// This file owns the search for the name that somebody may have meant.

package megatron

import (
	"maps"
	"math"
	"slices"
)

func nearest(name string, among map[string]bool) (string, int) {
	return nearestOf(name, slices.Sorted(maps.Keys(among)))
}

func nearestOf(name string, among []string) (best string, distance int) {
	distance = math.MaxInt
	for _, other := range among {
		if d := editDistance(name, other); d < distance {
			best, distance = other, d
		}
	}
	return best, distance
}

// editDistance is the least number of letters to insert, drop or change.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
