// This file owns the rule for references to docs/SPEC.md: a test names the promises
// that it covers as "SPEC S<chapter>.<line>", and each must be one that is kept.

package lint

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// specFile lists the promises. A line begins with "**S1.4**", followed by
// "*(planned)*" if the promise is not kept yet.
const specFile = "docs/SPEC.md"

var (
	specLine = regexp.MustCompile(`(?m)^\*\*(S\d+\.\d+)\*\*( \*\(planned\)\*)?`)
	specWord = regexp.MustCompile(`\bSPEC\b(.*)`)
	specList = regexp.MustCompile(`^ (S\d+\.\d+)(((, | and |, and )S\d+\.\d+)*)`)
	specRef  = regexp.MustCompile(`S\d+\.\d+`)
)

// readSpec returns the numbers in the text of specFile. The value is true if the
// promise is kept and false if it is planned.
func readSpec(text []byte) (kept map[string]bool, complaints []string) {
	kept = map[string]bool{}
	for _, m := range specLine.FindAllSubmatch(text, -1) {
		number := string(m[1])
		if _, twice := kept[number]; twice {
			complaints = append(complaints, fmt.Sprintf("%s: %s stands twice; give the second one a new number", specFile, number))
		}
		kept[number] = len(m[2]) == 0
	}
	return kept, complaints
}

// refersToSpec reports whether a file's mentions of SPEC are references. They are in
// tests and in Python; elsewhere they may be prose.
func refersToSpec(f *file) bool {
	return f.isTest() || strings.HasSuffix(f.name, ".py")
}

// checkSpec returns the numbers that tests name. It complains about references that
// are written in another form, unknown, or planned.
func checkSpec(files []*file) (named map[string]bool, complaints []string) {
	named = map[string]bool{}
	kept := map[string]bool{}
	for _, f := range files {
		if f.name == specFile {
			kept, complaints = readSpec(f.text)
		}
	}
	if len(kept) == 0 {
		return named, append(complaints, specFile+": no promise found; expected lines that begin with **S1.1**")
	}
	for _, f := range files {
		if !refersToSpec(f) || strings.HasPrefix(f.name, "internal/lint/") {
			continue
		}
		for i, line := range bytes.Split(f.text, []byte("\n")) {
			word := specWord.FindSubmatch(line)
			if word == nil {
				continue
			}
			list := specList.Find(word[1])
			if list == nil {
				complaints = append(complaints, fmt.Sprintf("%s:%d: expected a reference such as \"SPEC S6.2\" or \"SPEC S6.2, S6.3\"", f.name, i+1))
			}
			for _, ref := range specRef.FindAll(list, -1) {
				number := string(ref)
				named[number] = true
				if now, known := kept[number]; !known {
					complaints = append(complaints, fmt.Sprintf("%s:%d: %s has no %s", f.name, i+1, specFile, number))
				} else if !now {
					complaints = append(complaints, fmt.Sprintf("%s:%d: %s is marked as planned in %s; remove the mark there if it is kept now", f.name, i+1, number, specFile))
				}
			}
		}
	}
	return named, complaints
}

func TestSpecReferences(t *testing.T) {
	named, complaints := checkSpec(repo(t))
	complain(t, complaints)
	t.Logf("promises that tests name: %s", strings.Join(slices.Sorted(maps.Keys(named)), " "))
}

func TestSpecPlanted(t *testing.T) {
	src := "// SPEC S6.2\n// SPEC S1.4, S6.5 and S2.1 hold\n// SPEC 6.2\n// SPEC S1.8\n// SPEC S7.1\n// INSPECT it\n"
	spec := "**S1.4** It spills.\n\n**S2.1** It shards.\n**S6.2** It checks.\n**S6.5** It shows.\n**S7.1** *(planned)* It starts.\nsee **S1.8** too\n"
	named, complaints := checkSpec([]*file{
		{name: "a_test.go", text: []byte(src)},
		{name: "a.go", text: []byte(src)},
		{name: specFile, text: []byte(spec)},
	})
	mustComplain(t, complaints, "a_test.go:3", "a_test.go:4: docs/SPEC.md has no S1.8", "a_test.go:5: S7.1 is marked as planned")
	for _, want := range []string{"S6.2", "S1.4", "S6.5", "S2.1"} {
		if !named[want] {
			t.Errorf("%s was not seen", want)
		}
	}
}

func TestSpecFilePlanted(t *testing.T) {
	_, complaints := checkSpec([]*file{{name: specFile, text: []byte("**S1.1** One.\n**S1.1** *(planned)* Another.\n")}})
	mustComplain(t, complaints, "S1.1 stands twice")
	_, complaints = checkSpec([]*file{{name: "a_test.go", text: []byte("// SPEC S1.1\n")}})
	mustComplain(t, complaints, "no promise found")
}
