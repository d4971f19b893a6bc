// This file tests the cost of line numbers.

package input

import "testing"

// A line is counted from the offset before, not from the beginning: what lies before may
// change.
func TestLinesLookOnce(t *testing.T) {
	text := []byte("a\nb\nc\nd")
	l := lines{text: text, line: 3}
	for i, want := range []int{3, 3, 4, 4, 5, 5, 6} {
		if got := l.of(i); got != want {
			t.Errorf("offset %d is in line %d, want %d", i, got, want)
		}
		for j := range i {
			text[j] = '\n'
		}
	}
}
