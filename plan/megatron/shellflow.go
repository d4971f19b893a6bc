// This file owns loops and choices of scripts, and the jumps out of them.

package megatron

import (
	"maps"
	"slices"
	"strconv"
	"strings"
)

// jumps are the statements that end a loop, a turn of one, or a function. One that may not happen is not followed.
type jumps struct {
	kind    string // break, continue or return; none if the next statement follows
	levels  int    // how many loops it ends
	loops   int    // loops that are followed
	doubt   int    // branches that may not be taken, in the innermost loop or function
	around  int    // and around that loop, in the function
	doubted bool   // a jump stood in such a branch
	call    bool   // a function is followed
}

// maybe follows statements that may not be run.
func (sh *shell) maybe(doubt bool, body []statement) truth {
	if !doubt {
		return sh.run(body)
	}
	sh.jumps.doubt++
	defer func() { sh.jumps.doubt = max(sh.jumps.doubt-1, 0) }()
	return sh.run(body)
}

func (sh *shell) jump(kind string, fields []string) {
	j := &sh.jumps
	if kind == "return" && !j.call || kind != "return" && j.loops == 0 {
		return
	}
	if j.doubt > 0 || kind == "return" && j.around > 0 {
		j.doubted = true
		return
	}
	n, _ := strconv.Atoi(strings.Join(fields, ""))
	j.kind, j.levels = kind, min(max(n, 1), max(j.loops, 1))
}

// turn follows the body of a loop once, and reports whether the loop goes on.
func (sh *shell) turn(body []statement) bool {
	j := &sh.jumps
	doubt := j.doubt
	j.loops, j.doubt, j.around = j.loops+1, 0, j.around+doubt
	sh.run(body)
	j.loops, j.doubt, j.around = j.loops-1, doubt, j.around-doubt
	switch {
	case j.kind == "":
		return true
	case j.kind == "return":
		return false
	}
	if j.levels--; j.levels > 0 {
		return false
	}
	kind := j.kind
	j.kind = ""
	return kind == "continue"
}

func (sh *shell) loop(l loop) {
	doubted := sh.jumps.doubted
	sh.jumps.doubted = false
	defer func() { sh.jumps.doubted = sh.jumps.doubted || doubted }()
	switch {
	case l.counted != nil:
		sh.let(l.counted[0])
		sh.while(l.body, func() truth {
			if strings.TrimSpace(l.counted[1]) == "" {
				return yes
			}
			return sh.let(l.counted[1])
		}, func() { sh.let(l.counted[2]) })
	case l.name == "":
		sh.while(l.body, func() truth {
			if t := sh.run(l.condition); !l.until {
				return t
			} else {
				return t.not()
			}
		}, func() {})
	default:
		for _, w := range sh.fields(l.words) {
			if sh.set(l.name, []string{w}); sh.err != nil || !sh.turn(l.body) {
				return
			}
		}
	}
}

// while follows a loop as long as its condition holds. If the condition is not known, or a jump out of it is not, nor is how
// often it runs: then the body is followed once. A turn that changes nothing is the last.
func (sh *shell) while(body []statement, condition func() truth, next func()) {
	for sh.err == nil && sh.letters <= mostLetters {
		before, params := sh.vars, sh.params
		sh.vars = maps.Clone(before)
		sh.letters += len(before)
		t := condition()
		if t == unsure {
			if sh.guesses = true; sh.guess == no {
				return
			}
		}
		if t == no {
			return
		}
		on := sh.turn(body)
		if !on || t == unsure || sh.jumps.doubted {
			return
		}
		if next(); slices.Equal(params, sh.params) && maps.EqualFunc(before, sh.vars, slices.Equal) {
			return
		}
		if sh.commands++; sh.commands > mostCommands {
			sh.fail(errCommands)
		}
	}
}

// selection follows the first case whose pattern matches. If that is not known, it follows the cases that may be taken, as
// branches does.
func (sh *shell) selection(c selection) {
	value, sure := known(sh.text(c.word))
	falls := false
	for i, patterns := range c.patterns {
		t := no
		for _, p := range patterns {
			switch match := sh.matches(value, p, sh.extended); {
			case strings.Trim(p, "*") == "" && p != "":
				t = yes
			case !sure && t == no, match == unsure && t == no:
				t = unsure
			case sure && match == yes:
				t = yes
			}
		}
		if falls {
			t = yes
		}
		doubt := t == unsure
		if doubt {
			sh.guesses, t = true, sh.guess
		}
		if t == no {
			continue
		}
		sh.maybe(doubt, c.bodies[i])
		if falls = c.ends[i] == ";&"; sh.jumps.kind != "" || t == yes && !falls && c.ends[i] != ";;&" {
			return
		}
	}
}

// input marks the variables that a command sets from what it reads, because that is not known.
func (sh *shell) input(command string, fields []string) {
	var names []string
	for i := 0; i < len(fields); i++ {
		switch f := fields[i]; {
		case command == "printf" && f == "-v" && i+1 < len(fields):
			names = []string{fields[i+1]}
		case command == "printf":
		case len(f) > 1 && f[0] == '-' && command != "getopts":
			takes := strings.ContainsAny(f[len(f)-1:], "adinNptuOsCc")
			if takes = takes && !(command == "read" && strings.HasSuffix(f, "s")) && !(command != "read" && strings.HasSuffix(f, "t")); takes && i+1 < len(fields) {
				if i++; f[len(f)-1] == 'a' {
					names = append(names, fields[i])
				}
			}
		case command != "getopts" || i == 1:
			names = append(names, f)
		}
	}
	switch {
	case command == "getopts":
		names = append(names, "OPTARG", "OPTIND")
	case len(names) == 0 && command == "read":
		names = []string{"REPLY"}
	case len(names) == 0 && command != "printf":
		names = []string{"MAPFILE"}
	}
	for _, name := range names {
		if isName(name) {
			sh.forget(name)
			sh.set(name, []string{commandMark + "$(" + command + " " + name + ")" + commandMark})
		}
	}
}

// unset removes a variable or an element of an array.
func (sh *shell) unset(word string) {
	name, index, element := strings.Cut(word, "[")
	if !element {
		delete(sh.attributes, word)
		sh.forget(word)
		return
	}
	values, set := sh.vars[name]
	index = sh.text(strings.TrimSuffix(index, "]"))
	if n, ok := sh.arithmetic(index); ok && set {
		delete(sh.vars, name)
		for i, v := range values {
			if i != n && i-len(values) != n {
				sh.scatter(name, strconv.Itoa(i), v)
			}
		}
		sh.vars[name+elsewhere] = []string{""}
	}
	delete(sh.vars, name+"["+index+"]")
}
