// This file owns the test that no flag of a single run is ignored by a comparison.

package main

import (
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/train/run"
)

// Each flag that asks for a single run is refused beside --policy all, and each other one is not.
func TestFlagsOfSingleRuns(t *testing.T) {
	read := func(name string, more ...string) (bool, error) {
		f, cmd := &trainFlags{options: run.DefaultOptions()}, &cobra.Command{}
		f.add(cmd)
		value := map[string]string{"bool": "true", "int": "1", "uint64": "1", "float64": "0.5", "float": "0.5", "size": "1MiB"}[cmd.Flags().Lookup(name).Value.Type()]
		if value == "" {
			value = "x"
		}
		for i := 0; i < len(more); i += 2 {
			if err := cmd.Flags().Set(more[i], more[i+1]); err != nil {
				t.Fatal(err)
			}
		}
		if err := cmd.Flags().Set(name, value); err != nil {
			t.Skipf("--%s %s: %v", name, value, err)
		}
		return f.read(cmd.Flags())
	}
	f, cmd := &trainFlags{options: run.DefaultOptions()}, &cobra.Command{}
	f.add(cmd)
	single := 0
	cmd.Flags().VisitAll(func(x *pflag.Flag) {
		if x.Name == "policy" || x.Name == "out" { // which a comparison has too
			return
		}
		t.Run(x.Name, func(t *testing.T) {
			alone, err := read(x.Name)
			alone = alone || err != nil // --resume and --config need more
			_, err = read(x.Name, "policy", everyPolicy)
			if refused := err != nil && strings.Contains(err.Error(), "--"+x.Name+" is for a single run"); refused != alone {
				t.Errorf("--%s asks for a single run: %v; beside --policy all: %v", x.Name, alone, err)
			}
			if alone {
				single++
			}
		})
	})
	if single < 8 {
		t.Errorf("only %d flags ask for a single run: the test sees too little", single)
	}
}
