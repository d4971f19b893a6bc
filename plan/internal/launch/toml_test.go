package launch

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
)

func TestTOML(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    `{}`,
		"# nothing":                           `{}`,
		"a = 1\nb = 2.5e3 # more\nc = 1_000":  `{"a":1,"b":2500,"c":1000}`,
		"a = -1\nb = +2\nc = 0x10":            `{"a":-1,"b":2,"c":16}`,
		"a = true\r\nb = false":               `{"a":true,"b":false}`,
		`a = "x # y"` + "\nb = 'c:\\d'":       `{"a":"x # y","b":"c:\\d"}`,
		`a = "q\"\\\n\t"`:                     `{"a":"q\"\\\n\t"}`,
		"a = \"\"\"\none\ntwo\"\"\"\nb = 1":   `{"a":"one\ntwo","b":1}`,
		"[a.b]\nc = 1\n[a]\nd = 2":            `{"a":{"b":{"c":1},"d":2}}`,
		"a.b.c = 1\na.\"b d\" = 2":            `{"a":{"b":{"c":1},"b d":2}}`,
		"a = [1, # one\n 2,\n]\nb = []":       `{"a":[1,2],"b":[]}`,
		"a = {b = 1, c = {d = [\"x\", 'y']}}": `{"a":{"b":1,"c":{"d":["x","y"]}}}`,
		"  [ a ]  # table\n  b-c_1 = 1":       `{"a":{"b-c_1":1}}`,
	} {
		got, err := parseTOML(text)
		if err != nil {
			t.Errorf("%q: %v", text, err)
			continue
		}
		if data, _ := json.Marshal(got); string(data) != want {
			t.Errorf("%q is %s, want %s", text, data, want)
		}
	}
}

func TestWrongTOML(t *testing.T) {
	for text, words := range map[string]string{
		"a":                                   "line 1 key = value",
		"\n\na = ":                            "line 3 value",
		"= 1":                                 "a key",
		"a = b":                               `"b"`,
		"a = 1\na = 2":                        "line 2 twice",
		"a = 1\n[a]":                          "line 2 table",
		"a = 1\na.b = 2":                      "line 2 table",
		"[a]\n[a.b]\n[a]":                     "line 3 twice",
		"[[a]]":                               "arrays of tables",
		"[a":                                  "bracket",
		"a = 'x":                              "string that ends",
		"a = \"\"\"x":                         "string that ends",
		"a = [1 2]":                           "comma",
		"a = {b = 1 c = 2}":                   "comma",
		"a = 2026-01-01":                      "number",
		"a = 010":                             "number",
		"a = 8__192":                          "number",
		"a = 8_":                              "number",
		"a = 1e999":                           "smaller number",
		"a = -" + strings.Repeat("9", 400):    "smaller number",
		"a = 1 b = 2":                         "new line",
		strings.Repeat("a.", 40):              "at most 16",
		"a = " + strings.Repeat("[", 100000):  "at most 16",
		"a = " + strings.Repeat("{a=", 10000): "at most 16",
	} {
		_, err := parseTOML(text)
		if err == nil {
			t.Errorf("%.40q is accepted", text)
			continue
		}
		for w := range strings.FieldsSeq(words) {
			if !strings.Contains(err.Error(), w) {
				t.Errorf("%.40q: %v does not say %q", text, err, w)
			}
		}
		if strings.Contains(err.Error(), "\n") || len(err.Error()) > 200 {
			t.Errorf("%.40q: %v", text, err)
		}
	}
}

// SPEC S6.1: reading any text does not panic.
func FuzzTOML(f *testing.F) {
	f.Add("[a]\nb = [1, {c = \"x\"}] # d\n'e'.f = '''g'''")
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		if _, err := parseTOML(text); err != nil && strings.ContainsAny(err.Error(), "\n\r") {
			t.Errorf("%q is not one sentence", err)
		}
	})
}
