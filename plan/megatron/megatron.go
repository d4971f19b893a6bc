// Package megatron converts between jobs of Megatron-LM and setups. [Parse] reads
// arguments from a command line, a script, YAML or JSON, and [FromArgs] makes a
// [plan.Setup] of them. [Flags] returns the flags that ask for a setup, and [Unsaid]
// lists what no flag can ask for.
//
// This file owns the way from arguments to a setup, and the warnings about arguments that a
// setup cannot hold.
//
// Files that read the text: command.go owns the job that a command line or a script
// launches, launcher.go the GPUs that its launcher asks for, shell.go and the other files of that name the shell, yaml.go YAML and JSON,
// args.go single arguments, abbreviate.go the beginnings of flags, expr.go list expressions, and nearest.go and table.go flags that are
// misspelt or not read.
//
// Files that make the setup: model.go and mixer.go own the model, hybrid.go its pattern,
// adapt.go a model that is given beside the arguments, tokenizer.go its vocabulary,
// refuse.go jobs that are not predicted, split.go and layout.go the division
// of the job, settings.go batch, precision, optimiser and kernels, memory.go what saves
// memory, check.go contradictions, and numbers.go the arithmetic.
//
// Files that write flags: emit.go and emitset.go own the flags, unsaid.go what flags cannot
// express, and closest.go the nearest setup that they can.
package megatron

import (
	"cmp"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// Options adds what arguments do not say.
type Options struct {
	// GPUs is the number of GPUs. Zero takes it from the launcher's arguments
	// (nnodes, nproc-per-node), or else the smallest number that the layout allows.
	GPUs int
	// Hardware is the setup's hardware. It may be nil.
	Hardware *hardware.GPU
	// Vocab is the size of the vocabulary if the arguments leave it to a tokenizer.
	Vocab int
	// Name is the model's name.
	Name string
	// Model is the model of the job. Arguments may then shorten it, but not describe
	// another. If it is nil, the arguments describe the model.
	Model *model.Model
}

// Warning tells about an argument that was left out, or read in a way that may surprise.
type Warning struct {
	Flag string // without dashes, or none
	Text string // a sentence
}

// String returns the flag and the text.
func (w Warning) String() string {
	if w.Flag == "" {
		return w.Text
	}
	return "--" + w.Flag + ": " + w.Text
}

// Parse reads a file of arguments, as a map for [FromArgs]. A name that ends in .yaml or
// .yml means YAML, and one in .json JSON. Any other name means a command line or a shell
// script. Keys of the map that begin with a dollar sign are no flags; they say what the
// file does beside them. Parse returns an error if keys of YAML or JSON give a flag two
// values.
func Parse(name string, data []byte, o ParseOptions) (map[string]any, error) {
	switch strings.ToLower(path.Ext(name)) {
	case ".yaml", ".yml":
		return parseYAML(data, o.Env)
	case ".json":
		return parseJSON(data, o.Env)
	}
	return parseCommand(string(data), o)
}

// ParseOptions adds what a file does not hold itself. The zero value adds nothing.
type ParseOptions struct {
	// Env has variables that the file takes from its environment.
	Env map[string]string
	// Open returns another file that a script sources, by its path from the folder of
	// the script. It may be nil.
	Open func(name string) ([]byte, error)
}

// FromArgs returns the setup that arguments ask for. Keys are flags with or without
// dashes, with hyphens or underscores. Values are booleans for flags that take no value,
// numbers, strings or lists; a string such as "[a b c]" is a list too. FromArgs returns
// an error if the setup could not run in Megatron-LM, or if a flag is misspelt, and an
// [*Refused] if the job is not a decoder that trains.
func FromArgs(args map[string]any, o Options) (*plan.Setup, []Warning, error) {
	r, err := newReader(args)
	if err != nil {
		return nil, nil, err
	}
	if err := refuse(r, o); err != nil {
		return nil, nil, err
	}
	s := &plan.Setup{Hardware: o.Hardware}
	for _, step := range steps() {
		// Report a value that could not be read before what follows from it.
		if err := step(r, s, o); r.err != nil || err != nil {
			return nil, nil, r.blame(cmp.Or(r.err, err))
		}
	}
	r.leftovers(o.Model == nil)
	if r.err != nil {
		return nil, nil, r.err
	}
	return s, r.warnings, nil
}

// leftovers warns about every argument that nothing has read. In a file, an argument that
// is not known and whose name speaks of memory is an error.
func (r *reader) leftovers(file bool) {
	ignored, unmodelled := ignoredFlags(), unmodelledFlags()
	known, short := slices.Sorted(maps.Keys(r.known)), &abbreviations{}
	for _, name := range slices.Sorted(maps.Keys(r.args)) {
		switch v := r.args[name]; {
		case r.known[name] || ignored[name] || v.off:
		case unmodelled[name] != "":
			r.warn(name, "is not part of the forecast: "+unmodelled[name])
		default:
			r.unknown(name, file, known, short)
		}
	}
}

// unknown says what to do about a flag that Megatron-LM does not have either. A
// flag one or two letters away from one that decides about memory, and no more than a third of
// them, is an error: leaving it out would give a wrong answer that looks right.
func (r *reader) unknown(name string, file bool, known []string, short *abbreviations) {
	near, distance := nearest(name, known, max(2, len(name)/3))
	if distance <= min(2, max(1, len(name)/3)) && r.err == nil {
		r.err = fmt.Errorf("--%s is not a flag of Megatron-LM; did you mean --%s?", name, near)
		return
	}
	for _, word := range heavyWords {
		if file && r.err == nil && strings.Contains(name, word) {
			r.err = refused(option, "--%s is not known, and its name says that it can change memory; give --%[1]s false to plan the job without it", name)
			return
		}
	}
	text := "is not known, and was left out"
	if both := short.several(name); both != "" {
		text = both
	} else if distance <= len(name)/3 {
		text += "; the nearest flag that matters here is --" + near
	}
	r.warn(name, text)
}
