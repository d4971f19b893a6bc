// This file tests that the Python package knows exactly the modules of the one table.

package lint

import (
	"os"
	"regexp"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// pythonModules returns the names of modules in the text of the Python package's list.
func pythonModules(text string) (names []string) {
	for _, m := range regexp.MustCompile(`(?m)^    \("[^"]+", "(\w+)"\),$`).FindAllStringSubmatch(text, -1) {
		names = append(names, m[1])
	}
	extra := regexp.MustCompile(`(?m)^NAMES = .*\| \{(.*)\}\)$`).FindStringSubmatch(text)
	if extra == nil {
		return nil
	}
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllStringSubmatch(extra[1], -1) {
		names = append(names, m[1])
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func TestPythonModules(t *testing.T) {
	text, err := os.ReadFile("../../pytorch/stowage/_attach.py")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, m := range memory.Modules() {
		if m.Choices.Has(memory.Offload) {
			want = append(want, m.Name)
		}
	}
	slices.Sort(want)
	if got := pythonModules(string(text)); !slices.Equal(got, want) {
		t.Errorf("the Python package knows %v, and the table of modules has %v", got, want)
	}
}

func TestPythonModulesPlanted(t *testing.T) {
	text := "KNOWN = [\n    (\"*.a\", \"one\"),\n    (\"*.b\", \"two\"),\n]\nNAMES = sorted({g for _, g in KNOWN} | {\"three\"})\n"
	if got := pythonModules(text); !slices.Equal(got, []string{"one", "three", "two"}) {
		t.Errorf("found %v", got)
	}
}
