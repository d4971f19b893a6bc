// This file owns JSON as Python writes it, and the words for JSON that cannot be read.

package input

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
)

const unknownField = "json: unknown field"

// Plain rewords an error of encoding/json that names types of this program or rules of its
// grammar. What wrappers say stays, and so do other errors.
func Plain(err error) error {
	old, why := "", ""
	var syntax *json.SyntaxError
	var typed *json.UnmarshalTypeError
	switch {
	case errors.As(err, &syntax):
		old = syntax.Error()
		switch {
		case strings.Contains(old, "unexpected end"):
			why = "it ends too early"
		case strings.Contains(old, "max depth"):
			why = "it is nested too deeply"
		default:
			why = fmt.Sprintf("it is not JSON from character %d on", syntax.Offset)
		}
	case errors.As(err, &typed):
		old, why = typed.Error(), fmt.Sprintf("expected an object, got %s", typed.Value)
		number, ofRange := strings.CutPrefix(typed.Value, "number ")
		switch key := keysOf(typed.Field); {
		case key != "":
			why = fmt.Sprintf("%s has the wrong kind of value (%s)", key, typed.Value)
		case ofRange: // in a map or a list, whose keys encoding/json does not name
			why = fmt.Sprintf("the number %s is too large or of the wrong kind", number)
		case typed.Field != "":
			why = fmt.Sprintf("a value is of the wrong kind (%s)", typed.Value)
		}
	case errors.Is(err, io.ErrUnexpectedEOF):
		old, why = io.ErrUnexpectedEOF.Error(), "it ends too early"
	case errors.Is(err, io.EOF): // of a stream
		old, why = io.EOF.Error(), "it is empty"
	case err != nil && strings.Contains(err.Error(), unknownField): // it has no type
		old, why = unknownField, "unknown key"
	default:
		return err
	}
	return errors.New(strings.Replace(err.Error(), old, why, 1))
}

// keysOf returns a path of encoding/json without the names of embedded structs. No key of
// our files begins with a capital letter.
func keysOf(path string) string {
	embedded := func(name string) bool { return name != "" && name[0] >= 'A' && name[0] <= 'Z' }
	return strings.Join(slices.DeleteFunc(strings.Split(path, "."), embedded), ".")
}

// JSON returns a text of JSON in which the three numbers that Python writes and JSON does not have (NaN, Infinity,
// -Infinity) are words in quotes. A reader that wants a number there refuses the word, and one that does not read
// the key is not disturbed.
func JSON(data []byte) []byte {
	if json.Valid(data) {
		return data
	}
	var out []byte
	quoted := false
	for i := 0; i < len(data); i++ {
		if !quoted {
			if word := infinite(data[i:]); word != "" {
				out = append(append(append(out, '"'), word...), '"')
				i += len(word) - 1
				continue
			}
		}
		switch {
		case data[i] == '"':
			quoted = !quoted
		case data[i] == '\\' && quoted && i+1 < len(data):
			out = append(out, data[i])
			i++
		}
		out = append(out, data[i])
	}
	if !json.Valid(out) {
		return data // an error tells where it is wrong
	}
	return out
}

// infinite returns the number without an end at the beginning of a text.
func infinite(text []byte) string {
	for _, word := range []string{"-Infinity", "Infinity", "NaN"} {
		if bytes.HasPrefix(text, []byte(word)) {
			return word
		}
	}
	return ""
}
