// This file owns the tests of policies that somebody else made.

package policy

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// SPEC S6.4: who names more than leaves before the peak is told.
func TestLate(t *testing.T) {
	for _, x := range []struct {
		moved, before, after memory.Bytes
		want                 string
	}{
		{0, 100, 100, ""},
		{400 << 20, 1 << 30, 1<<30 - 300<<20, ""},
		{400 << 20, 1 << 30, 1<<30 - 200<<20, "offloading 400.0 MiB lowers the peak by only 200.0 MiB"},
		{400 << 20, 1 << 30, 2 << 30, "offloading 400.0 MiB lowers the peak by only 0 because"},
	} {
		d := &Decision{Before: Forecast{Peak: memory.Bytes(x.before)}, Forecast: Forecast{Peak: memory.Bytes(x.after), Counts: residency.Counts{OutBytes: memory.Bytes(x.moved)}}}
		if got := d.Late(); x.want == "" && got != "" || !strings.HasPrefix(got, x.want) {
			t.Errorf("%+v: %q", x, got)
		}
	}
}
