// This file owns how text is broken into lines. On a terminal the program breaks them again.

package planview

import (
	"strings"

	"github.com/stowage-dev/stowage/internal/plaintext"
)

// Wrap breaks text into lines of at most [plaintext.Width] columns. All lines begin with the
// indentation, and all but the first with two more columns.
func Wrap(text, indent string) string { return fold(text, indent, indent+"  ") }

// hang breaks text into lines to the right of a head.
func hang(head, text string) string {
	return fold(text, head, strings.Repeat(" ", len([]rune(head))))
}

// fold breaks text into lines that begin with indent, and the first with first.
func fold(text, first, indent string) string {
	var b strings.Builder
	column := 0
	for i, word := range strings.Fields(text) {
		n := len([]rune(word))
		switch {
		case i == 0:
			b.WriteString(first)
			column = len([]rune(first))
		case column+1+n > plaintext.Width:
			b.WriteString("\n" + indent)
			column = len(indent)
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += n
	}
	b.WriteByte('\n')
	return b.String()
}
