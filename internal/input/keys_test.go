package input_test

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/internal/input"
)

func TestKeys(t *testing.T) {
	for _, c := range []struct {
		text, under string
		json        bool
		want        string
	}{
		{"a: 1\nb: [1, 2]\na: 2 # last\n", "", false, "[{a 1 1} {b [1, 2] 2} {a 2 3}]"},
		{"t:\n  a: 1\n  a: x\nu: 2", "t", false, "[{a 1 2} {a x 3}]"},
		{"t: &n {a: 1, a: 2}", "t", false, "[{a 1 1} {a 2 1}]"},
		{"t: 1", "t", false, "[]"},
		{"- 1", "", false, "[]"},
		{"a: [", "", false, "[]"},
		{"{\"a\": 1,\n\"b\": {\"a\": 2},\n\"a\": \"x\"}", "", true, `[{a 1 1} {b {"a": 2} 2} {a "x" 3}]`},
		{"{\"a\": 1,\n\"b\": {\"a\": 2,\n\"a\": 3}}", "b", true, "[{a 2 2} {a 3 3}]"},
		{"[1]", "", true, "[]"},
		{`{"a": 1`, "", true, "[{a 1 1}]"},
	} {
		keys := input.YAMLKeys
		if c.json {
			keys = input.JSONKeys
		}
		if got := fmt.Sprint(keys([]byte(c.text), c.under)); got != c.want {
			t.Errorf("%q under %q: %s, want %s", c.text, c.under, got, c.want)
		}
	}
}
