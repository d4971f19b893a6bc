package plaintext_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/plaintext"
)

func TestWantsASCII(t *testing.T) {
	for env, want := range map[string]bool{
		"": false, "LC_ALL=C": true, "LC_ALL=POSIX": true, "LANG=C": true, "LC_CTYPE=POSIX": true, "LC_ALL=C.UTF-8": false, "LANG=en_US.utf8": false, "LANG=de_DE.ISO-8859-1": true,
		"LANG=de_DE.UTF-8@euro": false, "LANG=de_DE@euro": false, "LANG=de_DE": false,
		"LC_ALL=C LC_CTYPE=C.UTF-8 LANG=C.UTF-8": true, "LC_CTYPE=C LANG=C.UTF-8": true, "LC_CTYPE=C.UTF-8 LANG=C": false, "LC_ALL= LANG=C": true, "LC_MESSAGES=C": false,
	} {
		got := plaintext.WantsASCII(func(name string) string {
			for _, v := range strings.Fields(env) {
				if key, value, _ := strings.Cut(v, "="); key == name {
					return value
				}
			}
			return ""
		})
		if got != want {
			t.Errorf("%q: %v", env, got)
		}
	}
}

func TestASCII(t *testing.T) {
	for s, want := range map[string]string{
		"plain":                               "plain",
		"3 µs, 2 × 4 ≤ 8 → done…":             "3 us, 2 x 4 <= 8 -> done...",
		"allocated       ±  host":             "allocated     +/-  host", // columns stay where they are
		"a ± b":                               "a +/- b",
		"┌─┐│█▁ – “x”":                        `+-+|#_ - "x"`,
		"Größe 漢 😀":                           `Gr\u00f6\u00dfe \u6f22 \ud83d\ude00`,
		strings.ToValidUTF8("\xff", "\uFFFD"): "?",
	} {
		if got := plaintext.ASCII(s); got != want {
			t.Errorf("%q: %q, want %q", s, got, want)
		}
	}
}

func FuzzASCII(f *testing.F) {
	f.Add("µ  ± 漢 😀 \"\\ é")
	f.Fuzz(func(t *testing.T, s string) {
		s = strings.ToValidUTF8(s, "?")
		line, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		var back string
		inASCII := plaintext.ASCIIJSON(string(line))
		if err := json.Unmarshal([]byte(inASCII), &back); err != nil || back != s {
			t.Errorf("%s comes back as %q, %v", inASCII, back, err)
		}
		var b strings.Builder
		if _, err := plaintext.NewWriter(&b, true).Write([]byte(s)); err != nil {
			t.Fatal(err)
		}
		for _, text := range []string{inASCII, plaintext.ASCII(s), b.String()} {
			if strings.ContainsFunc(text, func(r rune) bool { return r > 127 }) {
				t.Errorf("%q has more than ASCII", text)
			}
		}
	})
}
