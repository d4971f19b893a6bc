// This file owns digests of what is made of many traces.

package export

import (
	"crypto/sha256"
	"fmt"
	"io"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Digests of everything that is written of many traces, normal and damaged. A change of any byte is
// seen; the other tests and the readers of this package say what the bytes mean. Write the digests
// anew with -update if the change is meant.
func TestDigests(t *testing.T) {
	var b strings.Builder
	gen := rapid.Custom(anyTraces)
	for i := range 48 {
		var traces []*trace.Trace
		switch {
		case i < 40:
			traces = gen.Example(i)
		default: // many of everything, and several ranks
			traces = []*trace.Trace{aRun(i%3, i-38, i-39), aRun(1+i%2, 1, 2*(i-39))}
		}
		fmt.Fprintf(&b, "%3d", i)
		for _, write := range []func(w io.Writer, traces []*trace.Trace) error{Perfetto, MemoryViz} {
			h := sha256.New()
			if err := write(h, traces); err != nil {
				t.Fatal(err)
			}
			fmt.Fprintf(&b, " %x", h.Sum(nil)[:6])
		}
		fmt.Fprintln(&b)
	}
	golden.Check(t, "digests.txt", b.String())
}
