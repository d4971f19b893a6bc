// Package version holds the version of Stowage. The file VERSION beside it is the only
// place where the version is written: the command embeds it, and the build of the Python
// package reads it. It is a version as PEP 440 writes them, such as 0.9.0 or 0.9.0.dev0.
//
// This file owns reading it.
package version

import (
	_ "embed"
	"strings"
)

//go:embed VERSION
var file string

// Number returns the version, such as "0.9.0".
func Number() string { return strings.TrimSpace(file) }
