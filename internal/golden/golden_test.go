package golden

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestDifference(t *testing.T) {
	for _, c := range []struct{ got, want, say string }{
		{"", "", ""},
		{"a\nb\n", "a\nb\n", ""},
		{"a\nb\n", "a\nc\n", "line 2 differs\n got \"b\"\nwant \"c\""},
		{"a\n", "a\nb", "line 2 differs\n got \"\"\nwant \"b\""},
		{"a", "a\n", "line 2 differs\n got nothing\nwant \"\""},
		{"a\nb", "a", "line 2 differs\n got \"b\"\nwant nothing"},
	} {
		if d := difference(c.got, c.want); d != c.say {
			t.Errorf("%q and %q: %q, want %q", c.got, c.want, d, c.say)
		}
	}
}

// recorder is a test that keeps its failures to itself.
type recorder struct {
	testing.TB
	failures []string
}

func (r *recorder) Helper() {}
func (r *recorder) Errorf(format string, args ...any) {
	r.failures = append(r.failures, format)
}
func (r *recorder) Fatalf(format string, args ...any) {
	r.failures = append(r.failures, format)
	panic(r)
}

func TestCheck(t *testing.T) {
	t.Chdir(t.TempDir())
	check := func(got string) (failures []string) {
		r := &recorder{TB: t}
		defer func() {
			if x := recover(); x != nil && x != any(r) {
				panic(x)
			}
			failures = r.failures
		}()
		Check(r, "x.txt", got)
		return r.failures
	}
	before := *update
	defer func() { *update = before }()

	*update = false
	if f := check("a"); len(f) != 1 || !strings.Contains(f[0], "-update") {
		t.Errorf("a file that is not there: %q", f)
	}
	*update = true
	if f := check("a"); len(f) != 0 {
		t.Errorf("an update: %q", f)
	}
	*update = false
	if f := check("a"); len(f) != 0 {
		t.Errorf("the same again: %q", f)
	}
	if f := check("b"); len(f) != 1 {
		t.Errorf("something else: %q", f)
	}
	if b, err := os.ReadFile(filepath.Join("testdata", "x.txt")); err != nil || string(b) != "a" {
		t.Errorf("the file holds %q, %v", b, err)
	}
}
