// This file owns what ends a launcher with the test that started it, elsewhere.

//go:build !linux

package mpi

import "syscall"

func procAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
