// This file owns how a script is parsed into statements.

package megatron

import (
	"fmt"
	"slices"
	"strings"
)

// parseScript returns the statements of a script.
func parseScript(text string) ([]statement, error) {
	s := &scanner{text: text, head: headOf(text)}
	if err := s.next(); err != nil {
		return nil, err
	}
	body, err := s.list()
	if err == nil && s.kind != 0 {
		err = s.next() // a bracket or word without its other half does not matter
		for err == nil && s.kind != 0 {
			var more []statement
			if more, err = s.list(); err != nil {
				break
			}
			if body = append(body, more...); s.kind != 0 {
				err = s.next()
			}
		}
	}
	return body, err
}

// ends are the words that end a list of statements.
var ends = []string{"then", "else", "elif", "fi", "do", "done", "esac", "}"}

func (s *scanner) isWord(word string) bool { return s.kind == 'w' && s.token == word }

func (s *scanner) isOperator(ops ...string) bool {
	return s.kind == 'o' && slices.Contains(ops, s.token)
}

// list reads statements up to a word or operator that ends them, which it leaves.
func (s *scanner) list() (out []statement, err error) {
	if s.depth++; s.depth > mostDepth {
		return nil, fmt.Errorf("statements are nested more than %d deep", mostDepth)
	}
	defer func() { s.depth-- }()
	for {
		switch {
		case s.kind == 0 || s.isOperator(")", ";;", ";&", ";;&") || s.kind == 'w' && slices.Contains(ends, s.token):
			return out, nil
		case s.kind == 'o' && s.token != "(":
			if err := s.next(); err != nil {
				return nil, err
			}
			continue
		}
		c, err := s.chain()
		if err != nil {
			return nil, err
		}
		if s.isOperator("&") {
			c = subshell{[]statement{c}}
		}
		out = append(out, c)
	}
}

// chain reads statements that && and || join.
func (s *scanner) chain() (statement, error) {
	var c chain
	for {
		item, err := s.statement()
		if err != nil {
			return nil, err
		}
		c.items = append(c.items, item)
		if !s.isOperator("&&", "||", "|", "|&") {
			break
		}
		op := s.token
		for s.kind == 'o' && (s.token == op || s.token == "\n") { // a line may end behind it
			if err := s.next(); err != nil {
				return nil, err
			}
		}
		if s.kind == 0 || s.kind == 'o' && s.token != "(" {
			break
		}
		c.ops = append(c.ops, op)
	}
	for i, item := range c.items { // each part of a pipeline is a process of its own
		if i > 0 && pipes(c.ops[i-1]) || i < len(c.ops) && pipes(c.ops[i]) {
			c.items[i] = subshell{[]statement{item}}
		}
	}
	if len(c.items) == 1 {
		return c.items[0], nil
	}
	return c, nil
}

func pipes(op string) bool { return op == "|" || op == "|&" }

// expect reads the word that must come next.
func (s *scanner) expect(word, before string) error {
	for s.isOperator("\n", ";") {
		if err := s.next(); err != nil {
			return err
		}
	}
	if !s.isWord(word) && !s.isOperator(word) {
		return fmt.Errorf("the script cannot be read: %q is missing behind %q", word, before)
	}
	return s.next()
}

func (s *scanner) statement() (statement, error) {
	if s.isOperator("(") {
		return s.brackets()
	}
	if s.kind != 'w' {
		return s.simple()
	}
	switch s.token {
	case "if":
		return s.ifStatement()
	case "while", "until":
		return s.whileStatement()
	case "for", "select":
		return s.forStatement()
	case "case":
		return s.caseStatement()
	case "{":
		if err := s.next(); err != nil {
			return nil, err
		}
		body, err := s.list()
		if err != nil {
			return nil, err
		}
		return block{body}, s.expect("}", "{")
	case "!":
		if err := s.next(); err != nil {
			return nil, err
		}
		if s.kind != 'w' {
			return block{}, nil
		}
		item, err := s.nested(s.statement)
		return negated{item}, err
	case "[[":
		return s.condition()
	case "function":
		if err := s.next(); err != nil {
			return nil, err
		}
		if name := strings.TrimSuffix(s.token, "()"); s.kind == 'w' && isName(name) {
			return s.function(name) // brackets may be left out
		}
	}
	name, ok := strings.CutSuffix(s.token, "()")
	if (ok || strings.HasPrefix(strings.TrimLeft(s.text[s.at:], " \t"), "()")) && isName(name) {
		return s.function(name)
	}
	return s.simple()
}

// nested calls a parser one level deeper.
func (s *scanner) nested(parse func() (statement, error)) (statement, error) {
	if s.depth++; s.depth > mostDepth {
		return nil, fmt.Errorf("statements are nested more than %d deep", mostDepth)
	}
	defer func() { s.depth-- }()
	return parse()
}

// brackets reads a subshell or an arithmetic command.
func (s *scanner) brackets() (statement, error) {
	if s.peek(0) == '(' && !s.open {
		end, err := s.closing(s.at-1, ')')
		if s.open = err != nil; !s.open {
			text := s.text[s.at:end]
			s.at = end
			return arithmetic{strings.TrimSuffix(strings.TrimPrefix(text, "("), "))")}, s.next()
		}
	}
	if err := s.next(); err != nil {
		return nil, err
	}
	body, err := s.list()
	if err != nil {
		return nil, err
	}
	if s.isOperator(")") {
		err = s.next()
	}
	return subshell{body}, err
}

func (s *scanner) function(name string) (statement, error) {
	if err := s.next(); err != nil {
		return nil, err
	}
	for s.isOperator("\n") || s.isWord("()") {
		if err := s.next(); err != nil {
			return nil, err
		}
	}
	if !s.isWord("{") && !s.isOperator("(") {
		return block{}, nil
	}
	body, err := s.nested(s.statement)
	return function{name, body}, err
}

func (s *scanner) ifStatement() (statement, error) {
	var b branches
	for {
		word := s.token
		if err := s.next(); err != nil {
			return nil, err
		}
		var condition []statement
		var err error
		if word != "else" {
			if condition, err = s.list(); err != nil {
				return nil, err
			}
			if err := s.expect("then", word); err != nil {
				return nil, err
			}
		}
		body, err := s.list()
		if err != nil {
			return nil, err
		}
		b.conditions, b.bodies = append(b.conditions, condition), append(b.bodies, body)
		if !s.isWord("elif") && !s.isWord("else") || word == "else" {
			return b, s.expect("fi", "if")
		}
	}
}

func (s *scanner) whileStatement() (statement, error) {
	l := loop{until: s.token == "until"}
	if err := s.next(); err != nil {
		return nil, err
	}
	var err error
	if l.condition, err = s.list(); err != nil {
		return nil, err
	}
	return s.loopBody(l, "while")
}

func (s *scanner) loopBody(l loop, word string) (statement, error) {
	err := s.expect("do", word)
	if err == nil {
		l.body, err = s.list()
	}
	if err == nil {
		err = s.expect("done", "do")
	}
	return l, err
}

func (s *scanner) forStatement() (statement, error) {
	if rest := strings.TrimLeft(s.text[s.at:], " \t"); strings.HasPrefix(rest, "((") {
		return s.countedLoop(len(s.text) - len(rest))
	}
	if err := s.next(); err != nil {
		return nil, err
	}
	l := loop{name: s.token}
	for s.kind != 0 && !s.isWord("do") {
		if err := s.next(); err != nil {
			return nil, err
		}
		if s.kind == 'w' && s.token != "in" && s.token != "do" {
			l.words = append(l.words, s.token)
		}
	}
	if !isName(l.name) {
		l.name, l.words = "_", []string{"1"}
	}
	return s.loopBody(l, "for")
}

// countedLoop reads for ((first; condition; next)), whose brackets are at a position.
func (s *scanner) countedLoop(at int) (statement, error) {
	end, err := s.closing(at, ')')
	if err != nil {
		return nil, err
	}
	parts := strings.Split(strings.TrimSuffix(strings.TrimPrefix(s.text[at:end], "(("), "))"), ";")
	if len(parts) != 3 {
		return nil, fmt.Errorf("the script cannot be read: for %s must have two semicolons", s.text[at:end])
	}
	s.at = end
	if err := s.next(); err != nil {
		return nil, err
	}
	return s.loopBody(loop{counted: parts}, "for")
}

func (s *scanner) caseStatement() (statement, error) {
	if err := s.next(); err != nil {
		return nil, err
	}
	c := selection{word: s.token}
	if err := s.next(); err != nil {
		return nil, err
	}
	if err := s.expect("in", "case"); err != nil {
		return nil, err
	}
	for {
		for s.isOperator("\n", ";;", ";&", ";;&", ";", "(") {
			if err := s.next(); err != nil {
				return nil, err
			}
		}
		if s.kind == 0 || s.isWord("esac") {
			return c, s.expect("esac", "case")
		}
		var patterns []string
		closed := false
		for !closed && (s.kind == 'w' || s.isOperator("|")) {
			if s.kind == 'w' {
				word := s.token
				if inner, open := strings.CutPrefix(word, "("); open { // a word if it has no blanks
					word, closed = strings.CutSuffix(inner, ")")
				}
				patterns = append(patterns, strings.Split(word, "|")...) // a | without blanks is part of a word
			}
			if err := s.next(); err != nil {
				return nil, err
			}
		}
		if !closed {
			if err := s.expect(")", "case"); err != nil {
				return nil, err
			}
		}
		body, err := s.list()
		if err != nil {
			return nil, err
		}
		c.patterns, c.bodies, c.ends = append(c.patterns, patterns), append(c.bodies, body), append(c.ends, s.token)
		if s.kind == 'w' && !s.isWord("esac") {
			return nil, fmt.Errorf("the script cannot be read: %q is missing behind %q", "esac", "case")
		}
	}
}

// condition reads [[ ... ]] as one command, with the operators inside as words.
func (s *scanner) condition() (statement, error) {
	c := simple{}
	for s.kind != 0 {
		c.words = append(c.words, s.token)
		end := s.isWord("]]")
		if err := s.next(); err != nil || end {
			return c, err
		}
	}
	return nil, fmt.Errorf("the script cannot be read: %q is missing behind %q", "]]", "[[")
}

// simple reads a command up to an operator.
func (s *scanner) simple() (statement, error) {
	c := simple{}
	for s.kind == 'w' || s.kind == 'r' {
		if s.kind == 'w' {
			c.words = append(c.words, s.token)
			if err := s.next(); err != nil {
				return nil, err
			}
			continue
		}
		mark := s.token
		if err := s.next(); err != nil {
			return nil, err
		}
		if s.kind != 'w' {
			break // nothing to redirect to
		}
		if before, ok := strings.CutSuffix(strings.TrimSuffix(mark, "-"), "<<"); ok && !strings.HasSuffix(before, "<") {
			h := newHere(s.token, strings.HasSuffix(mark, "-"))
			c.here, s.here = append(c.here, h), append(s.here, h)
		}
		if err := s.next(); err != nil {
			return nil, err
		}
	}
	if len(c.words) == 0 && s.kind == 'o' && s.token == "(" {
		return block{}, s.next()
	}
	return c, nil
}
