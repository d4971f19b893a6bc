package report

import (
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

// Of a run that was resumed often, a training process reads the latest parts alone, and
// its report says so. The last part is always read, of all ranks.
func TestReadRecent(t *testing.T) {
	dir := t.TempDir()
	var size int64
	for part := range 4 {
		for rank := range 2 {
			s := newScribe(rank)
			s.own(memory.Device, "parameters", mib)
			s.step(part+1, kib)
			data := encode(t, &s.t)
			size = int64(len(data))
			put(t, data, dir, TraceName(rank, part))
		}
	}
	for most, want := range map[int64][]int{0: {1, 2, 3, 4}, 1: {4}, 2*size + 99: {4}, 4*size + 99: {3, 4}, 1 << 30: {1, 2, 3, 4}} {
		r, err := ReadRecent(most, dir)
		if err != nil {
			t.Fatal(err)
		}
		run := r.Runs[0]
		for _, k := range run.Ranks {
			var steps []int
			for _, s := range k.Steps {
				steps = append(steps, s.Step)
			}
			if !slices.Equal(steps, want) {
				t.Errorf("within %d bytes rank %d has the steps %v", most, k.Rank, steps)
			}
		}
		said := strings.Contains(strings.Join(run.Missing, "\n"), "traces of earlier parts of the run (")
		if len(run.Ranks) != 2 || said != (len(want) < 4) {
			t.Errorf("within %d bytes %d ranks are shown, and missing are %q", most, len(run.Ranks), run.Missing)
		}
		if all, err := ReadTraces(dir, most); err != nil || len(all) != 2*len(want) {
			t.Errorf("within %d bytes there are %d traces, %v", most, len(all), err)
		}
	}
}
