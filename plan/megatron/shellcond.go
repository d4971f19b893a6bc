// This file owns the conditions of scripts, and what is known about them.

package megatron

import (
	"path"
	"slices"
	"strconv"
	"strings"
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

// test evaluates the words of [ and [[ up to the closing bracket.
func (sh *shell) test(words []string) truth {
	words = slices.DeleteFunc(slices.Clone(words), func(w string) bool { return w == "]" || w == "]]" || w == "\n" })
	for _, op := range []string{"||", "-o", "&&", "-a"} {
		if i := slices.Index(words, op); i > 0 {
			a, b := sh.test(words[:i]), sh.test(words[i+1:])
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
		return sh.test(words[1:]).not()
	}
	if len(words) > 2 && words[0] == "(" {
		return sh.test(words[1 : len(words)-1])
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
	case "=", "==":
		return truthOf(sh.matches(values[0], words[2]))
	case "!=":
		return truthOf(!sh.matches(values[0], words[2]))
	}
	a, err := strconv.Atoi(values[0])
	b, cannot := strconv.Atoi(values[2])
	compare, ok := map[string]bool{"-eq": a == b, "-ne": a != b, "-lt": a < b, "-le": a <= b, "-gt": a > b, "-ge": a >= b}[words[1]]
	if err != nil || cannot != nil || !ok {
		return unsure
	}
	return truthOf(compare)
}

// matches reports whether a value matches a pattern with *, ? and [a-z]. They count in
// quotes too, which no launch file depends on.
func (sh *shell) matches(value, pattern string) bool {
	pattern, _ = known(sh.text(pattern))
	plain := strings.NewReplacer("/", "\x03", "[!", "[^") // a star stands for slashes too
	ok, err := path.Match(plain.Replace(pattern), strings.ReplaceAll(value, "/", "\x03"))
	return value == pattern || ok && err == nil
}
