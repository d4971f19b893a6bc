// This file owns where output goes. Commands print without checking every line, so the
// output remembers the first failed write, such as to a full disk, and drops the rest.

package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/input"
)

// output is standard output that remembers its first error.
type output struct {
	w     io.Writer
	err   error
	meter *meter // its line makes way for output; may be nil
}

// Write writes to standard output unless an earlier write failed.
func (o *output) Write(p []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	o.meter.wipe()
	n, err := o.w.Write(p)
	if err != nil {
		o.err = fmt.Errorf("cannot write the output: %w", input.Cause(err))
	}
	return n, o.err
}

// printJSON prints v as indented JSON.
func printJSON(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// jsonFlag adds --json to a command.
func jsonFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON")
}
