// This file owns what steps do beside a golden file: every call of the device as a sum, every
// event and line of the log, and the counts. Other tests show that results are exact and that
// no wait is missing; this table shows what costs memory or time and no result.

package stash

import (
	"errors"
	"fmt"
	"hash/fnv"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/observe/trace"
)

func TestStepsStayGood(t *testing.T) {
	var b strings.Builder
	for _, seed := range []uint64{0, 1, 2, 3, 4, 5, 605, 797, 965} {
		for mode := Auto; mode <= BumpOnly; mode++ {
			inner, err := cpuDevice()
			if err != nil {
				t.Fatal(err)
			}
			dev, log := devicelog.Wrap(inner)
			log.Unordered = []string{"download compute#1", "copy stash records#1"} // of records, which are in a map
			c, err := drawChaos(t, dev, seed, mode)
			if err != nil {
				t.Fatal(err)
			}
			n, h := 0, fnv.New32a()
			c.m.cfg.Emit = func(e trace.Event) {
				n++
				fmt.Fprintf(h, "%+v\n", e)
			}
			fmt.Fprintf(&b, "seed %d, mode %d\n  %s\n", seed, mode, log.Take())
			if err := c.train(seed); err != nil {
				if mode != BumpOnly { // which not every order allows
					t.Fatal(seed, mode, err)
				}
				fmt.Fprintf(&b, "  %v\n", err)
			}
			spaces, pages := c.m.Held()
			fmt.Fprintf(&b, "  %s\n  %+v\n  holds %d and %d, unseen %d, generation %d, %d events %08x\n", log.Take(), c.m.Stats(), spaces, pages, c.m.Unseen(), c.m.Generation(), n, h.Sum32())
			if err := errors.Join(c.close(), dev.Close()); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "  %s\n", log.Take())
		}
	}
	golden.Check(t, "steps.txt", b.String())
}
