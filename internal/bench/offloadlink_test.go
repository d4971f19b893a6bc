// This file holds a table of the copies that are timed alone.

package bench

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

// The copies of a step run in the order that every step has: a group returns after it has left, and what a pass offloads
// leaves after everything is back that earlier passes need.
func TestCopiesAlone(t *testing.T) {
	var b strings.Builder
	group := func(n int) memory.GroupID { return memory.GroupID{Name: "g", Layer: n} }
	out := func(n, pass int, bytes int64) carried {
		return carried{group: group(n), pass: pass, bytes: bytes}
	}
	in := func(n, pass int, bytes int64) carried {
		return carried{in: true, group: group(n), pass: pass, bytes: bytes}
	}
	for _, c := range []struct {
		name   string
		copies []carried
	}{
		{"nothing", nil},
		{"out and back", []carried{out(1, 0, 1000), out(2, 0, 3000), out(3, 1, 2000), in(3, 2, 2000), in(2, 3, 3000), in(1, 3, 1000)}},
		{"two microbatches", []carried{out(1, 0, 500), in(1, 1, 500), out(2, 1, 400), out(3, 2, 300), in(2, 3, 400), in(3, 3, 300), out(4, 4, 200), out(5, 4, 100), in(4, 5, 200)}},
		{"back alone", []carried{in(1, 0, 100), out(2, 0, 200), in(2, 1, 200), out(3, 1, 50)}},
	} {
		d, log := devicelog.Wrap(open(t, memory.MiB))
		r, err := newLinkRig(d, c.copies)
		if err != nil {
			t.Fatal(err)
		}
		log.Take()
		for _, run := range []string{"once", "again"} {
			if took, err := r.run(); err != nil || took <= 0 {
				t.Error(took, err)
			}
			b.WriteString(c.name + ", " + run + "\n\t" + strings.Join(log.Lines(), "\n\t") + "\n")
			log.Take()
		}
		if err := r.close(); err != nil {
			t.Error(err)
		}
	}
	golden.Check(t, "copies.txt", b.String())
}
