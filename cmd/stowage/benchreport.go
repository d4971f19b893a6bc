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

// pageDone says where the page is, or returns the error of writing it.
func pageDone(cmd *cobra.Command, p *bench.Page, forProgram bool, err error) error {
	if err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	written(cmd, forProgram, "the report is", p.Path())
	return nil
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
