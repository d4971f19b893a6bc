//go:build !linux && !darwin

// This file owns terminals on systems where Stowage cannot query them: no file is one.

package sysinfo

import "os"

// Terminal returns false.
func Terminal(*os.File) (width, height int, ok bool) { return 0, 0, false }

// Foreground returns false.
func Foreground(*os.File) bool { return false }
