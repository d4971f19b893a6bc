// This file owns sizes as people type them: 64MiB, or several with commas.

package main

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/device"
)

// units are the suffixes, largest first; so "MiB" is not taken for "B" either.
var units = []struct {
	suffix string
	bytes  device.Bytes
}{{"TiB", 1024 * device.GiB}, {"GiB", device.GiB}, {"MiB", device.MiB}, {"KiB", device.KiB}, {"B", 1}}

// formatSize writes a size as parseSize reads it.
func formatSize(n device.Bytes) string {
	for _, u := range units {
		if n%u.bytes == 0 {
			return fmt.Sprintf("%d%s", n/u.bytes, u.suffix)
		}
	}
	panic("every size is a whole number of bytes")
}

// parseSize reads one size. Units are the binary ones, spelt out: "MB" is
// refused, because half of its readers mean 2^20 by it.
func parseSize(s string) (device.Bytes, error) {
	for _, u := range units {
		number, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseUint(number, 10, 63)
		if err != nil {
			break
		}
		if n == 0 {
			return 0, fmt.Errorf("a size must be at least 1B, not %q", s)
		}
		if n > uint64(1<<50/u.bytes) {
			return 0, fmt.Errorf("the size %q is more than 1024TiB", s)
		}
		return device.Bytes(n) * u.bytes, nil
	}
	return 0, fmt.Errorf("%q is no size; write a whole number with B, KiB, MiB, GiB or TiB, such as 64MiB", s)
}

// parseSizes reads a list of sizes.
func parseSizes(s string) (sizes []device.Bytes, err error) {
	for part := range strings.SplitSeq(s, ",") {
		n, err := parseSize(strings.TrimSpace(part))
		if err != nil {
			return nil, err
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}
