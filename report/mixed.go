// This file owns runs of several places on one page: what they are called, and which of
// them can be compared.

package report

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// onePath is the one name of a path that has several.
func onePath(name string) string {
	if full, err := filepath.Abs(name); err == nil {
		name = full
	}
	if plain, err := filepath.EvalSymlinks(name); err == nil {
		name = plain
	}
	return name
}

// mixed gives runs of several places names that tell them apart, and says which are not
// of the first one's training. Their ratios go: they are over the first run of another
// comparison.
func mixed(runs []Run) {
	name(runs)
	for i := range runs {
		r := &runs[i]
		r.Apart = r.training() != runs[0].training()
		r.Figures = slices.DeleteFunc(r.Figures, func(f Figure) bool { return f.Name == "step_ratio" })
	}
}

// name keeps the policies for names unless one is that of two runs, or the folder of
// another: then all have the names of folders, or paths where those are equal too.
func name(runs []Run) {
	policies, folders := map[string]int{}, map[string]int{}
	for _, r := range runs {
		policies[r.Name]++
		folders[r.folder]++
	}
	telling := true
	for _, r := range runs {
		last := path.Base(r.folder)
		telling = telling && policies[r.Name] == 1 && (last == r.Name || policies[last] == 0)
	}
	for i := range runs {
		switch r := &runs[i]; {
		case telling:
		case folders[r.folder] > 1:
			r.Name = filepath.Clean(r.path)
		default:
			r.Name = r.folder
		}
	}
}

// ways are the options that change how a run is trained, not what it comes to.
var ways = []string{
	"policy", "budget", "offload_modules", "offload_fraction", "recompute_modules", "graph", "pool", "prefetch", "eval_every", "save_every", "keep",
}

// training is equal for runs that trained the same on the same machine. Runs of
// comparisons have no options; they have the command.
func (r *Run) training() string {
	var b strings.Builder
	for _, key := range []string{"model", "layout", "device", "cpu", "threads"} {
		fmt.Fprintf(&b, "%s=%q\n", key, r.Environment[key])
	}
	for _, f := range r.Figures {
		if f.Name == "model" || f.Name == "steps" {
			fmt.Fprintf(&b, "%s=%s%g\n", f.Name, f.Text, f.Value)
		}
	}
	if r.Options == "" {
		return b.String() + r.Command
	}
	skip := false
	for line := range strings.Lines(r.Options) {
		if key, _, ok := strings.Cut(line, ":"); ok && !strings.HasPrefix(key, " ") && !strings.HasPrefix(key, "-") {
			skip = slices.Contains(ways, key)
		}
		if !skip && !strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}
