//go:build !linux

// This file owns the time of a thread where only the clock tells it.

package inputtest

import "time"

var began = time.Now()

// threadTime returns the time since the program began.
func threadTime() time.Duration { return time.Since(began) }
