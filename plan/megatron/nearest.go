// This file owns the search for the name that a user may have meant.

package megatron

import (
	"maps"
	"math"
	"slices"

	"github.com/stowage-dev/stowage/internal/spell"
)

// nearest returns the flag with the fewest letters to change, and how many these are.
func nearest(name string, among map[string]bool) (best string, distance int) {
	distance = math.MaxInt
	for _, other := range slices.Sorted(maps.Keys(among)) {
		if d := spell.Distance(name, other); d < distance {
			best, distance = other, d
		}
	}
	return best, distance
}

// meant suggests the word that was probably meant, or nothing.
func meant(word string, among []string) string {
	if near := spell.Nearest(word, among); near != "" {
		return "did you mean " + near + "? "
	}
	return ""
}
