// This file owns the flags of Megatron-LM for a job that came with arguments of its own:
// what must change in them, and all of them after the change. Arguments that say nothing
// about memory or layout stay as they are.

package planview

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/megatron"
)

// Given is the arguments of Megatron-LM that a job was described by.
type Given struct {
	// File names where the arguments stand. It is empty if they were assumed.
	File string
	// Args maps flags without dashes to their values, and Setup is what they ask for.
	Args  map[string]any
	Setup *plan.Setup
}

// together lists flags that say one thing. If one of them changes, all are written anew.
var together = [][]string{
	{
		"pipeline-model-parallel-size", "pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank",
		"num-layers-per-virtual-pipeline-stage", "virtual-pipeline-model-parallel-size", "decoder-first-pipeline-num-layers",
		"decoder-last-pipeline-num-layers", "account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
	},
	{"recompute-granularity", "recompute-modules", "recompute-method", "recompute-num-layers", "recompute-activations"},
	{"cuda-graph-impl", "cuda-graph-modules", "cuda-graph-scope", "enable-cuda-graph", "external-cuda-graph"},
}

// launcher lists flags of torchrun, which are no flags of Megatron-LM.
var launcher = []string{"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint", "rdzv-id"}

// idle lists flags that are assumed for every model and have no effect on some layouts.
var idle = []string{"sequence-parallel", "expert-tensor-parallel-size"}

// changed returns the arguments changed so that they ask for a setup, as words of a command
// line, and the changes, a line each: "- --name old" or "+ --name new". It returns false if
// the arguments ask for something else after the change.
func (g *Given) changed(s *plan.Setup) (words, changes []string, ok bool) {
	own, err := g.Setup.Normalise()
	if err != nil {
		return nil, nil, false
	}
	_, before := splitFlags(megatron.Flags(own))
	order, after := splitFlags(megatron.Flags(s))
	args := map[string]any{}
	for name, v := range g.Args {
		args[strings.ReplaceAll(strings.TrimLeft(name, "-"), "_", "-")] = v
	}
	old := maps.Clone(args)
	for _, name := range slices.Concat(order, slices.Collect(maps.Keys(before))) {
		value, stays := after[name]
		was, had := before[name]
		if stays && had && slices.Equal(value, was) {
			continue
		}
		group := []string{name}
		for _, names := range together {
			if slices.Contains(names, name) {
				group = names
			}
		}
		for _, x := range group {
			delete(args, x)
			if v, ok := after[x]; ok {
				args[x] = v
			}
		}
	}
	if batch := "global-batch-size"; g.File == "" && args[batch] == nil {
		args[batch] = after[batch] // it was assumed after the arguments were read
	}
	if !asks(args, s, after, g.File == "") {
		return nil, nil, false
	}
	if g.File == "" {
		// The model has no arguments, and those that were assumed may change nothing.
		for name, v := range after {
			if _, ok := args[name]; !ok {
				args[name] = v
			}
		}
		maps.DeleteFunc(args, func(name string, _ any) bool {
			return slices.Contains(idle, name) && !slices.Contains(order, name)
		})
	}
	for _, name := range orderOf(args, order) {
		if !slices.Contains(launcher, name) {
			words = append(words, flagWords(name, args[name])...)
		}
	}
	return words, changeLines(old, args, order), true
}

// changeLines lists what is not equal in two sets of arguments.
func changeLines(old, args map[string]any, order []string) (out []string) {
	both := maps.Clone(old)
	maps.Copy(both, args)
	names := orderOf(both, order)
	slices.SortStableFunc(names, func(a, b string) int { // what only goes away comes first
		return cmp.Compare(min(slices.Index(order, a), 0), min(slices.Index(order, b), 0))
	})
	for _, name := range names {
		was, is := flagWords(name, old[name]), flagWords(name, args[name])
		if slices.Equal(was, is) {
			continue
		}
		if was != nil {
			out = append(out, "- "+line(was))
		}
		if is != nil {
			out = append(out, "+ "+line(is))
		}
	}
	return out
}

// line writes a flag for a shell.
func line(words []string) string { return megatron.CommandLine(words) }

// asks reports whether arguments ask for the setup with the given flags. The model is given
// beside them if they do not describe it.
func asks(args map[string]any, s *plan.Setup, flags map[string][]string, modelBeside bool) bool {
	o := megatron.Options{GPUs: s.Layout.World, Hardware: s.Hardware, Vocab: s.Model.Vocab, Name: s.Model.Name}
	if modelBeside {
		o.Model, o.Vocab = s.Model, 0
	}
	got, _, err := megatron.FromArgs(args, o)
	if err != nil {
		return false
	}
	if got, err = got.Normalise(); err != nil {
		return false
	}
	_, said := splitFlags(megatron.Flags(got))
	return maps.EqualFunc(said, flags, slices.Equal)
}

// splitFlags returns the names of flags in their order, and their values.
func splitFlags(words []string) (order []string, values map[string][]string) {
	values = map[string][]string{}
	for _, w := range words {
		name, isFlag := strings.CutPrefix(w, "--")
		if !isFlag {
			last := order[len(order)-1]
			values[last] = append(values[last], w)
			continue
		}
		name, value, joined := strings.Cut(name, "=")
		order = append(order, name)
		values[name] = nil
		if joined {
			values[name] = []string{value}
		}
	}
	return order, values
}

// orderOf returns the names of arguments: first those of a given order, then the others.
func orderOf(args map[string]any, order []string) (names []string) {
	for _, name := range order {
		if _, ok := args[name]; ok {
			names = append(names, name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(args)) {
		if !slices.Contains(order, name) {
			names = append(names, name)
		}
	}
	return names
}

// flagWords returns an argument as words of a command line, or nil if it is not set.
func flagWords(name string, v any) []string {
	var values []string
	switch v := v.(type) {
	case nil:
		return nil
	case bool:
		if !v {
			return nil
		}
	case []string:
		values = v
	case []any:
		for _, x := range v {
			values = append(values, fmt.Sprint(x))
		}
	default:
		values = []string{fmt.Sprint(v)}
	}
	switch {
	case len(values) == 1 && (values[0] == "false" || values[0] == "null"):
		return nil
	case len(values) == 1 && values[0] == "true":
		values = nil
	case len(values) == 1 && strings.HasPrefix(values[0], "-"):
		return []string{"--" + name + "=" + values[0]} // a value that begins like a flag
	}
	return append([]string{"--" + name}, values...)
}

// newVariables returns the environment variables that a setup needs and another does not.
func newVariables(before, after *plan.Setup) (out []string) {
	old := megatron.Environment(before)
	for _, v := range megatron.Environment(after) {
		if !slices.Contains(old, v) {
			out = append(out, v)
		}
	}
	return out
}
