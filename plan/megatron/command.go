// This file owns the job that a command line or a shell script launches: which of its
// commands that is, and its arguments. launcher.go owns the GPUs that its launcher asks for.

package megatron

import (
	"fmt"
	"path"
	"slices"
	"strings"
)

// parseCommand reads the arguments of a job from a command line or a shell script, as a
// map for [FromArgs]. It follows variables, arrays, arithmetic and conditions as far as
// the text and the environment decide them. The arguments are those of the program that trains; if no
// command has the sizes of a model, variables that hold flags count too, as in files that
// others source. What the launcher says about GPUs comes along.
func parseCommand(text string, o ParseOptions) (map[string]any, error) {
	sh, err := follow(text, o, unsure)
	if err != nil {
		return nil, err
	}
	j := sh.job()
	if len(j.args) == 0 && len(sh.sourced)+len(j.open) == 0 {
		return nil, refused(noModelKind, "there is no model in this file: no flags are in the text; a list such as --num-layers 32 --hidden-size 4096 is expected")
	}
	args := map[string]any{}
	for name, words := range j.args {
		args[name] = words
	}
	if _, given := args["tokenizer-model"]; !given {
		for _, name := range []string{"TOKENIZER_MODEL", "TOKENIZER", "HF_MODEL_CKPT"} {
			if v, _ := sh.get(name); len(v) == 1 && v[0] != "" && !strings.ContainsAny(v[0], unsetMark+commandMark) {
				args["tokenizer-model"] = v // as scripts that source this one pass it on
				break
			}
		}
	}
	if j.program != "" {
		args[programKey] = []string{j.program}
	}
	if len(sh.sourced) > 0 {
		args[sourcedKey] = sh.sourced
	}
	if len(j.open) > 0 {
		args[openKey] = j.open
	}
	if len(sh.unread) > 0 {
		args[unreadKey] = sh.unread
	}
	if sh.guesses {
		if names := j.guessed(text, o); len(names) > 0 {
			args[guessedKey] = names
		}
	}
	if j.others {
		args[othersKey] = []string{"true"}
	}
	j.launcher.write(args)
	if notes := append(j.short.notes(args), j.notes...); len(notes) > 0 {
		args[notesKey] = notes
	}
	sh.env.write(args)
	return args, nil
}

// job is what a script launches.
type job struct {
	program  string
	args     map[string][]string
	open     []string // variables that may hold more arguments
	launcher launcher
	short    abbreviations
	notes    []string
	others   bool // whether there are launches with other arguments before
}

// guessed returns the flags that would be others if conditions that are not known held, or
// if they did not.
func (j *job) guessed(text string, o ParseOptions) (names []string) {
	ignored := ignoredFlags()
	for _, guess := range []truth{yes, no} {
		sh, err := follow(text, o, guess)
		if err != nil {
			continue
		}
		other := sh.job()
		if other.program != j.program || len(other.args) == 0 {
			continue // the whole job is in the other branch
		}
		for _, args := range []map[string][]string{j.args, other.args} {
			for name := range args {
				if !ignored[name] && (!slices.Equal(j.args[name], other.args[name]) || (j.args[name] == nil) != (other.args[name] == nil)) {
					names = append(names, name)
				}
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// part is a command divided at its program.
type part struct {
	before, after []string
	program       string
}

// divide finds the program of a command: the first Python file, or the module behind -m.
func divide(words []string) part {
	for i, w := range words {
		if strings.HasSuffix(w, ".py") && !strings.HasPrefix(w, "-") {
			return part{words[:i], words[i+1:], marks.Replace(w)}
		}
	}
	for i, w := range words[:max(len(words)-1, 0)] {
		if w == "-m" && !strings.HasPrefix(words[i+1], "torch") {
			return part{words[:i], words[i+2:], strings.ReplaceAll(marks.Replace(words[i+1]), ".", "/")}
		}
	}
	return part{after: words}
}

func isFlag(w string) bool { return len(w) > 2 && strings.HasPrefix(w, "--") }

func (sh *shell) job() *job {
	var parts []part
	for _, words := range sh.ran {
		parts = append(parts, divide(words))
	}
	j := &job{args: map[string][]string{}}
	for _, p := range parts {
		if p.program == "" || !slices.ContainsFunc(p.after, isFlag) && j.program != "" {
			continue
		}
		if kind, known := programKind(p.program); j.program == "" || known && kind == "" || !trains(j.program) {
			j.program = p.program // the last one that trains, or else the last one
		}
	}
	last := -1 // of its launches, of which each is a job of its own
	for i, p := range parts {
		if p.program == "" || path.Base(p.program) != path.Base(j.program) || last >= 0 && !slices.ContainsFunc(p.after, isFlag) {
			continue
		}
		if last >= 0 && (!slices.Equal(parts[last].after, p.after) || launcherOf(parts[last].before) != launcherOf(p.before)) {
			j.others = true
		}
		last = i
	}
	for i, p := range parts {
		switch {
		case i == last:
			j.launcher.add(p.before)
			j.read(p.after, true)
		case p.program == "" && j.program == "":
			j.read(p.after, false)
			j.launcher.add(p.after)
		case p.program == "" && len(p.after) > 0 && isFlag(p.after[0]):
			j.notes = append(j.notes, fmt.Sprintf("a line begins with %.40s, which a shell takes for a command of its own: what is on it takes no part; look for a missing backslash, or a comment, in the line before", marks.Replace(p.after[0])))
		case p.program == "":
			j.launcher.add(p.after) // srun, whose command was a text
		}
	}
	j.launcher.or(launcherOf(append([]string{batchWord}, sh.batch...)))
	if !slices.ContainsFunc(sizeFlags, func(f string) bool { return j.args[f] != nil }) {
		sh.fromVariables(j)
	}
	return j
}

func trains(program string) bool {
	kind, known := programKind(program)
	return known && kind == ""
}

// fromVariables adds the flags that variables hold, beneath those of the command.
func (sh *shell) fromVariables(j *job) {
	held := &job{args: map[string][]string{}, short: j.short}
	for _, name := range sh.order {
		words := markedFields(strings.ReplaceAll(strings.Join(sh.vars[name], " "), "\\\n", " "))
		if slices.ContainsFunc(words, isFlag) {
			p := divide(words)
			held.read(p.after, true)
			held.launcher.add(p.before)
		}
	}
	for name, words := range held.args {
		if j.args[name] == nil {
			j.args[name] = words
		}
	}
	j.launcher.or(held.launcher)
	j.short = held.short
	j.open = append(j.open, held.open...)
}

// read adds flags with their values. The last value counts. Behind a program, a variable
// that is not set and stands where no value is missing may hold further arguments.
func (j *job) read(words []string, behind bool) {
	name := ""
	for _, w := range words {
		flag, isFlag := strings.CutPrefix(w, "--")
		lone := w != "" && marked(w) == len(w)
		switch {
		case isFlag && flag != "":
			key, value, has := strings.Cut(flag, "=")
			name = j.short.whole(flagName(marks.Replace(key)))
			j.args[name] = []string{}
			if has {
				j.args[name], name = []string{marks.Replace(value)}, "" // the flag takes no more words
			}
		case lone && (name == "" || len(j.args[name]) > 0):
			if behind {
				j.open = append(j.open, marks.Replace(w))
			}
		case name != "":
			j.args[name] = append(j.args[name], marks.Replace(w))
		}
	}
}
