// This file owns where output goes. Commands print without checking every line, so the
// output remembers the first failed write, such as to a full disk, and drops the rest. On a
// terminal, text fits its width. A standard output that is closed (">&-") cannot be told from
// one to /dev/null: before anything of a program runs, Go opens that in its place.

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// output is standard output that remembers its first error.
type output struct {
	w     io.Writer
	err   error
	meter *meter // its line makes way for output; may be nil

	columns int  // of the terminal that text fits; zero if it is not fitted
	help    bool // the text is a help text
	held    strings.Builder
}

// newOutput returns the output on a file. It fits text if the file is a terminal.
func newOutput(file io.Writer, ascii bool) *output {
	return &output{w: plaintext.NewWriter(file, ascii), columns: columnsOf(file)}
}

// Write writes to standard output unless an earlier write failed. Text for a terminal is
// held up to the next empty line, because the lines of a table belong together.
func (o *output) Write(p []byte) (int, error) {
	if o.columns == 0 {
		return o.write(p)
	}
	o.held.Write(p)
	if text := o.held.String(); !o.help {
		if end := strings.LastIndex(text, "\n\n"); end >= 0 {
			o.held.Reset()
			o.held.WriteString(text[end+2:])
			o.fit(text[:end+2])
		}
	}
	return len(p), o.err
}

func (o *output) write(p []byte) (int, error) {
	if o.err != nil {
		return 0, o.err
	}
	o.meter.wipe()
	n, err := o.w.Write(p)
	if err != nil {
		o.err = fmt.Errorf("cannot write the output: %w", input.Cause(err))
		if errors.Is(err, syscall.EBADF) {
			o.err = errors.New("cannot write the output: standard output is open for reading only; redirect it with >")
		}
	}
	return n, o.err
}

func (o *output) fit(text string) {
	if o.help {
		text = plaintext.FitHelp(text, o.columns)
	} else {
		text = plaintext.Fit(text, o.columns)
	}
	o.write([]byte(text)) // which keeps its error
}

// flush writes what is held.
func (o *output) flush() {
	if text := o.held.String(); text != "" {
		o.held.Reset()
		o.fit(text)
	}
}

// whole returns the output of a command for programs, whose lines stay as they are.
func whole(cmd *cobra.Command) io.Writer {
	out := cmd.OutOrStdout()
	if o, ok := out.(*output); ok {
		o.flush()
		o.columns = 0
	}
	return out
}

// columnsOf returns the width of a terminal, or zero if the file is none. COLUMNS replaces
// the width that a terminal says it has.
func columnsOf(file io.Writer) int {
	if w, ok := file.(*plaintext.Writer); ok {
		file = w.Unwrap()
	}
	f, ok := file.(*os.File)
	if !ok {
		return 0
	}
	width, _, ok := sysinfo.Terminal(f)
	if !ok {
		return 0
	}
	if n, err := strconv.Atoi(os.Getenv("COLUMNS")); err == nil && n > 0 && n < 1<<16 {
		return n
	}
	return width
}

// say writes whole lines of text, which fit the width if w is a terminal.
func say(w io.Writer, text string) {
	if n := columnsOf(w); n > 0 {
		text = plaintext.Fit(text, n)
	}
	io.WriteString(w, text) // a command does not fail because nobody reads its remarks
}

// printJSON prints v as indented JSON.
func printJSON(cmd *cobra.Command, v any) error {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return err
	}
	text := b.String()
	if plaintext.WantsASCII(os.Getenv) {
		text = plaintext.ASCIIJSON(text)
	}
	_, err := io.WriteString(whole(cmd), text)
	return err
}

// jsonFlag adds --json to a command.
func jsonFlag(cmd *cobra.Command) *bool {
	return cmd.Flags().Bool("json", false, "print JSON")
}
