// This file owns the table of keys for many unlike setups. Write it anew with -update if a
// change is meant.

package maxtext

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
	"github.com/stowage-dev/stowage/plan/hardware"
)

func TestTable(t *testing.T) {
	tpu, err := hardware.ByName("tpu-v6e")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	accepted := 0
	for i := range 120 {
		s, what := plantest.Draw(i)
		if s, err = s.Normalise(); err != nil {
			continue
		}
		if accepted++; i%3 == 0 {
			s.Hardware = tpu
		}
		text := Config(s)
		parse(t, text)
		fmt.Fprintf(&b, "%d %s\n%s", i, what, text)
	}
	if accepted < 20 {
		t.Errorf("%d setups were accepted: the test sees too little", accepted)
	}
	golden.Check(t, "table.txt", b.String())
}
