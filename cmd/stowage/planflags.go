// This file owns how a command line of `stowage plan` is divided: into the command's
// own flags, and the settings of the job, which are Megatron-LM's flags or short names
// for them. Settings are not declared one by one, and lists are written with spaces, as
// Megatron-LM writes them.

package main

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/plan/config"
)

// planWords is a command line without the command's own flags.
type planWords struct {
	settings map[string][]string // the last one given counts
	rest     []string            // neither flag nor value
}

// splitPlan divides a command line. The command's own flags go to the flag parser. Any
// other flag is a setting and takes the words up to the next flag.
func splitPlan(own *pflag.FlagSet, args []string) (mine []string, w planWords, err error) {
	w.settings = map[string][]string{}
	for i := 0; i < len(args); i++ {
		word := args[i]
		if word == "--" { // what follows is no flag
			w.rest = append(w.rest, args[i+1:]...)
			break
		}
		name, value, given := strings.Cut(word, "=")
		name, long := strings.CutPrefix(name, "--")
		if name = strings.ReplaceAll(name, "_", "-"); name == "hardware" {
			name = "gpu"
		}
		if !long || name == "" {
			if word != "-" && strings.HasPrefix(word, "-") {
				mine = append(mine, word) // -h, or something that is refused there
			} else {
				w.rest = append(w.rest, word)
			}
			continue
		}
		var values []string
		if given {
			values = []string{value}
		}
		if f := own.Lookup(name); f != nil {
			n := 0
			if !given && f.NoOptDefVal == "" {
				n = 1
				if name == "compare" {
					n = 2
				}
			}
			if i+n >= len(args) || n == 2 && isFlag(args[i+2]) {
				return nil, w, usagef("flag --%s needs %s", name, map[int]string{1: "a value", 2: "two files"}[n])
			}
			mine = append(mine, ownWords(name, value, given, args[i+1:i+1+n])...)
			i += n
			continue
		}
		for !given && i+1 < len(args) && !isFlag(args[i+1]) {
			i++
			values = append(values, args[i])
		}
		w.add(name, values)
	}
	return mine, w, nil
}

// ownWords returns a flag with each of its values, as the flag parser reads it.
func ownWords(name, value string, given bool, next []string) (out []string) {
	switch {
	case given:
		return []string{"--" + name + "=" + value}
	case len(next) == 0:
		return []string{"--" + name}
	}
	for _, v := range next {
		out = append(out, "--"+name+"="+v)
	}
	return out
}

// isFlag reports whether a word is a flag. "-1" is a value.
func isFlag(word string) bool {
	rest, ok := strings.CutPrefix(word, "-")
	return ok && rest != "" && (rest[0] < '0' || rest[0] > '9') && rest[0] != '.'
}

func (w *planWords) add(name string, values []string) {
	if strings.HasSuffix(name, "-modules") {
		values = strings.Split(strings.Join(values, ","), ",") // a, b and c may have commas or spaces between them
	}
	w.settings[name] = values
}

// parsePlan parses the command's own flags and returns the settings.
func parsePlan(cmd *cobra.Command, args []string) (w planWords, help bool, err error) {
	cmd.InitDefaultHelpFlag()
	own, w, err := splitPlan(cmd.Flags(), args)
	if err != nil {
		return w, false, err
	}
	if err := cmd.Flags().Parse(own); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return w, true, nil
		}
		return w, false, flagError(cmd, err)
	}
	help, err = cmd.Flags().GetBool("help")
	if err != nil {
		panic("plan: there is no help flag: " + err.Error())
	}
	if help {
		return w, true, nil
	}
	return w, false, w.check(cmd)
}

// check returns an error if a setting is unknown, if a flag or a setting is empty, or if a
// number is zero that means "not given" inside of the program.
func (w *planWords) check(cmd *cobra.Command) error {
	if err := w.unknown(cmd.Flags()); err != nil {
		return err
	}
	if err := checkEmpty(cmd.Flags()); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(w.settings)) {
		if v := w.settings[name]; len(v) > 0 && blank(strings.Join(v, ",")) {
			return usagef("--%s is empty; give a value, or leave the flag out", name)
		}
	}
	for name, most := range map[string]int{"gpus": 1 << 24, "vocab": math.MaxInt32, "gpus-per-node": 1 << 16} {
		n, err := cmd.Flags().GetInt(name)
		if err != nil {
			panic("plan: there is no flag " + name + ": " + err.Error())
		}
		if cmd.Flags().Changed(name) && (n < 1 || n > most) {
			return usagef("--%s %d is out of range; give a number from 1 to %d, or leave the flag out", name, n, most)
		}
	}
	return nil
}

// unknown returns an error for a setting that no job has. A file may have such flags. On a
// command line they are mistakes, whatever else is wrong there: any model tells.
func (w *planWords) unknown(own *pflag.FlagSet) error {
	var words []string
	for _, x := range config.Words {
		words = append(words, x.Short)
	}
	own.VisitAll(func(f *pflag.Flag) { words = append(words, f.Name) })
	for _, name := range slices.Sorted(maps.Keys(w.settings)) {
		if slices.Contains(words, name) {
			continue
		}
		_, notes, err := config.Resolve(config.Input{Model: "llama-3-8b", Settings: map[string][]string{name: w.settings[name]}})
		misspelt := err != nil && strings.Contains(err.Error(), "is not a flag of Megatron-LM")
		near := spell.Nearest(name, words)
		switch unheard := slices.ContainsFunc(notes, func(n string) bool { return strings.HasPrefix(n, "--"+name+": is not known") }); {
		case (misspelt || unheard) && near != "":
			return usagef("unknown flag --%s (did you mean --%s?)", name, near)
		case misspelt:
			return (&jobFlags{}).asTyped(err, w.settings)
		case unheard:
			return usagef("unknown flag --%s", name)
		}
	}
	return nil
}

// settingHelp lists the short names in a help text, except those that are flags of the
// command.
func settingHelp(cmd *cobra.Command) string {
	var b strings.Builder
	for _, w := range config.Words {
		if cmd.Flags().Lookup(w.Short) != nil || w.Short == "counts" || w.Short == "trace" {
			continue
		}
		long := w.Help
		if w.Long != "" {
			long = "--" + w.Long
		}
		fmt.Fprintf(&b, "      --%-14s %s\n", w.Short, long)
	}
	return strings.TrimRight(b.String(), "\n")
}
