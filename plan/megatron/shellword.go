// This file owns how the words of a script are expanded: quotes, variables and arrays. What a script takes from its environment or from a command is marked, so
// that conditions can ignore it and errors can name it.

package megatron

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// These bytes stand around what is not known, as it is written: a variable that is not set,
// and the output of a command.
const unsetMark, commandMark = "\x01", "\x02"

var marks = strings.NewReplacer(unsetMark, "", commandMark, "")

// known returns a value with nothing in place of variables that are not set, and whether
// it holds no output of a command.
func known(value string) (string, bool) {
	parts := strings.Split(value, unsetMark)
	var out strings.Builder
	for i := 0; i < len(parts); i += 2 {
		out.WriteString(parts[i])
	}
	return out.String(), !strings.Contains(value, commandMark)
}

// expansion collects the fields of a word.
type expansion struct {
	sh     *shell
	split  bool // whether blanks in values divide the word
	fields []string
	now    strings.Builder
	some   bool // whether now is a field, even if it is empty
}

func (e *expansion) write(text string) {
	if text != "" {
		e.now.WriteString(text)
		e.some = true
	}
}

func (e *expansion) end() {
	if e.some {
		e.fields = append(e.fields, e.now.String())
	}
	e.now.Reset()
	e.some = false
}

// value writes a variable's value. Outside of quotes its blanks divide the word.
func (e *expansion) value(text string, quoted bool) {
	if e.sh.letters += len(text) + 1; e.sh.letters > mostLetters {
		return
	}
	if quoted || !e.split || strings.HasPrefix(text, unsetMark) || strings.HasPrefix(text, commandMark) {
		e.write(text)
		return
	}
	for i, f := range strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == '\t' || r == '\n' }) {
		if i > 0 || strings.IndexByte(" \t\n", text[0]) >= 0 {
			e.end()
		}
		e.write(f)
	}
	if text != "" && strings.IndexByte(" \t\n", text[len(text)-1]) >= 0 {
		e.end()
	}
}

// fields expands words as they are written into the words of a command.
func (sh *shell) fields(words []string) (out []string) {
	for _, w := range words {
		e := &expansion{sh: sh, split: true}
		e.expand(w, false)
		e.end()
		out = append(out, e.fields...)
	}
	return out
}

// text expands a word into one value.
func (sh *shell) text(word string) string {
	e := &expansion{sh: sh}
	e.expand(word, false)
	e.end()
	return strings.Join(e.fields, " ")
}

// expand writes a word. Inside of double quotes only the dollar sign, the backquote and
// some escapes mean anything.
func (e *expansion) expand(w string, quoted bool) {
	e.sh.within++
	defer func() { e.sh.within-- }()
	if e.sh.within > mostDepth {
		e.sh.fail(fmt.Errorf("quotes and variables are nested more than %d deep", mostDepth))
		return
	}
	s := &scanner{text: w}
	for s.at < len(w) {
		c := w[s.at]
		switch {
		case c == '\\' && s.at+1 < len(w):
			next := w[s.at+1]
			switch {
			case next == '\n':
			case quoted && strings.IndexByte("\"\\$`", next) < 0:
				e.write(w[s.at : s.at+2])
			default:
				e.write(w[s.at+1 : s.at+2])
			}
			s.at += 2
		case c == '\'' && !quoted || c == '"' && !quoted || c == '$' || c == '`':
			end, err := s.quoted(s.at)
			switch {
			case err != nil:
				end = len(w)
			case quoted && c == '$' && strings.IndexByte("'\"", s.peek(1)) >= 0:
				end = s.at + 1 // quotes mean nothing in quotes
			}
			e.part(w[s.at:], end-s.at, quoted)
			if name, n := plainName(w[s.at:]); name != "" {
				end = s.at + n
			}
			s.at = end
		case !quoted && e.split && strings.IndexByte(" \t\n", c) >= 0: // in what stands for a variable that is not set
			e.end()
			s.at++
		default:
			e.write(w[s.at : s.at+1])
			s.at++
		}
	}
}

// plainName returns the name behind a dollar sign without braces, and the length of both.
func plainName(w string) (string, int) {
	if len(w) < 2 || w[0] != '$' {
		return "", 0
	}
	end := 1 + nameLength(w[1:])
	if end > 1 && w[1] >= '0' && w[1] <= '9' {
		end = 2 // $10 is $1 and a zero
	}
	if end == 1 && strings.IndexByte("#@*?$!-", w[1]) >= 0 {
		end = 2
	}
	return w[1:end], end
}

// nameLength returns how many bytes at the beginning can belong to a name.
func nameLength(w string) int {
	n := 0
	for n < len(w) && (w[n] == '_' || w[n] >= '0' && w[n] <= '9' || w[n] >= 'A' && w[n] <= 'Z' || w[n] >= 'a' && w[n] <= 'z') {
		n++
	}
	return n
}

// part writes one quoted or substituted part: the first n bytes of w.
func (e *expansion) part(w string, n int, quoted bool) {
	p := w[:n]
	switch {
	case p[0] == '\'':
		e.some = true
		e.write(strings.TrimSuffix(p[1:], "'"))
	case p[0] == '"':
		inner := strings.TrimSuffix(p[1:], `"`)
		e.some = e.some || !wholeArray(inner)
		e.expand(inner, true)
	case strings.HasPrefix(p, "$'"):
		e.write(strings.Trim(p[1:], "'"))
	case strings.HasPrefix(p, `$"`):
		e.part(w[1:], n-1, quoted)
	case strings.HasPrefix(p, "$(("):
		body := strings.TrimSuffix(strings.TrimPrefix(p, "$(("), "))")
		if n, ok := e.sh.arithmetic(body); ok {
			e.value(strconv.Itoa(n), quoted)
		} else {
			e.write(commandMark + marks.Replace(p) + commandMark)
		}
	case p[0] == '`':
		e.write(commandMark + "$(" + strings.Trim(p, "`") + ")" + commandMark)
	case strings.HasPrefix(p, "$("):
		e.write(commandMark + marks.Replace(p) + commandMark)
	case strings.HasPrefix(p, "${"):
		e.parameter(strings.TrimSuffix(p[2:], "}"), p, quoted)
	default:
		if name, n := plainName(w); name != "" {
			e.parameter(name, w[:n], quoted)
		} else {
			e.write("$")
		}
	}
}

// wholeArray reports whether what stands in quotes is an array alone. Without elements it is no
// word, even in quotes.
func wholeArray(inner string) bool {
	body, ok := strings.CutPrefix(inner, "${")
	if !ok {
		return inner == "$@"
	}
	end, err := (&scanner{text: inner}).quoted(0)
	op := body[nameLength(body):]
	return err == nil && end == len(inner) && (strings.HasPrefix(body, "@") || op != body && strings.HasPrefix(op, "[@]"))
}

// parameter writes what stands between the braces of ${...}.
func (e *expansion) parameter(body, written string, quoted bool) {
	sh := e.sh
	if count, ok := strings.CutPrefix(body, "#"); ok && count != "" {
		name, index, _ := strings.Cut(count, "[")
		values, _ := sh.get(name)
		n := len(values)
		switch at, ok := sh.arithmetic(strings.TrimSuffix(index, "]")); {
		case name == count: // the length of a text
			n = len(strings.Join(values, " "))
		case index != "@]" && index != "*]" && ok:
			n = len(strings.Join(slice(values, at, 1), ""))
		}
		e.value(strconv.Itoa(n), quoted)
		return
	}
	if body == "#" || body == "?" {
		e.value(strconv.Itoa(map[string]int{"#": len(sh.params)}[body]), quoted)
		return
	}
	end := nameLength(body)
	name, op := body[:end], body[end:]
	if name == "" && op != "" {
		name, op = op[:1], op[1:]
	}
	values, set := sh.get(name)
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= len(sh.params) {
		values, set = sh.params[n-1:n], true
	}
	if index, after, ok := strings.Cut(op, "]"); ok && strings.HasPrefix(index, "[") {
		if v, ok := sh.vars[name+"["+sh.text(index[1:])+"]"]; ok { // declare -A
			values, index = v, "[0"
		}
		e.element(values, index[1:], after, written, quoted)
		return
	}
	if name == "@" || name == "*" {
		params := sh.params // none outside of functions
		if from, length, ok := sliced(op); ok {
			if from > 0 {
				from-- // they count from 1
			}
			params, op = slice(params, from, length), ""
		}
		e.element(params, name, op, written, quoted)
		return
	}
	value := strings.Join(values[:min(len(values), 1)], "")
	plain, _ := known(value)
	empty := !set || plain == "" && !strings.Contains(value, commandMark)
	colon := strings.HasPrefix(op, ":")
	op = strings.TrimPrefix(op, ":")
	lacks := !set || colon && empty
	switch {
	case op == "" && set:
		e.value(value, quoted)
	case op == "":
		e.write(unsetMark + marks.Replace(written) + unsetMark)
	case strings.IndexByte("-=", op[0]) >= 0 && lacks:
		if op[0] == '=' {
			sh.set(name, []string{sh.text(op[1:])})
		}
		e.expand(op[1:], quoted)
	case op[0] == '+':
		if !lacks {
			e.expand(op[1:], quoted)
		}
	case strings.IndexByte("-=?", op[0]) >= 0 && set:
		e.value(value, quoted)
	case op[0] == '?':
		e.write(unsetMark + "${" + name + "}" + unsetMark)
	case !set:
		e.write(unsetMark + marks.Replace(written) + unsetMark)
	default:
		e.value(sh.changed(value, op, colon), quoted)
	}
}

// element writes elements of an array.
func (e *expansion) element(values []string, index, after, written string, quoted bool) {
	switch {
	case index == "@" || index == "*":
		if op := strings.TrimPrefix(after, ":"); op != "" && strings.IndexByte("-+=?", op[0]) >= 0 {
			lacks := len(values) == 0 || op != after && strings.Join(values, " ") == ""
			if op[0] == '+' && lacks {
				return
			}
			if op[0] == '+' || lacks && op[0] != '?' {
				e.some = e.some || quoted
				e.expand(op[1:], quoted)
				return
			}
		}
		if from, length, ok := sliced(after); ok {
			values = slice(values, from, length)
		}
		if index == "*" && quoted { // one word
			e.value(strings.Join(values, " "), true)
			return
		}
		for i, v := range values {
			if e.sh.letters > mostLetters {
				return
			}
			if i > 0 && e.split {
				e.end()
			} else if i > 0 {
				e.write(" ")
			}
			if quoted {
				e.some = true
			}
			e.value(v, quoted)
		}
	default:
		n, ok := e.sh.arithmetic(index)
		switch {
		case !ok:
			e.write(unsetMark + marks.Replace(written) + unsetMark)
		default:
			for _, v := range slice(values, n, 1) {
				e.value(v, quoted)
			}
		}
	}
}

// sliced returns the offset and the length of ":1" or ":1:2". Without a length it is all that is
// left. What begins with ":-", ":+", ":=" or ":?" is none: a negative offset has a space or a
// parenthesis before it.
func sliced(op string) (from, length int, ok bool) {
	op, ok = strings.CutPrefix(op, ":")
	if op != "" && strings.IndexByte("-+=?", op[0]) >= 0 {
		return 0, 0, false
	}
	text, most, has := strings.Cut(op, ":")
	from, err := strconv.Atoi(strings.Trim(text, " ()"))
	length = math.MaxInt
	if has && err == nil {
		length, err = strconv.Atoi(strings.TrimSpace(most))
	}
	return from, length, ok && err == nil && length >= 0
}

// cut returns where a part of n letters or elements begins and ends. A negative offset counts
// from the end.
func cut(n, from, length int) (first, end int) {
	if from < 0 {
		from += n
	}
	if from < 0 || from > n {
		return 0, 0
	}
	return from, from + min(length, n-from)
}

// slice returns a part of an array.
func slice(of []string, from, length int) []string {
	first, end := cut(len(of), from, length)
	return of[first:end]
}

// replacement divides old/with at the first slash that is in no quotes and does not begin old.
func replacement(text string) (old, with string) {
	s := &scanner{text: text}
	for at := 0; at < len(text); at++ {
		switch c := text[at]; {
		case c == '\\':
			at++
		case c == '/' && at > 0:
			return text[:at], text[at+1:]
		case strings.IndexByte("\"'$`", c) >= 0:
			if end, err := s.quoted(at); err == nil {
				at = end - 1
			}
		}
	}
	return text, ""
}

// changed applies the operators that change a value: % and # with a text or a star, / with
// texts, and an offset with a length. Variables are put into the texts.
func (sh *shell) changed(value, op string, colon bool) string {
	if colon {
		if from, length, ok := sliced(":" + op); ok {
			first, end := cut(len(value), from, length)
			return value[first:end]
		}
		return value
	}
	pattern := sh.text(strings.TrimLeft(op, "%#"))
	replace, global := strings.CutPrefix(strings.TrimPrefix(op, "/"), "/")
	old, with := replacement(replace)
	fixed := !strings.ContainsAny(old, "*?[\\#%{(`") && !strings.ContainsRune(with, '\\')
	switch old = sh.text(old); {
	case strings.HasPrefix(op, "/") && old != "" && fixed:
		times := 1
		if global {
			times = -1
		}
		return strings.Replace(value, old, sh.text(with), times)
	case strings.HasPrefix(op, "%"):
		if cut, ok := strings.CutSuffix(pattern, "*"); ok {
			find := strings.LastIndex
			if strings.HasPrefix(op, "%%") {
				find = strings.Index
			}
			if i := find(value, cut); i >= 0 && cut != "" {
				return value[:i]
			}
			return value
		}
		return strings.TrimSuffix(value, pattern)
	case strings.HasPrefix(op, "#"):
		if cut, ok := strings.CutPrefix(pattern, "*"); ok {
			find := strings.Index
			if strings.HasPrefix(op, "##") {
				find = strings.LastIndex
			}
			if i := find(value, cut); i >= 0 && cut != "" {
				return value[i+len(cut):]
			}
			return value
		}
		return strings.TrimPrefix(value, pattern)
	case op == "^^" || op == "@U":
		return strings.ToUpper(value)
	case op == ",," || op == "@L":
		return strings.ToLower(value)
	}
	return value
}
