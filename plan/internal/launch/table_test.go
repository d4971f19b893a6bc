// This file owns the table of changes: what each line of the files in testdata is good for. Write
// it anew with -update if a change is meant.

package launch

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// Each line is left out, gets another number, or the other of true and false: what changes, or
// why the file is refused.
func TestTableOfLines(t *testing.T) {
	number := regexp.MustCompile(`([:=] *)([0-9][0-9.e+_-]*)(,? *)$`)
	var b strings.Builder
	for _, name := range inputs(t) {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		base, err := Parse(data, nil)
		if err != nil {
			t.Fatal(err)
		}
		was := strings.Split(base.text(), "\n")
		fmt.Fprintf(&b, "%s\n", filepath.Base(name))
		lines := strings.Split(string(data), "\n")
		for i, line := range lines {
			if strings.Trim(line, " {}[],") == "" || strings.HasPrefix(strings.TrimSpace(line), "#") {
				continue
			}
			changes := []string{""}
			for _, with := range []string{"0", "3", "0.5"} {
				changes = append(changes, number.ReplaceAllString(line, "${1}"+with+"${3}"))
			}
			changes = append(changes, strings.Replace(line, "true", "false", 1), strings.Replace(line, "false", "true", 1))
			for _, change := range slices.Compact(changes) {
				if change == line {
					continue
				}
				changed := slices.Clone(lines)
				changed[i] = change
				fmt.Fprintf(&b, "  %s -> %s:", strings.TrimSpace(line), strings.TrimSpace(change))
				f, err := Parse([]byte(strings.Join(changed, "\n")), nil)
				switch {
				case err != nil:
					fmt.Fprintf(&b, " %v\n", err)
					continue
				case f == nil:
					fmt.Fprint(&b, " not a launch file\n")
					continue
				}
				is := strings.Split(f.text(), "\n")
				for _, l := range was {
					if !slices.Contains(is, l) {
						fmt.Fprintf(&b, " -{%s}", l)
					}
				}
				for _, l := range is {
					if !slices.Contains(was, l) {
						fmt.Fprintf(&b, " +{%s}", l)
					}
				}
				fmt.Fprintln(&b)
			}
		}
	}
	golden.Check(t, "lines.txt", b.String())
}
