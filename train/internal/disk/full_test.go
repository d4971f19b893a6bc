package disk

import (
	"path/filepath"
	"strings"
	"testing"
)

// A file system without inodes has room once files are removed, not once bytes are free.
func TestMakeRoom(t *testing.T) {
	for _, c := range []struct {
		inodes, free uint64
		want         string
	}{{1000, 0, "remove some files"}, {1000, 1, "free some space"}, {0, 0, "free some space"}} {
		if got := makeRoom(c.inodes, c.free); !strings.HasPrefix(got, c.want) {
			t.Errorf("%+v: %s", c, got)
		}
	}
	for _, path := range []string{t.TempDir(), filepath.Join(t.TempDir(), "not", "there"), "relative"} {
		if got := MakeRoom(path); got != "free some space" {
			t.Errorf("%s: %s", path, got)
		}
	}
}
