// This file owns reading all traces of a run.

package report

import (
	"cmp"
	"fmt"
	"os"

	"github.com/stowage-dev/stowage/observe/trace"
)

// ReadTraces reads the traces of one run: those in its folder, or the one in the file of
// that name. It skips traces that cannot be read, and returns an error if none is left.
func ReadTraces(run string) (all []*trace.Trace, err error) {
	files := TraceFiles(run)
	if info, err := os.Stat(run); err == nil && !info.IsDir() {
		files = []TraceFile{{Path: run}}
	}
	for _, f := range files {
		t, cannot := ReadTrace(f.Path)
		if cannot != nil {
			err = cmp.Or(err, cannot)
			continue
		}
		all = append(all, t)
	}
	switch {
	case len(all) > 0:
		return all, nil
	case err != nil:
		return nil, fmt.Errorf("%s has no trace that can be read: %w", run, err)
	}
	return nil, fmt.Errorf("%s has no trace; in a comparison, give the folder of one policy", run)
}
