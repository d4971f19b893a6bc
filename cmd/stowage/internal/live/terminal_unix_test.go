//go:build linux

package live

import (
	"testing"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/live/livetest"
)

// Where letters cannot be written over there is no screen.
func TestNoScreen(t *testing.T) {
	_, tty := livetest.Terminal(t)
	if NewScreen(tty, environment("TERM=xterm")) == nil {
		t.Error("a terminal is not taken for one")
	}
	for _, env := range []string{"TERM=dumb", "TERM="} {
		if NewScreen(tty, environment(env)) != nil {
			t.Errorf("%s has a screen", env)
		}
	}
}
