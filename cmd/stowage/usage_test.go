// This file tests the parts of usage.go and sizes.go that need no command.

package main

import (
	"testing"

	"github.com/stowage-dev/stowage/memory"
)

func TestParseSize(t *testing.T) {
	for s, want := range map[string]memory.Bytes{
		"1B": 1, "4KiB": 4 << 10, "64MiB": 64 << 20, "3GiB": 3 << 30, "1024TiB": 1 << 50, "007MiB": 7 << 20,
		"1 MiB": 1 << 20, "1MB": 1e6, "1mib": 1 << 20, "1.5MiB": 3 << 19,
	} {
		if got, err := memory.ParseBytes(s); err != nil || got != want {
			t.Errorf("%q: %d, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "B", "MiB", "1", "+1MiB", "0x10B", "1025TiB", "18446744073709551617B", "1_000B"} {
		if got, err := memory.ParseBytes(s); err == nil {
			t.Errorf("%q was read as %d", s, got)
		}
	}
}

// What is read lies within bounds, and is read again as the same.
func FuzzParseSize(f *testing.F) {
	f.Add("64MiB")
	f.Add("1024TiB")
	f.Add("-1B")
	f.Fuzz(func(t *testing.T, s string) {
		n, err := memory.ParseBytes(s)
		if err != nil {
			return
		}
		if again, err := memory.ParseBytes(n.Exact()); err != nil || again != n || n <= 0 || n > 1<<50 {
			t.Errorf("%q was read as %d, and that as %d, %v", s, n, again, err)
		}
	})
}
