// This file owns the rule of clocks: durations come from readings that never go back.

package lint

import (
	"go/ast"
	"slices"
	"testing"
)

// dates lists the files that write down when something began. All others compute
// durations, and a number made of the machine's clock is no good for that: the clock can be
// set while a program runs.
var dates = []string{
	"cmd/stowage/benchoffloadopts.go",
	"internal/bench/page.go",
	"pytorch/bridge/internal/session/stats.go",
	"train/run/tracing.go",
	"cmd/stowage/cluster.go", // compares the dates of machines
}

// checkClocks complains about numbers and times that were made without the monotonic reading.
func checkClocks(files []*file, dates []string) (complaints []string) {
	for _, f := range files {
		if f.syntax == nil || f.isTest() || slices.Contains(dates, f.name) {
			continue
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				switch s.Sel.Name {
				case "Unix", "UnixNano", "UnixMicro", "UnixMilli":
					complaints = append(complaints, f.name+": "+s.Sel.Name+" reads the machine's clock, which can be set; use time.Since or device.Now, or list the file as one that writes dates")
				}
			}
			return true
		})
	}
	return complaints
}

func TestClocks(t *testing.T) { complain(t, checkClocks(repo(t), dates)) }

func TestClocksPlanted(t *testing.T) {
	const src = "package p\nimport \"time\"\nvar x = time.Now().UnixNano()\n"
	mustComplain(t, checkClocks([]*file{
		parseGo(t, "device/cpu/x.go", src),
		parseGo(t, "device/cpu/x_test.go", src),
		parseGo(t, "train/run/tracing.go", src),
	}, dates), "device/cpu/x.go: UnixNano")
}
