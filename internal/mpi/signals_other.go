// This file owns the signals that a library would take, elsewhere: nothing is done.

//go:build !linux

package mpi

type actions struct{}

func signalActions() *actions { return nil }

func (*actions) restore() {}

func delayAborts() {}
