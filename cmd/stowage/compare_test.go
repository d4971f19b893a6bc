// This file owns the comparison of a run in two processes with the same run in one.

package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

var compare = flag.Int("compare", 0, "compare the steps of two processes with those of two ranks in one process, in so many rounds")

// With -compare, TestCompareProcesses trains the main job in one process and in two, which take
// turns. It prints what a step takes of time, of processor time and of context switches, and
// the ratio of the times, by round and in the middle. It fails only if bits differ.
func TestCompareProcesses(t *testing.T) {
	if *compare == 0 {
		t.Skip("run it with -v -compare 5")
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	const line = "train --pp 1 --dp 2 --ep 2 --policy stash --trace=false --steps 12 --plain --out "
	for _, s := range starters[:2] {
		t.Run(s.name, func(t *testing.T) {
			var ratios []float64
			for i := range *compare {
				one, two := fmt.Sprintf("%s-%d-one", s.name, i), fmt.Sprintf("%s-%d-two", s.name, i)
				alone := exec.Command(self, strings.Fields(line+one)...)
				alone.Env = append(os.Environ(), asProgram+"=1")
				if out, err := alone.CombinedOutput(); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				group := s.start(t, 2, line+two)
				if err := group.Wait(); err != nil {
					t.Fatalf("%v\n%s", err, group.out.String())
				}
				if a, b := digestOf(t, one), digestOf(t, two); a != b {
					t.Errorf("parameters are %s in one process and %s in two", a, b)
				}
				a, b := secondsOf(t, one), secondsOf(t, two)
				m, n := median(a), median(b)
				ratios = append(ratios, n/m)
				t.Logf("round %d: a step takes %s in one process and %s in two: %.2f", i+1, costOf(alone, m, len(a)), costOf(group.Cmd, n, len(b)), n/m)
			}
			t.Logf("%s: two processes take %.2f times as long, from %.2f to %.2f in %d rounds", s.name, median(ratios), slices.Min(ratios), slices.Max(ratios), len(ratios))
		})
	}
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}

// secondsOf returns the time of each step of a run.
func secondsOf(t *testing.T, dir string) (all []float64) {
	text, err := os.ReadFile(filepath.Join(dir, "metrics.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	for line := range bytes.Lines(text) {
		var step struct{ Seconds float64 }
		if err := json.Unmarshal(line, &step); err != nil {
			t.Fatal(err)
		}
		all = append(all, step.Seconds)
	}
	return all
}

// costOf says what a step took, of which the usual one took so many seconds.
func costOf(c *exec.Cmd, seconds float64, steps int) string {
	p := c.ProcessState
	switches := p.SysUsage().(*syscall.Rusage).Nvcsw / int64(steps)
	return fmt.Sprintf("%.0f ms (%d ms of processors, %d times asleep)", 1e3*seconds, (p.UserTime()+p.SystemTime()).Milliseconds()/int64(steps), switches)
}
