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
	if got := Plain(fmt.Errorf("f: %w", json.NewDecoder(strings.NewReader("")).Decode(&to))).Error(); got != "f: it is empty" {
		t.Errorf("an empty stream gives %q", got)
	}
	d := json.NewDecoder(strings.NewReader(`{"C":1}`))
	d.DisallowUnknownFields()
	if got := Plain(fmt.Errorf("f: %w", d.Decode(&to))).Error(); got != `f: unknown key "C"` {
		t.Errorf("a key too many gives %q", got)
	}
	var untagged struct{ Version int }
	if got := Plain(json.Unmarshal([]byte(`{"version":"x"}`), &untagged)).Error(); got != "a value is of the wrong kind (string)" {
		t.Errorf("a key without a name gives %q", got)
	}
	var keys map[string]any
	if got := Plain(json.Unmarshal([]byte(`{"a":1e400}`), &keys)).Error(); got != "the number 1e400 is too large or of the wrong kind" {
		t.Errorf("a number out of range gives %q", got)
	}
	if other := errors.New("other"); Plain(other) != other {
		t.Error("another error was changed")
	}
}

// Numbers that Python writes and JSON does not have become words, and nothing else changes.
func TestNumbersOfPython(t *testing.T) {
	for text, want := range map[string]string{
		`{"a": NaN}`:                           `{"a": "NaN"}`,
		`{"a": [0.0, Infinity,-Infinity]}`:     `{"a": [0.0, "Infinity","-Infinity"]}`,
		`{"NaN": "to \"Infinity\"", "b": NaN}`: `{"NaN": "to \"Infinity\"", "b": "NaN"}`,
		`NaN`:                                  `"NaN"`,
		`{"a": "NaN"}`:                         `{"a": "NaN"}`,
		`{"a": NaNs}`:                          `{"a": NaNs}`, // an error then names the place in the file
		`{"a": NaN, "b`:                        `{"a": NaN, "b`,
		`{"a": "\`:                             `{"a": "\`,
		`{"a": Infinity`:                       `{"a": Infinity`,
	} {
		if got := string(JSON([]byte(text))); got != want {
			t.Errorf("%s became %s, want %s", text, got, want)
		}
	}
}
