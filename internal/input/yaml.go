// This file owns parsing YAML within bounds. The parser takes time and memory that grow
// with the square of the keys of a mapping and of the depth, and exponentially with
// aliases. Its lexer takes both in proportion to the text, so the bounds are checked on
// tokens first, and on the tree for aliases, before any value is made.

package input

import (
	"bytes"
	"errors"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"github.com/stowage-dev/stowage/memory"
)

// Bounds of YAML. A file of settings has a few hundred keys in a few levels.
const (
	yamlBytes   = 1 << 20
	yamlTokens  = 1 << 16
	yamlKeys    = 4096    // of mappings that are not in braces: 70 ms and 70 MB
	yamlDepth   = 64      // levels of nesting
	yamlPaths   = 1 << 25 // bytes of the path that each value remembers, of all values
	yamlAliased = 1 << 16 // values that aliases stand for
)

// UnmarshalYAML parses YAML into v as yaml.UnmarshalWithOptions does. It returns an error
// if the text is larger, has more keys or is nested more deeply than any file of
// settings, if its aliases stand for too much, or if it has a second document, which the
// parser would ignore. It does not panic.
func UnmarshalYAML(text []byte, v any, opts ...yaml.DecodeOption) (err error) {
	defer func() { // the parser can panic
		if p := recover(); p != nil {
			err = fmt.Errorf("the YAML cannot be parsed: %v", p)
		}
	}()
	if err := CheckYAML(text); err != nil {
		return err
	}
	if line := secondDocument(text); line > 0 {
		return fmt.Errorf("line %d: expected one document, got a second one behind ---; write all of it above", line)
	}
	return plain(yaml.UnmarshalWithOptions(text, v, opts...))
}

// YAMLError reports text that is not valid YAML, or does not fit the value that it is
// parsed into. It stands for the parser's error: that one prints the text around it,
// which takes gigabytes for a long line. errors.As finds the types of the parser.
type YAMLError struct {
	Line    int // 0 if it is not known
	Message string
	Twice   bool // a mapping has a key twice
	err     error
}

// Error returns the line and what is wrong there.
func (e *YAMLError) Error() string {
	if e.Line == 0 {
		return e.Message
	}
	return fmt.Sprintf("line %d: %s", e.Line, e.Message)
}

// As finds an error of the parser. There is no Unwrap, since nobody may print what it
// would return.
func (e *YAMLError) As(target any) bool { return errors.As(e.err, target) }

// plain replaces an error of the parser.
func plain(err error) error {
	var said yaml.Error
	if !errors.As(err, &said) {
		return err
	}
	e := &YAMLError{err: err}
	e.Message, _, _ = strings.Cut(said.GetMessage(), "\n")
	if t := said.GetToken(); t != nil && t.Position != nil {
		e.Line = t.Position.Line
		if e.Twice = strings.Contains(e.Message, "already defined"); e.Twice {
			e.Message = fmt.Sprintf("%.60s is given twice; leave one of them out", t.Value)
		}
	}
	return e
}

// CheckYAML returns an error if UnmarshalYAML would refuse the text because of its
// bounds. The text need not be valid.
func CheckYAML(text []byte) error {
	if len(text) > yamlBytes {
		return fmt.Errorf("expected at most %s of YAML, got %s", memory.Bytes(yamlBytes).Short(), memory.Bytes(len(text)).Short())
	}
	tokens := lexer.Tokenize(string(text))
	aliased, err := checkTokens(tokens)
	if err != nil || !aliased {
		return err
	}
	file, err := parser.Parse(tokens, 0)
	if err != nil {
		return nil // parsing it again says what is wrong
	}
	return checkAliases(file)
}

// secondDocument returns the line in which a second document begins, or 0.
func secondDocument(text []byte) int {
	if !bytes.Contains(text, []byte("---")) && !bytes.Contains(text, []byte("...")) {
		return 0
	}
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return 0 // parsing it again says what is wrong
	}
	begun := false
	for _, doc := range file.Docs {
		if doc.Body == nil || doc.Body.Type() == ast.DirectiveType || doc.Body.GetToken() == nil {
			continue
		}
		if begun {
			return doc.Body.GetToken().Position.Line
		}
		begun = true
	}
	return 0
}

// checkTokens checks all bounds but that of aliases. It reports whether there are any.
func checkTokens(tokens token.Tokens) (aliased bool, err error) {
	if len(tokens) > yamlTokens {
		return false, fmt.Errorf("expected YAML of at most %d words and signs, got %d", yamlTokens, len(tokens))
	}
	var columns []int // where the blocks around a token begin
	flow, keys, depth, longest, prefixes := 0, 0, 0, 0, 0
	for i, t := range tokens {
		block := false // whether a block begins here, or goes on
		if t.Type != token.AnchorType && t.Type != token.TagType && (i == 0 || tokens[i-1].Type != token.AnchorType) {
			prefixes = 0
		}
		switch t.Type {
		case token.SequenceStartType, token.MappingStartType:
			flow++
		case token.SequenceEndType, token.MappingEndType:
			flow = max(0, flow-1)
		case token.SequenceEntryType, token.MappingKeyType:
			block = true
		case token.AliasType:
			aliased = true
		case token.AnchorType, token.TagType:
			if prefixes++; prefixes > 2 {
				return false, fmt.Errorf("expected at most an anchor and a tag before a value in YAML, got more in line %d", t.Position.Line)
			}
		case token.MappingValueType:
			longest = max(longest, keyBytes(tokens[:i]))
			if flow == 0 {
				keys++
			}
		}
		if i+1 < len(tokens) && tokens[i+1].Type == token.MappingValueType {
			block = true
		}
		if block && flow == 0 && t.Position != nil {
			for len(columns) > 0 && columns[len(columns)-1] > t.Position.Column {
				columns = columns[:len(columns)-1]
			}
			if n := len(columns); n == 0 || columns[n-1] < t.Position.Column {
				columns = append(columns, t.Position.Column)
			}
		}
		if depth = max(depth, flow+len(columns)); depth > yamlDepth {
			return false, fmt.Errorf("expected YAML of at most %d levels, got more in line %d", yamlDepth, t.Position.Line)
		}
	}
	switch {
	case keys > yamlKeys:
		return false, fmt.Errorf("expected at most %d keys in YAML, got %d", yamlKeys, keys)
	case depth*longest*len(tokens) > yamlPaths:
		return false, fmt.Errorf("expected YAML with short keys, got one of %d bytes among %d words and signs", longest, len(tokens))
	}
	return aliased, nil
}

// keyBytes returns the bytes of the key before a colon.
func keyBytes(before token.Tokens) int {
	if len(before) == 0 {
		return 0
	}
	return len(before[len(before)-1].Value)
}

// checkAliases returns an error if the aliases of a file stand for too many values.
func checkAliases(file *ast.File) error {
	for _, doc := range file.Docs {
		w := aliases{sizes: map[string]int{}}
		if doc.Body == nil {
			continue
		}
		if w.size(doc.Body); w.total > yamlAliased || w.inside {
			return fmt.Errorf("expected YAML whose aliases stand for at most %d values and not for themselves", yamlAliased)
		}
	}
	return nil
}

// aliases counts the values of a tree with all aliases replaced by what they stand for.
type aliases struct {
	sizes  map[string]int // of anchors; -1 while the anchor's own value is counted
	total  int            // values that aliases stand for
	inside bool           // whether an alias stands for a value that it is part of
}

// size returns the number of values under a node, at most about yamlAliased.
func (w *aliases) size(node ast.Node) (n int) {
	add := func(more ast.Node) {
		if more != nil {
			n = min(n+w.size(more), yamlAliased+1)
		}
	}
	n = 1
	switch x := node.(type) {
	case *ast.MappingNode:
		for _, v := range x.Values {
			add(v)
		}
	case *ast.MappingValueNode:
		add(x.Key)
		add(x.Value)
	case *ast.MappingKeyNode:
		add(x.Value)
	case *ast.SequenceNode:
		for _, v := range x.Values {
			add(v)
		}
	case *ast.TagNode:
		add(x.Value)
	case *ast.AnchorNode:
		name := x.Name.GetToken().Value
		w.sizes[name] = -1
		add(x.Value)
		w.sizes[name] = n
	case *ast.AliasNode:
		size := w.sizes[x.Value.GetToken().Value]
		w.inside = w.inside || size < 0
		n = max(size, 1)
		w.total = min(w.total+n, yamlAliased+1)
	}
	return n
}
