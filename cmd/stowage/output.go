// This file owns where output goes. A full disk or a closed pipe must not pass
// unnoticed, and nobody wants to check every line that is printed, so the first
// failed write sticks and everything behind it is dropped.

package main

import (
	"encoding/json"
	"fmt"
	"io"

	"github.com/spf13/cobra"
)

// output is standard output with a memory for its first error.
type output struct {
	w   io.Writer
	err error
}

func (o *output) Write(p []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	n, err := o.w.Write(p)
	if err != nil {
		o.err = fmt.Errorf("cannot write the output: %w", err)
	}
	return n, o.err
}

// printJSON writes v for machines: one object, indented, with a line's end.
func printJSON(cmd *cobra.Command, v any) error {
	e := json.NewEncoder(cmd.OutOrStdout())
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(v)
}

// jsonFlag adds the flag that every command with an answer has.
func jsonFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON for machines")
}
