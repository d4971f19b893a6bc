// This file owns the table of what is said of many unlike setups. A change of any figure or
// word is seen. Write it anew with -update if the change is meant.

package planview

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
)

func TestTable(t *testing.T) {
	var b strings.Builder
	shown := 0
	var last *Report
	for i := 0; shown < 24; i++ {
		s, what := plantest.Draw(i)
		if s.Hardware == nil {
			continue
		}
		r, err := New(Request{Setup: s, Search: NoSearch, Command: "stowage plan", BudgetFrom: "a test"})
		if err != nil {
			continue
		}
		shown++
		fmt.Fprintf(&b, "\n%d %s\n", i, what)
		if shown%8 == 1 { // all of it
			var text strings.Builder
			r.WriteText(&text, []int{0}, Hints{})
			b.WriteString(text.String())
		}
		r.Timeline = nil
		for _, part := range []any{r.Model, r.Setup, r.Hardware, r.Node, r.Decisions, r.Flags} {
			text, err := json.Marshal(part)
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(text)
			fmt.Fprintf(&b, "%x ", sum[:4])
		}
		fmt.Fprintf(&b, "%v %d %d %d %v %v\n", r.Fits, r.Missing, r.Spare, r.Heaviest, r.Peak, r.Reserved)
		if x := r.Time; x != nil {
			fmt.Fprintf(&b, "%.5g %d\n", []float64{x.Step, x.Bubble, x.Replicas, x.Update, x.Recompute, x.Copies, x.Tokens, x.TFLOPS}, x.Slowest)
		}
		if last != nil {
			c := Compare("a", "b", last, r)
			c.WriteText(&b)
			text, err := json.Marshal(c)
			if err != nil {
				t.Fatal(err)
			}
			sum := sha256.Sum256(text)
			fmt.Fprintf(&b, "%x\n", sum[:4])
		}
		last = r
	}
	golden.Check(t, "table.txt", b.String())
}
