// This file owns `stowage completion`, and the words that shells complete: the values of
// flags, and the settings of `stowage plan`.

package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train"
)

// shells are the shells that can be completed.
var shells = []string{"bash", "zsh", "fish"}

func newCompletion() *cobra.Command {
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print a script that completes commands in bash, zsh or fish",
		Long: `Print a script that makes the Tab key complete commands, flags and their values: models,
hardware, policies, modules, scopes and pools. Load it in the shell, or put it where the
shell finds it at every start. It needs no other package.`,
		Example: `  source <(stowage completion bash)                       in this shell, or in ~/.bashrc
  stowage completion zsh >"${fpath[1]}/_stowage"          for zsh, which then starts anew
  stowage completion fish >~/.config/fish/completions/stowage.fish`,
		ValidArgs: shells,
		Args: func(_ *cobra.Command, args []string) error {
			switch {
			case len(args) != 1:
				return usagef("expected one shell: %s", strings.Join(shells, ", "))
			case !slices.Contains(shells, args[0]):
				return usagef("there is no completion for %q; choose from %s", args[0], strings.Join(shells, ", "))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			out, root := whole(cmd), cmd.Root()
			switch args[0] {
			case "zsh":
				return root.GenZshCompletion(out)
			case "fish":
				return root.GenFishCompletion(out, true)
			}
			var b bytes.Buffer
			if err := root.GenBashCompletionV2(&b, true); err != nil {
				return err
			}
			_, err := out.Write(bytes.Replace(b.Bytes(), []byte(bashWords), []byte(bashAlone), 1))
			return err
		},
	}
}

// bashWords is the line of the script for bash that needs the package bash-completion, and
// bashAlone what replaces it: without the package, words end at spaces.
const (
	bashWords = `    _get_comp_words_by_ref "$@" cur prev words cword
`
	bashAlone = `    if declare -F _get_comp_words_by_ref >/dev/null 2>&1; then
        _get_comp_words_by_ref "$@" cur prev words cword
        return
    fi
    local line=${COMP_LINE:0:$COMP_POINT}
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    cword=$((${#words[@]} - 1))
    cur=${words[cword]}
    prev=${words[cword > 0 ? cword - 1 : 0]}
`
)

// flagWords has the words that a flag takes, by the flag's name. A name behind that of a
// command counts for this command only.
var flagWords = map[string]func() []string{
	"model":             model.Presets,
	"policy":            func() []string { return append(slices.Clone(train.Policies), everyPolicy) },
	"offload-modules":   modulesWith(memory.Offload),
	"recompute-modules": modulesWith(memory.Recompute),
	"stash-modules":     modulesWith(memory.Stash),
	"pool":              poolNames,
	"dispatch":          list("alltoall", "ring"),
	"device":            list("cpu", "cuda"),
	"grad-comm-dtype":   list("bf16", "fp32"),
	"graph":             scopeNames,
	"cuda-graph-scope":  scopeNames,
	"gpu":               hardware.Names,
	"search":            list("policy", "layout", "none"),
	"largest":           largestWords,
	"flags":             func() []string { return planTargets },
	"routing":           list("natural", "balanced", "skewed", "counts"),
	"synth":             list("zipf", "drift", "burst"),
	"fallback":          list("persistent", "dynamic"),

	"plan rank":           list("heaviest", "all", "none"),
	"plan offload":        func() []string { return append(memory.MegatronModules(memory.Offload), "none") },
	"plan recompute":      func() []string { return append(memory.MegatronModules(memory.Recompute), "full", "none") },
	"plan graph":          func() []string { return append(scopeNames(), "none") },
	"plan pool":           list("fixed", "max", "arena", "recorded"),
	"plan precision":      list("bf16", "fp16", "fp32", "fp8", "blockwise", "mxfp8", "nvfp4"),
	"plan fsdp":           list("params", "grads", "optim", "none"),
	"plan loss":           list("native", "native-fused", "te"),
	"plan dispatcher":     list("allgather", "alltoall", "deepep", "hybridep"),
	"bench offload graph": list("none", "scopes", "full"),
}

func list(words ...string) func() []string { return func() []string { return words } }

// modulesWith returns the names of the modules that a choice can be made for.
func modulesWith(c memory.Choice) func() []string {
	return func() (names []string) {
		for _, m := range memory.Modules() {
			if m.Choices.Has(c) {
				names = append(names, m.Name)
			}
		}
		return names
	}
}

func poolNames() (names []string) {
	for _, k := range bucket.PoolKinds {
		names = append(names, k.String())
	}
	return names
}

func scopeNames() (names []string) {
	for s := memory.Attn; s <= memory.FullIteration; s++ {
		names = append(names, s.String())
	}
	return names
}

// wordsOf returns the words that a flag of a command takes, or nil.
func wordsOf(cmd *cobra.Command, flag string) []string {
	path := strings.TrimPrefix(cmd.CommandPath(), cmd.Root().Name()+" ")
	for _, key := range []string{path + " " + flag, strings.Fields(path + " ")[0] + " " + flag, flag} {
		if words, ok := flagWords[key]; ok {
			return words()
		}
	}
	return nil
}

// fileFlags take the name of a file beside their words.
var fileFlags = []string{"model", "gpu", "routing"}

// completeValue returns the words that complete the value of a flag. Shells offer files if
// none fits and the flag can take one.
func completeValue(cmd *cobra.Command, flag, typed string) ([]string, cobra.ShellCompDirective) {
	before := typed[:strings.LastIndexByte(typed, ',')+1] // the earlier words of a list
	var fit []string
	for _, w := range wordsOf(cmd, flag) {
		if strings.HasPrefix(before+w, typed) {
			fit = append(fit, before+w)
		}
	}
	f := cmd.Flags().Lookup(flag)
	number := f != nil && slices.Contains([]string{"int", "int64", "uint64", "float64", "duration"}, f.Value.Type())
	if number || wordsOf(cmd, flag) != nil && !slices.Contains(fileFlags, flag) {
		return fit, cobra.ShellCompDirectiveNoFileComp
	}
	return fit, cobra.ShellCompDirectiveDefault
}

// addCompletion makes the values of the flags of all commands complete.
func addCompletion(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		addCompletion(c)
	}
	if cmd.DisableFlagParsing {
		cmd.ValidArgsFunction = completeWord
		return
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		err := cmd.RegisterFlagCompletionFunc(f.Name, func(cmd *cobra.Command, _ []string, typed string) ([]string, cobra.ShellCompDirective) {
			return completeValue(cmd, f.Name, typed)
		})
		if err != nil {
			panic("completion: " + err.Error())
		}
	})
}

// completeWord completes a word of a command that divides its command line itself. The
// library completes the names of its flags.
func completeWord(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if flag, value, ok := strings.Cut(typed, "="); ok && strings.HasPrefix(flag, "--") {
		return completeValue(cmd, flag[2:], value)
	}
	if strings.HasPrefix(typed, "-") {
		return completeSetting(cmd, typed), cobra.ShellCompDirectiveNoFileComp
	}
	// The last flag takes this word if it takes a word at all, and no value follows it yet
	// or it takes a list.
	for i := len(args) - 1; i >= 0; i-- {
		name, long := strings.CutPrefix(args[i], "--")
		if !long {
			continue
		}
		f := cmd.Flags().Lookup(name)
		switch {
		case f != nil && f.NoOptDefVal != "": // true or false
		case f == nil || f.Value.Type() == listType || i == len(args)-1:
			return completeValue(cmd, name, typed)
		}
		break
	}
	var names []string
	if cmd.Name() == "explain" && len(args) == 0 {
		for _, m := range memory.Modules() {
			names = append(names, m.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// completeSetting returns the settings of a job that a word begins.
func completeSetting(cmd *cobra.Command, typed string) (names []string) {
	if !strings.HasPrefix(cmd.CommandPath(), cmd.Root().Name()+" plan") {
		return nil
	}
	for _, w := range config.Words {
		if name := "--" + w.Short; strings.HasPrefix(name, typed) && cmd.Flags().Lookup(w.Short) == nil && w.Short != "trace" {
			help := w.Help
			if help == "" {
				help = w.Long
			}
			names = append(names, fmt.Sprintf("%s\t%s", name, help))
		}
	}
	return names
}
