// This file owns the tests of locks.

package atomicfile

import (
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// Writers that add to one file under its lock lose nothing that another one added, through a link
// as well.
func TestLock(t *testing.T) {
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(file, link); err != nil {
		t.Fatal(err)
	}
	const writers, times = 4, 20
	var all sync.WaitGroup
	for i := range writers {
		path := []string{file, link}[i%2]
		all.Go(func() {
			for range times {
				unlock, err := Lock(path)
				if err != nil {
					t.Error(err)
					return
				}
				old, _ := os.ReadFile(path)
				if err := WriteBytes(path, append(old, byte('0'+i))); err != nil {
					t.Error(err)
				}
				unlock()
			}
		})
	}
	all.Wait()
	if text, err := os.ReadFile(file); len(text) != writers*times {
		t.Errorf("%d of %d additions are in the file: %s, %v", len(text), writers*times, text, err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 1 {
		t.Errorf("left in the folder: %v", left)
	}
}

func TestLockNowhere(t *testing.T) {
	if _, err := Lock(filepath.Join(t.TempDir(), "no", "file")); !os.IsNotExist(err) {
		t.Errorf("a lock in a folder that does not exist: %v", err)
	}
}
