// This file owns how a script is followed: which of its statements count, and which
// commands it would run. Nothing is executed.

package megatron

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
)

// A script can repeat itself and put variables into each other, so the commands that are
// followed and the letters that are put in are bounded.
const mostCommands, mostLetters = 20_000, 4 << 20

var errCommands = fmt.Errorf("the script runs more than %d commands", mostCommands)

// shell follows a script.
type shell struct {
	vars      map[string][]string // a plain variable has one element
	order     []string            // names in the order in which they were first set
	params    []string            // of the function that runs, or of set --
	outer     map[string][]string // what local variables of that function hide; nil outside
	env       environ
	open      func(string) ([]byte, error) // nil if no other file is read
	functions map[string]statement
	ran       [][]string // commands that are not the shell's own
	batch     []string   // words of #SBATCH lines
	sourced   []string   // files that the script reads and that were not found
	files     int        // that were found

	guess   truth // of conditions that are not known; unsure follows all branches
	guesses bool  // whether there are such conditions

	unread     []string          // expansions that are not followed
	attributes map[string]string // of variables: i, u, l or n
	extended   bool              // patterns such as +(a) are allowed
	jumps      jumps

	commands, letters, steps int
	depth, within            int // of statements, and of words within each other
	err                      error
}

// follow follows a script.
func follow(text string, o ParseOptions, guess truth) (*shell, error) {
	sh := &shell{guess: guess, vars: map[string][]string{}, env: environ{given: o.Env, read: map[string]bool{}}, open: o.Open, functions: map[string]statement{}, attributes: map[string]string{}}
	for name, value := range o.Env {
		sh.vars[name] = []string{value}
	}
	sh.script(clean(text))
	if sh.err == nil && sh.letters > mostLetters {
		sh.err = fmt.Errorf("the variables of the text grow beyond %d letters", mostLetters)
	}
	return sh, sh.err
}

// clean writes ends of lines as Unix does and removes bytes that have a meaning here.
func clean(text string) string {
	return strings.NewReplacer("\r\n", "\n", unsetMark, "", commandMark, "").Replace(text)
}

// script follows a text, also one that a command has as an argument.
func (sh *shell) script(text string) {
	if sh.depth++; sh.depth > mostDepth {
		sh.fail(fmt.Errorf("variables and quoted command lines are nested without end"))
	}
	defer func() { sh.depth-- }()
	if sh.err != nil {
		return
	}
	body, err := parseScript(text)
	if err != nil && sh.depth == 1 { // a text inside of it may be anything
		sh.fail(err)
		return
	}
	sh.run(body)
}

func (sh *shell) fail(err error) {
	if sh.err == nil {
		sh.err = err
	}
}

// run follows statements and returns what is known about the last one.
func (sh *shell) run(body []statement) (t truth) {
	for _, s := range body {
		if sh.commands++; sh.commands > mostCommands {
			sh.fail(errCommands)
		}
		if sh.err != nil || sh.letters > mostLetters {
			return unsure
		}
		if t = sh.one(s); sh.jumps.kind != "" {
			return t
		}
	}
	return t
}

func (sh *shell) one(s statement) truth {
	sh.depth++
	defer func() { sh.depth-- }()
	if sh.depth > mostDepth {
		sh.fail(fmt.Errorf("functions are nested without end"))
		return unsure
	}
	switch s := s.(type) {
	case simple:
		return sh.command(s)
	case block:
		return sh.run(s.body)
	case subshell:
		t := unsure
		sh.apart(func() { t = sh.run(s.body) })
		return t
	case negated:
		return sh.one(s.item).not()
	case chain:
		return sh.chain(s)
	case branches:
		return sh.branches(s)
	case loop:
		sh.loop(s)
	case selection:
		sh.selection(s)
	case function:
		sh.functions[s.name] = s.body
	case arithmetic:
		return sh.let(s.text)
	}
	return unsure
}

// apart follows what a process of its own does, and forgets what it sets.
func (sh *shell) apart(follow func()) {
	vars, order, params, outer, functions, extended, jumps := sh.vars, sh.order, sh.params, sh.outer, sh.functions, sh.extended, sh.jumps
	sh.vars, sh.order, sh.outer, sh.functions = maps.Clone(vars), slices.Clone(order), maps.Clone(outer), maps.Clone(functions)
	sh.letters += len(vars) + len(functions) // copies count, so that they are bounded too
	follow()
	sh.vars, sh.order, sh.params, sh.outer, sh.functions, sh.extended, sh.jumps = vars, order, params, outer, functions, extended, jumps
}

func (sh *shell) chain(c chain) truth {
	t := sh.run(c.items[:1])
	for i, op := range c.ops {
		if op == "&&" && t == no || op == "||" && t == yes {
			continue
		}
		doubt := (op == "&&" || op == "||") && t == unsure
		t = sh.maybe(doubt, c.items[i+1:i+2])
		if sh.jumps.kind != "" {
			break
		}
	}
	return t
}

// branches follows the branch whose condition holds. If that is not known, it follows
// every branch that may be taken, in order, so that the last one counts.
func (sh *shell) branches(b branches) truth {
	for i, body := range b.bodies {
		t := yes
		if b.conditions[i] != nil {
			t = sh.run(b.conditions[i])
		}
		doubt := t == unsure
		if doubt {
			sh.guesses, t = true, sh.guess
		}
		if t == no {
			continue
		}
		sh.maybe(doubt, body)
		if t == yes || sh.jumps.kind != "" {
			break
		}
	}
	return unsure
}

// get returns the values of a variable, and whether it is set.
func (sh *shell) get(name string) ([]string, bool) {
	values, set := sh.vars[name]
	sh.env.look(name, strings.Join(values, " "), set)
	return values, set
}

func (sh *shell) set(name string, values []string) {
	if given, ok := sh.env.given[name]; ok && strings.ContainsAny(strings.Join(values, " "), unsetMark+commandMark) {
		values = []string{given} // what the caller gives replaces what is not known
	}
	if _, there := sh.vars[name]; !there {
		sh.order = append(sh.order, name)
	}
	sh.vars[name] = sh.attributed(name, values)
}

// attributed returns values as declare -i, -u and -l change them.
func (sh *shell) attributed(name string, values []string) []string {
	as := sh.attributes[name]
	if as == "" {
		return values
	}
	values = slices.Clone(values)
	for i, v := range values {
		if strings.ContainsAny(v, unsetMark+commandMark) {
			continue
		}
		switch as {
		case "i":
			n, ok := sh.offset(v)
			if values[i] = strconv.Itoa(n); !ok {
				values[i] = commandMark + "$((" + v + "))" + commandMark
			}
		case "u":
			values[i] = strings.ToUpper(v)
		case "l":
			values[i] = strings.ToLower(v)
		default:
			sh.unread = append(sh.unread, "${"+name+"}")
			values[i] = commandMark + "${" + name + "}" + commandMark
		}
	}
	return values
}

// forget removes a variable and all of its elements.
func (sh *shell) forget(name string) {
	delete(sh.vars, name)
	maps.DeleteFunc(sh.vars, func(v string, _ []string) bool { return strings.HasPrefix(v, name+"[") })
}

// scatter sets an element of an array whose elements are not one behind the other.
func (sh *shell) scatter(name, index, text string) {
	sh.set(name+"["+index+"]", []string{text})
	sh.vars[name+elsewhere] = []string{""}
}

// assign handles NAME=value, NAME+=value and their arrays, and reports whether the word is
// one of them.
func (sh *shell) assign(word string) bool {
	name, value, ok := strings.Cut(word, "=")
	name, more := strings.CutSuffix(name, "+")
	name, index, indexed := strings.Cut(name, "[")
	if !ok || !isName(name) {
		return false
	}
	if inner, array := strings.CutPrefix(value, "("); array && strings.HasSuffix(inner, ")") && !indexed {
		sh.assignArray(name, inner[:len(inner)-1], more)
		return true
	}
	text := sh.text(value)
	index = strings.TrimSuffix(index, "]")
	old := sh.vars[name]
	if more {
		old, _ = sh.get(name)
	}
	switch n, known := sh.arithmetic(index); {
	case !indexed:
		old = slices.Clone(old)
		if len(old) == 0 {
			old = []string{""}
		}
		if more && sh.attributes[name] == "i" {
			text = cmp.Or(old[0], "0") + "+(" + text + ")"
		} else if more {
			text = old[0] + text
		}
		if sh.letters += len(text); sh.letters > mostLetters {
			return true
		}
		old[0] = text
		sh.set(name, old)
	case known && n < 0:
		n += len(old)
		fallthrough
	case known && n >= 0 && n <= len(old):
		values := slices.Clone(old)
		if n < 0 {
			return true // which bash refuses
		}
		if n == len(values) {
			values = append(values, "")
		}
		if values[n] = text; more {
			values[n] = old[min(n, len(old)-1)] + text
		}
		sh.set(name, values)
	case known:
		sh.scatter(name, strconv.Itoa(n), text)
	default:
		sh.scatter(name, sh.text(index), text)
	}
	return true
}

// assignArray follows NAME=(...) and NAME+=(...).
func (sh *shell) assignArray(name, inner string, more bool) {
	var values []string
	var indices, texts []string
	for _, w := range arrayWords(inner) {
		if key, value, ok := strings.Cut(w, "]="); ok && strings.HasPrefix(key, "[") { // declare -A
			indices, texts = append(indices, sh.text(key[1:])), append(texts, sh.text(value))
		} else {
			values = append(values, sh.fields([]string{w})...)
		}
	}
	if more {
		old, _ := sh.get(name)
		values = append(slices.Clone(old), values...)
	}
	scattered := more && sh.scattered(name)
	if !more || scattered && len(indices) == 0 {
		sh.forget(name)
	}
	switch sh.letters += len(values); {
	case scattered && len(indices) == 0: // where the new elements are is not known
		sh.vars[name+elsewhere] = []string{""}
	case len(indices) == 0 || len(values) > 0:
		sh.set(name, values)
	}
	for i, index := range indices {
		sh.scatter(name, index, texts[i])
	}
}

// arrayWords splits what stands between the brackets of an array.
func arrayWords(text string) (words []string) {
	s := &scanner{text: text}
	for {
		if err := s.next(); err != nil || s.kind == 0 {
			return words
		}
		if s.kind == 'w' {
			words = append(words, s.token)
		}
	}
}

// own are commands whose words are not arguments of a job. The value is what is known
// about their success.
var own = map[string]truth{
	"true": yes, ":": yes, "false": no, "echo": yes, "printf": yes, "set": yes, "shopt": yes, "shift": yes, "trap": yes, "ulimit": yes, "wait": yes, "unset": yes,
	"let": unsure, "exit": unsure, "return": unsure, "cd": unsure, "mkdir": unsure, "rm": unsure, "cp": unsure, "mv": unsure, "ln": unsure, "ls": unsure, "cat": unsure,
	"sed": unsure, "awk": unsure, "grep": unsure, "tee": unsure, "sleep": unsure, "date": unsure, "read": unsure, "pip": unsure, "pip3": unsure, "git": unsure,
	"module": unsure, "conda": unsure, "command": unsure, "type": unsure, "which": unsure, "touch": unsure, "chmod": unsure, "wget": unsure, "curl": unsure,
	"mapfile": unsure, "readarray": unsure, "pushd": unsure, "popd": unsure, "nvidia-smi": unsure, "hostname": unsure, "pkill": unsure, "kill": unsure, "getopts": unsure, "break": unsure, "continue": unsure,
	"source": unsure, ".": unsure,
}

// declarations set variables that stand behind them.
var declarations = []string{"export", "declare", "local", "readonly", "typeset"}

func (sh *shell) command(c simple) truth {
	words := c.words
	n := 0
	for n < len(words) && assigned(words[n]) != "" {
		n++
	}
	if n == len(words) {
		for _, w := range words {
			sh.assign(w)
		}
		return yes
	}
	before, words := words[:n], words[n:]
	switch name := words[0]; {
	case name == batchWord:
		sh.slurm(sh.fields(words[1:]))
		return yes
	case slices.Contains(declarations, name):
		sh.declare(name, words[1:])
		return yes
	case name == "[" || name == "[[" || name == "test":
		return sh.test(words[1:], name == "[[")
	case strings.HasPrefix(name, "((") && strings.HasSuffix(name, "))"):
		return sh.one(arithmetic{name[2 : len(name)-2]})
	}
	fields := sh.fields(words) // before the command's own variables are set
	if len(fields) == 0 {
		return yes
	}
	for _, w := range before { // they are the command's alone
		name := assigned(w)
		defer sh.restore(name, sh.vars[name])
		sh.assign(w)
	}
	if body, ok := sh.functions[fields[0]]; ok {
		return sh.call(body, fields[1:])
	}
	if sh.readHere(fields, c.here) {
		return unsure
	}
	if t, ok := own[path.Base(fields[0])]; ok {
		if sh.builtin(fields); fields[0] == "getopts" && len(sh.params) == 0 {
			return no
		}
		return t
	}
	sh.external(fields, c.here)
	return unsure
}

// assigned returns the name of the variable that a word sets, or nothing.
func assigned(word string) string {
	name, _, ok := strings.Cut(word, "=")
	name, _, _ = strings.Cut(strings.TrimSuffix(name, "+"), "[")
	if !ok || !isName(name) {
		return ""
	}
	return name
}

// restore gives a variable the values that it had before, or none.
func (sh *shell) restore(name string, values []string) {
	if sh.vars[name] = values; values == nil {
		delete(sh.vars, name)
	}
}

// declare follows a declaration. In a function it hides variables of the same name, unless
// it is for all.
func (sh *shell) declare(word string, words []string) {
	global := word == "export" || word == "readonly" || slices.ContainsFunc(words, func(w string) bool {
		return strings.HasPrefix(w, "-") && strings.Contains(w, "g")
	})
	as, not := "", ""
	for _, w := range words {
		if strings.HasPrefix(w, "-") && word != "export" && word != "readonly" {
			for _, a := range []string{"i", "u", "l", "n"} {
				if strings.Contains(w, a) {
					as = a
				}
			}
			continue
		}
		if strings.HasPrefix(w, "+") {
			not += w[1:]
			continue
		}
		v, _, set := strings.Cut(w, "=")
		if sh.outer != nil && isName(v) && !global {
			if _, hidden := sh.outer[v]; !hidden {
				sh.outer[v] = sh.vars[v]
				delete(sh.attributes, v)
				if !set {
					delete(sh.vars, v)
				}
			}
		}
		switch {
		case as != "" && isName(v):
			sh.attributes[v] = as
		case sh.attributes[v] != "" && strings.Contains(not, sh.attributes[v]):
			delete(sh.attributes, v)
		}
		sh.assign(w)
	}
}

// call follows a function with its arguments.
func (sh *shell) call(body statement, params []string) truth {
	before, outer, around, attributes := sh.params, sh.outer, sh.jumps, maps.Clone(sh.attributes)
	sh.params, sh.outer, sh.jumps = params, map[string][]string{}, jumps{call: true}
	t := sh.one(body)
	sh.jumps = around
	for name, values := range sh.outer {
		if sh.restore(name, values); attributes[name] != "" {
			sh.attributes[name] = attributes[name]
		} else {
			delete(sh.attributes, name)
		}
	}
	sh.params, sh.outer = before, outer
	return t
}

func (sh *shell) builtin(fields []string) {
	switch name := path.Base(fields[0]); {
	case (name == "source" || name == ".") && len(fields) > 1:
		sh.source(fields[1])
	case name == "unset":
		for _, v := range fields[1:] {
			sh.unset(v)
		}
	case name == "break" || name == "continue" || name == "return":
		sh.jump(name, fields[1:])
	case name == "shopt":
		if on := slices.Contains(fields, "-s"); slices.Contains(fields, "extglob") {
			sh.extended = on || sh.extended && !slices.Contains(fields, "-u")
		}
	case name == "read" || name == "mapfile" || name == "readarray" || name == "getopts" || name == "printf":
		sh.input(name, fields[1:])
	case name == "set" && len(fields) > 1 && fields[1] == "--":
		sh.params = fields[2:]
	case name == "shift":
		n, err := strconv.Atoi(strings.Join(fields[1:], ""))
		if err != nil {
			n = 1
		}
		sh.params = sh.params[min(max(n, 0), len(sh.params)):]
	case name == "let":
		for _, f := range fields[1:] {
			sh.let(f)
		}
	}
}

// mostFiles bounds the files that a script can read.
const mostFiles = 32

// source follows another file. What a script puts before its name, such as $(pwd)/ or
// ${SCRIPT_DIR}/, is taken for the folder of the script.
func (sh *shell) source(name string) {
	plain := strings.TrimPrefix(name[strings.LastIndexAny(name, unsetMark+commandMark)+1:], "/")
	if plain != "" && sh.open != nil && sh.files < mostFiles && !strings.ContainsAny(plain, unsetMark+commandMark) {
		if data, err := sh.open(plain); err == nil {
			sh.files++
			sh.script(clean(string(data)))
			return
		}
	}
	sh.sourced = append(sh.sourced, marks.Replace(name))
}

// runsText are commands that run a text, which they have as an argument or read.
var runsText = []string{"bash", "sh", "zsh", "sbatch", "srun", "ssh", "salloc", "su"}

// external notes a command, and follows command lines in its words.
func (sh *shell) external(fields []string, here []*hereText) {
	name := path.Base(fields[0])
	if name == "eval" { // which is not a process of its own
		sh.script(strings.Join(fields[1:], " "))
		return
	}
	run := func(text string) { sh.apart(func() { sh.script(text) }) }
	reads := slices.Contains(runsText, name)
	for _, h := range here {
		switch {
		case !reads:
		default:
			run(sh.here(h))
		}
	}
	var words []string
	for i, f := range fields {
		flags := strings.Contains(" "+strings.Join(strings.Fields(f), " "), " --")
		divided := strings.ContainsAny(f, " \t\n")
		switch {
		case divided && (isText(fields[:i]) || strings.Contains(f, ".py ") && flags):
			run(f)
		case divided && flags:
			words = append(words, markedFields(f)...)
		default:
			words = append(words, f)
		}
	}
	sh.ran = append(sh.ran, words)
}

// isText reports whether the next word of a command is the text of a script: behind the
// option of a shell, or what ssh takes.
func isText(before []string) bool {
	if len(before) == 0 {
		return false
	}
	last := before[len(before)-1]
	option := len(last) > 1 && last[0] == '-' && last[1] != '-' && strings.HasSuffix(last, "c")
	shells := []string{"bash", "sh", "zsh"}
	return option && slices.ContainsFunc(before, func(w string) bool { return slices.Contains(shells, path.Base(w)) }) ||
		before[0] == "ssh"
}

// slurm notes the words of an #SBATCH line and what Slurm sets in the environment of such
// a job.
func (sh *shell) slurm(words []string) {
	sh.batch = append(sh.batch, words...)
	l := launcherOf(append([]string{batchWord}, sh.batch...))
	tasks := l.all
	if tasks == 0 {
		tasks = l.nodes * l.tasks
	}
	for name, value := range map[string]int{
		"SLURM_NNODES": l.nodes, "SLURM_JOB_NUM_NODES": l.nodes, "SLURM_NTASKS_PER_NODE": l.tasks, "SLURM_GPUS_ON_NODE": l.gpus, "SLURM_GPUS_PER_NODE": l.gpus,
		"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks,
	} {
		if _, set := sh.vars[name]; !set && value > 0 {
			sh.vars[name] = []string{strconv.Itoa(value)}
		}
	}
}
