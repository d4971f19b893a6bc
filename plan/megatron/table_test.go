// This file owns two tables: the flags of many unlike setups, and what each flag of a few of them
// is good for. Write them anew with -update if a change is meant.

package megatron

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
	"github.com/stowage-dev/stowage/plan"
)

// drawn returns drawn setups that are accepted, in words and normalised.
func drawn(t *testing.T, n int) (words []string, setups []*plan.Setup) {
	for i := 0; len(setups) < n; i++ {
		if s, what := plantest.Draw(i); true {
			if s, err := s.Normalise(); err == nil {
				words, setups = append(words, fmt.Sprint(i, " ", what)), append(setups, s)
			}
		}
		if i > 10*n {
			t.Fatalf("%d setups of %d are accepted", len(setups), i)
		}
	}
	return words, setups
}

func TestTableOfFlags(t *testing.T) {
	var b strings.Builder
	words, setups := drawn(t, 30)
	for i, s := range setups {
		fmt.Fprintf(&b, "%s\n  %s\n", words[i], CommandLine(Flags(s)))
		for _, list := range [][]string{Unsaid(s), Environment(s)} {
			for _, line := range list {
				fmt.Fprintf(&b, "  %s\n", line)
			}
		}
		if near := CommandLine(Flags(Closest(s))); near != CommandLine(Flags(s)) {
			fmt.Fprintf(&b, "  near: %s\n", near)
		}
	}
	golden.Check(t, "flags.txt", b.String())
}

// Each flag is left out, and given another number: what changes in the setup, or why it is
// refused.
func TestTableOfChanges(t *testing.T) {
	var b strings.Builder
	gen := rapid.Custom(drawSetup)
	for i := range 12 {
		s := gen.Example(i)
		args, err := Parse("job.sh", []byte(CommandLine(Flags(s))), ParseOptions{})
		if err != nil {
			t.Fatal(err)
		}
		o := Options{GPUs: s.Layout.World}
		base, _, err := FromArgs(maps.Clone(args), o)
		if err != nil {
			t.Fatal(err)
		}
		was := plantest.Fields(base)
		fmt.Fprintf(&b, "setup %d: %s\n", i, s.Model.Name)
		for _, name := range slices.Sorted(maps.Keys(args)) {
			changes := []any{nil}
			if text := fmt.Sprint(args[name]); strings.Trim(text, "0123456789") == "" && text != "" {
				changes = append(changes, "3", "4")
			}
			for _, value := range changes {
				changed := maps.Clone(args)
				if value == nil {
					delete(changed, name)
				} else {
					changed[name] = value
				}
				fmt.Fprintf(&b, "  %s %v:", name, value)
				got, warnings, err := FromArgs(changed, o)
				if err != nil {
					fmt.Fprintf(&b, " %v\n", err)
					continue
				}
				fmt.Fprintf(&b, "%s (%d warnings)\n", plantest.Changes(was, plantest.Fields(got)), len(warnings))
			}
		}
	}
	golden.Check(t, "changes.txt", b.String())
}
