// This file owns words that stand for several: {a,b} and {1..4}. It also owns the escapes of $'...'.

package megatron

import (
	"fmt"
	"strconv"
	"strings"
	"unicode/utf8"
)

// braces returns the words that a word with braces stands for, or the word itself.
func (sh *shell) braces(word string) []string {
	if !strings.Contains(word, "{") {
		return []string{word}
	}
	if sh.within++; sh.within > mostDepth {
		sh.fail(fmt.Errorf("quotes and variables are nested more than %d deep", mostDepth))
	}
	defer func() { sh.within-- }()
	s := &scanner{text: word}
	for at := 0; at < len(word) && sh.err == nil; at++ {
		switch c := word[at]; {
		case c == '\\':
			at++
		case strings.IndexByte("\"'$`", c) >= 0:
			if end, err := s.quoted(at); err == nil {
				at = end - 1
			}
		case c == '{':
			parts, end := sh.parts(word, at)
			if parts == nil {
				continue
			}
			var out []string
			after := sh.braces(word[end:])
			for _, p := range parts {
				for _, a := range after {
					if sh.letters += at + len(p) + len(a) + 1; sh.letters > mostLetters {
						return out
					}
					out = append(out, word[:at]+p+a)
				}
			}
			return out
		}
	}
	return []string{word}
}

// parts returns what stands between the braces at a position, divided, and where they end. There are none if the braces
// stand for themselves.
func (sh *shell) parts(word string, at int) (parts []string, end int) {
	s, depth, from := &scanner{text: word}, 0, at+1
	for i := at; i < len(word); i++ {
		if sh.steps++; sh.steps > mostSteps {
			sh.fail(fmt.Errorf("the braces of the text are divided into more than %d letters", mostSteps))
			return nil, 0
		}
		switch c := word[i]; {
		case c == '\\':
			i++
		case strings.IndexByte("\"'$`", c) >= 0:
			if end, err := s.quoted(i); err == nil {
				i = end - 1
			}
		case c == '{':
			depth++
		case c == ',' && depth == 1:
			parts = append(parts, word[from:i])
			from = i + 1
		case c == '}':
			if depth--; depth > 0 {
				continue
			}
			if parts == nil {
				return sh.sequence(word[from:i]), i + 1
			}
			var out []string
			for _, p := range append(parts, word[from:i]) {
				out = append(out, sh.braces(p)...)
			}
			return out, i + 1
		}
	}
	return nil, 0
}

// sequence returns the words of 1..4, 01..10..3 or a..e.
func (sh *shell) sequence(text string) (out []string) {
	parts := strings.Split(text, "..")
	if len(parts) != 2 && len(parts) != 3 {
		return nil
	}
	step := 1
	if len(parts) == 3 {
		n, err := strconv.Atoi(parts[2])
		if err != nil {
			return nil
		}
		step = max(n, -n, 1)
	}
	isLetter := func(s string) bool { return len(s) == 1 && (s[0]|32 >= 'a' && s[0]|32 <= 'z') }
	letters := isLetter(parts[0]) && isLetter(parts[1])
	first, err := strconv.Atoi(parts[0])
	last, cannot := strconv.Atoi(parts[1])
	if letters {
		first, last = int(parts[0][0]), int(parts[1][0])
	} else if err != nil || cannot != nil {
		return nil
	}
	width := 0
	for _, p := range parts[:2] {
		if digits := strings.TrimPrefix(p, "-"); !letters && len(digits) > 1 && digits[0] == '0' {
			width = max(len(parts[0]), len(parts[1]))
		}
	}
	if last < first {
		step = -step
	}
	for n := first; step > 0 && n <= last || step < 0 && n >= last; n += step {
		if len(out) > mostCommands {
			sh.fail(fmt.Errorf("{%s} stands for more than %d words", text, mostCommands))
			return nil
		}
		if letters {
			out = append(out, string(rune(n)))
		} else {
			out = append(out, fmt.Sprintf("%0*d", width, n))
		}
	}
	return out
}

// escapes replaces the escapes of $'...' by what they stand for.
func escapes(text string) string {
	var out strings.Builder
	for at := 0; at < len(text); {
		if text[at] != '\\' || at+1 == len(text) {
			out.WriteByte(text[at])
			at++
			continue
		}
		c := text[at+1]
		at += 2
		if i := strings.IndexByte("abefnrtvE\\'\"?", c); i >= 0 {
			out.WriteByte("\a\b\x1b\f\n\r\t\v\x1b\\'\"?"[i])
			continue
		}
		base, most := 16, map[byte]int{'x': 2, 'u': 4, 'U': 8}[c]
		if c >= '0' && c <= '7' {
			base, most = 8, 3
			at--
		}
		n := 0
		for n < most && at+n < len(text) && isDigit(text[at+n], base) {
			n++
		}
		code, err := strconv.ParseUint(text[at:at+n], base, 32)
		switch at += n; {
		case err != nil:
			out.WriteString(`\` + string(c))
		case c == 'u' || c == 'U':
			out.Write(utf8.AppendRune(nil, rune(code)))
		default:
			out.WriteByte(byte(code))
		}
	}
	return clean(out.String())
}

func isDigit(c byte, base int) bool {
	if base == 8 {
		return c >= '0' && c <= '7'
	}
	return c >= '0' && c <= '9' || c|32 >= 'a' && c|32 <= 'f'
}
