package main

import (
	"bytes"
	"encoding/json"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/plan/page"
)

// twoReports are small and made by hand: the second moves a group to the host
// and has another layout.
func twoReports() (a, b *page.Report) {
	const gib = 1 << 30
	a = &page.Report{
		Version: page.Version, Model: page.Model{Name: "toy"}, Hardware: &page.Hardware{Name: "h100"}, Budget: 60 * gib,
		Setup:    page.Setup{TP: 1, PP: 2, OffloadModules: []string{}},
		Heaviest: 0, Peak: page.Band{Low: 60 * gib, Expected: 61 * gib, High: 62 * gib}, Reserved: page.Band{Low: 62 * gib, Expected: 63 * gib, High: 65 * gib},
		Time: &page.Time{Step: 2},
	}
	a.Ranks = []page.Rank{
		{Rank: 0, Causes: []page.Cause{{Name: "weights", Bytes: 20 * gib}, {Name: "activations", Bytes: 41 * gib}, {Name: "pools"}}, Groups: []page.Group{{Name: "core_attn", Total: 21 * gib}, {Name: "moe_act", Total: 20 * gib}}, Peak: a.Peak},
		{Rank: 1, Causes: []page.Cause{{Name: "weights", Bytes: 22 * gib}}, Peak: page.Band{Expected: 40 * gib}},
	}
	again := *a
	b = &again
	b.Setup.PP, b.Setup.OffloadModules = 4, []string{"core_attn"}
	b.Heaviest, b.Fits, b.Time = 1, true, &page.Time{Step: 2.1}
	b.Peak.Expected, b.Reserved = 45*gib, page.Band{Low: 44 * gib, Expected: 47 * gib, High: 49 * gib}
	b.Ranks = []page.Rank{
		a.Ranks[1],
		{Rank: 1, Causes: []page.Cause{{Name: "weights", Bytes: 20 * gib}, {Name: "activations", Bytes: 20 * gib}, {Name: "pools", Bytes: gib}}, Groups: []page.Group{{Name: "moe_act", Total: 20 * gib}, {Name: "router", Total: gib}}, Peak: b.Peak, Host: 21 * gib},
	}
	b.Ranks[0].Rank = 0
	return a, b
}

func TestCompareText(t *testing.T) {
	a, b := twoReports()
	c := compare("a.json", "b.yaml", a, b)
	var out bytes.Buffer
	compareText(&out, c)
	golden.Check(t, "plan-compare.txt", out.String())
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden.Check(t, "plan-compare.json", string(text)+"\n")
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
		r, err := readReport(data)
		if err != nil || r == nil {
			return
		}
		var out bytes.Buffer
		compareText(&out, compare("a", "b", r, r))
		if strings.Contains(out.String(), "NaN") {
			t.Errorf("%q gives %s", data, out.String())
		}
	})
}

// A setup beside itself differs in nothing.
func TestCompareSame(t *testing.T) {
	a, _ := twoReports()
	c := compare("a", "a", a, a)
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
	for _, line := range strings.Split(wrap(strings.Repeat("word ", 60), "    "), "\n") {
		if len(line) > planWidth || (line != "" && !strings.HasPrefix(line, "    word") && !strings.HasPrefix(line, "      word")) {
			t.Errorf("%q", line)
		}
	}
	if got := wrap("", "  "); got != "\n" {
		t.Errorf("%q", got)
	}
}

// A side without hardware has no step and no budget, which is said; equal sides
// are said to be equal, and long settings stay in their column.
func TestPlanCompareUneven(t *testing.T) {
	planFiles(t, nil)
	job := "plan --model mixtral-8x7b --gpus 32 --pp 4 --ep 8 --gbs 64 --seq 4096 --json"
	for name, more := range map[string]string{"bare.json": "", "full.json": " --gpu h100 --budget 52GiB"} {
		stdout, stderr, code := command(strings.Fields(job + more)...)
		if code != exitOK || stderr != "" {
			t.Fatalf("code %d, errors %q", code, stderr)
		}
		if err := os.WriteFile(name, []byte(stdout), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	stdout, stderr, code := command("plan", "--compare", "bare.json", "full.json")
	if code != exitOK || stderr != "" {
		t.Fatalf("code %d, errors %q", code, stderr)
	}
	for _, want := range []string{`(?m)^budget +- +52\.00$`, `(?m)^fits +- +yes$`, `(?m)^step +- +\d`, `(?m)^offload_fractions +none +0\.78125 `} {
		if !regexp.MustCompile(want).MatchString(stdout) {
			t.Errorf("%s is not in\n%s", want, stdout)
		}
	}
	if stdout, _, _ := command("plan", "--compare", "full.json", "full.json"); !strings.Contains(stdout, "no setting differs") {
		t.Errorf("equal sides:\n%s", stdout)
	}
	if got := clip(strings.Repeat("é", 50)); len([]rune(got)) != 36 {
		t.Errorf("a long setting is %q", got)
	}
}
