// This file owns what surrounds the tests: no goroutine may be left behind, and only CI runs
// every case.

package train

import (
	"flag"
	"testing"

	"github.com/stowage-dev/stowage/internal/leak"
)

func TestMain(m *testing.M) { leak.Main(m) }

var full = flag.Bool("full", false, "run every layout, pool, policy and fault of the tests that take long; CI does")

// few reports whether tests that take long run some of their cases.
func few() bool { return !*full || testing.Short() || raceEnabled }
