// Package launch reads the launch files of systems other than Megatron-LM: what they say
// about a model and its layout, as settings of Megatron-LM.
package launch

// This file owns the result, and the way from a file's contents to its reader. Each system
// has a file of its own.

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/model"
)

// File is what a launch file says.
type File struct {
	// System is the system's name, as in "DeepSpeed".
	System string
	// Model is nil if the file does not describe one.
	Model *model.Model
	// Args are settings by the names of Megatron-LM's flags, without dashes.
	Args map[string]any
	// Keys are the keys of the file whose values Args has as they are, by flag.
	Keys map[string]string
	// GPUs is the number of GPUs that the file lays out, or zero.
	GPUs int
	// Accumulation is the number of microbatches of a step, if the file states it in
	// place of a global batch. Otherwise it is zero.
	Accumulation int
	// Unset says which key of the model's sizes has a value from another file or the
	// environment. It is empty if there is none.
	Unset string
	// Reads has the variables of the environment that the file reads, and From which of them
	// a key got its value from.
	Reads map[string]bool
	From  map[string]string
	// Notes says what was assumed, approximated or left out, a sentence each.
	Notes []string
}

// Described reports whether the settings describe a model by themselves.
func (f *File) Described() bool {
	return f.Model == nil && f.Args["num-layers"] != nil && f.Args["hidden-size"] != nil
}

// InFile returns an error about a setting in words of the file, if the file has it as it is.
func (f *File) InFile(err error) error {
	flag, problem, _ := strings.Cut(strings.TrimPrefix(err.Error(), "--"), " ")
	key := f.Keys[flag]
	said := fmt.Errorf("%s %s", key, problem)
	var refused *megatron.Refused
	switch {
	case key == "":
		return err
	case errors.As(err, &refused): // a variable
		other := *refused
		other.Text = said.Error()
		return &other
	case strings.HasPrefix(problem, "takes no value"):
		said = fmt.Errorf("%s is %s; it must be true or false", key, short(f.Args[flag]))
	}
	return f.blame(said)
}

// blame returns an error about the given variable that is the value of the key that the error
// begins with.
func (f *File) blame(err error) error {
	key, _, _ := strings.Cut(err.Error(), " ")
	if name := f.From[key]; name != "" {
		return fmt.Errorf("the variable %s is wrong: %w", name, err)
	}
	return err
}

// Parse reads a launch file. Variables of its environment are those of env. It returns nil if the contents are not those of a system that
// it knows, a *megatron.Refused if the file asks for what the planner does not model, and
// another error if the file is wrong.
func Parse(data []byte, env map[string]string) (*File, error) {
	if keys, err := deepSpeedKeys(data); err != nil || keys != nil {
		if err != nil {
			return nil, err
		}
		return deepSpeed(keys)
	}
	if isTitan(data) {
		return titan(data)
	}
	if isMaxText(data) {
		return maxText(data)
	}
	if isNeMo(data) {
		return nemo(data, env)
	}
	return nil, nil
}

// reader translates one file. It keeps the first error and goes on with harmless values.
type reader struct {
	file *File
	err  error
}

func newReader(system string) *reader {
	return &reader{file: &File{System: system, Args: map[string]any{}, Keys: map[string]string{}, Reads: map[string]bool{}, From: map[string]string{}}}
}

func (r *reader) done() (*File, error) {
	if r.err != nil {
		return nil, r.file.blame(r.err)
	}
	return r.file, nil
}

func (r *reader) set(flag string, value any) { r.file.Args[flag] = value }

func (r *reader) note(format string, args ...any) {
	r.file.Notes = append(r.file.Notes, fmt.Sprintf(format, args...))
}

func (r *reader) fail(format string, args ...any) {
	if r.err == nil {
		r.err = fmt.Errorf(format, args...)
	}
}

// refuse reports what the planner does not model.
func (r *reader) refuse(format string, args ...any) {
	if r.err == nil {
		r.err = &megatron.Refused{Kind: "not modelled: " + r.file.System, Text: fmt.Sprintf(format, args...)}
	}
}

// table is an object of a file. path is its name for errors, with a dot behind it unless it
// is the whole file.
type table struct {
	r    *reader
	path string
	keys map[string]any
	read map[string]bool
}

func (r *reader) table(path string, keys map[string]any) *table {
	return &table{r: r, path: path, keys: keys, read: map[string]bool{}}
}

// sub returns an object inside of the table. It is empty if the key is missing or null.
func (t *table) sub(key string) *table {
	t.read[key] = true
	inner, ok := t.keys[key].(map[string]any)
	if v := t.keys[key]; v != nil && !ok {
		t.r.fail("%s%s is %s; it must hold keys of its own", t.path, key, short(v))
	}
	return t.r.table(t.path+key+".", inner)
}

// has reports whether the key has a value.
func (t *table) has(key string) bool {
	t.read[key] = true
	return t.keys[key] != nil
}

// whole reads a whole number from lo to hi, or returns otherwise if the key is missing.
func (t *table) whole(key string, otherwise, lo, hi int) int {
	if !t.has(key) {
		return otherwise
	}
	f, ok := t.keys[key].(float64)
	if i, whole := t.keys[key].(int); whole {
		f, ok = float64(i), true
	}
	if !ok || f != float64(int(f)) || int(f) < lo || int(f) > hi {
		t.wrong(key, fmt.Sprintf("a whole number from %d to %d", lo, hi))
		return max(lo, 1)
	}
	return int(f)
}

// share reads a number from 0 to 1.
func (t *table) share(key string, otherwise float64) float64 {
	if !t.has(key) {
		return otherwise
	}
	f, ok := t.keys[key].(float64)
	if i, whole := t.keys[key].(int); whole {
		f, ok = float64(i), true
	}
	if !ok || !(f >= 0 && f <= 1) {
		t.wrong(key, "a number from 0 to 1")
	}
	return f
}

// wrong reports the value of a key, or the variable that it needs.
func (t *table) wrong(key, want string) {
	if v := t.keys[key]; isUnset(v) && t.r.err == nil {
		t.r.err = unset(t.path+key, v)
	}
	t.r.fail("%s%s is %s; it must be %s", t.path, key, short(t.keys[key]), want)
}

// flag reads true or false.
func (t *table) flag(key string, otherwise bool) bool {
	if !t.has(key) {
		return otherwise
	}
	b, ok := t.keys[key].(bool)
	if !ok {
		t.wrong(key, "true or false")
	}
	return b
}

// word reads a string, one of a list if there is one.
func (t *table) word(key, otherwise string, among ...string) string {
	if !t.has(key) {
		return otherwise
	}
	s, ok := t.keys[key].(string)
	if !ok || len(among) > 0 && !slices.Contains(among, s) {
		want := "a string"
		if len(among) > 0 {
			want = "one of " + strings.Join(among, ", ")
		}
		t.r.fail("%s%s is %s; it must be %s", t.path, key, short(t.keys[key]), want)
		return otherwise
	}
	return s
}

// on reports whether a key has a value that does not switch a part off: false, zero, an
// empty value, or a table with enabled set to false.
func (t *table) on(key string) bool {
	switch v := t.has(key); x := t.keys[key].(type) {
	case bool:
		return x
	case float64:
		return x != 0
	case int:
		return x != 0
	case string:
		return x != ""
	case []any:
		return len(x) > 0
	case map[string]any:
		return len(x) > 0 && x["enabled"] != false
	default:
		return v
	}
}

// without refuses keys that are on and that the planner does not model.
func (t *table) without(keys map[string]string) {
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if t.on(key) {
			t.r.refuse("%s%s %s, which is not modelled", t.path, key, keys[key])
		}
	}
}

// rest notes the keys that nobody has read, except those that change no memory.
func (t *table) rest(harmless ...string) {
	var unread []string
	for _, key := range slices.Sorted(maps.Keys(t.keys)) {
		if !t.read[key] && !slices.Contains(harmless, key) && t.on(key) {
			unread = append(unread, t.path+key)
		}
	}
	if n := len(unread); n > 8 {
		unread = append(unread[:8], fmt.Sprintf("and %d more", n-8))
	}
	if len(unread) > 0 {
		t.r.note("keys that are not known are left out: %s", strings.Join(unread, ", "))
	}
}

// short writes a value so that an error stays one line.
func short(v any) string {
	text, err := json.Marshal(v)
	if err != nil { // JSON has no infinity
		text = []byte(fmt.Sprint(v))
	}
	if len(text) > 40 {
		return fmt.Sprintf("%.40s...", text)
	}
	return string(text)
}
