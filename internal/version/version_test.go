// This file owns the test that the version is one that Python's tools accept.

package version

import (
	"os"
	"regexp"
	"testing"
)

func TestNumber(t *testing.T) {
	if !regexp.MustCompile(`^\d+\.\d+\.\d+((a|b|rc|\.dev)\d+)?$`).MatchString(Number()) {
		t.Errorf("VERSION holds %q; write it as PEP 440 does, such as 0.9.0 or 0.9.0.dev0", Number())
	}
}

// The Python package states the same version, if it states one in its source.
func TestPythonVersion(t *testing.T) {
	text, err := os.ReadFile("../../pytorch/stowage/__init__.py")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^__version__(?:: str)? = "(.+)"`).FindSubmatch(text)
	if m != nil && string(m[1]) != Number() {
		t.Errorf("pytorch/stowage/__init__.py has version %s, and VERSION %s; make them the same", m[1], Number())
	}
}
