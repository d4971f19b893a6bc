// This file owns the name of the processor on macOS, which has no file of it.

package sysinfo

import "syscall"

// brand returns the name of the processor, or "".
func brand() string {
	name, _ := syscall.Sysctl("machdep.cpu.brand_string") // without it there is no name
	return name
}
