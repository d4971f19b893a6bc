// This file owns the table of what is predicted for many unlike setups. A change of any
// figure is seen. Write it anew with -update if the change is meant.

package plan_test

import (
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
	"github.com/stowage-dev/stowage/plan"
)

func TestTable(t *testing.T) {
	var b strings.Builder
	accepted := 0
	for i := range 300 {
		s, what := plantest.Draw(i)
		p, err := plan.Predict(s)
		if err != nil {
			continue
		}
		accepted++
		fmt.Fprintf(&b, "%d %s\n", i, what)
		for _, r := range p.Ranks {
			text, err := json.Marshal(r)
			if err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, "  %d %d %d %d %x\n", r.Static.Expected, r.Peak.Expected, r.Reserved.High, r.Host, digest(text))
		}
	}
	if accepted < 150 {
		t.Errorf("%d setups were accepted: the test sees too little", accepted)
	}
	golden.Check(t, "table.txt", b.String())
}

func digest(text []byte) []byte {
	sum := sha256.Sum256(text)
	return sum[:6]
}
