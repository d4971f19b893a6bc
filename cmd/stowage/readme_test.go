// This file tests the command lines that documents and help texts show.

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// lineShown finds command lines: in blocks of code, with or without a prompt, and between
// backquotes.
var lineShown = regexp.MustCompile("(?m)^(?:\\$ )?(?:build/)?(stowage [^|`\n]*)|`(stowage [^`]*)`")

// linesIn returns the command lines in a document, in their order.
func linesIn(text string) (lines []string) {
	for _, m := range lineShown.FindAllStringSubmatch(text, -1) {
		line := strings.Join(strings.Fields(m[1]+m[2]), " ")
		line, _, _ = strings.Cut(line, " #")
		line, _, _ = strings.Cut(line, " >")
		if name := strings.Fields(line); len(name) > 1 && !strings.HasPrefix(name[1], "(") {
			lines = append(lines, line)
		}
	}
	return lines
}

// checkLine returns an error if the flags of a command line do not exist or have a value
// of the wrong kind. It runs nothing.
func checkLine(line string) error {
	line = strings.TrimSuffix(line, " --model ...")
	if line == "stowage help" {
		return nil // the library adds this command when it runs
	}
	cmd, rest, err := newRoot().Find(words(line)[1:])
	if err != nil {
		return err
	}
	cmd.InitDefaultHelpFlag()
	switch {
	case cmd.Name() == "train":
		_, err = parseTrain(cmd, rest)
	case cmd.DisableFlagParsing:
		_, _, err = parsePlan(cmd, rest)
	default:
		if err = cmd.ParseFlags(rest); err == nil && cmd.HasSubCommands() && len(cmd.Flags().Args()) > 0 {
			err = chooseCommand(cmd, cmd.Flags().Args())
		}
	}
	return err
}

// Every command line of the documents and of the help texts has flags that exist.
func TestShownLines(t *testing.T) {
	var all []string
	for _, name := range []string{"README.md", "CONTRIBUTING.md", "docs/*.md"} {
		files, err := filepath.Glob(filepath.Join("..", "..", name))
		if err != nil || len(files) == 0 {
			t.Fatalf("%s: %v", name, err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, linesIn(string(text))...)
		}
	}
	var examples func(cmd *cobra.Command)
	examples = func(cmd *cobra.Command) {
		text := strings.ReplaceAll(cmd.Example, "\\\n", "")
		for line := range strings.Lines(text) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), "   ")
			line, _, _ = strings.Cut(line, " >")
			for part := range strings.SplitSeq(line, "|") {
				if part = strings.TrimSpace(part); strings.HasPrefix(part, "stowage ") {
					all = append(all, strings.ReplaceAll(part, `"`, "'"))
				}
			}
		}
		for _, c := range cmd.Commands() {
			examples(c)
		}
	}
	examples(newRoot())
	if len(all) < 60 {
		t.Errorf("only %d command lines were found: %q", len(all), all)
	}
	t.Chdir(t.TempDir())
	for _, line := range all {
		if err := checkLine(line); err != nil && !strings.Contains(err.Error(), "no such file") {
			t.Errorf("%s\n\t%v", line, err)
		}
	}
}

// The commands of the README work in the order in which they stand, those on a GPU and
// with files of the reader's apart. Runs are shorter here, and their batches smaller.
func TestReadmeInOrder(t *testing.T) {
	text, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	smaller := strings.NewReplacer("--steps 300", "--steps 2", "--steps 600", "--steps 3", "--steps 50", "--steps 1", "--save-every 100", "--save-every 1", "--ep 64 --dp 128", "--ep 4 --dp 4", ":8080", "127.0.0.1:0")
	ran := 0
	for _, m := range regexp.MustCompile(`(?m)^\$ (stowage [^#\n]*)`).FindAllStringSubmatch(string(text), -1) {
		line := smaller.Replace(strings.TrimSpace(m[1]))
		switch train := strings.HasPrefix(line, "stowage train"); {
		case strings.Contains(line, "cuda"), strings.Contains(line, "config.json"):
			continue
		case line == "stowage train":
			continue // TestTrainDefault runs the comparison
		case train && strings.Contains(line, "--dry-run"):
			line = strings.Replace(line, "--seq 4096", "--seq 64 --policy none", 1)
		case train && !strings.Contains(line, "--resume"):
			line += " --micro 1 --seq 16"
			if !strings.Contains(line, "--steps") {
				line += " --steps 1"
			}
		}
		ran++
		if _, stderr, code := command(words(line)[1:]...); code != exitOK || strings.Contains(stderr, "is not there") {
			t.Errorf("%s: code %d, errors %q", line, code, stderr)
		}
	}
	if ran < 7 {
		t.Error(fmt.Errorf("only %d commands were run", ran))
	}
}
