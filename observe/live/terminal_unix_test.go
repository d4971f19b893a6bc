//go:build linux

package live

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/pseudoterm"
)

// There is no screen for a file that is not a terminal or cannot move its cursor.
func TestNoScreen(t *testing.T) {
	_, tty := pseudoterm.Open(t)
	if NewScreen(tty, environment("TERM=xterm")) == nil {
		t.Error("a terminal is not taken for one")
	}
	for _, env := range []string{"TERM=dumb", "TERM="} {
		if NewScreen(tty, environment(env)) != nil {
			t.Errorf("%s has a screen", env)
		}
	}
}
