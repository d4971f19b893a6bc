// This file owns abbreviated flags. Megatron-LM parses its arguments with Python's argparse, which
// takes the beginning of a flag for the flag if no other one begins so.

package megatron

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
)

// steps read a setup, each a part of it. Which flags they read does not depend on the values of
// others.
func steps() []func(*reader, *plan.Setup, Options) error {
	return []func(*reader, *plan.Setup, Options) error{
		readModel, readLayout, readBatch, readPrecision, readOptimizer, readKernels, readMemory, check,
	}
}

// megatronFlags returns the names of all flags of Megatron-LM that this package knows, in order:
// those that it reads, and those that it leaves out.
func megatronFlags() []string {
	r, err := newReader(map[string]any{
		"num-layers": 1, "hidden-size": 64, "num-attention-heads": 1, "seq-length": 8, "max-position-embeddings": 8, "vocab-size": 8, "micro-batch-size": 1,
	})
	if err == nil {
		err = refuse(r, Options{})
	}
	s := &plan.Setup{}
	for _, step := range steps() {
		if err == nil {
			err = step(r, s, Options{})
		}
	}
	if err != nil || r.err != nil {
		panic(fmt.Sprintf("megatron: a small job is refused: %v, %v", err, r.err))
	}
	names := r.known
	maps.Copy(names, ignoredFlags())
	for name := range unmodelledFlags() {
		names[name] = true
	}
	maps.DeleteFunc(names, func(name string, _ bool) bool { return strings.HasPrefix(name, "$") })
	return slices.Sorted(maps.Keys(names))
}

// abbreviations finds the flags that abbreviated ones stand for.
type abbreviations struct {
	flags []string          // in order, or nil before the first is looked for
	taken map[string]string // abbreviated flags by the whole name
}

// whole returns the flag that a name stands for: the name itself if it is a flag, or if none or
// several begin with it.
func (a *abbreviations) whole(name string) string {
	if launcherFlags[name] != "" {
		return name
	}
	begin := a.beginning(name)
	if len(begin) != 1 || begin[0] == name {
		return name
	}
	if a.taken == nil {
		a.taken = map[string]string{}
	}
	a.taken[begin[0]] = name
	return begin[0]
}

// beginning returns the flags that begin with a name, or the name alone if it is a flag.
func (a *abbreviations) beginning(name string) []string {
	if a.flags == nil {
		a.flags = megatronFlags()
	}
	at, is := slices.BinarySearch(a.flags, name)
	if is || name == "" {
		return []string{name}
	}
	end := at
	for end < len(a.flags) && strings.HasPrefix(a.flags[end], name) {
		end++
	}
	return a.flags[at:end]
}

// notes returns a note for each flag among the arguments that was abbreviated.
func (a *abbreviations) notes(args map[string]any) (notes []string) {
	for _, name := range slices.Sorted(maps.Keys(a.taken)) {
		if _, given := args[name]; given {
			notes = append(notes, fmt.Sprintf("--%s is read as --%s, the only flag that begins so, as argparse does", a.taken[name], name))
		}
	}
	return notes
}

// several says which flags a name that is none may abbreviate, or nothing if it is not the
// beginning of several.
func (a *abbreviations) several(name string) string {
	begin := a.beginning(name)
	if len(begin) < 2 {
		return ""
	}
	all := fmt.Sprintf("--%s and --%s", begin[0], begin[1])
	if n := len(begin) - 2; n > 0 {
		all = fmt.Sprintf("--%s, --%s and %d more", begin[0], begin[1], n)
	}
	return fmt.Sprintf("is the beginning of %s, so Megatron-LM refuses it; it was left out", all)
}
