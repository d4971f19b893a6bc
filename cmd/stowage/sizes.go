// This file owns lists of sizes in flags, such as 64KiB,64MiB.

package main

import (
	"strings"

	"github.com/stowage-dev/stowage/memory"
)

// parseSizes reads sizes that are separated by commas.
func parseSizes(s string) (sizes []memory.Bytes, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := memory.ParseBytes(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}
