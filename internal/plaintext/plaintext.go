// Package plaintext makes text that terminals and logs can show: without control
// characters, in ASCII if the locale has nothing else, and within the width of a terminal.
// Names of models, modules, tensors and files come from outside, and a terminal obeys what
// they hold: a name can move the cursor, recolour the screen or hide what follows.
//
// This file owns control characters, ascii.go ASCII, and fit.go the width.
package plaintext

import (
	"fmt"
	"io"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// String returns s with each control character replaced by an escape such as \u001b.
// Newlines and tabs stay. So does the meaning of JSON, which has the same escapes.
func String(s string) string {
	if !strings.ContainsFunc(s, obeyed) && utf8.ValidString(s) {
		return s
	}
	var b strings.Builder
	for _, r := range s { // bytes that are not UTF-8 become U+FFFD
		if obeyed(r) {
			fmt.Fprintf(&b, `\u%04x`, r)
		} else {
			b.WriteRune(r)
		}
	}
	return b.String()
}

// obeyed reports whether a terminal obeys a character in place of showing it. Beside
// control characters there are those that reverse the direction of text and those that
// end a line.
func obeyed(r rune) bool {
	switch {
	case r == '\n' || r == '\t':
		return false
	case unicode.IsControl(r):
		return true
	}
	return r == '\u2028' || r == '\u2029' || unicode.Is(unicode.Bidi_Control, r)
}

// Writer writes text to another writer with control characters replaced. Its methods can
// be called from several goroutines.
type Writer struct {
	w     io.Writer
	ascii bool
	mu    sync.Mutex
	part  []byte // the beginning of a character whose rest comes later
}

// NewWriter returns a writer that writes to w, in ASCII alone if ascii is set.
func NewWriter(w io.Writer, ascii bool) *Writer { return &Writer{w: w, ascii: ascii} }

// Write writes p as String returns it. It keeps half a character at the end of p for the
// next call.
func (w *Writer) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	text := p
	if len(w.part) > 0 {
		text = append(w.part, p...)
	}
	end := len(text)
	for i := 1; i < utf8.UTFMax && i <= len(text); i++ {
		if c := text[len(text)-i:]; utf8.RuneStart(c[0]) {
			if !utf8.FullRune(c) {
				end -= i
			}
			break
		}
	}
	rest := append([]byte(nil), text[end:]...)
	plain := String(string(text[:end]))
	if w.ascii {
		plain = ASCII(plain)
	}
	if _, err := io.WriteString(w.w, plain); err != nil {
		return 0, err
	}
	w.part = rest
	return len(p), nil
}

// Unwrap returns the writer below, for programs that ask whether it is a terminal.
func (w *Writer) Unwrap() io.Writer { return w.w }
