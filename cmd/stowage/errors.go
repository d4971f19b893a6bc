// This file owns the words and exit codes of errors. Libraries return errors that name
// settings of the API; this file translates them into flags.

package main

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/train/run"
)

// settingFlags lists, for each setting that an error can name, the flags that set it.
// The first one that a command has is the one that its user typed. A setting is the name
// of a field, without the struct that holds it.
var settingFlags = map[string][]string{
	"Model": {"model"}, "Data": {"data"}, "Text": {"data"}, "Steps": {"steps"}, "Seed": {"seed"}, "HoldOut": {"hold-out"}, "HeldOut": {"hold-out"}, "EvalEvery": {"eval-every"},
	"Folder": {"out"}, "Resume": {"resume"}, "SaveEvery": {"save-every"}, "Keep": {"keep"}, "Trace": {"trace"},

	"PP": {"pp"}, "VPP": {"vpp"}, "EP": {"ep"}, "DP": {"dp"}, "Micro": {"micro", "mbs"}, "Seq": {"seq"}, "Microbatches": {"microbatches"},
	"Dispatch": {"dispatch"}, "Capacity": {"capacity-factor"}, "Device": {"device"}, "Layers": {"layers"}, "Rank": {"rank"}, "Stage": {"stage"},

	"Policy": {"policy"}, "Budget": {"budget"}, "Offload": {"offload-modules"}, "OffloadModules": {"offload-modules"},
	"Fraction": {"offload-fraction", "activation-offload-fraction"}, "OffloadFraction": {"offload-fraction", "activation-offload-fraction"},
	"Recompute": {"recompute-modules"}, "RecomputeModules": {"recompute-modules"}, "Stash": {"stash-modules"}, "StashModules": {"stash-modules"},
	"Graph": {"graph"}, "Scopes": {"graph", "cuda-graph-scope"}, "Pool": {"pool"}, "Sharding": {"pool"}, "Prefetch": {"prefetch"}, "GradComm": {"grad-comm-dtype"},
	"BF16": {"bf16"}, "Number": {"bf16"}, "MinBytes": {"min-offloaded-tensor-size"}, "DeltaBytes": {"delta-offload-bytes-across-pp-ranks"}, "Margin": {"margin"},
	"MaxInflight": {"fine-grained-offloading-max-inflight-offloads"},

	"LR": {"lr"}, "MinLR": {"min-lr"}, "WarmUp": {"warm-up"}, "Decay": {"decay"}, "Beta1": {"beta1"}, "Beta2": {"beta2"},
	"WeightDecay": {"weight-decay"}, "Weights": {"weight-decay"}, "Clip": {"clip"}, "AuxLoss": {"aux-loss"}, "BiasRate": {"bias-rate"},
}

// flagOf returns the flag of a command that sets a setting, or the setting itself if the
// command has none.
func flagOf(cmd *cobra.Command, setting string) string {
	name := setting[strings.LastIndexByte(setting, '.')+1:]
	for _, flag := range settingFlags[name] {
		if cmd != nil && cmd.Flags().Lookup(flag) != nil {
			return "--" + flag
		}
	}
	return setting
}

// moduleFlags are the settings that make each choice for modules.
var moduleFlags = [memory.Choices]string{memory.Stash: "StashModules", memory.Offload: "OffloadModules", memory.Recompute: "RecomputeModules"}

// describe returns an error in the words of a command: one sentence that names flags.
func describe(cmd *cobra.Command, err error) string {
	switch e := err.(type) {
	case *run.InputError:
		return describe(cmd, e.Err)
	case *run.PolicyError:
		return fmt.Sprintf("policy %s: %s", e.Policy, describe(cmd, e.Err))
	case *run.InterruptedError:
		switch {
		case e.Comparison:
			return "the comparison was interrupted and not written; the one before is as it was"
		case e.Folder == "":
			return "the run was interrupted and not saved, because it has no --out"
		}
		return fmt.Sprintf("the run was interrupted and saved; continue it with --out %s --resume", e.Folder)
	case *memory.RankError:
		if _, named := e.Err.(*memory.BudgetError); named {
			return describe(cmd, e.Err)
		}
		return fmt.Sprintf("rank %d: %s", e.Rank, describe(cmd, e.Err))
	case *memory.SettingError:
		return oneLine(e.Named(flagOf(cmd, e.Setting)))
	case *memory.ModuleError:
		return fmt.Sprintf("%s %s %s; %s", flagOf(cmd, moduleFlags[e.Choice]), cmp.Or(e.Module, `""`), e.Problem, e.Remedy)
	case *memory.BudgetError:
		return describeBudget(cmd, e)
	case interface{ Unwrap() []error }:
		var all []string
		for _, err := range e.Unwrap() {
			all = append(all, describe(cmd, err))
		}
		return strings.Join(all, "; ")
	case interface{ Unwrap() error }:
		// What a wrapper says before the error that it wraps stays.
		if inner := e.Unwrap(); inner != nil {
			if before, ok := strings.CutSuffix(err.Error(), inner.Error()); ok {
				return before + describe(cmd, inner)
			}
		}
	}
	return oneLine(err.Error())
}

// describeBudget says what a budget lacks.
func describeBudget(cmd *cobra.Command, e *memory.BudgetError) string {
	text := fmt.Sprintf("rank %d: %s %s is too small", e.Rank, flagOf(cmd, "Budget"), e.Budget.Short())
	if e.Held > 0 {
		return fmt.Sprintf("%s: weights, optimiser and tables alone hold %s; raise it, or shard the parameters", text, e.Held.Short())
	}
	kib := (e.Need + memory.KiB - 1) / memory.KiB * memory.KiB
	remedy := "raise it to " + kib.Exact()
	if e.HostFull {
		remedy += ", allow more host memory"
	}
	return fmt.Sprintf("%s for a step with everything offloaded or recomputed that can be; %s, or use smaller microbatches", text, remedy)
}

// exitCode returns the exit code for an error: scripts tell a wrong command line from
// work that failed.
func exitCode(err error) int {
	var interrupted *run.InterruptedError
	var usage *usageError
	var input *run.InputError
	var setting *memory.SettingError
	var module *memory.ModuleError
	var budget *memory.BudgetError
	var signalled *signalError
	var told *comm.Told
	switch {
	case errors.As(err, &told):
		return told.Code
	case errors.As(err, &signalled):
		return exitSignal(signalled.signal)
	case errors.As(err, &interrupted):
		return exitInterrupted
	case errors.Is(err, syscall.EPIPE): // other commands are ended by the signal itself
		return exitSignal(syscall.SIGPIPE)
	case fromDisk(err):
		return exitFailure
	case errors.As(err, &usage), errors.As(err, &input):
		return exitUsage
	case fromMachine(err):
		return exitFailure
	case errors.As(err, &setting), errors.As(err, &module), errors.As(err, &budget):
		return exitUsage
	}
	return exitFailure
}

// fromMachine reports whether the machine lacks what an error is about.
func fromMachine(err error) bool {
	var unsupported *device.Unsupported
	var full *device.OutOfMemory
	return errors.As(err, &unsupported) || errors.As(err, &full)
}

// fromDisk reports whether a disk failed or is full, or too many files are open: another
// command line would not help.
func fromDisk(err error) bool {
	var no syscall.Errno
	return errors.As(err, &no) && slices.Contains([]syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.EFBIG, syscall.EIO, syscall.EMFILE, syscall.ENFILE}, no)
}

// mostWord is the most bytes of a word in a sentence: no path is longer.
const mostWord = 4096

// exponents are written by Go with a sign or with zeros that others leave out. A number is a
// word of its own, because paths have such letters too.
var exponents = regexp.MustCompile(`^(\(?-?[0-9.]+e)(?:\+0*|(-)0+)([1-9][0-9]*[;,):]*)$`)

// readable leaves the middle out of words that nobody would read to their end, and writes
// numbers as 1e30 and 1e-5, except inside of quotes.
func readable(text string) string {
	parts := strings.Split(text, `"`)
	for i := 0; i < len(parts); i += 2 {
		words := strings.Split(parts[i], " ")
		for k, w := range words {
			words[k] = exponents.ReplaceAllString(w, "$1$2$3")
		}
		parts[i] = strings.Join(words, " ")
	}
	text = strings.Join(parts, `"`)
	words := strings.Split(text, " ")
	for i, w := range words {
		if len(w) > mostWord {
			words[i] = strings.ToValidUTF8(w[:60], "") + "…" + strings.ToValidUTF8(w[len(w)-20:], "")
		}
	}
	return strings.Join(words, " ")
}

// figures returns a number with so many figures, or as many as it needs for -1. Large
// numbers are written as 1e30.
func figures(x float64, n int) string {
	return strings.Replace(strconv.FormatFloat(x, 'g', n, 64), "e+", "e", 1)
}

// oneLine keeps the promise of one sentence for errors that were joined.
func oneLine(text string) string {
	return strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")
}

// withBreaks writes the line breaks of arguments as \n, where oneLine took them for those
// between errors.
func withBreaks(text string, args []string) string {
	for _, arg := range args {
		if name, value, ok := strings.Cut(arg, "="); ok && strings.HasPrefix(name, "--") {
			arg = value
		}
		if arg = strings.TrimSpace(arg); strings.Contains(arg, "\n") {
			text = strings.ReplaceAll(text, oneLine(arg), strings.ReplaceAll(arg, "\n", `\n`))
		}
	}
	return text
}
