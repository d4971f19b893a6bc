// Package run starts, resumes and compares training runs. It turns [Options] into a
// [Job], and a job can train one run with a folder to resume it from ([Job.Run]), train
// the same model under every memory policy ([Job.Compare]), or predict the memory of
// either without training ([Job.Forecast], [Job.ForecastAll]).
//
// Every mistake of the user is an [InputError], which often wraps a
// [memory.SettingError] that names a field of [Options], "Folder" or "Resume".
package run

// This file owns the options: their defaults and their YAML. model.go owns models,
// job.go the way from options to a trainer, run.go one run, folder.go its folder,
// compare.go the comparison, forecast.go forecasts, errors.go the errors, progress.go
// what is shown during a run.

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/lexer"
	"github.com/goccy/go-yaml/token"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/train"
)

// Options describes a run. The model chooses the sizes of the layout (PP, VPP, EP, DP)
// that are zero.
type Options struct {
	Model ModelSpec `yaml:"model"`
	Data  string    `yaml:"data"`
	Steps int       `yaml:"steps"`
	Seed  uint64    `yaml:"seed"`

	HoldOut   float64 `yaml:"hold_out"`   // share of the text that is evaluated on
	EvalEvery int     `yaml:"eval_every"` // steps; zero evaluates only at the end

	PP           int     `yaml:"pp"`
	VPP          int     `yaml:"vpp"`
	EP           int     `yaml:"ep"`
	DP           int     `yaml:"dp"`
	Micro        int     `yaml:"micro"`
	Seq          int     `yaml:"seq"`
	Microbatches int     `yaml:"microbatches"`
	Dispatch     string  `yaml:"dispatch"`
	Capacity     float64 `yaml:"capacity_factor"`
	Device       string  `yaml:"device"`

	Policy    string   `yaml:"policy"`
	Budget    string   `yaml:"budget,omitempty"`
	Offload   []string `yaml:"offload_modules,omitempty"`
	Fraction  float64  `yaml:"offload_fraction"`
	Recompute []string `yaml:"recompute_modules,omitempty"`
	Stash     []string `yaml:"stash_modules,omitempty"`
	Graph     []string `yaml:"graph,omitempty"`
	Pool      string   `yaml:"pool,omitempty"`
	Prefetch  int      `yaml:"prefetch"`
	GradComm  string   `yaml:"grad_comm_dtype"`
	BF16      bool     `yaml:"bf16"`

	LR          float64  `yaml:"lr"`
	MinLR       float64  `yaml:"min_lr"`
	WarmUp      int      `yaml:"warm_up"`
	Decay       int      `yaml:"decay"`
	Beta1       float64  `yaml:"beta1"`
	Beta2       float64  `yaml:"beta2"`
	WeightDecay float64  `yaml:"weight_decay"`
	Clip        float64  `yaml:"clip"`
	AuxLoss     *float64 `yaml:"aux_loss,omitempty"` // nil takes the model's
	BiasRate    float64  `yaml:"bias_rate"`

	Trace     bool `yaml:"trace"` // write traces to the folder
	SaveEvery int  `yaml:"save_every"`
	Keep      int  `yaml:"keep"`

	read []byte // the config.yaml of a run that these are the options of
	note string // what was wrong with it, or ""
}

// DefaultOptions returns the options of a run on the CPU with a small model and the
// built-in text. Steps is zero and must be set.
func DefaultOptions() Options {
	a := train.DefaultOptim()
	return Options{
		Model: ModelSpec{Name: "tiny-moe"}, Seed: 1, Micro: 4, Seq: 128, Microbatches: 2, Dispatch: "alltoall", Device: "cpu",
		Fraction: 1, Prefetch: 1, GradComm: "fp32", LR: a.LR, MinLR: a.MinLR, WarmUp: a.WarmUp, Decay: a.Decay, Beta1: a.Beta1, Beta2: a.Beta2,
		WeightDecay: a.WeightDecay, Clip: a.Clip, BiasRate: 1e-3, Trace: true, SaveEvery: 100, Keep: 2,
	}
}

// ChoosePolicy names a policy if none is given: "budget" with a budget, "graphs" with
// scopes to capture, and else "stash".
func (o *Options) ChoosePolicy() {
	switch {
	case o.Policy != "":
	case o.Budget != "":
		o.Policy = "budget"
	case len(o.Graph) > 0:
		o.Policy = "graphs"
	default:
		o.Policy = "stash"
	}
}

// ReadFile reads options from a file of YAML. It leaves those that the file does not
// name as they are. It returns an error if the file names none.
func (o *Options) ReadFile(file string) error {
	text, err := input.ReadFile(file, input.Settings)
	if err != nil {
		return fmt.Errorf("cannot read %s: %w", file, input.Cause(err))
	}
	if saysNothing(text) {
		return fmt.Errorf("%s says nothing; write options to it, such as \"steps: 100\", or give another file", file)
	}
	return o.parse(file, text)
}

// saysNothing reports whether YAML has no keys, only comments for example.
func saysNothing(text []byte) bool {
	var keys map[string]any
	return len(bytes.TrimSpace(text)) == 0 || input.UnmarshalYAML(text, &keys) == nil && len(keys) == 0
}

func (o *Options) parse(file string, text []byte) error {
	text = input.WithoutMark(text)
	strange := func(r rune) bool {
		return r == utf8.RuneError || unicode.IsControl(r) && !strings.ContainsRune("\n\r\t", r)
	}
	if i := bytes.IndexFunc(text, strange); i >= 0 {
		return fmt.Errorf("%s, line %d: expected text, got binary data", file, 1+bytes.Count(text[:i], []byte("\n")))
	}
	if saysNothing(text) {
		return nil // the parser would set all options to zero
	}
	err := input.UnmarshalYAML(text, o, yaml.Strict())
	var said yaml.Error
	if err != nil && !errors.As(err, &said) {
		return fmt.Errorf("%s: %w", file, err)
	}
	if err := decimal(file, text); err != nil {
		return err
	}
	if err == nil {
		return checkRead(file, text)
	}
	at := file
	if t := said.GetToken(); t != nil && t.Position != nil {
		at = fmt.Sprintf("%s, line %d", file, t.Position.Line)
		var unknown *yaml.UnknownFieldError
		if errors.As(err, &unknown) {
			return fmt.Errorf("%s: unknown key %q%s", at, t.Value, suggest(t.Value, optionKeys()))
		}
	}
	var kind *yaml.TypeError
	if errors.As(err, &kind) && said.GetToken() != nil {
		return fmt.Errorf("%s: expected %s, got %q", at, kindName(kind.DstType), said.GetToken().Value)
	}
	var large *yaml.OverflowError
	if errors.As(err, &large) {
		return fmt.Errorf("%s: %s is out of range; expected %s", at, large.SrcNum, kindName(large.DstType))
	}
	var node *yaml.UnexpectedNodeTypeError
	if errors.As(err, &node) {
		return fmt.Errorf("%s: expected %s, got %s", at, nodeName(node.Expected), nodeName(node.Actual))
	}
	var syntax *yaml.SyntaxError
	if errors.As(err, &syntax) { // the parser's own words are about its grammar
		t := said.GetToken()
		switch {
		case t == nil || t.Position == nil:
		case strings.Contains(said.GetMessage(), "already defined"):
			return fmt.Errorf("%s: %s is given twice; leave one of them out", at, t.Value)
		case indentedByTab(text, t.Position.Line):
			return fmt.Errorf("%s: a line begins with a tab; indent it with spaces", at)
		}
		return fmt.Errorf("%s: expected YAML such as steps: 100, got something that is not; look for a bracket or quote without its other half", at)
	}
	message, _, _ := strings.Cut(said.GetMessage(), "\n")
	return fmt.Errorf("%s: %s", at, message)
}

// indentedByTab reports whether a line of a text, counted from one, begins with a tab or
// has one behind spaces.
func indentedByTab(text []byte, line int) bool {
	lines := bytes.Split(text, []byte("\n"))
	return line > 0 && line <= len(lines) && bytes.HasPrefix(bytes.TrimLeft(lines[line-1], " "), []byte("\t"))
}

// nodeName names a part of a YAML file in plain words.
func nodeName(n ast.NodeType) string {
	switch n {
	case ast.SequenceType:
		return "a list"
	case ast.MappingType, ast.MappingValueType:
		return "keys with values"
	case ast.StringType, ast.LiteralType:
		return "a word"
	case ast.IntegerType, ast.FloatType, ast.InfinityType, ast.NanType:
		return "a number"
	case ast.BoolType:
		return "true or false"
	}
	return "something else"
}

// checkRead returns an error about what the parser lets pass: a key that is no word, such as
// 1 or true, a key without a value, a whole number with a fraction, which it cuts off, and one that is too large,
// which it makes another number of.
func checkRead(file string, text []byte) error {
	given := map[string]any{}
	if input.UnmarshalYAML(text, &given) != nil {
		return nil // the options could be read
	}
	known := optionKeys()
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if !slices.Contains(known, key) {
			return fmt.Errorf("%s: unknown key %q%s", file, key, suggest(key, known))
		}
		if given[key] == nil { // as a script writes it whose variable is not set
			return fmt.Errorf("%s: %s has no value; give one, or leave the line out", file, key)
		}
	}
	for f := range reflect.TypeFor[Options]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		k := f.Type.Kind()
		if k != reflect.Int && k != reflect.Uint64 {
			continue
		}
		text, _ := given[name].(string) // of a number that is too large
		x, ok := given[name].(float64)
		if _, err := strconv.ParseUint(text, 10, 64); errors.Is(err, strconv.ErrRange) || ok && (x != math.Trunc(x) || math.Abs(x) >= 1<<63) {
			return fmt.Errorf("%s: expected a whole number for %s, got %s", file, name, strings.Replace(fmt.Sprint(given[name]), "e+", "e", 1))
		}
	}
	return nil
}

// otherNumber is a number that is not written in decimal digits.
var otherNumber = regexp.MustCompile(`^[+-]?(0[xXoObB][0-9a-fA-FpP_.+-]+|0[0-9_]+|[0-9]+(_[0-9]+)+)$`)

// decimal returns an error if an option that is a number is not written in decimal digits, as on a command line: 0x10, 1_000,
// or 010, which means different numbers to different readers.
func decimal(file string, text []byte) error {
	tokens := lexer.Tokenize(string(text))
	for i := 1; i+1 < len(tokens); i++ {
		key, value := tokens[i-1].Value, tokens[i+1]
		if tokens[i].Type != token.MappingValueType || !otherNumber.MatchString(value.Value) {
			continue
		}
		for f := range reflect.TypeFor[Options]().Fields() {
			kind := f.Type.Kind()
			if kind == reflect.Pointer {
				kind = f.Type.Elem().Kind()
			}
			if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name == key && kind >= reflect.Int && kind <= reflect.Float64 {
				return fmt.Errorf("%s, line %d: expected a number in decimal digits for %s, such as 8, got %s", file, value.Position.Line, name, value.Value)
			}
		}
	}
	return nil
}

// kindName names a type in plain words.
func kindName(t reflect.Type) string {
	switch {
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.String:
		return "a word"
	case t.Kind() == reflect.Slice:
		return "a list"
	case t.ConvertibleTo(reflect.TypeFor[float64]()) && t.Kind() != reflect.Float64:
		return "a whole number"
	}
	return "a number"
}

// optionKeys returns the keys that a file can have.
func optionKeys() (names []string) {
	for f := range reflect.TypeFor[Options]().Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("yaml"), ","); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// suggest returns the known word that is nearest to a word, in brackets.
func suggest(word string, known []string) string {
	if near := spell.Nearest(word, known); near != "" {
		return fmt.Sprintf(" (did you mean %s?)", near)
	}
	return "; the keys are " + strings.Join(known, ", ")
}

// configHead begins the options of a run on disk.
const configHead = "# A run of stowage train"

// encode returns the options as the YAML that ReadFile reads.
func (o *Options) encode() ([]byte, error) {
	text, err := yaml.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("cannot write the options: %w", err)
	}
	if err := input.CheckYAML(text); err != nil { // a run must be able to read them again
		return nil, fmt.Errorf("cannot write the options: %w", err)
	}
	return append([]byte(configHead+".\n"), text...), nil
}
