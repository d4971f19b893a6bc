// This file owns what to do about a disk that is full: of bytes, or of files.

package disk

import (
	"path/filepath"
	"syscall"
)

// MakeRoom says what to do where a file system that holds a path has no room: free space, or
// remove files if it has bytes and no inodes for more files, which the system calls by the same
// name.
func MakeRoom(path string) string {
	var s syscall.Statfs_t
	for syscall.Statfs(path, &s) != nil {
		up := filepath.Dir(path) // it may not be there yet
		if up == path {
			return makeRoom(0, 0)
		}
		path = up
	}
	return makeRoom(uint64(s.Files), uint64(s.Ffree))
}

// makeRoom says it for a file system with so many inodes. Some have no fixed number, and say zero.
func makeRoom(inodes, free uint64) string {
	if inodes > 0 && free == 0 {
		return "remove some files, because the file system has no inodes left for more (df -i shows them)"
	}
	return "free some space"
}
