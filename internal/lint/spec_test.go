// This file owns the references to the specification: tests name what they
// cover as "SPEC S<chapter>.<line>", and a reference must lead somewhere.

package lint

import (
	"bytes"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// lastOf is the number of requirements in each chapter.
var lastOf = map[int]int{1: 7, 2: 7, 3: 5, 4: 6, 5: 5, 6: 5}

var (
	specWord = regexp.MustCompile(`\bSPEC\b(.*)`)
	specList = regexp.MustCompile(`^ (S\d+\.\d+)(((, | and |, and )S\d+\.\d+)*)`)
	specRef  = regexp.MustCompile(`S(\d+)\.(\d+)`)
)

// refersToSpec tells whether a file's mentions of the specification are
// references: those in tests are, prose elsewhere need not be.
func refersToSpec(f *file) bool {
	return f.isTest() || strings.HasSuffix(f.name, ".py")
}

func checkSpec(files []*file) (named map[string]bool, complaints []string) {
	named = map[string]bool{}
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
				complaints = append(complaints, fmt.Sprintf("%s:%d: write the reference as \"SPEC S6.2\" or \"SPEC S6.2, S6.3\"", f.name, i+1))
			}
			for _, ref := range specRef.FindAllSubmatch(list, -1) {
				chapter, _ := strconv.Atoi(string(ref[1]))
				n, _ := strconv.Atoi(string(ref[2]))
				if n < 1 || n > lastOf[chapter] {
					complaints = append(complaints, fmt.Sprintf("%s:%d: the specification has no %s", f.name, i+1, ref[0]))
				}
				named[string(ref[0])] = true
			}
		}
	}
	return named, complaints
}

func TestSpecReferences(t *testing.T) {
	named, complaints := checkSpec(repo(t))
	complain(t, complaints)
	t.Logf("requirements that tests name: %s", strings.Join(slices.Sorted(maps.Keys(named)), " "))
}

func TestSpecPlanted(t *testing.T) {
	src := "// SPEC S6.2\n// SPEC S1.4, S6.5 and S2.1 hold\n// SPEC 6.2\n// SPEC S1.8\n// SPEC S7.1\n// INSPECT it\n"
	named, complaints := checkSpec([]*file{
		{name: "a_test.go", text: []byte(src)},
		{name: "a.go", text: []byte(src)},
	})
	mustComplain(t, complaints, "a_test.go:3", "a_test.go:4", "a_test.go:5")
	for _, want := range []string{"S6.2", "S1.4", "S6.5", "S2.1"} {
		if !named[want] {
			t.Errorf("%s was not seen", want)
		}
	}
}
