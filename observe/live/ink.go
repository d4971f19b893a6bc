// This file owns lines of coloured text: measuring, cutting and writing them.

package live

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// ink is the look of text: the parameters of a terminal's "select graphic rendition".
// The terminal's user chooses what the sixteen colours look like.
type ink string

const (
	plainInk ink = ""
	boldInk  ink = "1"
	faintInk ink = "2"
	redInk   ink = "31"
	greenInk ink = "32"
	blueInk  ink = "34"
	pinkInk  ink = "35"
)

// span is text of one look. Each character is one column wide.
type span struct {
	ink  ink
	text string
}

type line []span

func text(s string) span { return span{plainInk, s} }

func (l line) width() (n int) {
	for _, s := range l {
		n += utf8.RuneCountInString(s.text)
	}
	return n
}

// cut returns the first width columns.
func (l line) cut(width int) (out line) {
	for _, s := range l {
		r := []rune(s.text)
		r = r[:min(len(r), width)]
		width -= len(r)
		if len(r) > 0 {
			out = append(out, span{s.ink, string(r)})
		}
	}
	return out
}

// write writes the line. Each span ends its own ink, so that the text behind it, even a
// shell's prompt after a kill, looks as usual.
func (l line) write(b *strings.Builder, colour bool) {
	for _, s := range l {
		if !colour || s.ink == plainInk {
			b.WriteString(s.text)
			continue
		}
		b.WriteString("\x1b[" + string(s.ink) + "m" + s.text + "\x1b[0m")
	}
}

// printable replaces characters of a user's name that may not be one column wide.
func printable(name string) string {
	return strings.Map(func(r rune) rune {
		if r > unicode.MaxASCII || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, name)
}
