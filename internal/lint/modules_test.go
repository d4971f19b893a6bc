// This file tests that the Python package knows exactly the modules of the one table, and
// the report's page exactly the choices.

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
	for _, c := range differences(pythonModules(string(text)), want, "NAMES or KNOWN in pytorch/stowage/_attach.py") {
		t.Error(c)
	}
}

// differences says what to add to a place and what to remove from it.
func differences(got, want []string, place string) (complaints []string) {
	for _, name := range want {
		if !slices.Contains(got, name) {
			complaints = append(complaints, "add "+name+" to "+place)
		}
	}
	for _, name := range got {
		if !slices.Contains(want, name) {
			complaints = append(complaints, "remove "+name+" from "+place)
		}
	}
	return complaints
}

func TestPythonModulesPlanted(t *testing.T) {
	text := "KNOWN = [\n    (\"*.a\", \"one\"),\n    (\"*.b\", \"two\"),\n]\nNAMES = sorted({g for _, g in KNOWN} | {\"three\"})\n"
	if got := pythonModules(text); !slices.Equal(got, []string{"one", "three", "two"}) {
		t.Errorf("found %v", got)
	}
}

func TestDifferencesPlanted(t *testing.T) {
	got := differences([]string{"one", "old"}, []string{"one", "new"}, "the list")
	if want := []string{"add new to the list", "remove old from the list"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// pageChoices returns the choices that a script of the page lists.
func pageChoices(script string) (names []string) {
	list := regexp.MustCompile(`(?m)^const CHOICES = \[(.*)\];$`).FindStringSubmatch(script)
	if list == nil {
		return nil
	}
	for _, m := range regexp.MustCompile(`"(\w+)"`).FindAllStringSubmatch(list[1], -1) {
		names = append(names, m[1])
	}
	return names
}

// styledChoices returns the choices that a style sheet gives a colour.
func styledChoices(sheet string) (names []string) {
	for _, m := range regexp.MustCompile(`\.c-(\w+) \{`).FindAllStringSubmatch(sheet, -1) {
		if m[1] != "other" { // what the page does not know
			names = append(names, m[1])
		}
	}
	return names
}

func TestPageChoices(t *testing.T) {
	var want []string
	for c := range memory.Choice(memory.Choices) {
		want = append(want, c.String())
	}
	for _, x := range []struct {
		file, place string
		find        func(string) []string
	}{
		{"js/68-policy.js", "CHOICES in observe/report/page/js/68-policy.js", pageChoices},
		{"css/20-page.css", "the classes .c-* in observe/report/page/css/20-page.css", styledChoices},
	} {
		text, err := os.ReadFile("../../observe/report/page/" + x.file)
		if err != nil {
			t.Fatal(err)
		}
		for _, c := range differences(x.find(string(text)), want, x.place) {
			t.Error(c)
		}
	}
}

func TestPageChoicesPlanted(t *testing.T) {
	if got := pageChoices("let a;\nconst CHOICES = [\"keep\", \"drop\"];\n"); !slices.Equal(got, []string{"keep", "drop"}) {
		t.Errorf("the script lists %v", got)
	}
	if got := styledChoices(".c-keep { --c: 1; } .c-drop { --c: 2; } .c-other { --c: 3; }"); !slices.Equal(got, []string{"keep", "drop"}) {
		t.Errorf("the sheet has %v", got)
	}
}
