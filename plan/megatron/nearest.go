// This file owns the search for the name that a user may have meant.

package megatron

import "github.com/stowage-dev/stowage/internal/spell"

// nearest returns the flag with the fewest letters to change, and how many these are. It returns
// no flag, and a number above most, if none is as near as that.
func nearest(name string, among []string, most int) (best string, distance int) {
	distance = most + 1
	for _, other := range among {
		if atLeast(name, other) >= distance { // which takes far less time
			continue
		}
		if d := spell.Distance(name, other); d < distance {
			best, distance = other, d
		}
	}
	return best, distance
}

// atLeast returns a number of letters that have to change in any case: those that one word has
// and the other has not.
func atLeast(a, b string) int {
	var more [256]int
	for i := range len(a) {
		more[a[i]]++
	}
	for i := range len(b) {
		more[b[i]]--
	}
	inserted, deleted := 0, 0
	for _, n := range more {
		inserted, deleted = inserted+max(-n, 0), deleted+max(n, 0)
	}
	return max(inserted, deleted)
}

// meant suggests the word that was probably meant, or nothing.
func meant(word string, among []string) string {
	if near := spell.Nearest(word, among); near != "" {
		return "did you mean " + near + "? "
	}
	return ""
}
