// This file owns the keys of a mapping as its text has them. Readers of YAML and JSON keep
// the last of equal keys; with the lines a caller can say which ones contradict each other.

package input

import (
	"bytes"
	"encoding/json"
	"fmt"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// Key is a key of a mapping with its value, both as they are written.
type Key struct {
	Name, Value string
	Line        int
}

// YAMLKeys returns the keys at the top of YAML that UnmarshalYAML reads, or those of the
// first mapping behind the key under, unless that is empty. Equal keys are all there, in order.
func YAMLKeys(text []byte, under string) (keys []Key) {
	file, err := parser.ParseBytes(text, 0, parser.AllowDuplicateMapKey())
	if err != nil {
		return nil
	}
	for _, doc := range file.Docs {
		for _, v := range pairs(doc.Body) {
			if under == "" {
				keys = append(keys, yamlKey(v))
			} else if v.Key.GetToken().Value == under {
				for _, inner := range pairs(v.Value) {
					keys = append(keys, yamlKey(inner))
				}
				return keys
			}
		}
	}
	return keys
}

func yamlKey(v *ast.MappingValueNode) Key {
	t := v.Key.GetToken()
	return Key{Name: t.Value, Value: v.Value.String(), Line: t.Position.Line}
}

// pairs returns the pairs of a mapping, and nothing for another node.
func pairs(node ast.Node) []*ast.MappingValueNode {
	switch x := node.(type) {
	case *ast.MappingNode:
		return x.Values
	case *ast.MappingValueNode:
		return []*ast.MappingValueNode{x}
	case *ast.AnchorNode:
		return pairs(x.Value)
	}
	return nil
}

// JSONKeys does the same for valid JSON.
func JSONKeys(text []byte, under string) []Key { return jsonKeys(text, 1, under) }

// jsonKeys returns the keys of an object whose text begins in a line.
func jsonKeys(text []byte, line int, under string) (keys []Key) {
	d := json.NewDecoder(bytes.NewReader(text))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil
	}
	at := lines{text: text, line: line}
	for d.More() {
		t, err := d.Token()
		name, is := t.(string)
		line := at.of(int(d.InputOffset()))
		var value json.RawMessage
		if err != nil || !is || d.Decode(&value) != nil {
			return keys
		}
		if under == "" {
			keys = append(keys, Key{Name: name, Value: string(value), Line: line})
		} else if name == under {
			return jsonKeys(value, at.of(int(d.InputOffset())-len(value)), "")
		}
	}
	return keys
}

// lines counts the lines of a text from its beginning to its end. It looks at each byte once,
// so the keys of an object of megabytes take no longer than its bytes.
type lines struct {
	text       []byte
	line, seen int // the line of text[seen]
}

// of returns the line of an offset, which must not be before the last one.
func (l *lines) of(offset int) int {
	l.line += bytes.Count(l.text[l.seen:offset], []byte("\n"))
	l.seen = offset
	return l.line
}

// Contradiction returns an error if a key is there twice with different values. Most readers of
// JSON take the last one without a word.
func Contradiction(keys []Key) error {
	first := map[string]Key{}
	for _, k := range keys {
		before, twice := first[k.Name]
		switch {
		case !twice:
			first[k.Name] = k
		case before.Value != k.Value && before.Line == k.Line:
			return fmt.Errorf("line %d gives %.40s different values; leave one of them out", k.Line, k.Name)
		case before.Value != k.Value:
			return fmt.Errorf("lines %d and %d give %.40s different values; leave one of them out", before.Line, k.Line, k.Name)
		}
	}
	return nil
}

// Repeated returns an error if an object of valid JSON has a key twice, wherever it stands.
func Repeated(data []byte) error {
	d := json.NewDecoder(bytes.NewReader(data))
	var open []map[string]bool // the keys of the objects around a token; nil for an array
	key := false               // whether the next token is a key, if it ends nothing
	for {
		t, err := d.Token()
		if err != nil {
			return nil // the end
		}
		last := len(open) - 1
		switch t {
		case json.Delim('{'):
			open = append(open, map[string]bool{})
		case json.Delim('['):
			open = append(open, nil)
		case json.Delim('}'), json.Delim(']'):
			open = open[:last]
		default:
			if key {
				if open[last][t.(string)] {
					line := 1 + bytes.Count(data[:d.InputOffset()], []byte("\n"))
					return fmt.Errorf("line %d: the key %.40q is there twice; leave one of them out", line, t)
				}
				open[last][t.(string)], key = true, false
				continue
			}
		}
		key = len(open) > 0 && open[len(open)-1] != nil
	}
}
