package input

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
)

// Errors about JSON are in words of the file, not of the package that reads it.
func TestPlain(t *testing.T) {
	type Embedded struct {
		B int `json:"b"`
	}
	var to struct {
		A struct{ Embedded } `json:"a"`
	}
	for text, want := range map[string]string{
		"":                         "f: it ends too early",
		`{"a":`:                    "f: it ends too early",
		"{\x0e}":                   "f: it is not JSON from character 2 on",
		strings.Repeat("[", 20000): "f: it is nested too deeply",
		"[]":                       "f: expected an object, got array",
		`{"a":{"b":"x"}}`:          "f: a.b has the wrong kind of value (string)",
	} {
		err := fmt.Errorf("f: %w", json.Unmarshal([]byte(text), &to))
		if got := Plain(err).Error(); got != want {
			t.Errorf("%.20q gives %q, want %q", text, got, want)
		}
	}
	err := fmt.Errorf("f: %w", json.NewDecoder(strings.NewReader("{")).Decode(&to))
	if got := Plain(err).Error(); got != "f: it ends too early" {
		t.Errorf("a stream gives %q", got)
	}
	d := json.NewDecoder(strings.NewReader(`{"C":1}`))
	d.DisallowUnknownFields()
	if got := Plain(fmt.Errorf("f: %w", d.Decode(&to))).Error(); got != `f: unknown key "C"` {
		t.Errorf("a key too many gives %q", got)
	}
	if other := errors.New("other"); Plain(other) != other {
		t.Error("another error was changed")
	}
}
