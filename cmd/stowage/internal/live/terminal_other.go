//go:build !linux && !darwin

// This file owns terminals of systems where nothing is known of them: plain lines do.

package live

import "os"

func terminal(*os.File) (width, height int, ok bool) { return 0, 0, false }

func foreground(*os.File) bool { return false }

func continued() (<-chan os.Signal, func()) { return nil, func() {} }
