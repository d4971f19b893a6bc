// Package megatron reads and writes jobs in the words of Megatron-LM: argument
// lists as they stand on a command line or in a script, the YAML of its
// functional tests, and maps of arguments become a [plan.Setup]; a setup becomes
// the flags that ask for it. It is pure.
//
// This file owns the way in: from arguments to a setup, and what is said about
// those that have no place in it. args.go reads single values, command.go and
// yaml.go files; model.go, split.go and settings.go build the parts of a setup,
// check.go refuses contradictions, emit.go writes flags.
package megatron

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// Options has what an argument list does not say.
type Options struct {
	// GPUs is the size of the job; zero takes it from the launcher's arguments
	// (nnodes, nproc-per-node), or else the smallest that the layout needs.
	GPUs int
	// Hardware becomes that of the setup; it may be nil.
	Hardware *hardware.GPU
	// Vocab is the size of the vocabulary where the arguments leave it to a
	// tokenizer's file.
	Vocab int
	// Name becomes the model's.
	Name string
	// Model, if given, is the model of the job; arguments may then shorten it,
	// but not describe another.
	Model *model.Model
}

// Warning is something about one argument that a user should know: the setup
// was made without it, or it was read in a way that may surprise.
type Warning struct {
	Flag string // without dashes
	Text string // a sentence
}

func (w Warning) String() string { return "--" + w.Flag + ": " + w.Text }

// FromArgs makes a setup from arguments. Keys are flags with or without their
// dashes, with hyphens or underscores; values are true and false for flags that
// take none, numbers, strings, or lists; a string "[a b c]" is a list too.
func FromArgs(args map[string]any, o Options) (*plan.Setup, []Warning, error) {
	r, err := newReader(args)
	if err != nil {
		return nil, nil, err
	}
	s := &plan.Setup{Hardware: o.Hardware}
	for _, step := range []func(*reader, *plan.Setup, Options) error{
		readModel, readLayout, readBatch, readPrecision, readOptimizer, readKernels, readMemory, check,
	} {
		// A value that could not be read comes before what follows from it.
		if err := step(r, s, o); r.err != nil || err != nil {
			return nil, nil, cmp.Or(r.err, err)
		}
	}
	r.leftovers()
	if r.err != nil {
		return nil, nil, r.err
	}
	return s, r.warnings, nil
}

// leftovers looks at every argument that nothing has asked for.
func (r *reader) leftovers() {
	ignored, unmodelled := ignoredFlags(), unmodelledFlags()
	for _, name := range slices.Sorted(maps.Keys(r.args)) {
		switch v := r.args[name]; {
		case r.known[name] || ignored[name] || v.off:
		case unmodelled[name] != "":
			r.warn(name, "is not part of the prediction: "+unmodelled[name])
		default:
			r.unknown(name)
		}
	}
}

// unknown says what to do about a flag that Megatron-LM does not have either. A
// flag one or two letters away from one that decides about memory is an error:
// leaving it out would give a wrong answer that looks right.
func (r *reader) unknown(name string) {
	near, distance := nearest(name, r.known)
	if distance <= 2 && r.err == nil {
		r.err = fmt.Errorf("--%s is not a flag of Megatron-LM; did you mean --%s?", name, near)
		return
	}
	text := "is not known, and was left out"
	if distance <= len(name)/3 {
		text += "; the nearest flag that matters here is --" + near
	}
	r.warn(name, text)
}
