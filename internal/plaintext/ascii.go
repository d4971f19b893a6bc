// This file owns ASCII: which locales ask for it, and what stands for other characters.

package plaintext

import (
	"fmt"
	"strings"
	"unicode/utf16"
	"unicode/utf8"
)

// WantsASCII reports whether the locale has no characters beyond ASCII: C, POSIX, or one
// with a character set other than UTF-8. Env returns environment variables, as os.Getenv
// does. The first of LC_ALL, LC_CTYPE and LANG that is set counts.
func WantsASCII(env func(string) string) bool {
	for _, name := range []string{"LC_ALL", "LC_CTYPE", "LANG"} {
		if v := env(name); v != "" {
			locale, _, _ := strings.Cut(v, "@")
			locale, set, has := strings.Cut(locale, ".")
			set = strings.ReplaceAll(strings.ToUpper(set), "-", "")
			return has && set != "UTF8" || !has && (locale == "C" || locale == "POSIX")
		}
	}
	return false
}

// likeness has what stands for characters in ASCII. Most keep their width, so that tables
// stay aligned.
var likeness = map[rune]string{
	'±': "+/-", '×': "x", '·': "*", 'µ': "u", 'μ': "u", '°': " deg", '–': "-", '—': "-", '−': "-", '…': "...", '\u00a0': " ",
	'→': "->", '←': "<-", '≤': "<=", '≥': ">=", '≠': "!=", '≈': "~", '“': `"`, '”': `"`, '„': `"`, '‘': "'", '’': "'",
	'│': "|", '┃': "|", '║': "|", '─': "-", '━': "-", '═': "=", '┌': "+", '┐': "+", '└': "+", '┘': "+", '├': "+", '┤': "+", '┬': "+", '┴': "+", '┼': "+",
	'█': "#", '▇': "#", '▆': "*", '▅': "+", '▄': "=", '▃': "-", '▂': ".", '▁': "_", '▒': "=", '▸': ">", '•': "*",
	utf8.RuneError: "?",
}

// ASCII returns s with each character beyond ASCII replaced by what looks like it, or by an
// escape such as \u00e9. Where that is wider and blanks stand before it, they make room.
func ASCII(s string) string {
	if isASCII(s) {
		return s
	}
	var out []byte
	for _, r := range s {
		if r < utf8.RuneSelf {
			out = append(out, byte(r))
			continue
		}
		text, ok := likeness[r]
		if !ok {
			text = escape(r)
		}
		for n := 1; n < len(text) && len(out) > 1 && out[len(out)-1] == ' ' && out[len(out)-2] == ' '; n++ {
			out = out[:len(out)-1]
		}
		out = append(out, text...)
	}
	return string(out)
}

// ASCIIJSON returns JSON with each character beyond ASCII escaped. It means the same.
func ASCIIJSON(s string) string {
	if isASCII(s) {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		if r < utf8.RuneSelf {
			b.WriteRune(r)
		} else {
			b.WriteString(escape(r))
		}
	}
	return b.String()
}

// escape returns a character as JSON and Go write it in ASCII: in two halves beyond 16 bits.
func escape(r rune) string {
	if a, b := utf16.EncodeRune(r); a != utf8.RuneError {
		return fmt.Sprintf(`\u%04x\u%04x`, a, b)
	}
	return fmt.Sprintf(`\u%04x`, r)
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}
