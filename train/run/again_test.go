// This file tests what is left of a policy of a comparison that is tried again.

package run

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk"
)

// A budget that was too small is tried again with more. Nothing of the first attempt stays.
func TestPolicyThatIsTriedAgain(t *testing.T) {
	cfg := smallJob(t, nil).config
	c := &collection{disk: disk.OS{}, work: t.TempDir(), p: NewProgress(io.Discard, nil, nil)}
	for range 2 {
		x := &contestant{name: "budget", traces: (&Job{}).trace(&cfg)}
		c.open(x)
		if err := x.metrics.Close(); err != nil {
			t.Error(err)
		}
		if err := x.traces.close(); err != nil || c.failed != nil {
			t.Fatalf("%v, %v", err, c.failed)
		}
	}
	names, err := os.ReadDir(filepath.Join(c.work, "budget", "trace"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%v, %v", names, err)
	}
	for _, n := range names {
		if strings.HasPrefix(n.Name(), ".") {
			t.Errorf("%s is left", n.Name())
		}
	}
}
