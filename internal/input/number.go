// This file owns numbers that users write: in decimal digits, as they are said. Go's own readers also take 0x10, 1_000, 0b11,
// 0x1p-3 and infinity, which are more often a slip than meant.

package input

import (
	"math"
	"regexp"
	"strconv"
)

var (
	whole  = regexp.MustCompile(`^[+-]?[0-9]+$`)
	number = regexp.MustCompile(`^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?$`)
)

// IsWhole reports whether a text is a whole number in decimal digits, however large.
func IsWhole(text string) bool { return whole.MatchString(text) }

// Number reads a number in decimal digits, with or without a point and an exponent. It returns false for anything else, and
// for a number that is too large.
func Number(text string) (float64, bool) {
	if !number.MatchString(text) {
		return 0, false
	}
	x, err := strconv.ParseFloat(text, 64)
	return x, err == nil && !math.IsInf(x, 0)
}
