//go:build linux

// This file tests access to the memory of other GPUs in the same process.

package cuda

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// The GPUs of a process access each other's device memory, however it was allocated, and
// nobody else's.
func TestPeers(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	f.gpus = 3
	for _, peers := range [][]int{nil, {0, 2, 1, 2}} { // itself counts for nothing, nor does one twice
		d, err := v.open(Options{Ordinal: 1, HostCapacity: memory.GiB, Peers: peers})
		if err != nil {
			t.Fatal(err)
		}
		s := newStream(t, d, "s")
		a, err := d.Alloc(memory.Device, 3*memory.MiB, "a")
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.Reserve(memory.Device, 16*memory.MiB, "b")
		if err != nil {
			t.Fatal(err)
		}
		h, err := d.Alloc(memory.Host, memory.MiB, "h")
		if err != nil {
			t.Fatal(err)
		}
		for _, n := range []memory.Bytes{memory.MiB, 5 * memory.MiB, 16 * memory.MiB} {
			if err := d.Grow(b, n); err != nil {
				t.Fatal(err)
			}
		}
		chunks := 0
		for _, m := range f.chunks {
			want := []int32{1}
			if m.kind == locationDevice && peers != nil {
				want = []int32{1, 0, 2}
			}
			var got []int32
			for _, x := range m.open {
				if x.location.kind == locationDevice && x.flags == accessReadWrite {
					got = append(got, x.location.id)
				}
			}
			if chunks++; !slices.Equal(got, want) {
				t.Errorf("peers %v: memory of kind %d is open to GPUs %v, want %v", peers, m.kind, got, want)
			}
		}
		if chunks < 5 {
			t.Errorf("%d chunks", chunks)
		}
		for _, x := range []*device.Buffer{a, b, h} {
			s.Free(x)
		}
		closeDevice(t, d)
	}
}

// A GPU that cannot access the memory, or that is not there, is an error with one sentence.
func TestNoPeers(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	f.gpus, f.apart = 2, map[[2]int]bool{{1, 0}: true}
	for _, x := range []struct {
		gpu, peer int
		want      string
	}{{0, 1, "start a process for each GPU"}, {1, 0, ""}, {0, 2, "the driver finds 2 GPUs"}} {
		d, err := v.open(Options{Ordinal: x.gpu, HostCapacity: memory.GiB, Peers: []int{x.peer}})
		var none *device.Unsupported
		if x.want == "" && err == nil {
			closeDevice(t, d)
		} else if !errors.As(err, &none) || x.want == "" || !strings.Contains(err.Error(), x.want) {
			t.Errorf("GPU %d with peer %d: %v", x.gpu, x.peer, err)
		}
	}
}
