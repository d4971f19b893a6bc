// This file owns the commands of $(...) whose output the text decides: here-documents and files
// that cat prints, what echo and printf print, and the arithmetic of expr and bc. Nothing is
// executed.

package megatron

import (
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// output returns what the commands of $(...) print, and whether that is known.
func (sh *shell) output(text string) (out string, known bool) {
	sh.apart(func() { out, known = sh.pipeline(text) })
	return out, known
}

// pipeline returns what a command, or commands with pipes between them, print.
func (sh *shell) pipeline(text string) (string, bool) {
	body, err := parseScript(text)
	if err != nil || len(body) != 1 {
		return "", false
	}
	items := []statement{body[0]}
	if c, ok := body[0].(chain); ok {
		items = c.items
		if slices.ContainsFunc(c.ops, func(op string) bool { return op != "|" }) {
			return "", false
		}
	}
	out, known := "", false
	for i, item := range items {
		if part, ok := item.(subshell); ok && len(part.body) == 1 { // of a pipeline
			item = part.body[0]
		}
		c, ok := item.(simple)
		if !ok || len(c.words) == 0 {
			return "", false
		}
		if i == 0 {
			out, known = sh.prints(c)
		} else {
			out, known = sh.joins(c, out)
		}
		if !known {
			return "", false
		}
	}
	return strings.TrimRight(out, "\n"), known
}

// prints returns what a command prints from the text alone.
func (sh *shell) prints(c simple) (string, bool) {
	switch fields := sh.fields(c.words); {
	case len(fields) == 0: // variables without words
		return "", len(c.here) == 0
	case fields[0] == "cat" && len(c.here) == 1 && (len(fields) == 1 || len(fields) == 2 && fields[1] == "-"):
		return sh.here(c.here[0]), true
	case len(c.here) > 0 || len(fields) < 2:
	case fields[0] == "cat" && len(fields) == 2:
		return sh.file(fields[1])
	case fields[0] == "expr":
		return sh.computed(strings.Join(fields[1:], " "))
	case fields[0] == "printf" && (fields[1] == "%s " || fields[1] == "%s\\n"):
		return strings.Join(fields[2:], " ") + " ", true
	case fields[0] == "echo":
		words := fields[1:]
		if len(words) > 0 && words[0] == "-n" {
			words = words[1:]
		}
		out := strings.Join(words, " ")
		return out, !strings.HasPrefix(out, "-e") && !strings.HasPrefix(out, "-E") && !strings.ContainsAny(out, `\`)
	}
	return "", false
}

// joins returns what a command of a pipeline makes of what it reads, if it puts lines into one.
func (sh *shell) joins(c simple, in string) (string, bool) {
	switch strings.Join(c.words, " ") {
	case `tr '\n' ' '`, `tr "\n" " "`, `tr '\n' " "`, `tr -s '\n' ' '`:
		return strings.ReplaceAll(in, "\n", " "), true
	case "xargs":
		return strings.Join(strings.Fields(in), " "), !strings.ContainsAny(in, `'"\`)
	case "bc":
		return sh.computed(in)
	}
	return "", false
}

// computed returns what expr or bc make of whole numbers.
func (sh *shell) computed(text string) (string, bool) {
	if strings.Trim(text, "0123456789+-*/%() ") != "" || strings.Contains(text, "**") || octal.MatchString(text) {
		return "", false
	}
	n, ok := sh.arithmetic(text)
	return strconv.Itoa(n), ok
}

// octal finds numbers that a shell reads in another base than these commands.
var octal = regexp.MustCompile(`(^|[^0-9])0[0-9]`)

// file returns what is in another file of the script.
func (sh *shell) file(name string) (string, bool) {
	if sh.open == nil || sh.files >= mostFiles || strings.HasPrefix(name, "-") || strings.ContainsAny(name, unsetMark+commandMark) {
		return "", false
	}
	data, err := sh.open(name)
	if err != nil {
		return "", false
	}
	sh.files++
	return clean(string(data)), true
}

// here returns a here-document, whose variables count unless its end is quoted.
func (sh *shell) here(h *hereText) string {
	if h.plain {
		return h.text
	}
	e := &expansion{sh: sh, here: true}
	e.expand(h.text, true)
	e.end()
	return strings.Join(e.fields, " ")
}

// readHere follows the command read -r -d "" NAME <<EOF, which sets a variable to a here-document. It reports
// whether the command is that.
func (sh *shell) readHere(fields []string, here []*hereText) bool {
	if fields[0] != "read" || len(here) != 1 || len(fields) < 4 || !isName(fields[len(fields)-1]) {
		return false
	}
	ends := slices.Index(fields, "")
	if ends < 1 || ends != len(fields)-2 || !strings.HasSuffix(fields[ends-1], "d") || !strings.HasPrefix(fields[ends-1], "-") {
		return false
	}
	for _, f := range fields[1:ends] {
		if !slices.Contains([]string{"-r", "-d", "-rd"}, f) {
			return false
		}
	}
	sh.set(fields[len(fields)-1], []string{strings.Trim(sh.here(here[0]), sh.separators())})
	return true
}
