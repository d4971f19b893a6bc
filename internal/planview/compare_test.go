package planview

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/internal/plaintext"
	"github.com/stowage-dev/stowage/memory"
)

// twoReports are small and made by hand: the second moves a group to the host
// and has another layout.
func twoReports() (a, b *Report) {
	const gib = 1 << 30
	a = &Report{
		Version: Version, Model: Model{Name: "toy"}, Hardware: &Hardware{Name: "h100"}, Budget: 60 * gib,
		Setup:    Setup{TP: 1, PP: 2, OffloadModules: []string{}},
		Heaviest: 0, Peak: Band{Low: 60 * gib, Expected: 61 * gib, High: 62 * gib}, Reserved: Band{Low: 62 * gib, Expected: 63 * gib, High: 65 * gib},
		Time: &Time{Step: 2},
	}
	a.Ranks = []Rank{
		{Rank: 0, Causes: []Cause{{Name: "weights", Bytes: 20 * gib}, {Name: "activations", Bytes: 41 * gib}, {Name: "pools"}}, Groups: []Group{{Name: "core_attn", Total: 21 * gib}, {Name: "moe_act", Total: 20 * gib}}, Peak: a.Peak},
		{Rank: 1, Causes: []Cause{{Name: "weights", Bytes: 22 * gib}}, Peak: Band{Expected: 40 * gib}},
	}
	again := *a
	b = &again
	b.Setup.PP, b.Setup.OffloadModules = 4, []string{"core_attn"}
	b.Heaviest, b.Fits, b.Time = 1, true, &Time{Step: 2.1}
	b.Peak.Expected, b.Reserved = 45*gib, Band{Low: 44 * gib, Expected: 47 * gib, High: 49 * gib}
	b.Ranks = []Rank{
		a.Ranks[1],
		{Rank: 1, Causes: []Cause{{Name: "weights", Bytes: 20 * gib}, {Name: "activations", Bytes: 20 * gib}, {Name: "pools", Bytes: gib}}, Groups: []Group{{Name: "moe_act", Total: 20 * gib}, {Name: "router", Total: gib}}, Peak: b.Peak, Host: 21 * gib},
	}
	b.Ranks[0].Rank = 0
	return a, b
}

func TestCompareText(t *testing.T) {
	a, b := twoReports()
	c := Compare("a.json", "b.yaml", a, b)
	var out bytes.Buffer
	c.WriteText(&out)
	golden.Check(t, "compare.txt", out.String())
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "compare.json", string(text)+"\n")
}

// A warning of both sides is written once, and others with their side.
func TestWarningsOfBothSides(t *testing.T) {
	var out bytes.Buffer
	(&Comparison{A: Side{Warnings: []string{"one", "two"}}, B: Side{Warnings: []string{"two", "three"}}}).writeNotes(&out)
	if got, want := out.String(), "\nnote on A: one\nnote on both: two\nnote on B: three\n"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

// What has a name several times is added up, on both sides.
func TestDifferencesAddUp(t *testing.T) {
	of := func(c Cause) (string, memory.Bytes) { return c.Name, c.Bytes }
	got := differences([]Cause{{Name: "x", Bytes: 1}, {Name: "x", Bytes: 2}}, []Cause{{Name: "x", Bytes: 4}, {Name: "y"}, {Name: "x", Bytes: 8}}, of)
	if want := []Difference{{Name: "x", A: 3, B: 12, More: 9}}; !slices.Equal(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

// No report makes the comparison panic.
func FuzzReadReport(f *testing.F) {
	a, _ := twoReports()
	text, err := json.Marshal(a)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(text)
	f.Add([]byte(`{"version":1,"heaviest_rank":0,"ranks":[{"rank":0}],"time":{"step_seconds":1}}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		r, err := Read(data)
		if err != nil || r == nil {
			return
		}
		var out bytes.Buffer
		Compare("a", "b", r, r).WriteText(&out)
		if strings.Contains(out.String(), "NaN") {
			t.Errorf("%q gives %s", data, out.String())
		}
	})
}

// A setup beside itself differs in nothing.
func TestCompareSame(t *testing.T) {
	a, _ := twoReports()
	c := Compare("a", "a", a, a)
	if len(c.Settings) != 0 {
		t.Errorf("settings differ: %v", c.Settings)
	}
	for _, d := range append(append(c.Causes, c.Groups...), c.Ranks...) {
		if d.More != 0 || d.A != d.B {
			t.Errorf("%+v differs", d)
		}
	}
}

func TestWrap(t *testing.T) {
	for _, line := range strings.Split(Wrap(strings.Repeat("word ", 60), "    "), "\n") {
		if len(line) > plaintext.Width || (line != "" && !strings.HasPrefix(line, "    word") && !strings.HasPrefix(line, "      word")) {
			t.Errorf("%q", line)
		}
	}
	if got := Wrap("", "  "); got != "\n" {
		t.Errorf("%q", got)
	}
}

func TestClip(t *testing.T) {
	if got := clip(strings.Repeat("é", 50)); len([]rune(got)) != 36 {
		t.Errorf("a long setting is %q", got)
	}
}

// A side without budget, hardware or time has dashes, and nothing is subtracted from it.
func TestCompareWithoutBudgets(t *testing.T) {
	var out strings.Builder
	line := func(cells ...string) { out.WriteString(strings.Join(cells, " | ") + "\n") }
	fast, slow := 1.0, 2.0
	for _, a := range []Side{{}, {Budget: 1 << 30, Fits: true}, {Step: &fast}} {
		for _, b := range []Side{{}, {Budget: 3 << 30}, {Step: &slow}} {
			budgets(func(name, a, b, more string) { line(name, a, b, more) }, &a, &b)
			out.WriteString("-\n")
		}
	}
	want := `-
budget | - | 3.00 | 
fits | - | no | 
-
step | - | 2.00 s | 
-
budget | 1.00 | - | 
fits | yes | - | 
-
budget | 1.00 | 3.00 | +2.00
fits | yes | no | 
-
budget | 1.00 | - | 
fits | yes | - | 
step | - | 2.00 s | 
-
step | 1.00 s | - | 
-
budget | - | 3.00 | 
fits | - | no | 
step | 1.00 s | - | 
-
step | 1.00 s | 2.00 s | +100.0 %
-
`
	if out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
	for text, want := range map[string]string{
		`{"version":1,"ranks":[{"rank":0}],"time":{"step_seconds":0}}`: "its step takes no time", `{"version":1,"ranks":[{"rank":0}],"time":{"step_seconds":0.1}}`: "", `{"version":1,"ranks":[{"rank":0}]}`: "",
		`{"version":1,"ranks":[{"rank":1}]}`: "its heaviest rank, 0, is not among its ranks", `{"version":2,"ranks":[]}`: "the report is of version 2, and this program reads version 1; print it again",
	} {
		if _, err := Read([]byte(text)); (err == nil) != (want == "") || err != nil && err.Error() != want {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}
