// This file owns the test of what a storage says of itself.

package offload

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/residency"
)

// Bytes are here while they are resident or leaving. A copy out may read them while they leave,
// or if a second group holds them; nobody needs them when they are dead.
func TestStatesOfAStorage(t *testing.T) {
	for state, want := range map[residency.State][3]bool{
		residency.Resident: {true, false, false}, residency.Leaving: {true, true, false}, residency.Away: {},
		residency.Returning: {}, residency.Dead: {false, false, true},
	} {
		for saves := range 4 {
			s := &Storage{state: &residency.Storage{State: state}, saves: saves}
			if got := [3]bool{s.Here(), s.Busy(), s.Over()}; got != [3]bool{want[0], want[1] || saves > 1, want[2]} {
				t.Errorf("%v, held by %d groups: here, busy and over are %v", state, saves, got)
			}
		}
	}
}
