package letter

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/comm"
)

// A letter is read as it was written, whatever was in its place before.
func TestLetters(t *testing.T) {
	want := Letter{Call{Signature{AllReduce, comm.BF16, comm.Max, 3, 1 << 40}, 7, 2}, 5, 9}
	b := []byte(strings.Repeat("\xff", Size))
	want.Write(b)
	if got := Read(b); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := b[3:8]; string(got) != "\x00\x00\x00\x00\x00" {
		t.Errorf("bytes that mean nothing are %v", got)
	}
}

// Calls are named as in one process. What another process says may be anything. SPEC S7.2
func TestNames(t *testing.T) {
	ranks := []int{4, 6}
	for want, c := range map[string]Call{
		"all-gather #1 of 8 bytes a rank":                         {Signature{Kind: AllGather, Bytes: 8}, 1, 0},
		"all-reduce #2 of 8 bytes (bf16, mean)":                   {Signature{AllReduce, comm.BF16, comm.Mean, 0, 8}, 2, 0},
		"broadcast #3 of 8 bytes from rank 6":                     {Signature{Kind: Broadcast, Root: 1, Bytes: 8}, 3, 0},
		"send #4 of 8 bytes to rank 4":                            {Signature{Kind: Send, Bytes: 8}, 4, 0},
		"receive #5 of 8 bytes from rank -1":                      {Signature{Kind: Recv, Bytes: 8}, 5, 2},
		"split #6":                                                {Signature{Kind: Split, Bytes: 8}, 6, 0},
		"call 200 #7 of 8 bytes a rank":                           {Signature{Kind: 200, Bytes: 8}, 7, -1},
		"reduce-scatter #8 of 0 bytes (Type(77), Op(99))":         {Signature{ReduceScatter, 77, 99, 0, 0}, 8, 0},
		"broadcast #18446744073709551615 of 0 bytes from rank -1": {Signature{Kind: Broadcast, Root: -5}, 1<<64 - 1, 0},
	} {
		if got := c.Name(ranks); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
