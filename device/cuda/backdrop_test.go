//go:build linux

// This file owns the tests of backdrops on the made-up driver: how they are mapped,
// and what a failure half-way leaves.

package cuda

import (
	"bytes"
	"errors"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// stage is a reserved buffer with a backdrop, and what all of it should hold.
type stage struct {
	t    rapid.TB
	d    *Device
	f    *fake
	s    device.Stream
	b    *device.Buffer
	want []byte
}

func newStage(t rapid.TB, d *Device, f *fake, s device.Stream, limit, size memory.Bytes) *stage {
	b, err := d.Reserve(memory.Device, limit, "pool")
	if err != nil {
		t.Fatal(err)
	}
	x := &stage{t, d, f, s, b, make([]byte, limit)}
	if err := errors.Join(d.Grow(b, size), d.Backdrop(b)); err != nil {
		t.Fatal(err)
	}
	s.Fill(b.All(), 0) // what it had before the backdrop may be anything
	x.fill(0)
	return x
}

// fill writes to both ends of the memory from an offset on.
func (x *stage) fill(from memory.Bytes) {
	to := x.b.Size()
	for _, r := range []device.Range{x.b.Slice(from, min(5000, to-from)), x.b.Slice(max(from, to-5000), min(5000, to-from))} {
		part := x.want[r.Off : r.Off+r.Len]
		for i := range part {
			part[i] = byte(i%253 + 1)
		}
		x.s.Upload(r, part)
	}
}

// check reads all of it, and looks at the mappings: without a gap from the first
// byte to the last granule, and memory of its own in front only.
func (x *stage) check(when string) {
	if err := x.s.Sync(); err != nil {
		x.t.Fatal(err)
	}
	x.f.mu.Lock()
	for at, end := x.b.Addr(), x.b.Addr()+uintptr(roundUp(x.b.Max(), granule)); at < end; {
		m := x.f.chunks[at]
		if m == nil {
			x.f.mu.Unlock()
			x.t.Fatalf("%s: nothing is mapped %d bytes into %v", when, at-x.b.Addr(), x.b)
		}
		// A block is held by its handle beside its mappings.
		if own, in := m.holds == 1, at < x.b.Addr()+uintptr(x.b.Size()); own != in {
			x.t.Errorf("%s: %d bytes into %v there is memory of its own: %v", when, at-x.b.Addr(), x.b, own)
		}
		at += m.size
	}
	x.f.mu.Unlock()
	if got := bytesAt(x.b.Addr(), x.b.Max()); !bytes.Equal(got, x.want) {
		x.t.Fatalf("%s: %v does not hold what was written, and zeros", when, x.b)
	}
}

func (x *stage) grow(size memory.Bytes) {
	old := x.b.Size()
	if err := x.d.Grow(x.b, size); err != nil {
		x.t.Fatal(err)
	}
	x.check("grown")
	x.fill(old)
	if err := x.s.Sync(); err != nil { // nothing may use it while it grows
		x.t.Fatal(err)
	}
}

// Whatever the steps, there is never a gap, and the blocks stay zero.
func TestBackdropMappings(t *testing.T) {
	d, f := openFake(t, Options{})
	s := newStream(t, d, "s")
	rapid.Check(t, func(t *rapid.T) {
		// Borders are drawn in granules, most of them a little off.
		off := rapid.IntRange(0, 5000)
		granules := rapid.IntRange(1, 20).Draw(t, "granules")
		limit := memory.Bytes(granules)*granule - memory.Bytes(off.Draw(t, "short of"))
		size := func(from memory.Bytes) memory.Bytes {
			n := memory.Bytes(rapid.IntRange(int(from/granule), granules).Draw(t, "to")) * granule
			return max(from, min(limit, n+memory.Bytes(off.Draw(t, "beyond"))))
		}
		x := newStage(t, d, f, s, limit, size(0))
		x.check("at first")
		for range rapid.IntRange(0, 3).Draw(t, "steps") {
			x.grow(size(x.b.Size()))
		}
		x.check("filled")
		s.Free(x.b)
		if err := s.Sync(); err != nil {
			t.Fatal(err)
		}
	})
	d.Memory()
	if most := uint64(granule + backdropPiece); f.used > most {
		t.Errorf("%d bytes are left with no buffer, more than the blocks' %d", f.used, most)
	}
	closeDevice(t, d)
	if len(f.maps) != 0 || len(f.chunks) != 0 || f.used != 0 || len(f.left()) != 0 {
		t.Errorf("%d ranges, %d chunks, %d bytes and %v are left", len(f.maps), len(f.chunks), f.used, f.left())
	}
}

// Running out of memory at any call leaves everything as it was, and is over when
// there is memory again.
func TestBackdropRunsOut(t *testing.T) {
	d, f := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	fails := 0
	for _, call := range []string{"cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemAddressReserve"} {
		for n := 0; ; n++ {
			b, err := d.Reserve(memory.Device, 34*memory.MiB, "pool")
			if err != nil {
				t.Fatal(err)
			}
			f.full[call] = n
			err = d.Backdrop(b)
			_, unused := f.full[call]
			delete(f.full, call)
			var oom *device.OutOfMemory
			if !unused && !errors.As(err, &oom) {
				t.Fatalf("Backdrop with a failure of %s %d: %v", call, n, err)
			}
			if err := d.Backdrop(b); err != nil {
				t.Fatal(err)
			}
			x := &stage{t, d, f, s, b, make([]byte, 34*memory.MiB)}
			x.check("after a failure")
			f.full[call] = n
			err = d.Grow(b, 5*memory.MiB)
			_, spare := f.full[call]
			delete(f.full, call)
			if !spare && (!errors.As(err, &oom) || oom.Asked != 5*memory.MiB || b.Size() != 0) {
				t.Fatalf("Grow with a failure of %s %d: %v", call, n, err)
			}
			if !spare {
				fails++
				x.check("after a refused growth")
			}
			if d.err() != nil {
				t.Fatal(d.err())
			}
			if !spare {
				x.grow(5 * memory.MiB)
			}
			s.Free(b)
			synced(t, s)
			if unused && spare {
				break
			}
		}
	}
	// One memory of 6 MiB, its mapping and one granule of what was a piece of 8 MiB,
	// access to both.
	if fails != 1+2+2 {
		t.Errorf("%d calls of a growth were made to fail", fails)
	}
}

// A backdrop that cannot be put back is a hole, which is the device's end.
func TestBackdropIsLost(t *testing.T) {
	for call, code := range map[string]result{"cuMemMap": errOutOfMemory, "cuMemUnmap": errInvalidHandle, "cuMemsetD8Async": errInvalidHandle} {
		t.Run(call, func(t *testing.T) {
			d, f := openFake(t, Options{})
			s := newStream(t, d, "s")
			x := newStage(t, d, f, s, 8*memory.MiB, 100)
			synced(t, s)
			f.fail[call] = code
			if err := d.Grow(x.b, 3*memory.MiB); err == nil {
				t.Error("the growth succeeded")
			}
			isFinal(t, d, d.err(), call)
			delete(f.fail, call)
			f.excused = call == "cuMemMap" // nothing can be mapped over the hole
			s.Free(x.b)
			if err := d.Close(); !errors.Is(err, d.err()) {
				t.Errorf("Close: %v", err)
			}
		})
	}
}
