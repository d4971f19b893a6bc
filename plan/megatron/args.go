// This file owns single arguments: their names, their values as text, and how they are read
// as numbers, words and lists.

package megatron

import (
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
)

// value is the value of a flag: nothing, one word or more.
type value struct {
	words []string
	off   bool   // given as false or null
	open  string // a variable that is not set or a word in place of a number, if the flag can do without it
}

// reader returns arguments by name, with Megatron-LM's defaults. It notes which names were
// read, present or not: those are the flags that this package understands. It keeps its
// first error.
type reader struct {
	args     map[string]value
	known    map[string]bool
	warnings []Warning
	err      error
}

func newReader(args map[string]any) (*reader, error) {
	r := &reader{args: map[string]value{}, known: map[string]bool{}}
	for key, v := range args {
		name := flagName(key)
		if _, twice := r.args[name]; twice {
			return nil, fmt.Errorf("--%s is given twice under different spellings; keep one", name)
		}
		val, err := toValue(v)
		if dispensable[name] && slices.ContainsFunc(val.words, isVariable) || ofLauncher[name] && slices.ContainsFunc(val.words, isWord) {
			val = value{off: true, open: strings.Join(val.words, " ")}
		}
		if err != nil {
			return nil, fmt.Errorf("--%s: %w", name, err)
		}
		r.args[name] = val
	}
	return r, nil
}

// dispensable flags can be left out if a script takes them from its environment, because
// their numbers can be given otherwise.
var dispensable = map[string]bool{"nnodes": true, "nproc-per-node": true, "tokenizer-type": true, "tokenizer-model": true}

// ofLauncher are numbers in place of which torchrun takes a range or a word such as auto.
var ofLauncher = map[string]bool{"nnodes": true, "nproc-per-node": true}

func isWord(word string) bool {
	_, err := strconv.ParseFloat(word, 64)
	return err != nil
}

func isVariable(word string) bool { return strings.Contains(word, "$") }

// flagName removes leading dashes and replaces underscores by hyphens.
func flagName(key string) string {
	return strings.ReplaceAll(strings.TrimLeft(strings.TrimSpace(key), "-"), "_", "-")
}

func toValue(v any) (value, error) {
	switch v := v.(type) {
	case nil:
		return value{off: true}, nil
	case bool:
		return value{off: !v}, nil
	case string:
		return value{words: splitList(v)}, nil
	case []string:
		return value{words: v}, nil
	case []any:
		var out value
		for _, e := range v {
			one, err := toValue(e)
			if err != nil || one.off {
				return value{}, errors.New("a list must hold numbers and words alone")
			}
			out.words = append(out.words, one.words...)
		}
		return out, nil
	case float64:
		return value{words: []string{strconv.FormatFloat(v, 'g', -1, 64)}}, nil
	case int, int64, uint64:
		return value{words: []string{fmt.Sprint(v)}}, nil
	}
	return value{}, errors.New("a value must be a number, a word or a list, and not keys with values of their own")
}

// splitList splits "[a b c]" and "a b c". Expressions such as "([0]*3+[1])" have brackets
// inside and stay whole.
func splitList(s string) []string {
	s = strings.TrimSpace(s)
	if inner, ok := strings.CutPrefix(s, "["); ok && strings.HasSuffix(inner, "]") && !strings.ContainsAny(inner[:len(inner)-1], "[]") {
		s = strings.ReplaceAll(inner[:len(inner)-1], ",", " ")
	}
	words := strings.Fields(s)
	for i, w := range words {
		words[i] = strings.Trim(w, `"'`)
	}
	return words
}

func (r *reader) warn(flag, text string) {
	r.warnings = append(r.warnings, Warning{Flag: flag, Text: text})
}

func (r *reader) fail(format string, a ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, a...)
	}
}

// get marks a flag as understood and returns its words.
func (r *reader) get(name string) (words []string, given bool) {
	r.known[name] = true
	v, ok := r.args[name]
	for _, w := range v.words {
		if isVariable(w) && r.err == nil {
			r.err = r.unset(name, w)
		}
	}
	return v.words, ok && !v.off
}

func (r *reader) given(name string) bool {
	_, ok := r.get(name)
	return ok
}

// flag reads a flag without a value. Files may give it the value "true".
func (r *reader) flag(name string) bool {
	again := r.known[name]
	r.known[name] = true
	v, ok := r.args[name]
	words := slices.DeleteFunc(slices.Clone(v.words), isVariable) // what follows it in a script
	if i := slices.IndexFunc(v.words, isVariable); i >= 0 && strings.Contains(v.words[i], "{oc.env:") {
		r.get(name) // YAML, where nothing follows a flag
	} else if i >= 0 && !again {
		r.more(v.words[i])
	}
	if ok = ok && !v.off; !ok || len(words) == 0 {
		return ok
	}
	on, err := strconv.ParseBool(strings.ToLower(words[0]))
	if err != nil || len(words) > 1 {
		r.fail("--%s takes no value, but %q is given", name, strings.Join(words, " "))
	}
	return on
}

// more notes what a script takes from elsewhere and may be further arguments.
func (r *reader) more(word string) {
	if w := (Warning{Text: word + " may hold more arguments, which are not in the text and take no part"}); !slices.Contains(r.warnings, w) {
		r.warnings = append(r.warnings, w)
	}
}

// oneWord reads a flag's single word, or none. Files write "none" for that, unless the flag
// allows this word.
func (r *reader) oneWord(name string, allowed ...string) (string, bool) {
	words, ok := r.get(name)
	if !ok || (len(words) == 1 && strings.EqualFold(words[0], "none") && !slices.Contains(allowed, "none")) {
		return "", false
	}
	if len(words) == 0 {
		r.fail("--%s takes one value, but none is given", name)
		return "", false
	}
	if len(words) != 1 {
		r.fail("--%s takes one value, but %d are given", name, len(words))
		return "", false
	}
	return strings.Trim(words[0], `"'`), true
}

func (r *reader) word(name, otherwise string, allowed ...string) string {
	w, ok := r.oneWord(name, allowed...)
	if !ok {
		return otherwise
	}
	if len(allowed) > 0 && !slices.Contains(allowed, w) {
		r.fail("--%s %s is unknown; %schoose from %s", name, shown(w), meant(w, allowed), strings.Join(allowed, ", "))
	}
	return w
}

// mostCount bounds every count, so products of two fit into an int64.
const mostCount = math.MaxInt32

// count reads a number that is not negative.
func (r *reader) count(name string, otherwise int) int { return r.atLeast(0, name, otherwise) }

// positive reads a count that must not be zero.
func (r *reader) positive(name string, otherwise int) int { return r.atLeast(1, name, otherwise) }

// grouped are digits with underscores between them, as Python writes large numbers.
var grouped = regexp.MustCompile(`^[+-]?[0-9]+(_[0-9]+)+$`)

// atLeast reads a count. It must be whole, even if a file writes it as 4e3.
func (r *reader) atLeast(least float64, name string, otherwise int) int {
	w, ok := r.oneWord(name)
	if !ok {
		return otherwise
	}
	digits := w
	if grouped.MatchString(w) {
		digits = strings.ReplaceAll(w, "_", "")
	}
	f, ok := input.Number(digits)
	switch {
	case !ok || f != math.Trunc(f):
		r.fail("--%s %s: a whole number is expected", name, shown(w))
	case f < least:
		r.fail("--%s %s: the number must be at least %g", name, shown(w), least)
	case f > mostCount:
		r.fail("--%s %s: the number must be at most %d", name, shown(w), mostCount)
	default:
		return int(f)
	}
	return otherwise
}

func (r *reader) number(name string, otherwise float64) float64 {
	w, ok := r.oneWord(name)
	if !ok {
		return otherwise
	}
	f, ok := input.Number(w)
	if !ok {
		r.fail("--%s %s: a number is expected", name, shown(w))
		return otherwise
	}
	return f
}

// shown quotes a word in which spaces would be overlooked.
func shown(w string) string {
	if strings.ContainsFunc(w, unicode.IsSpace) || w == "" {
		return strconv.Quote(w)
	}
	return w
}

// share reads a number from 0 to 1.
func (r *reader) share(name string, otherwise float64) float64 {
	f := r.number(name, otherwise)
	if f < 0 || f > 1 {
		r.fail("--%s %g: the share must lie between 0 and 1", name, f)
		return otherwise
	}
	return f
}

// list reads a flag's words. Each must be allowed.
func (r *reader) list(name string, allowed ...string) []string {
	words, ok := r.get(name)
	if !ok {
		return nil
	}
	out := []string{}
	for _, w := range words {
		if len(allowed) > 0 && !slices.Contains(allowed, w) {
			r.fail("--%s %s is unknown; %schoose from %s", name, shown(w), meant(w, allowed), strings.Join(allowed, ", "))
		}
		if !slices.Contains(out, w) {
			out = append(out, w)
		}
	}
	return out
}

// modules reads a flag's modules. Megatron-LM must accept each for the choice.
func (r *reader) modules(name string, c memory.Choice) []string {
	allowed := memory.MegatronModules(c)
	words, _ := r.get(name)
	for _, w := range words {
		if _, ok := memory.LookupModule(w); ok && !slices.Contains(allowed, w) {
			r.fail("--%s %s is not one of Megatron-LM's %s modules; choose from %s", name, w, c, strings.Join(allowed, ", "))
		}
	}
	return r.list(name, allowed...)
}
