// This file owns comparisons of which one takes the place of another: the hidden folders that
// say so, and what a report says of them.

package report

import (
	"fmt"
	"path/filepath"
)

// Hidden folders in that of a comparison which takes the place of another. A process that is
// killed leaves one of them, and the next comparison in the folder goes on from there. Package
// train/run makes them, and one of its tests holds the names equal.
const (
	readyFolder  = ".ready"  // files of the one before are being removed
	movingFolder = ".moving" // files of the new one are being moved to their places
)

// betweenTwo reports whether the files of a comparison may be of two comparisons.
func betweenTwo(dir string) bool {
	return exists(filepath.Join(dir, readyFolder)) || exists(filepath.Join(dir, movingFolder))
}

// watchReplacing looks at the comparison in a folder before its files are read. The function
// that it returns is called after that: it returns a sentence if another comparison took, or
// takes, its place, and otherwise "".
func watchReplacing(dir string) (sentence func() string) {
	before := betweenTwo(dir)
	return func() string {
		if !before && !betweenTwo(dir) {
			return ""
		}
		return fmt.Sprintf("%s holds parts of two comparisons, because a new one is taking the place of another, or was killed while it did; what is shown may be of either; if no comparison is under way, the next one in this folder completes it", dir)
	}
}
