// This file owns the conditions of scripts, and what is known about them.

package megatron

import (
	"slices"
	"strconv"
)

// truth is what is known about a condition.
type truth int

const (
	unsure truth = iota // also for every command that is not run
	yes
	no
)

func truthOf(is bool) truth {
	if is {
		return yes
	}
	return no
}

func (t truth) not() truth { return [...]truth{unsure: unsure, yes: no, no: yes}[t] }

// test evaluates the words of [ and [[ up to the closing bracket. In [[ a word is a pattern, and a number an expression.
func (sh *shell) test(words []string, double bool) truth {
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "]" || w == "]]" || w == "\n" })
	for _, op := range []string{"||", "-o", "&&", "-a"} {
		if i := slices.Index(words, op); i > 0 {
			a, b := sh.test(words[:i], double), sh.test(words[i+1:], double)
			any := op == "||" || op == "-o"
			switch {
			case any && (a == yes || b == yes):
				return yes
			case !any && (a == no || b == no):
				return no
			case a == unsure || b == unsure:
				return unsure
			}
			return truthOf(!any)
		}
	}
	if len(words) > 0 && words[0] == "!" {
		return sh.test(words[1:], double).not()
	}
	if len(words) > 2 && words[0] == "(" {
		return sh.test(words[1:len(words)-1], double)
	}
	values, sure := make([]string, len(words)), true
	for i, w := range words {
		value, ok := known(sh.text(w))
		values[i], sure = value, sure && ok
	}
	switch {
	case len(words) == 2 && words[0] == "-v":
		_, set := sh.get(words[1])
		return truthOf(set)
	case !sure:
		return unsure
	case len(words) == 1:
		return truthOf(values[0] != "")
	case len(words) == 2 && words[0] == "-z":
		return truthOf(values[1] == "")
	case len(words) == 2 && words[0] == "-n":
		return truthOf(values[1] != "")
	case len(words) != 3:
		return unsure
	}
	switch words[1] {
	case "=", "==", "!=":
		t := truthOf(values[0] == values[2])
		if double {
			t = sh.matches(values[0], words[2], true)
		}
		if words[1] == "!=" {
			t = t.not()
		}
		return t
	}
	a, sure := sh.number(values[0], double)
	b, known := sh.number(values[2], double)
	compare, ok := map[string]bool{"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[words[1]]
	if !sure || !known || !ok {
		return unsure
	}
	return truthOf(compare)
}

func (sh *shell) number(value string, double bool) (int, bool) {
	if double && value != "" {
		return sh.arithmetic(value)
	}
	n, err := strconv.Atoi(value)
	return n, err == nil
}

// matches reports whether a value matches a pattern.
func (sh *shell) matches(value, word string, extended bool) truth {
	p, ok := sh.pattern(word, extended)
	if !ok {
		return unsure
	}
	return truthOf(p.matches(value, &sh.steps))
}
