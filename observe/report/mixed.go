// This file owns reports of several folders: the names of their runs, and which of them
// can be compared.

package report

import (
	"fmt"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

// canonical returns the same path for all names of a file.
func canonical(name string) string {
	if full, err := filepath.Abs(name); err == nil {
		name = full
	}
	if plain, err := filepath.EvalSymlinks(name); err == nil {
		name = plain
	}
	return name
}

// combine gives runs of several folders distinct names and marks those that trained
// something else than the first. It removes ratios of times, because each is relative
// to the first run of its own comparison.
func combine(runs []Run) {
	rename(runs)
	for i := range runs {
		r := &runs[i]
		r.Apart = r.training() != runs[0].training()
		r.Figures = slices.DeleteFunc(r.Figures, func(f Figure) bool { return f.Name == "step_ratio" })
	}
}

// rename names runs after their folders, or after their paths if folders are equal too.
// It keeps the names of policies if they alone tell the runs apart.
func rename(runs []Run) {
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

// memoryOptions are the options that do not change the results of a run.
var memoryOptions = []string{
	"policy", "budget", "offload_modules", "offload_fraction", "recompute_modules", "stash_modules", "graph", "pool", "prefetch", "eval_every", "trace", "save_every", "keep",
}

// training returns a text that is equal for runs that trained the same on the same
// machine. Runs of a comparison have no options; their command tells them apart.
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
			skip = slices.Contains(memoryOptions, key)
		}
		if !skip && !strings.HasPrefix(line, "#") {
			b.WriteString(line)
		}
	}
	return b.String()
}
