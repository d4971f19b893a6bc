// Package golden compares what a test made with a file under testdata, and
// writes the file anew where the tests run with -update. Only tests import it.
package golden

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

// Check compares with testdata/name.
func Check(t testing.TB, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := write(file, got); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("%v; run the test with -update to write it", err)
	}
	if d := difference(got, string(want)); d != "" {
		t.Errorf("%s: %s\nrun the test with -update if that is right", file, d)
	}
}

func write(file, text string) error {
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return err
	}
	return os.WriteFile(file, []byte(text), 0o644)
}

// difference describes the first line that differs, or is empty.
func difference(got, want string) string {
	if got == want {
		return ""
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range max(len(g), len(w)) {
		if a, b := line(g, i), line(w, i); a != b {
			return fmt.Sprintf("line %d differs\n got %s\nwant %s", i+1, a, b)
		}
	}
	panic("golden: texts that differ have a line that differs")
}

// line returns a line in quotes, or a word for its absence.
func line(lines []string, i int) string {
	if i >= len(lines) {
		return "nothing"
	}
	return fmt.Sprintf("%q", lines[i])
}
