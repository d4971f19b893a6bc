// This file owns the table of how long steps of many unlike setups take. A change of any
// time is seen. Write it anew with -update if the change is meant.

package cost

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
)

func TestTable(t *testing.T) {
	var b strings.Builder
	accepted := 0
	for i := range 300 {
		s, what := plantest.Draw(i)
		n, err := s.Normalise()
		if err != nil {
			continue
		}
		m, err := New(n)
		if err != nil {
			continue
		}
		accepted++
		fmt.Fprintf(&b, "%d %s\n", i, what)
		p := m.Policy()
		step := m.Step(p.Passes)
		fmt.Fprintf(&b, "  %.5g %.5g %.5g %.5g %.5g %d %.5g\n", step.Total, step.Busy, step.Bubble, step.Replicas, step.Update, step.Slowest, m.Bound(p.Passes))
		fmt.Fprintf(&b, "  %.5g tokens/s %.5g TFLOPS\n", step.Tokens, step.TFLOPS)
		for k, x := range p.Passes {
			fmt.Fprintf(&b, "  %.5g %.5g again %.5g late %.5g\n", x.Forward, x.Backward, p.Recompute[k], p.Late[k])
		}
	}
	if accepted < 100 {
		t.Errorf("%d setups were accepted: the test sees too little", accepted)
	}
	golden.Check(t, "table.txt", b.String())
}
