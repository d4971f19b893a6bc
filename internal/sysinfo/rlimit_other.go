//go:build !unix

// This file owns systems without limits of a shell.

package sysinfo

const pageBytes = 4096

func rlimits() []column { return nil }
