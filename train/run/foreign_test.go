// This file owns the test that a run replaces no file of somebody else.

package run

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/train/internal/disk"
)

// A folder with any file that has the name of a run's, and that no run wrote, is refused and
// stays as it is.
func TestFilesOfOthersStay(t *testing.T) {
	for _, name := range []string{configName, metricsName, summaryName} {
		dir := t.TempDir()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte("mine: 1\n"), 0o666); err != nil {
			t.Fatal(err)
		}
		f, err := claim(disk.OS{}, dir)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.look(false, NewProgress(io.Discard, nil, nil)); err == nil || !isInput(err) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
		if err := f.undo(); err != nil {
			t.Error(err)
		}
		if text, err := os.ReadFile(path); err != nil || string(text) != "mine: 1\n" {
			t.Errorf("%s is %q, %v", name, text, err)
		}
		if left, _ := os.ReadDir(dir); len(left) != 1 {
			t.Errorf("%s: the folder has %v", name, left)
		}
	}
}
