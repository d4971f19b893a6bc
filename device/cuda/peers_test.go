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

// Device memory can be given to other processes if that is wanted and the driver offers it,
// and is made without that if the driver then refuses.
func TestShareable(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	for _, x := range []struct {
		shareable, files, rdma, refuses bool
		want                            [2]int
	}{
		{false, true, true, false, [2]int{0, 0}}, {true, false, true, false, [2]int{0, 0}}, {true, true, false, false, [2]int{1, 0}},
		{true, true, true, false, [2]int{1, 1}}, {true, true, true, true, [2]int{0, 0}},
	} {
		clear(f.made)
		delete(f.attrs, attrFileHandles)
		delete(f.attrs, attrVirtualRDMA)
		if x.files {
			f.attrs[attrFileHandles] = 1
		}
		if x.rdma {
			f.attrs[attrVirtualRDMA] = 1
		}
		f.refuses = x.refuses
		d, err := v.open(Options{HostCapacity: memory.GiB, Shareable: x.shareable})
		if err != nil {
			t.Fatal(err)
		}
		s := newStream(t, d, "s")
		for _, kind := range []memory.Kind{memory.Device, memory.Host} {
			b, err := d.Alloc(kind, 3*memory.MiB, "b")
			if err != nil {
				t.Fatal(err)
			}
			s.Free(b)
		}
		if got := f.made[locationDevice]; got != x.want || f.made[locationHostNuma] != [2]int{} {
			t.Errorf("%+v: memory is made with %v, that of the host with %v", x, got, f.made[locationHostNuma])
		}
		closeDevice(t, d)
	}
}

// Parts of a range lie in one chunk each, and together they are the range.
func TestChunks(t *testing.T) {
	v, _ := newFake(t, memory.GiB)
	d, err := v.open(Options{HostCapacity: memory.GiB})
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(t, d, "s")
	b, err := d.Reserve(memory.Device, 16*memory.MiB, "b")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []memory.Bytes{memory.MiB, 5 * memory.MiB, 12 * memory.MiB} {
		if err := d.Grow(b, n); err != nil {
			t.Fatal(err)
		}
	}
	a, err := d.Alloc(memory.Device, 100, "a")
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct {
		r    device.Range
		want []memory.Bytes
	}{{b.Slice(memory.MiB, 9*memory.MiB), []memory.Bytes{memory.MiB, 4 * memory.MiB, 4 * memory.MiB}}, {b.Slice(2*memory.MiB, 4*memory.MiB), []memory.Bytes{4 * memory.MiB}}, {a.All(), []memory.Bytes{100}}} {
		at := x.r.Off
		var got []memory.Bytes
		for _, p := range x.r.Buf.Mem.(interface {
			Chunks(r device.Range) []device.Range
		}).Chunks(x.r) {
			if p.Off != at {
				t.Errorf("%v: a part begins at %v, want %v", x.r, p.Off, at)
			}
			at += p.Len
			got = append(got, p.Len)
		}
		if !slices.Equal(got, x.want) {
			t.Errorf("%v has parts of %v, want %v", x.r, got, x.want)
		}
	}
	s.Free(a)
	s.Free(b)
	closeDevice(t, d)
}

// A region that shrinks keeps the chunks that reach into what stays, and maps the others again
// when it grows.
func TestShrink(t *testing.T) {
	v, _ := newFake(t, memory.GiB)
	d, err := v.open(Options{HostCapacity: memory.GiB})
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(t, d, "s")
	b, err := d.Reserve(memory.Device, 16*memory.MiB, "b")
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range []memory.Bytes{2 * memory.MiB, 6 * memory.MiB, 12 * memory.MiB} {
		if err := d.Grow(b, n); err != nil {
			t.Fatal(err)
		}
	}
	r := b.Mem.(*region)
	for _, x := range []struct{ to, mapped memory.Bytes }{{7, 12}, {6, 6}, {3, 6}, {2, 2}} {
		if r.shrink(x.to * memory.MiB); r.mapped() != x.mapped*memory.MiB {
			t.Errorf("%v are mapped for %d MiB, want %d MiB", r.mapped(), x.to, x.mapped)
		}
	}
	if f := r.grow(12 * memory.MiB); f != nil || r.mapped() != 12*memory.MiB {
		t.Errorf("grown again: %v, %v are mapped", f, r.mapped())
	}
	s.Free(b)
	closeDevice(t, d)
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
