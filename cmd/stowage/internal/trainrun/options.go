// Package trainrun is what `stowage train` does: it makes a run of the words that a
// user gives, trains it with a folder to come back to, or trains the same model
// under all memory policies and compares them.
//
// This file owns the options: their defaults, and the YAML that they are kept in.
// model.go owns models, job.go the way from options to a trainer, run.go one run,
// folder.go its folder, compare.go the comparison, forecast.go what is said of both
// without training, errors.go whose an error is, progress.go what is shown meanwhile.
package trainrun

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/goccy/go-yaml"

	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/train"
)

// Options are a run as a user gives it. Keys of YAML are the flags' names with
// underscores. Sizes of the layout that are zero are chosen by the model.
type Options struct {
	Model ModelSpec `yaml:"model"`
	Data  string    `yaml:"data"`
	Steps int       `yaml:"steps"`
	Seed  uint64    `yaml:"seed"`

	HoldOut   float64 `yaml:"hold_out"`   // the share of the text that is evaluated on
	EvalEvery int     `yaml:"eval_every"` // steps; zero evaluates at the end alone

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
	AuxLoss     *float64 `yaml:"aux_loss,omitempty"` // nil is the model's
	BiasRate    float64  `yaml:"bias_rate"`

	SaveEvery int `yaml:"save_every"`
	Keep      int `yaml:"keep"`
}

// Defaults are the options of a run of which nothing is said.
func Defaults() Options {
	a := train.DefaultOptim()
	return Options{
		Model: ModelSpec{Name: "tiny-moe"}, Seed: 1, Micro: 8, Seq: 128, Microbatches: 2, Dispatch: "alltoall", Device: "cpu",
		Fraction: 1, Prefetch: 1, GradComm: "fp32", LR: a.LR, MinLR: a.MinLR, WarmUp: a.WarmUp, Decay: a.Decay, Beta1: a.Beta1, Beta2: a.Beta2,
		WeightDecay: a.Weights, Clip: a.Clip, BiasRate: 1e-3, SaveEvery: 100, Keep: 2,
	}
}

// ChoosePolicy names the policy of a run that gives none: what is given instead of it
// says which. Rows of experts go into pages.
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

// Read reads options from a file of YAML over those that are there.
func (o *Options) Read(file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("%s cannot be read: %w", file, pathless(err))
	}
	return o.parse(file, text)
}

func (o *Options) parse(file string, text []byte) (err error) {
	defer func() { // the parser is not ours
		if p := recover(); p != nil {
			err = fmt.Errorf("%s cannot be read as YAML: %v", file, p)
		}
	}()
	if len(bytes.TrimSpace(text)) == 0 {
		return nil
	}
	strange := func(r rune) bool {
		return r == utf8.RuneError || unicode.IsControl(r) && !strings.ContainsRune("\n\r\t", r)
	}
	if i := bytes.IndexFunc(text, strange); i >= 0 {
		return fmt.Errorf("%s, line %d: the file has bytes that are no text", file, 1+bytes.Count(text[:i], []byte("\n")))
	}
	err = yaml.UnmarshalWithOptions(text, o, yaml.Strict())
	var said yaml.Error
	switch {
	case err == nil:
		return fractions(file, text)
	case !errors.As(err, &said):
		return err
	}
	at := file
	if t := said.GetToken(); t != nil && t.Position != nil {
		at = fmt.Sprintf("%s, line %d", file, t.Position.Line)
		var unknown *yaml.UnknownFieldError
		if errors.As(err, &unknown) {
			return fmt.Errorf("%s: unknown key %q%s", at, t.Value, meant(t.Value, keys()))
		}
	}
	var kind *yaml.TypeError
	if errors.As(err, &kind) && said.GetToken() != nil {
		return fmt.Errorf("%s: %q stands where %s belongs", at, said.GetToken().Value, kindWord(kind.DstType))
	}
	message, _, _ := strings.Cut(said.GetMessage(), "\n")
	return fmt.Errorf("%s: %s", at, message)
}

// fractions refuses numbers with one where whole ones belong; the parser cuts them off.
func fractions(file string, text []byte) error {
	given := map[string]any{}
	if yaml.Unmarshal(text, &given) != nil {
		return nil // the options could be read
	}
	for f := range reflect.TypeFor[Options]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		x, ok := given[name].(float64)
		if k := f.Type.Kind(); ok && (k == reflect.Int || k == reflect.Uint64) && x != math.Trunc(x) {
			return fmt.Errorf("%s: %s is %g, where a whole number belongs", file, name, x)
		}
	}
	return nil
}

// kindWord names a type for those who do not write this program.
func kindWord(t reflect.Type) string {
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

// keys are those of the file.
func keys() (names []string) {
	for f := range reflect.TypeFor[Options]().Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		names = append(names, name)
	}
	return names
}

// meant names the word that was probably meant, in brackets.
func meant(word string, known []string) string {
	best, least := "", len(word)/2+1
	for _, k := range known {
		if d := spell.Distance(word, k); d < least {
			best, least = k, d
		}
	}
	if best == "" {
		return "; the keys are " + strings.Join(known, ", ")
	}
	return fmt.Sprintf(" (did you mean %s?)", best)
}

// configHead is how the options of a run begin on disk.
const configHead = "# A run of stowage train; --config reads it.\n"

// Text is the options as YAML, which Read reads.
func (o *Options) Text() ([]byte, error) {
	text, err := yaml.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("the options cannot be written: %w", err)
	}
	return append([]byte(configHead), text...), nil
}
