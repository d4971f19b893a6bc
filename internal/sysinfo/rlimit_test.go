package sysinfo

import (
	"fmt"
	"slices"
	"testing"
	"testing/fstest"

	"github.com/stowage-dev/stowage/memory"
)

// The limit with the least room comes first, with what counts towards it.
func TestRlimits(t *testing.T) {
	pages := func(n memory.Bytes) int64 { return int64(n) / pageBytes }
	root := fstest.MapFS{"proc/self/statm": {Data: fmt.Appendf(nil, "%d 2 3 4 5 %d 7\n", pages(memory.GiB), pages(memory.MiB))}}
	set := []column{{Rlimit{Command: "ulimit -v", Limit: 3 * memory.GiB}, 0}, {Rlimit{Command: "ulimit -d", Limit: 2 * memory.MiB}, 5}}
	got := readRlimits(root, set)
	if len(got) != 2 || got[0].String() != "this process may map 2.00 MiB of memory (ulimit -d) and has mapped 1.00 MiB" || got[1].Used != memory.GiB {
		t.Errorf("%v", got)
	}
	if got := readRlimits(fstest.MapFS{}, set[:1]); got[0].String() != "this process may map 3.00 GiB of memory (ulimit -v)" {
		t.Errorf("%v", got)
	}
	if got := readRlimits(root, nil); got != nil {
		t.Errorf("%v", got)
	}
}

// The limit that leaves least comes first, however large it is.
func TestTightestLimit(t *testing.T) {
	root := fstest.MapFS{"proc/self/statm": {Data: []byte("100 7 0 0 0 20 0")}}
	set := []column{{Rlimit{Command: "small and free", Limit: memory.Bytes(50 * pageBytes)}, 1}, {Rlimit{Command: "large and full", Limit: memory.Bytes(101 * pageBytes)}, 0}, {Rlimit{Command: "unknown", Limit: memory.Bytes(30 * pageBytes)}, 99}}
	var got []string
	for _, l := range readRlimits(root, set) {
		got = append(got, l.Command)
	}
	if want := []string{"large and full", "unknown", "small and free"}; !slices.Equal(got, want) {
		t.Errorf("the order is %q, want %q", got, want)
	}
}
