// This file owns reading all traces of a run.

package report

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/observe/trace"
)

// ReadTraces reads the traces of one run: those in its folder, or the one in the file of
// that name. Of a run that was resumed it reads the latest, of most bytes together, as
// [ReadRecent] does. It skips traces that cannot be read or are of another run than those
// before them, and returns an error if none is left. The traces are packed; see [trace.ReadPacked].
func ReadTraces(run string, most int64) (all []*trace.Trace, err error) {
	files, _, _ := recent(TraceFiles(run), most)
	if info, err := os.Stat(run); err == nil && !info.IsDir() {
		files = []TraceFile{{Path: run}}
	}
	fellows := fellows{}
	for _, f := range files {
		t, cannot := readPacked(f.Path)
		if cannot == nil {
			if why := fellows.strange(t.Header, f.Part); why != "" {
				cannot = errors.New(why)
			}
		}
		if cannot != nil {
			err = cmp.Or(err, fmt.Errorf("%s: %w", filepath.Base(f.Path), inFewWords{input.Cause(cannot)}))
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

// inFewWords is an error about a trace without the name of the package that found it.
type inFewWords struct{ error }

func (e inFewWords) Error() string { return strings.TrimPrefix(e.error.Error(), "trace: ") }
func (e inFewWords) Unwrap() error { return e.error }

// recent returns the traces of the latest parts of a run that have most bytes together,
// the number of others, and their bytes. It always returns the last part, and all parts
// if most is zero.
func recent(files []TraceFile, most int64) (latest []TraceFile, others int, bytes int64) {
	if most == 0 {
		return files, 0, 0
	}
	size := map[int]int64{} // by part
	for _, f := range files {
		if info, err := os.Stat(f.Path); err == nil {
			size[f.Part] += info.Size()
		}
	}
	parts := slices.SortedFunc(maps.Keys(size), func(a, b int) int { return b - a })
	keep, sum := map[int]bool{}, int64(0)
	for i, part := range parts {
		if sum += size[part]; sum > most && i > 0 {
			break
		}
		keep[part] = true
	}
	for _, f := range files {
		if keep[f.Part] {
			latest = append(latest, f)
		} else {
			others++
		}
	}
	for part, n := range size {
		if !keep[part] {
			bytes += n
		}
	}
	return latest, others, bytes
}
