// This file tests how streams of the same name are told apart.

package devicekit_test

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/devicekit"
)

func TestLabels(t *testing.T) {
	l := devicekit.Labels{}
	for _, x := range []struct{ name, want string }{
		{"copy", "copy"}, {"compute", "compute"}, {"copy", "copy 2"}, {"copy", "copy 3"}, {"compute", "compute 2"}, {"", ""}, {"", " 2"},
	} {
		if got := l.Next(x.name); got != x.want {
			t.Errorf("a stream named %q is labelled %q; want %q", x.name, got, x.want)
		}
	}
}
