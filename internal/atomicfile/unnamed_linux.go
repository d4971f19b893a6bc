// This file owns files without a name: the flag that opens them, and the call that names them.

package atomicfile

import (
	"os"
	"syscall"
	"unsafe"
)

// unnamed is O_TMPFILE, which package syscall lacks.
const unnamed = 1<<22 | syscall.O_DIRECTORY

// giveName gives an open file a name.
func giveName(f *os.File, name string) error {
	from, err := syscall.BytePtrFromString(procName(f))
	if err != nil {
		return err
	}
	to, err := syscall.BytePtrFromString(name)
	if err != nil {
		return err
	}
	here, follow := -100, uintptr(0x400) // AT_FDCWD, AT_SYMLINK_FOLLOW
	_, _, errno := syscall.Syscall6(syscall.SYS_LINKAT, uintptr(here), uintptr(unsafe.Pointer(from)), uintptr(here), uintptr(unsafe.Pointer(to)), follow, 0)
	if errno != 0 {
		return errno
	}
	return nil
}
