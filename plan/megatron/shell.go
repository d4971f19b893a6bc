// This file owns the grammar of shell scripts: words, commands, and the statements that
// hold them. shellrun.go runs statements, shellword.go expands words.

package megatron

import (
	"fmt"
	"strings"
)

// statement is one of the types below.
type statement interface{}

type (
	// simple is a command. Its words are as they are written.
	simple struct {
		words []string
		here  []*hereText
	}
	// chain runs statements one after the other. ops[i] stands between i and i+1: && or ||
	// for a condition, and anything else for none.
	chain struct {
		items []statement
		ops   []string
	}
	block struct{ body []statement }
	// subshell is ( ... ), a part of a pipeline, or what & puts into the background. What it
	// sets ends with it.
	subshell struct{ body []statement }
	negated  struct{ item statement }
	// branches are the parts of an if. The last condition is nil for an else.
	branches struct{ conditions, bodies [][]statement }
	loop     struct {
		name      string // of the variable, or none for while
		words     []string
		counted   []string // of for ((first; condition; next)), or nil
		until     bool
		condition []statement
		body      []statement
	}
	selection struct {
		word     string
		patterns [][]string
		bodies   [][]statement
		ends     []string // behind bodies: ;; or ;& or ;;&
	}
	function struct {
		name string
		body statement
	}
	// arithmetic is ((...)).
	arithmetic struct{ text string }
)

// hereText is the text that a command reads from the script.
type hereText struct {
	end    string
	plain  bool // in quotes: variables stay as they are written
	indent bool // tabs before its lines do not count
	text   string
}

// mostDepth bounds how deeply statements and quotes are nested.
const mostDepth = 100

// scanner splits a script. It has the position and the token that was read last.
type scanner struct {
	text  string
	at    int
	depth int

	kind  byte // 'w' for a word, 'o' for an operator, 0 at the end
	token string
	here  []*hereText // texts that begin at the next line
	open  bool        // a bracket is never closed, so that no other is looked for
	head  int         // the length of the lines before the first command, where sbatch looks for its own
}

func (s *scanner) byteAt(i int) byte {
	if i < len(s.text) {
		return s.text[i]
	}
	return 0
}

func (s *scanner) peek(i int) byte { return s.byteAt(s.at + i) }

// next reads a token.
func (s *scanner) next() error {
	for {
		switch c := s.peek(0); {
		case c == ' ' || c == '\t':
			s.at++
		case c == '\\' && s.peek(1) == '\n':
			s.at += 2
		case c == '#' && (s.at >= s.head || !strings.HasPrefix(s.text[s.at:], batchWord+" ")):
			s.at += len(line(s.text[s.at:]))
		case c == 0 && s.at >= len(s.text):
			s.kind, s.token = 0, ""
			return nil
		case c == '\n':
			s.at++
			s.kind, s.token = 'o', "\n"
			return s.hereTexts()
		default:
			return s.operatorOrWord()
		}
	}
}

// headOf returns the length of the empty lines and comments at the beginning of a script. Slurm
// reads no further.
func headOf(text string) (n int) {
	for l := range strings.Lines(text) {
		if word := strings.TrimSpace(l); word != "" && word[0] != '#' {
			break
		}
		n += len(l)
	}
	return n
}

func line(text string) string {
	if end := strings.IndexByte(text, '\n'); end >= 0 {
		return text[:end]
	}
	return text
}

var operators = []string{";;&", ";;", ";&", "&&", "||", "|&", ";", "&", "|", "(", ")"}

func (s *scanner) operatorOrWord() error {
	rest := s.text[s.at:]
	for _, op := range operators {
		if strings.HasPrefix(rest, op) && (op != "(" || s.balanced() == 0) && !strings.HasPrefix(rest, "&>") {
			s.kind, s.token = 'o', op
			s.at += len(op)
			return nil
		}
	}
	if n := redirection(rest); n > 0 {
		s.kind, s.token = 'r', rest[:n]
		s.at += n
		return nil
	}
	return s.word()
}

// word reads a word as it is written, without continued lines.
func (s *scanner) word() error {
	var out strings.Builder
	for s.at < len(s.text) {
		c := s.text[s.at]
		switch {
		case strings.IndexByte(" \t\n;&", c) >= 0:
			s.kind, s.token = 'w', out.String()
			return nil
		case c == '|' && out.Len() > 0 && strings.IndexByte(" \t\n|&\x00", s.peek(1)) < 0:
			out.WriteByte(c) // inside of a layout
			s.at++
		case c == '(' && isArray(out.String()):
			end, err := s.closing(s.at, ')')
			if err != nil {
				return err
			}
			out.WriteString(s.text[s.at:end])
			s.at = end
		case c == '(' && s.balanced() > 0:
			n := s.balanced()
			out.WriteString(s.text[s.at : s.at+n])
			s.at += n
		case strings.IndexByte("|()<>", c) >= 0:
			s.kind, s.token = 'w', out.String()
			return nil
		case c == '\\' && s.at+1 == len(s.text):
			return fmt.Errorf("the text ends with a backslash; the line that should follow is missing")
		case c == '\\' && s.text[s.at+1] == '\n':
			s.at += 2
		case c == '\\':
			out.WriteString(s.text[s.at : s.at+2])
			s.at += 2
		case strings.IndexByte("'\"`$", c) >= 0:
			end, err := s.quoted(s.at)
			if err != nil {
				return err
			}
			out.WriteString(s.text[s.at:end])
			s.at = end
		default:
			out.WriteByte(c)
			s.at++
		}
	}
	s.kind, s.token = 'w', out.String()
	return nil
}

// isArray reports whether a word is NAME= or NAME+=, before the bracket of an array.
func isArray(word string) bool {
	name, ok := strings.CutSuffix(word, "=")
	return ok && isName(strings.TrimSuffix(name, "+"))
}

// quoted returns the end of what a quote or a dollar sign at a position begins.
func (s *scanner) quoted(at int) (int, error) {
	if s.depth++; s.depth > mostDepth {
		return 0, fmt.Errorf("quotes and brackets are nested more than %d deep", mostDepth)
	}
	defer func() { s.depth-- }()
	switch c := s.text[at]; {
	case c == '\'' || c == '`':
		end := strings.IndexByte(s.text[at+1:], c)
		if end < 0 {
			return 0, fmt.Errorf("a quote (%c) is not closed", c)
		}
		return at + end + 2, nil
	case c == '"':
		return s.closing(at, '"')
	case strings.HasPrefix(s.text[at:], "$("):
		return s.closing(at+1, ')')
	case strings.HasPrefix(s.text[at:], "${"):
		return s.closing(at+1, '}')
	case strings.HasPrefix(s.text[at:], "$["):
		return s.closing(at+1, ']')
	case strings.HasPrefix(s.text[at:], "$$"):
		return at + 2, nil
	case strings.HasPrefix(s.text[at:], "$'"):
		for end := at + 2; end < len(s.text); end++ {
			switch s.text[end] {
			case '\\':
				end++
			case '\'':
				return end + 1, nil
			}
		}
		return 0, fmt.Errorf("a quote (') is not closed")
	case strings.HasPrefix(s.text[at:], "$\""):
		return s.quoted(at + 1)
	}
	return at + 1, nil
}

// closing returns the position behind the mark that closes what opens at a position:
// a quote, a brace or a bracket.
func (s *scanner) closing(at int, mark byte) (int, error) {
	open, depth := s.text[at], 1
	commands := mark == ')' && !strings.HasPrefix(s.text[at:], "((")
	var here []*hereText // that begin at the next line
	for i := at + 1; i < len(s.text); {
		switch c := s.text[i]; {
		case c == '<' && commands && strings.HasPrefix(s.text[i:], "<<") && s.byteAt(i+2) != '<' && s.text[i-1] != '<':
			h, n := announced(s.text[i+2:])
			here, i = append(here, h), i+2+n
			continue
		case c == '\n' && len(here) > 0:
			inner := &scanner{text: s.text, at: i + 1, here: here}
			if err := inner.hereTexts(); err != nil {
				return 0, err
			}
			here, i = nil, inner.at
			continue
		case c == '\\':
			i += 2
			continue
		case c == mark:
			if depth--; depth == 0 {
				return i + 1, nil
			}
		case c == open && open != '{': // which means nothing in ${...}
			depth++
		case c == '#' && commands && strings.IndexByte(" \t\n(", s.text[i-1]) >= 0:
			i += len(line(s.text[i:]))
			continue
		case c == '$' && mark == '"' && strings.IndexByte("({", s.byteAt(i+1)) < 0:
			// A quote behind it closes the text.
		case c == '$' || c == '`' || mark != '"' && (c == '"' || c == '\''):
			end, err := s.quoted(i)
			if err != nil {
				return 0, err
			}
			i = end
			continue
		}
		i++
	}
	if mark == '"' {
		return 0, fmt.Errorf("a quote (%c) is not closed", mark)
	}
	return 0, fmt.Errorf("a %q is not closed by %q", open, mark)
}

// announced reads what stands behind << up to the end of its word, and returns the length of that.
func announced(text string) (*hereText, int) {
	rest, indent := strings.CutPrefix(text, "-")
	rest = strings.TrimLeft(rest, " \t")
	n := len(rest)
	if end := strings.IndexAny(rest, " \t\n;&|()<>"); end >= 0 {
		n = end
	}
	return newHere(rest[:n], indent), len(text) - len(rest) + n
}

// newHere returns a here-document that a word ends. A word with quotes makes its text plain.
func newHere(word string, indent bool) *hereText {
	end := strings.NewReplacer("'", "", `"`, "", `\`, "").Replace(word)
	return &hereText{end: end, plain: end != word, indent: indent}
}

// balanced returns the length of text that a shell would not accept without quotes but that
// lists of arguments contain: a bracket expression without blanks, such as (tt|)*5 or
// (127,0). It is zero for anything else.
func (s *scanner) balanced() int {
	const longest = 1 << 10 // so that a text of brackets is not read again and again
	depth := 0
	for i := s.at; i < min(len(s.text), s.at+longest); i++ {
		switch s.text[i] {
		case '(':
			depth++
		case ')':
			depth--
		case ' ', '\t', '\n':
			return 0
		}
		if depth == 0 {
			return i + 1 - s.at
		}
	}
	return 0
}

// redirection returns the length of a redirection at the beginning of a text, such as > or
// 2>&1, or zero.
func redirection(text string) int {
	n := 0
	for n < len(text) && n < 2 && text[n] >= '0' && text[n] <= '9' {
		n++
	}
	if strings.HasPrefix(text, "&>") {
		n = 1
	}
	begin := n
	for n < len(text) && (text[n] == '>' || text[n] == '<') && n-begin < 3 {
		n++
	}
	if n == begin {
		return 0
	}
	if n < len(text) && (text[n] == '&' || text[n] == '|' || text[n] == '-' && strings.HasSuffix(text[:n], "<<")) {
		n++
	}
	return n
}

func isName(s string) bool {
	for i, c := range s {
		if c != '_' && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return s != ""
}

// hereTexts reads the texts that were announced in the line before.
func (s *scanner) hereTexts() error {
	for _, h := range s.here {
		var text strings.Builder
		for {
			if s.at >= len(s.text) {
				break // the end of the script ends it, as in a shell
			}
			l := line(s.text[s.at:])
			s.at = min(s.at+len(l)+1, len(s.text))
			if h.indent {
				l = strings.TrimLeft(l, "\t")
			}
			if l == h.end {
				break
			}
			text.WriteString(l + "\n")
		}
		h.text = text.String()
	}
	s.here = nil
	return nil
}
