// This file owns `stowage bench record`: the history of results.

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/internal/version"
)

// historyFile is the history of this repository.
const historyFile = "docs/benchmarks.jsonl"

func newBenchRecord() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "record FILE…",
		Short: "Add results to the history and compare them with the last ones",
		Long: `Read results that benchmarks printed with --json, append one line for each to the
history, and print each result beside the last one of the same command on the same
hardware. A result is the --json of "bench copy", "bench stash", "bench pools",
"bench offload" or of a comparison with "train", or what torch_moe.py, torch_kernels.py and
torch_mamba.py of pytorch/bench write. A - stands for standard input.

A line of the history has the date, the hardware, the version, the command and the key
figures. A figure that changed by at most 3 % counts as the same. If one result cannot
be read, nothing is written.`,
		Example: `  stowage bench copy --json > copy.json
  stowage bench record copy.json
  stowage bench stash --json | stowage bench record -
  stowage train --json > train.json
  stowage bench record train.json --command "stowage train" --note "quiet machine"`,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return usagef("expected the file of a result, such as copy.json; print one with stowage bench copy --json")
			}
			return nil
		},
	}
	f := cmd.Flags()
	to := f.String("to", historyFile, "`file` of the history, which is created if it does not exist")
	hardware := f.String("hardware", "", "`name` of the hardware (default the GPU of the result, or else this machine's processor)")
	command := f.String("command", "", "`command` that printed the result, if the result does not say it")
	note := f.String("note", "", "`text` to add to the entries")
	date := f.String("date", "", "`day` of the results, such as 2026-11-15 (default today)")
	cmd.RunE = func(cmd *cobra.Command, files []string) error {
		day := cmp.Or(*date, time.Now().UTC().Format(time.DateOnly))
		if _, err := time.Parse(time.DateOnly, day); err != nil {
			return usagef("--date expects a day such as 2026-11-15, got %q", day)
		}
		var entries []bench.Entry
		var reads []flagFile
		var told error // a file that has a command, which is not that of --command
		lacks := false // a command
		for _, file := range files {
			reads = append(reads, flagFile{name: file})
			e, err := readResult(cmd, file)
			if err != nil {
				return usagef("%s: %w", file, err)
			}
			e.Date, e.Note = day, *note
			e.Hardware = cmp.Or(*hardware, e.Hardware, thisProcessor())
			e.Version = cmp.Or(e.Version, version.Number())
			if *command != "" && e.Command != "" && e.Command != *command {
				told = cmp.Or(told, usagef("%s says that %q printed it, and --command %q; leave that out", file, e.Command, *command))
			}
			lacks = lacks || e.Command == ""
			if e.Command = cmp.Or(e.Command, *command); e.Command == "" {
				return usagef("%s does not say which command printed it; give it with --command", file)
			}
			entries = append(entries, e)
		}
		if told != nil && !lacks {
			return told
		}
		if err := checkFiles([]flagFile{{"to", *to}}, reads...); err != nil {
			return err
		}
		return record(cmd, *to, entries)
	}
	return cmd
}

// The most bytes of one result, and of a history.
const mostResult, mostHistory = 16 << 20, 256 << 20

// readResult reads a result from a file or from standard input.
func readResult(cmd *cobra.Command, file string) (bench.Entry, error) {
	var text []byte
	var err error
	if file == "-" {
		text, err = io.ReadAll(io.LimitReader(cmd.InOrStdin(), mostResult))
	} else {
		text, err = input.ReadFile(file, mostResult)
	}
	if err != nil {
		return bench.Entry{}, input.Cause(err)
	}
	return bench.ReadEntry(text)
}

// record appends entries to a history and prints the comparisons.
func record(cmd *cobra.Command, file string, entries []bench.Entry) error {
	unlock, err := atomicfile.Lock(file) // another one may record at the same time
	if err != nil {
		return usagef("--to %s: %w", file, input.Cause(err))
	}
	defer unlock()
	old, err := input.ReadFile(file, mostHistory)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return usagef("--to %s: the file cannot be read: %w", file, input.Cause(err))
	}
	history, err := bench.ReadHistory(bytes.NewReader(old))
	if err != nil {
		return usagef("--to %s: %w", file, input.Plain(err))
	}
	if len(old) > 0 && old[len(old)-1] != '\n' {
		old = append(old, '\n')
	}
	before := make([]*bench.Entry, len(entries))
	for i, e := range entries {
		line, err := e.Line()
		if err != nil {
			return err
		}
		before[i] = e.Previous(history)
		history, old = append(history, e), append(old, line...)
	}
	if err := atomicfile.WriteBytes(file, old); err != nil {
		return fmt.Errorf("--to: %w", err)
	}
	for i, e := range entries {
		bench.CompareText(cmd.OutOrStdout(), e, before[i])
	}
	return nil
}

// thisProcessor names the processor of this machine.
func thisProcessor() string {
	m := sysinfo.Read()
	return fmt.Sprintf("%s, %s", cmp.Or(strings.TrimSpace(m.CPU.Model), "unknown processor"), counted(m.CPU.Threads, "thread"))
}

// printResult prints the JSON of a benchmark, with the command and the version that
// `stowage bench record` keeps.
func printResult(cmd *cobra.Command, result any) error {
	label, err := json.Marshal(bench.Label{Command: flagLine(cmd, "json", "report", "svg"), Version: version.Number()})
	if err != nil {
		return err
	}
	text, err := json.Marshal(result)
	if err != nil {
		return err
	}
	all := append(append(label[:len(label)-1], ','), text[1:]...)
	return printJSON(cmd, json.RawMessage(all))
}
