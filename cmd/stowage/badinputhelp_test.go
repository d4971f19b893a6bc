// This file owns what the tables of bad inputs need: the files that are misused, and the words that no message has.

package main

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// goWords finds what only a programmer understands.
var goWords = regexp.MustCompile(`strconv|parsing|invalid (argument|syntax|character)|%!|\[[^\]"]+ [^\]"]*\]|map\[|<nil>|0x[0-9a-f]{6}|goroutine|panic|Go value|sequence|mapping|schedule: |[ (](json|yaml): |unmarshal|\{[A-Z]\w*:|: open |: stat |: read |[0-9]e(\+|-0)[0-9]|bare "`)

// words splits a command line at spaces outside of single quotes.
func words(line string) (out []string) {
	for i, part := range strings.Split(line, "'") {
		if i%2 == 1 {
			out = append(out, part)
		} else {
			out = append(out, strings.Fields(part)...)
		}
	}
	return out
}

// fixtures fills the current folder with files to misuse.
func fixtures(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"empty", "run", "run/report.html"} { // a page cannot replace a folder
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{
		"text.txt": "neither JSON nor YAML: {", "small.json": smallModel, "part.yaml": "steps: 1.5\n",
		"negative.yaml": "seed: -1\n", "word.yaml": "graph: attn\n", "list.yaml": "- a\n",
	} {
		writeFile(t, name, text)
	}
	if err := os.Symlink("loop", "loop"); err != nil {
		t.Fatal(err)
	}
	result, stderr, code := command("bench", "pools", "--model", "tiny-moe", "--json")
	if code != exitOK {
		t.Fatal(stderr)
	}
	writeFile(t, "result.json", result)
}

// files lists what is in the current folder, with sizes.
func files(t *testing.T) (list string) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && !d.IsDir() {
			path += fmt.Sprintf(" (%d bytes)", info.Size())
		}
		list += path + "\n"
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return list
}
