// This file owns that only Linux has files without a name.

//go:build !linux

package atomicfile

import "os"

const unnamed = 0

// giveName is never called.
func giveName(*os.File, string) error { return os.ErrInvalid }
