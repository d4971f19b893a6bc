package plaintext_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stowage-dev/stowage/internal/plaintext"
)

func TestString(t *testing.T) {
	for s, want := range map[string]string{
		"":                          "",
		"tiny-moe":                  "tiny-moe",
		"two\nlines\tand é 漢":       "two\nlines\tand é 漢",
		"\x1b[31mred\x1b[0m":        `\u001b[31mred\u001b[0m`,
		"\x1b]0;title\a":            `\u001b]0;title\u0007`,
		"over\rwritten\b\x7f\x00":   `over\u000dwritten\u0008\u007f\u0000`,
		"\u009b2J":                  `\u009b2J`,
		"a\x9b2J\xff":               "a\uFFFD2J\uFFFD",
		"\u202egnp.exe\u2066\u200f": `\u202egnp.exe\u2066\u200f`,
		"a\u2028b":                  `a\u2028b`,
	} {
		if got := plaintext.String(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}

// However text is cut into calls, the same is written, and JSON keeps its meaning.
func FuzzWriter(f *testing.F) {
	f.Add("\x1b[31m é 漢 \u202e \xff\xe6\xbc", uint8(3))
	f.Add("{\"a\": \"\u009b\"}", uint8(1))
	f.Fuzz(func(t *testing.T, text string, size uint8) {
		var b strings.Builder
		w := plaintext.NewWriter(&b, false)
		for rest := text; rest != ""; {
			n := min(int(size)%7+1, len(rest))
			if m, err := w.Write([]byte(rest[:n])); m != n || err != nil {
				t.Fatal(m, err)
			}
			rest = rest[n:]
		}
		if want := plaintext.String(text); b.String() != want && utf8.ValidString(text) {
			t.Errorf("%q was written as %q, want %q", text, b.String(), want)
		}
		if strings.ContainsAny(b.String(), "\x1b\r\b\a\x00\x7f\u009b\u202e") {
			t.Errorf("%q was written as %q", text, b.String())
		}
		line, err := json.Marshal(strings.ToValidUTF8(text, "?"))
		var back string
		if err == nil {
			err = json.Unmarshal([]byte(plaintext.String(string(line))), &back)
		}
		if err != nil || back != strings.ToValidUTF8(text, "?") {
			t.Errorf("%s comes back as %q, %v", line, back, err)
		}
	})
}

type broken struct{}

func (broken) Write([]byte) (int, error) { return 0, errors.New("full") }

func TestWriterError(t *testing.T) {
	if n, err := plaintext.NewWriter(broken{}, false).Write([]byte("x")); n != 0 || err == nil {
		t.Error(n, err)
	}
}
