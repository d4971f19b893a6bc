// This file owns the part of TOML that launch files use: tables, keys with dots, strings,
// numbers, booleans, arrays and inline tables. It has no dates and no arrays of tables.

package launch

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// These bound what a file may hold. Its size is bounded where it is read.
const (
	maxTOMLDepth = 16
	maxTOMLKeys  = 1 << 14
)

// parseTOML returns the tables of a file. Numbers are float64, and arrays []any.
func parseTOML(text string) (map[string]any, error) {
	p := &tomlParser{text: text, line: 1, tables: map[string]bool{}}
	top := map[string]any{}
	at := top
	for p.space(true); p.rest() != ""; p.space(true) {
		var err error
		if p.take("[") {
			if at, err = p.header(top); err != nil {
				return nil, err
			}
		} else if err = p.pair(at, 0); err != nil {
			return nil, err
		}
		if p.space(false); p.rest() != "" && p.rest()[0] != '\n' {
			return nil, p.wrong("a new line behind the value")
		}
	}
	return top, nil
}

type tomlParser struct {
	text string
	at   int
	line int
	keys int
	// tables has the headers so far.
	tables map[string]bool
}

func (p *tomlParser) rest() string { return p.text[p.at:] }

func (p *tomlParser) wrong(expected string) error {
	found := "the end of the file"
	if rest := p.rest(); rest != "" {
		line, _, _ := strings.Cut(rest, "\n")
		found = strconv.Quote(fmt.Sprintf("%.20s", line))
	}
	return fmt.Errorf("line %d: expected %s, got %s", p.line, expected, found)
}

// take skips a word if it is next.
func (p *tomlParser) take(word string) bool {
	if !strings.HasPrefix(p.rest(), word) {
		return false
	}
	p.at += len(word)
	return true
}

// space skips blanks and comments, and line ends too if lines is set.
func (p *tomlParser) space(lines bool) {
	for ; p.at < len(p.text); p.at++ {
		switch c := p.text[p.at]; {
		case c == ' ' || c == '\t' || c == '\r':
		case c == '\n' && lines:
			p.line++
		case c == '#':
			end := strings.IndexByte(p.rest(), '\n')
			if end < 0 {
				p.at = len(p.text)
				return
			}
			p.at += end - 1
		default:
			return
		}
	}
}

// header reads the name of a table, behind its bracket, and returns the table.
func (p *tomlParser) header(top map[string]any) (map[string]any, error) {
	if p.take("[") {
		p.at--
		return nil, p.wrong("one bracket, because arrays of tables are not read")
	}
	path, err := p.key()
	if err != nil {
		return nil, err
	}
	if !p.take("]") {
		return nil, p.wrong("a closing bracket behind the name of the table")
	}
	name := fmt.Sprintf("%q", path)
	if p.tables[name] {
		return nil, fmt.Errorf("line %d: the table %.40q is there twice", p.line, strings.Join(path, "."))
	}
	p.tables[name] = true
	return p.descend(top, path)
}

// descend returns the table at a path, and makes those that are missing.
func (p *tomlParser) descend(t map[string]any, path []string) (map[string]any, error) {
	for _, key := range path {
		if t[key] == nil {
			t[key] = map[string]any{}
		}
		inner, ok := t[key].(map[string]any)
		if !ok {
			return nil, fmt.Errorf("line %d: %.40q is a value, and here it is used as a table", p.line, key)
		}
		t = inner
	}
	return t, nil
}

// pair reads a key with its value into a table.
func (p *tomlParser) pair(t map[string]any, depth int) error {
	path, err := p.key()
	if err != nil {
		return err
	}
	if !p.take("=") {
		return p.wrong("key = value")
	}
	p.space(false)
	v, err := p.value(depth)
	if err != nil {
		return err
	}
	if t, err = p.descend(t, path[:len(path)-1]); err != nil {
		return err
	}
	last := path[len(path)-1]
	if t[last] != nil {
		return fmt.Errorf("line %d: %.40q is set twice", p.line, last)
	}
	if p.keys++; p.keys > maxTOMLKeys {
		return fmt.Errorf("line %d: the file has more than %d keys", p.line, maxTOMLKeys)
	}
	t[last] = v
	return nil
}

// key reads a key, which may have dots, and the blanks around it.
func (p *tomlParser) key() (path []string, err error) {
	for {
		p.space(false)
		var part string
		if p.rest() != "" && (p.text[p.at] == '"' || p.text[p.at] == '\'') {
			if part, err = p.quoted(); err != nil {
				return nil, err
			}
		} else {
			n := 0
			for n < len(p.rest()) && bareKey(p.rest()[n]) {
				n++
			}
			if part = p.rest()[:n]; n == 0 {
				return nil, p.wrong("a key")
			}
			p.at += n
		}
		if path = append(path, part); len(path) > maxTOMLDepth {
			return nil, p.wrong(fmt.Sprintf("a key of at most %d parts", maxTOMLDepth))
		}
		p.space(false)
		if !p.take(".") {
			return path, nil
		}
	}
}

func bareKey(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '_' || c == '-'
}

func (p *tomlParser) value(depth int) (any, error) {
	if depth > maxTOMLDepth {
		return nil, p.wrong(fmt.Sprintf("a value nested at most %d deep", maxTOMLDepth))
	}
	switch {
	case p.rest() == "":
		return nil, p.wrong("a value")
	case p.text[p.at] == '"' || p.text[p.at] == '\'':
		return p.quoted()
	case p.take("["):
		return p.array(depth)
	case p.take("{"):
		return p.inline(depth)
	}
	n := strings.IndexAny(p.rest(), " \t\r\n,]}#")
	if n < 0 {
		n = len(p.rest())
	}
	word := p.rest()[:n]
	switch word {
	case "true", "false":
		p.at += n
		return word == "true", nil
	}
	f, err := strconv.ParseFloat(strings.ReplaceAll(word, "_", ""), 64)
	if i, bad := strconv.ParseInt(word, 0, 64); bad == nil { // also 0x, 0o and 0b
		f, err = float64(i), nil
	}
	if errors.Is(err, strconv.ErrRange) {
		return nil, p.wrong("a smaller number")
	}
	if err != nil || notTOML.MatchString(word) {
		return nil, p.wrong("a string, a number, true, false, an array or a table")
	}
	p.at += n
	return f, nil
}

// notTOML finds what Go reads as a number and TOML does not: 010, which would be 8, and lines
// below numbers that do not stand between two digits.
var notTOML = regexp.MustCompile(`^[+-]?0[0-9_]|__|^_|_$`)

func (p *tomlParser) array(depth int) (any, error) {
	list := []any{}
	for {
		p.space(true)
		if p.take("]") {
			return list, nil
		}
		v, err := p.value(depth + 1)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
		if p.space(true); !p.take(",") && !strings.HasPrefix(p.rest(), "]") {
			return nil, p.wrong("a comma or a closing bracket in the array")
		}
	}
}

func (p *tomlParser) inline(depth int) (any, error) {
	t := map[string]any{}
	for {
		p.space(true)
		if p.take("}") {
			return t, nil
		}
		if err := p.pair(t, depth+1); err != nil {
			return nil, err
		}
		if p.space(true); !p.take(",") && !strings.HasPrefix(p.rest(), "}") {
			return nil, p.wrong("a comma or a closing brace in the table")
		}
	}
}

// quoted reads a string. Single quotes keep everything; double quotes have escapes, of which
// those that JSON has too are read. Three quotes may span lines.
func (p *tomlParser) quoted() (string, error) {
	mark := p.rest()[:1]
	if long := strings.Repeat(mark, 3); strings.HasPrefix(p.rest(), long) {
		end := strings.Index(p.rest()[3:], long)
		if end < 0 {
			return "", p.wrong("a string that ends")
		}
		s := p.rest()[3 : 3+end]
		p.at += end + 6
		p.line += strings.Count(s, "\n")
		return strings.TrimPrefix(s, "\n"), nil
	}
	var b strings.Builder
	for i := p.at + 1; i < len(p.text); i++ {
		switch c := p.text[i]; {
		case c == mark[0]:
			p.at = i + 1
			return b.String(), nil
		case c == '\n':
			return "", p.wrong("a string that ends on its line")
		case c == '\\' && mark == `"` && i+1 < len(p.text):
			i++
			if at := strings.IndexByte(`"\/nrt`, p.text[i]); at >= 0 {
				b.WriteByte("\"\\/\n\r\t"[at])
			} else {
				b.WriteString(p.text[i-1 : i+1]) // names of files, which nobody reads here
			}
		default:
			b.WriteByte(c)
		}
	}
	return "", p.wrong("a string that ends")
}
