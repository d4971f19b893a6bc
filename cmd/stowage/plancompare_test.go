package main

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// A side without hardware has a dash for its step and its budget. Equal sides have no
// differences.
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
	for _, want := range []string{`(?m)^budget +- +52\.00$`, `(?m)^fits +- +yes$`, `(?m)^step +- +\d`, `(?m)^offload_fractions +none +0\.640625 `} {
		if !regexp.MustCompile(want).MatchString(stdout) {
			t.Errorf("%s is not in\n%s", want, stdout)
		}
	}
	if stdout, _, _ := command("plan", "--compare", "full.json", "full.json"); !strings.Contains(stdout, "no setting differs") {
		t.Errorf("equal sides:\n%s", stdout)
	}
}
