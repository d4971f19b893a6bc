// This file owns what stands between the braces of ${...}: which value is meant, and how it is changed.

package megatron

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// elsewhere is an index of an array whose elements are not one behind the other, or have names (declare -A): single ones
// are known, and all of them together are not.
const elsewhere = "[]"

func (sh *shell) scattered(name string) bool {
	_, is := sh.vars[name+elsewhere]
	return is
}

// parameter writes what stands between the braces of ${...}.
func (e *expansion) parameter(body, written string, quoted bool) {
	if count, ok := strings.CutPrefix(body, "#"); ok && count != "" {
		e.count(count, written, quoted)
		return
	}
	if body == "#" || body == "?" {
		e.value(strconv.Itoa(map[string]int{"#": len(e.sh.params)}[body]), quoted)
		return
	}
	if target, ok := strings.CutPrefix(body, "!"); ok && target != "" {
		e.indirect(target, written, quoted)
		return
	}
	sh := e.sh
	end := nameLength(body)
	name, op := body[:end], body[end:]
	if name != "" && name[0] >= '0' && name[0] <= '9' && !strings.HasPrefix(written, "${") {
		name, op = name[:1], "" // $10 is $1 and a zero, which is read by the caller
	}
	if name == "" && op != "" {
		name, op = op[:1], op[1:]
	}
	if index, after, ok := indexed(op); ok {
		e.atIndex(name, index, after, written, quoted)
		return
	}
	if name == "@" || name == "*" {
		e.list(sh.params, name, op, written, quoted) // none outside of functions
		return
	}
	values, set := sh.get(name)
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= len(sh.params) {
		values, set = sh.params[n-1:n], true
	}
	e.scalar(name, strings.Join(values[:min(len(values), 1)], ""), set, op, written, quoted)
}

// indexed divides [index] from what follows it.
func indexed(op string) (index, after string, ok bool) {
	if !strings.HasPrefix(op, "[") {
		return "", op, false
	}
	end, err := (&scanner{text: op}).closing(0, ']')
	if err != nil {
		return "", op, false
	}
	return op[1 : end-1], op[end:], true
}

// count writes the length of a value, or the number of elements of an array.
func (e *expansion) count(body, written string, quoted bool) {
	end := nameLength(body)
	name, op := body[:end], body[end:]
	index, after, array := indexed(op)
	all := index == "@" || index == "*"
	switch values, _ := e.sh.get(name); {
	case body == "@" || body == "*":
		e.value(strconv.Itoa(len(e.sh.params)), quoted)
	case name == "" || !array && op != "" || after != "" || all && e.sh.scattered(name):
		e.unread(written)
	case all:
		e.value(strconv.Itoa(len(values)), quoted)
	default:
		one := &expansion{sh: e.sh}
		if array {
			one.atIndex(name, index, "", written, true)
		} else {
			one.parameter(name, "${"+name+"}", true)
		}
		text := one.now.String()
		value, sure := known(text)
		if !sure {
			e.unknown(written)
			return
		}
		e.value(strconv.Itoa(len(lettersOf(value))), quoted)
	}
}

// indirect writes ${!NAME}, the value of the variable whose name a variable has, and ${!NAME[@]}, the indices of an array.
func (e *expansion) indirect(body, written string, quoted bool) {
	end := nameLength(body)
	name, op := body[:end], body[end:]
	values, set := e.sh.get(name)
	if op == "[@]" || op == "[*]" {
		if e.sh.scattered(name) {
			e.unread(written)
			return
		}
		indices := make([]string, len(values))
		for i := range values {
			indices[i] = strconv.Itoa(i)
		}
		e.list(indices, op[1:2], "", written, quoted)
		return
	}
	target := strings.Join(values[:min(len(values), 1)], "")
	if n, err := strconv.Atoi(name); err == nil && n > 0 && n <= len(e.sh.params) {
		target, set = e.sh.params[n-1], true
	}
	switch base, _, _ := strings.Cut(target, "["); {
	case name == "" || op == "*" || op == "@" || strings.HasPrefix(op, "["):
		e.unread(written)
	case !set || strings.Contains(target, unsetMark):
		e.unset(written)
	case !isName(base):
		e.unknown(written)
	default:
		e.parameter(target+op, "${"+target+op+"}", quoted)
	}
}

// atIndex writes elements of an array.
func (e *expansion) atIndex(name, index, after, written string, quoted bool) {
	sh := e.sh
	values, set := sh.get(name)
	if index == "@" || index == "*" {
		if sh.scattered(name) {
			e.unread(written)
			return
		}
		e.list(values, index, after, written, quoted)
		return
	}
	index = sh.text(index)
	if v, ok := sh.vars[name+"["+index+"]"]; ok { // declare -A
		e.scalar("", strings.Join(v, ""), true, after, written, quoted)
		return
	}
	n, ok := sh.arithmetic(index)
	if !ok {
		e.unset(written)
		return
	}
	if n < 0 {
		n += len(values)
	}
	there := ok && n >= 0 && n < len(values)
	value := ""
	if there {
		value = values[n]
	}
	if v, ok := sh.vars[name+"["+strconv.Itoa(n)+"]"]; ok {
		value, there = v[0], true
	}
	if !there && after == "" && (set || sh.scattered(name)) {
		return
	}
	e.scalar("", value, there, after, written, quoted)
}

// scalar writes one value, changed by the operator behind its name. A name is needed for = alone.
func (e *expansion) scalar(name, value string, set bool, op, written string, quoted bool) {
	sh := e.sh
	plain, _ := known(value)
	empty := !set || plain == "" && !strings.Contains(value, commandMark)
	plainOp := strings.TrimPrefix(op, ":")
	lacks := !set || plainOp != op && empty
	switch {
	case op == "" && set:
		e.value(value, quoted)
	case op == "":
		e.unset(written)
	case plainOp != "" && strings.IndexByte("-=", plainOp[0]) >= 0 && lacks:
		if plainOp[0] == '=' && isName(name) {
			sh.set(name, []string{sh.text(plainOp[1:])})
		}
		e.expand(plainOp[1:], quoted)
	case plainOp != "" && plainOp[0] == '+':
		if !lacks {
			e.expand(plainOp[1:], quoted)
		}
	case plainOp != "" && strings.IndexByte("-=?", plainOp[0]) >= 0 && set && (plainOp[0] != '?' || !lacks || strings.Contains(value, unsetMark)):
		e.value(value, quoted)
	case plainOp != "" && plainOp[0] == '?':
		e.unset("${" + name + "}")
	case !set || strings.Contains(value, unsetMark) && !strings.Contains(value, commandMark):
		e.unset(written)
	case strings.Contains(value, commandMark):
		e.unknown(written)
	default:
		if text, ok := sh.changed(value, op); ok {
			e.value(text, quoted)
		} else if strings.Contains(sh.text(op), unsetMark) {
			e.unset(written)
		} else {
			e.unread(written)
		}
	}
}

// list writes all elements of an array, or all parameters.
func (e *expansion) list(values []string, index, after, written string, quoted bool) {
	op := strings.TrimPrefix(after, ":")
	switch {
	case op != "" && strings.IndexByte("-+=?", op[0]) >= 0:
		lacks := len(values) == 0 || op != after && strings.Join(values, " ") == ""
		switch {
		case op[0] == '?' && lacks:
			e.unset(written)
			return
		case op[0] == '+' && lacks:
			e.some = e.some || quoted && len(values) > 0
			return
		case op[0] == '+' || lacks:
			e.some = e.some || quoted
			e.expand(op[1:], quoted)
			return
		}
	case op != after:
		from, length, ok := e.sh.sliced(op)
		if params := strings.HasPrefix(written, "${@") || strings.HasPrefix(written, "${*"); ok && params {
			ok = from != 0 // where the script's name stands
			if from > 0 {
				from-- // they count from 1
			}
		}
		if !ok || length < 0 {
			e.unread(written)
			return
		}
		first, end := cut(len(values), from, length)
		values = values[first:end]
	case after != "":
		changed := make([]string, len(values))
		for i, v := range values {
			var ok bool
			if changed[i], ok = e.sh.changed(v, after); !ok || strings.ContainsAny(v, unsetMark+commandMark) {
				e.unread(written)
				return
			}
		}
		values = changed
	}
	if index == "*" && (quoted || !e.split) { // one word
		separator := e.sh.separators()
		e.value(strings.Join(values, separator[:min(1, len(separator))]), quoted)
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
}

// sliced returns the offset and the length of "1" or "1:2". Without a length it is all that is left.
func (sh *shell) sliced(text string) (from, length int, ok bool) {
	s, length := &scanner{text: text}, math.MaxInt
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c == '?': // its colon is none between offset and length
			return 0, 0, false
		case c == '(':
			end, err := s.closing(i, ')')
			if err != nil {
				return 0, 0, false
			}
			i = end - 1
		case c == '$':
			end, err := s.quoted(i)
			if err != nil {
				return 0, 0, false
			}
			i = end - 1
		case c == ':':
			if length, ok = sh.offset(text[i+1:]); !ok {
				return 0, 0, false
			}
			text = text[:i]
		}
	}
	from, ok = sh.offset(text)
	return from, length, ok
}

func (sh *shell) offset(text string) (int, bool) {
	if strings.TrimSpace(text) == "" {
		return 0, true
	}
	return sh.arithmetic(text)
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

// replacement divides old/with at the first slash that is in no quotes and does not begin old.
func replacement(text string, from int) (old, with string) {
	s := &scanner{text: text}
	for at := 0; at < len(text); at++ {
		switch c := text[at]; {
		case c == '\\':
			at++
		case c == '/' && at >= from:
			return text[:at], text[at+1:]
		case strings.IndexByte("\"'$`", c) >= 0:
			if end, err := s.quoted(at); err == nil {
				at = end - 1
			}
		}
	}
	return text, ""
}

// changed applies an operator that changes a value as bash does. It returns false if the operator is one that we do not
// follow, or needs what is not known.
func (sh *shell) changed(value, op string) (string, bool) {
	if sh.letters += len(value); sh.steps > mostSteps {
		sh.fail(fmt.Errorf("the patterns of the text are compared with more than %d letters", mostSteps))
		return "", false
	}
	switch op[0] {
	case '%', '#':
		return sh.trimmed(value, op)
	case '/':
		return sh.replaced(value, op[1:])
	case '^', ',':
		return sh.cased(value, op)
	case ':':
		if op == ":" {
			return "", false
		}
		from, length, ok := sh.sliced(op[1:])
		letters := lettersOf(value)
		if length < 0 {
			first, _ := cut(len(letters), from, 0)
			if length += len(letters) - first; length < 0 {
				return "", false // bash stops there
			}
		}
		first, end := cut(len(letters), from, length)
		return strings.Join(letters[first:end], ""), ok
	}
	switch op {
	case "@U":
		return strings.ToUpper(value), true
	case "@L":
		return strings.ToLower(value), true
	case "@u":
		return sh.cased(value, "^")
	}
	return "", false
}

// trimmed removes the beginning (#) or the end (%) that a pattern matches, the longest one if the sign stands twice.
func (sh *shell) trimmed(value, op string) (string, bool) {
	word, twice := strings.CutPrefix(op[1:], op[:1])
	p, ok := sh.pattern(word, sh.extended)
	letters := lettersOf(value)
	if op[0] == '%' {
		p, letters = reversed(p), reversed(letters)
	}
	n, longest := p.beginnings(letters, &sh.steps)
	if twice {
		n = longest
	}
	if letters = letters[max(n, 0):]; op[0] == '%' {
		letters = reversed(letters)
	}
	return strings.Join(letters, ""), ok
}

// replaced puts a text in the place of what a pattern matches: once, everywhere behind a slash, or at the beginning (#) or
// the end (%) alone.
func (sh *shell) replaced(value, op string) (string, bool) {
	rest, everywhere := strings.CutPrefix(op, "/")
	from, where := 1, byte(0)
	if !everywhere && rest != "" && strings.IndexByte("#%", rest[0]) >= 0 {
		where, rest, from = rest[0], rest[1:], 0
	}
	old, word := replacement(rest, from)
	if old == "" && where == 0 {
		return value, true
	}
	p, ok := sh.pattern(old, sh.extended)
	with := sh.text(word)
	// Since bash 5.2 a & is what was found, and was itself before.
	if !ok || strings.ContainsAny(with, unsetMark+commandMark+"&") {
		return "", false
	}
	letters := lettersOf(value)
	if where == '%' {
		_, n := reversed(p).beginnings(reversed(letters), &sh.steps)
		if n < 0 {
			return value, true
		}
		return strings.Join(letters[:len(letters)-n], "") + with, true
	}
	if len(p) == 0 && where == 0 {
		return value, true
	}
	var out strings.Builder
	for at := 0; at < len(letters) || at == 0; {
		_, n := p.beginnings(letters[at:], &sh.steps)
		switch {
		case n >= 0 && (n > 0 || at == 0):
			out.WriteString(with)
			sh.letters += len(with)
			if at += n; !everywhere {
				return out.String() + strings.Join(letters[at:], ""), true
			}
			if n > 0 {
				continue
			}
		case where == '#':
			return value, true
		}
		if at == len(letters) || sh.letters > mostLetters || sh.steps > mostSteps {
			break
		}
		out.WriteString(letters[at])
		at++
	}
	return out.String(), true
}

// cased changes the letters that match a pattern, or the first one: ^ to upper case, a comma to lower case.
func (sh *shell) cased(value, op string) (string, bool) {
	word, all := strings.CutPrefix(op[1:], op[:1])
	if word == "" {
		word = "?"
	}
	p, ok := sh.pattern(word, sh.extended)
	change := strings.ToUpper
	if op[0] == ',' {
		change = strings.ToLower
	}
	letters := lettersOf(value)
	for i, l := range letters[:min(len(letters), max(1, map[bool]int{true: len(letters)}[all]))] {
		if _, n := p.beginnings([]string{l}, &sh.steps); n == 1 {
			letters[i] = change(l)
		}
	}
	return strings.Join(letters, ""), ok
}
