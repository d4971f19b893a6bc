//go:build !linux && !darwin

// This file owns terminals on systems where Stowage cannot query them: there is no
// screen then.

package live

import "os"

func terminal(*os.File) (width, height int, ok bool) { return 0, 0, false }

func foreground(*os.File) bool { return false }

func continued() (<-chan os.Signal, func()) { return nil, func() {} }
