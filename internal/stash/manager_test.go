// This file owns the manager on every pipeline shape.

package stash

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

func loopOn(t *testing.T, dev device.Device, c loopConfig) *loop {
	t.Helper()
	l, err := newLoop(t, dev, c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.close(); err != nil {
			t.Error(err)
		}
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func roomy(mode Mode) ManagerConfig {
	return ManagerConfig{Mode: mode, Store: Config{
		Page: 4 * memory.KiB, Pages: [Tiers]schedule.Pages{256, 0}, Max: [Tiers]schedule.Pages{256, 256},
	}}
}

// SPEC S1.1, S1.2, S1.3, S1.5, SPEC S3.2: every pipeline shape gives the gradients of the
// model in every mode, with one read of device memory a step and no wait.
func TestManagerGivesExactGradients(t *testing.T) {
	pipelines := map[string]struct {
		p    schedule.Pipeline
		rank int
		bump bool
	}{
		"PP 1":                   {schedule.Pipeline{Ranks: 1, Chunks: 1, Microbatches: 3}, 0, true},
		"1F1B first rank":        {schedule.Pipeline{Ranks: 4, Chunks: 1, Microbatches: 6}, 0, false},
		"1F1B last rank":         {schedule.Pipeline{Ranks: 4, Chunks: 1, Microbatches: 6}, 3, true},
		"interleaved first rank": {schedule.Pipeline{Ranks: 2, Chunks: 2, Microbatches: 4}, 0, false},
	}
	for name, x := range pipelines {
		for _, sets := range []int{1, 2, 3} {
			for _, mode := range []Mode{Auto, PagesOnly} {
				t.Run(fmt.Sprintf("%s, %d sets, mode %d", name, sets, mode), func(t *testing.T) {
					l := loopOn(t, openCPU(t), loopConfig{
						ManagerConfig: roomy(mode), pipeline: x.p, rank: x.rank, layers: 3, sets: sets, maxRows: 50,
					})
					if err := l.run(4, rand.New(rand.NewPCG(1, 2)), 50); err != nil {
						t.Fatal(err)
					}
					st := l.m.Stats()
					if st.Reruns != 0 || st.Departures != 0 || st.Steps != 4 {
						t.Errorf("stats %+v", st)
					}
					if got := l.m.store.bump; got != (x.bump && mode == Auto) {
						t.Errorf("the store is a stack: %v", got)
					}
				})
			}
		}
	}
}
