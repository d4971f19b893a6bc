// This file owns the search for the name that somebody may have meant.

package megatron

import (
	"maps"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/internal/spell"
)

func nearest(name string, among map[string]bool) (string, int) {
	return nearestOf(name, slices.Sorted(maps.Keys(among)))
}

func nearestOf(name string, among []string) (best string, distance int) {
	distance = math.MaxInt
	for _, other := range among {
		if d := spell.Distance(name, other); d < distance {
			best, distance = other, d
		}
	}
	return best, distance
}
