// This file owns what steps do beside a golden file: every call of the device, every event
// of the trace and the counts, as sums. Other tests show that results are exact and that no
// wait is missing; this table shows what costs memory or time and no result.

package offload

import (
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/observe/trace"
)

// sum adds up what is traced, times excepted: of these only the order counts.
type sum struct {
	n    int
	hash uint32
	last int64
}

func (d *sum) Emit(e trace.Event) {
	h := fnv.New32a()
	later := e.Time > d.last
	e.Time, d.last = 0, e.Time
	fmt.Fprint(h, d.hash, later, fmt.Sprintf("%+v", e))
	d.n, d.hash = d.n+1, h.Sum32()
}

func TestStepsStayGood(t *testing.T) {
	if raceEnabled {
		t.Skip("the table is the same, and takes long")
	}
	var b strings.Builder
	for name, c := range checked {
		if !strings.HasPrefix(name, "interleaved") {
			continue
		}
		d := &sum{}
		c.Trace, c.Rank = d, 3
		dev, log := devicelog.Wrap(openCPU(t))
		l, err := newLoop(dev, c)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "%s\n  %s\n", name, log.Take())
		rng := rand.New(rand.NewPCG(1, 2))
		for i := range 4 {
			if i == 3 && c.how != whole {
				l.plan = nil // and scopes are captured again
			}
			l.feed(rng)
			if err := errors.Join(l.issue(i), l.compare()); err != nil {
				t.Fatal(name, i, err)
			}
			if i == 0 {
				l.plan = l.planned(l.m.Tape().Schedule())
			}
			s := l.m.Last()
			s.Names = nil
			dev, host := l.m.Memory()
			fmt.Fprintf(&b, "  step %d: %s\n    %d events %08x, holds %d and %d\n    %+v\n", i, log.Take(), d.n, d.hash, dev, host, s)
		}
		all := l.m.Stats()
		for _, k := range []string{"attn", "mlp"} {
			fmt.Fprintf(&b, "  %s: %+v\n", k, *all.Names[k])
		}
		if err := errors.Join(l.close(), dev.Close()); err != nil {
			t.Fatal(name, err)
		}
		closed, _, _ := strings.Cut(log.Take(), ":") // scopes are closed in any order
		fmt.Fprintf(&b, "  %s\n", closed)
	}
	golden.Check(t, "steps.txt", b.String())
}
