// This file owns how the words of a script are expanded: quotes, blanks and what dollar signs begin. What a script takes from its
// environment or from a command is marked, so that conditions can ignore it and errors can name it.

package megatron

import (
	"fmt"
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
	here   bool // whether the word is a text that a command reads, in which quotes mean nothing
	match  bool // whether the word is a pattern, in which quotes take the meaning from stars
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

// literal writes text that stands for itself in a pattern too.
func (e *expansion) literal(text string) {
	if e.match && !strings.ContainsAny(text, unsetMark+commandMark) {
		text = escaped(text)
	}
	e.write(text)
}

// unknown writes what stands for a value that is not known.
func (e *expansion) unknown(written string) {
	e.write(commandMark + marks.Replace(written) + commandMark)
}

// unread writes what stands for an expansion that we do not follow, which an error names.
func (e *expansion) unread(written string) {
	e.sh.unread = append(e.sh.unread, marks.Replace(written))
	e.unknown(written)
}

// unset writes what stands for a variable that is not set.
func (e *expansion) unset(written string) {
	e.write(unsetMark + marks.Replace(written) + unsetMark)
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
	if quoted {
		e.literal(text)
		return
	}
	if !e.split {
		e.write(text)
		return
	}
	e.divide(text, e.sh.separators())
}

// marked returns the length of what is not known at the beginning of a text, with its marks, or
// zero.
func marked(text string) int {
	if text == "" || !strings.ContainsAny(text[:1], unsetMark+commandMark) {
		return 0
	}
	end := strings.IndexByte(text[1:], text[0])
	if end < 0 {
		return len(text)
	}
	return end + 2
}

// markedFields divides a text at blanks, except those in what is not known.
func markedFields(text string) (fields []string) {
	var now strings.Builder
	for at := 0; at < len(text); {
		if n := marked(text[at:]); n > 0 {
			now.WriteString(text[at : at+n])
			at += n
			continue
		}
		if strings.IndexByte(" \t\n", text[at]) < 0 {
			now.WriteByte(text[at])
		} else if now.Len() > 0 {
			fields = append(fields, now.String())
			now.Reset()
		}
		at++
	}
	if now.Len() > 0 {
		fields = append(fields, now.String())
	}
	return fields
}

// separators are the letters that divide values, which a script may set (IFS).
func (sh *shell) separators() string {
	if values, set := sh.vars["IFS"]; set {
		return strings.Join(values[:min(len(values), 1)], "")
	}
	return " \t\n"
}

// divide writes the fields of a value. Blanks count once, and each other separator ends a field, also an empty one.
func (e *expansion) divide(text, separators string) {
	blank := func(c byte) bool { return strings.IndexByte(separators, c) >= 0 && strings.IndexByte(" \t\n", c) >= 0 }
	for at := 0; at < len(text); {
		if strings.IndexByte(separators, text[at]) < 0 {
			from := at
			for at < len(text) && strings.IndexByte(separators, text[at]) < 0 {
				at += max(marked(text[at:]), 1)
			}
			e.write(text[from:at])
			continue
		}
		begun := at == 0 && !e.some
		for at < len(text) && blank(text[at]) {
			at++
		}
		if at < len(text) && strings.IndexByte(separators, text[at]) >= 0 {
			e.some = true
			at++
			for at < len(text) && blank(text[at]) {
				at++
			}
		} else if begun {
			continue
		}
		e.end()
	}
}

// fields expands words as they are written into the words of a command.
func (sh *shell) fields(words []string) (out []string) {
	for _, written := range words {
		for _, w := range sh.braces(written) {
			e := &expansion{sh: sh, split: true}
			e.expand(w, false)
			e.end()
			out = append(out, e.fields...)
		}
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

// pattern expands a word into a pattern, in which quoted letters stand for themselves. It returns false if the pattern
// is not known, or is one that we do not follow.
func (sh *shell) pattern(word string, extended bool) (glob, bool) {
	e := &expansion{sh: sh, match: true}
	e.expand(word, false)
	e.end()
	text := strings.Join(e.fields, " ")
	if strings.ContainsAny(text, unsetMark+commandMark) {
		return nil, false
	}
	return parseGlob(text, extended)
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
				e.literal(w[s.at : s.at+2])
			default:
				e.literal(w[s.at+1 : s.at+2])
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
		case quoted && c == '"' && !e.here: // in the text of "${X:-"text"}"
			s.at++
		case quoted:
			e.literal(w[s.at : s.at+1])
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
		e.literal(strings.TrimSuffix(p[1:], "'"))
	case p[0] == '"':
		inner := strings.TrimSuffix(p[1:], `"`)
		e.some = e.some || !wholeArray(inner)
		e.expand(inner, true)
	case strings.HasPrefix(p, "$'"):
		e.some = true
		e.literal(escapes(strings.TrimSuffix(p[2:], "'")))
	case strings.HasPrefix(p, `$"`):
		e.part(w[1:], n-1, quoted)
	case strings.HasPrefix(p, "$[") && strings.HasSuffix(p, "]"): // as scripts wrote it once
		p = "$((" + p[2:len(p)-1] + "))"
		fallthrough
	case strings.HasPrefix(p, "$(("):
		body := strings.TrimSuffix(strings.TrimPrefix(p, "$(("), "))")
		if n, ok := e.sh.arithmetic(body); ok {
			e.value(strconv.Itoa(n), quoted)
		} else {
			e.unknown(p)
		}
	case p[0] == '`':
		e.command(strings.Trim(p, "`"), quoted)
	case strings.HasPrefix(p, "$("):
		e.command(strings.TrimSuffix(p[2:], ")"), quoted)
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

// command writes the output of commands.
func (e *expansion) command(body string, quoted bool) {
	if out, ok := e.sh.output(body); ok {
		e.some = e.some || quoted
		e.value(out, quoted)
		return
	}
	e.unknown("$(" + body + ")")
}

// wholeArray reports whether what stands in quotes is an array alone. Without elements it is no
// word, even in quotes.
func wholeArray(inner string) bool {
	body, ok := strings.CutPrefix(inner, "${")
	if !ok {
		return inner == "$@"
	}
	body = strings.TrimPrefix(body, "!")
	end, err := (&scanner{text: inner}).quoted(0)
	op := body[nameLength(body):]
	return err == nil && end == len(inner) && (strings.HasPrefix(body, "@") || op != body && strings.HasPrefix(op, "[@]"))
}
