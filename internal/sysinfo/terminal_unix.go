//go:build linux || darwin

// This file owns queries to a terminal: whether a file is one, its size, and whether this
// program is in its foreground.

package sysinfo

import (
	"os"
	"syscall"
	"unsafe"
)

// Terminal returns the size of a terminal, which may be zero. It returns false if f is
// not a terminal.
func Terminal(f *os.File) (width, height int, ok bool) {
	var size struct{ rows, columns, x, y uint16 }
	ok = query(f, syscall.TIOCGWINSZ, unsafe.Pointer(&size))
	return int(size.columns), int(size.rows), ok
}

// Foreground reports whether this program is in the foreground of the terminal. A
// terminal that does not control this program knows no foreground.
func Foreground(f *os.File) bool {
	var group int32
	return !query(f, syscall.TIOCGPGRP, unsafe.Pointer(&group)) || int(group) == syscall.Getpgrp()
}

// query asks the terminal, and reports whether it answers.
func query(f *os.File, what uintptr, answer unsafe.Pointer) bool {
	_, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), what, uintptr(answer))
	return errno == 0
}
