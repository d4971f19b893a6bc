// This file owns --report of the benchmarks.

package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/bench"
)

// reportFlag adds --report to a benchmark. The function that it returns makes the page,
// or returns nil if the flag is not given; call it after the flags are parsed.
func reportFlag(cmd *cobra.Command) func() *bench.Page {
	file := cmd.Flags().String("report", "", "write a page with the figures to a `file` of HTML")
	return func() *bench.Page {
		if *file == "" {
			return nil
		}
		return &bench.Page{Title: cmd.CommandPath(), Command: flagLine(cmd), Version: thisVersion().String(), File: *file}
	}
}

// pageError adds the flag to an error of writing a page.
func pageError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("--report: %w; give a file in a folder that you may write to", err)
}

// flagLine returns the command with the flags that were given, in the order of their
// names, but without those that are left out.
func flagLine(cmd *cobra.Command, without ...string) string {
	var args []string
	cmd.Flags().Visit(func(f *pflag.Flag) {
		if !slices.Contains(without, f.Name) {
			args = append(args, "--"+f.Name+"="+strings.Trim(f.Value.String(), "[]"))
		}
	})
	return commandLine(cmd, args)
}
