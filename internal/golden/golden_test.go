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

// Each number, flag and empty pointer is changed alone, and what is said of it is in the table.
func TestVary(t *testing.T) {
	type part struct{ N int }
	type whole struct {
		A     int
		F     float64
		On    bool
		Parts []part
		None  *part
		Skip  int
		words string
	}
	got := Vary(func() *whole { return &whole{A: 7, F: 2, Parts: []part{{8}}, words: "w"} }, func(name string) bool { return name != "Skip" }, map[string][]int{"N": {50}}, func(w *whole) string {
		switch {
		case w.words != "w" || w.Skip != 0:
			return "what was not to be changed was"
		case w.A == 3:
			panic("three")
		case w.A != 7:
			return "another A"
		case w.F != 2:
			return "another F"
		case w.On:
			return "on"
		case w.Parts[0].N > 49:
			return "many"
		case w.None != nil:
			return "some"
		}
		return "fine"
	})
	const want = `  A = -1, 0, 1, 2, 4, 5, 255, 256, 1025: another A
  A = 3: panic: three
  F = -1, -0, 1, 1.5, 1e+06, 1.0000001e+06, 3.4028234663852886e+38, 3.5e+38, NaN, +Inf: another F
  On = true: on
  Parts[0].N = -1, 0, 1, 2, 3, 4, 5, 49: fine
  Parts[0].N = 255, 256, 1025, 50, 51: many
  None = empty: some
`
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
