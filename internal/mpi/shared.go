// This file owns files of memory that processes share.

package mpi

import (
	"os"
	"path/filepath"
	"strings"
)

// Unlink removes the names of memory that this process shares with others of its machine. Call it
// after a failure, so that nothing is left: Open MPI does so only at its end, and complains if it
// was done before.
func (l *Library) Unlink() {
	maps, _ := os.ReadFile("/proc/self/maps")
	for _, path := range shared(string(maps)) {
		_ = os.Remove(path)
	}
}

// shared returns the files of shared memory among mappings.
func shared(maps string) (paths []string) {
	for line := range strings.Lines(maps) {
		at := strings.Index(line, "/dev/shm/")
		if at < 0 {
			continue
		}
		path := strings.TrimSpace(line[at:])
		name := filepath.Base(path)
		if strings.HasPrefix(name, "vader_segment.") || strings.HasPrefix(name, "sm_segment.") { // Open MPI 4, 5
			paths = append(paths, path)
		}
	}
	return paths
}
