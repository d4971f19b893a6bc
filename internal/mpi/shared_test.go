package mpi

import (
	"slices"
	"testing"
)

func TestShared(t *testing.T) {
	const maps = `7f1 rw-s 00000000 00:17 11 /dev/shm/vader_segment.node.0.316a0001.1
7f3 rw-s 00000000 00:17 13 /dev/shm/sm_segment.node.0.316a0001.1
7f4 rw-s 00000000 00:17 14 /dev/shm/else.1
7f5 r-xp 00000000 00:17 15 /usr/lib/libmpi.so.40
`
	want := []string{"/dev/shm/vader_segment.node.0.316a0001.1", "/dev/shm/sm_segment.node.0.316a0001.1"}
	if got := shared(maps); !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}
