// This file owns the lock of those that read a file and replace it by what they read and more.

package atomicfile

import (
	"os"
	"path/filepath"
	"syscall"
)

// Lock waits until no other process or goroutine holds the lock of the file at path and takes it: what the
// holder reads stays true until it has replaced the file. The file need not exist. The lock is one of
// the file's folder, since the file itself is another one after it was replaced; it ends with
// unlock or with the process and leaves nothing behind. Where a file system knows no such locks, Lock
// does nothing.
func Lock(path string) (unlock func(), err error) {
	to, err := behind(path)
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(filepath.Dir(to))
	if err != nil {
		return nil, err
	}
	for {
		// NFS wants a descriptor that can be written to, which a folder's is not.
		if syscall.Flock(int(dir.Fd()), syscall.LOCK_EX) != syscall.EINTR {
			return func() { dir.Close() }, nil // nothing was written
		}
	}
}
