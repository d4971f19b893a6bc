// This file owns the tests of groups that stay in their sets.

package stash

import (
	"errors"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/schedule"
)

// With a set for each group that is saved at once nothing is copied, in the first step
// neither. With fewer sets groups move to pages, which a rerun makes room for.
func TestKeepAll(t *testing.T) { // SPEC S1.5, S1.6, S6.2
	c := loopConfig{pipeline: schedule.Pipeline{Ranks: 2, Chunks: 1, Microbatches: 4}, layers: 2, maxRows: 30}
	c.Store.Page, c.Store.Max, c.KeepAll = 4096, [Tiers]schedule.Pages{100, 100}, true
	for sets := 1; sets <= 4; sets++ { // two microbatches of two layers are saved at once
		c.sets = sets
		var stats Stats
		program := check.On(cpuDevice, func(dev device.Device) error {
			l, err := newLoop(t, dev, c)
			if err != nil {
				return err
			}
			l.protect()
			err = l.run(4, rand.New(rand.NewPCG(1, 2)), 30)
			stats = l.m.Stats()
			return errors.Join(err, l.close())
		})
		if err := check.Explore(check.Options{}, 3, program); err != nil {
			t.Fatalf("%d sets: %v", sets, err)
		}
		if all := sets == 4; (stats.Stashed == 0) != all || (stats.Reruns == 0) != all {
			t.Errorf("%d sets: %+v", sets, stats)
		}
	}
}
