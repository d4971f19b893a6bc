//go:build race

// This file owns the knowledge that Go's race detector is on: it makes runs ten times as
// long, so there are fewer of them.

package train

const raceEnabled = true
