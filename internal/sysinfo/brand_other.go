//go:build !darwin

// This file owns systems whose files name the processor, if anything does.

package sysinfo

func brand() string { return "" }
