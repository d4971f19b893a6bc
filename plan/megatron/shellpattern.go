// This file owns the patterns of scripts: what *, ? and [a-z] match.

package megatron

import (
	"strings"
	"unicode/utf8"
)

// mostSteps bounds how many letters patterns are compared with.
const mostSteps = 64 << 20

// glob is what a value is compared with, an element for each letter of it, or a star.
type glob []element

// element matches one letter, or as many as there are.
type element struct {
	star    bool
	any     bool
	not     bool
	letters string    // one of these
	ranges  [][2]rune // or one within these
}

// special are the bytes that mean something in a pattern. A backslash before them takes that away.
const special = `\*?[]!^-:`

// escaped returns a text as a pattern that matches the text alone.
func escaped(text string) string {
	if !strings.ContainsAny(text, special) {
		return text
	}
	var out strings.Builder
	for i := range len(text) {
		if strings.IndexByte(special, text[i]) >= 0 {
			out.WriteByte('\\')
		}
		out.WriteByte(text[i])
	}
	return out.String()
}

// parseGlob reads a pattern. It returns false if the pattern has a part that bash understands and we do not: a
// class of collation, or an extended pattern such as +(a|b) where the script allows these.
func parseGlob(text string, extended bool) (p glob, ok bool) {
	for text != "" {
		if extended && len(text) > 1 && text[1] == '(' && strings.IndexByte("?*+@!", text[0]) >= 0 {
			return nil, false
		}
		switch text[0] {
		case '*':
			if n := len(p); n == 0 || !p[n-1].star {
				p = append(p, element{star: true})
			}
			text = text[1:]
			continue
		case '?':
			p = append(p, element{any: true})
			text = text[1:]
			continue
		case '[':
			e, n, ok := parseClass(text)
			if !ok {
				return nil, false
			}
			if n > 0 {
				p = append(p, e)
				text = text[n:]
				continue
			}
		case '\\':
			if len(text) > 1 {
				text = text[1:]
			}
		}
		n := letterLength(text)
		p = append(p, element{letters: text[:n]})
		text = text[n:]
	}
	return p, true
}

// classes are the names that stand in [:name:].
var classes = map[string][][2]rune{
	"alpha": {{'a', 'z'}, {'A', 'Z'}}, "digit": {{'0', '9'}}, "alnum": {{'a', 'z'}, {'A', 'Z'}, {'0', '9'}}, "upper": {{'A', 'Z'}}, "lower": {{'a', 'z'}},
	"space": {{'\t', '\r'}, {' ', ' '}}, "blank": {{'\t', '\t'}, {' ', ' '}}, "xdigit": {{'0', '9'}, {'a', 'f'}, {'A', 'F'}},
	"punct": {{'!', '/'}, {':', '@'}, {'[', '`'}, {'{', '~'}}, "word": {{'a', 'z'}, {'A', 'Z'}, {'0', '9'}, {'_', '_'}},
}

// parseClass reads [...] and returns its length, which is zero if the bracket is not closed and stands for itself.
func parseClass(text string) (e element, n int, ok bool) {
	at := 1
	if at < len(text) && (text[at] == '!' || text[at] == '^') {
		e.not = true
		at++
	}
	for first := true; at < len(text); first = false {
		switch c := text[at]; {
		case c == ']' && !first:
			return e, at + 1, true
		case c == '[' && at+1 < len(text) && strings.IndexByte(".=", text[at+1]) >= 0:
			return e, 0, false
		case strings.HasPrefix(text[at:], "[:"):
			name, _, closed := strings.Cut(text[at+2:], ":]")
			ranges, known := classes[name]
			if !closed || !known {
				return e, 0, false
			}
			e.ranges = append(e.ranges, ranges...)
			at += len(name) + 4
			continue
		}
		low, n := letterIn(text[at:])
		at += n
		high := low
		if strings.HasPrefix(text[at:], "-") && at+1 < len(text) && text[at+1] != ']' {
			high, n = letterIn(text[at+1:])
			at += 1 + n
		}
		e.ranges = append(e.ranges, [2]rune{low, high})
	}
	return element{}, 0, true
}

// letterIn returns the letter at the beginning of a part of [...], and its length with a backslash before it.
func letterIn(text string) (rune, int) {
	skip := 0
	if text[0] == '\\' && len(text) > 1 {
		skip = 1
	}
	r, n := utf8.DecodeRuneInString(text[skip:])
	return r, skip + n
}

// letterLength returns the length of the letter at the beginning of a text that is not empty.
func letterLength(text string) int {
	_, n := utf8.DecodeRuneInString(text)
	return n
}

// lettersOf divides a text into its letters.
func lettersOf(text string) (out []string) {
	for text != "" {
		n := letterLength(text)
		out = append(out, text[:n])
		text = text[n:]
	}
	return out
}

func (e element) matches(letter string) bool {
	if e.any {
		return true
	}
	if e.letters != "" {
		return e.letters == letter
	}
	r, _ := utf8.DecodeRuneInString(letter)
	for _, within := range e.ranges {
		if within[0] <= r && r <= within[1] {
			return !e.not
		}
	}
	return e.not
}

// beginnings returns the lengths of the shortest and the longest beginning of letters that the pattern matches, or -1.
// It counts its steps.
func (p glob) beginnings(letters []string, steps *int) (shortest, longest int) {
	shortest, longest = -1, -1
	at := make([]bool, len(p)+1) // the elements before which the pattern may stand
	at[0] = true
	for i := 0; ; i++ {
		for k, e := range p {
			if at[k] && e.star {
				at[k+1] = true
			}
		}
		if at[len(p)] {
			if longest = i; shortest < 0 {
				shortest = i
			}
		}
		if *steps += len(p) + 1; i == len(letters) || *steps > mostSteps {
			return shortest, longest
		}
		some := false
		for k := len(p); k >= 0; k-- {
			stays := k < len(p) && p[k].star && at[k]
			comes := k > 0 && at[k-1] && !p[k-1].star && p[k-1].matches(letters[i])
			at[k] = stays || comes
			some = some || at[k]
		}
		if !some {
			return shortest, longest
		}
	}
}

// reversed returns the pattern that matches the same letters in reverse order.
func reversed[S ~[]E, E any](s S) S {
	out := make(S, len(s))
	for i, e := range s {
		out[len(s)-1-i] = e
	}
	return out
}

// matches reports whether the whole text matches.
func (p glob) matches(text string, steps *int) bool {
	letters := lettersOf(text)
	_, longest := p.beginnings(letters, steps)
	return longest == len(letters)
}
