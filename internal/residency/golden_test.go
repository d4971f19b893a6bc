// This file owns what the machine decides beside a golden file: every mark, wait, copy and
// place of many drawn steps, as sums. Other tests show that decisions are right; this table
// shows those that cost memory or time alone.

package residency

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

func TestDecisionsStayGood(t *testing.T) {
	var b strings.Builder
	for _, of := range []struct {
		name  string
		write func(draw, int) program
	}{{"own", write}, {"borrowed", writeBorrowed}} {
		for block := range uint64(20) {
			var sum uint32
			var c Counts
			var peak, host, top, events memory.Bytes
			for seed := block * 20; seed < block*20+20; seed++ {
				p := of.write(rand.New(rand.NewPCG(seed, 11)).IntN, 20+int(seed%120))
				if !p.cfg.Borrowed {
					p.cfg.Align = 1 << (seed % 3)
				}
				r := p.run(-1)
				if r.x.wrong != "" {
					t.Fatalf("seed %d: %s", seed, r.x.wrong)
				}
				n := r.m.Counts()
				sum = 31*sum + r.x.decided
				c.Out, c.In, c.OutBytes, c.InBytes, c.Late, c.Evicted, c.HostFull, c.Duplicates = c.Out+n.Out, c.In+n.In, c.OutBytes+n.OutBytes, c.InBytes+n.InBytes, c.Late+n.Late, c.Evicted+n.Evicted, c.HostFull+n.HostFull, c.Duplicates+n.Duplicates
				peak, host, top, events = peak+r.m.Device().Peak(), host+r.m.Host().Peak(), top+r.m.Device().Top(), events+memory.Bytes(p.tape.Schedule().Len())
			}
			fmt.Fprintf(&b, "%s %d: %08x, %+v, peaks %d and %d, top %d, %d events\n", of.name, block*20, sum, c, peak, host, top, events)
		}
	}
	golden.Check(t, "decisions.txt", b.String())
}
