// This file owns backdrops: the rest of a reserved buffer, from the end of its memory
// to the end of its addresses, is mapped again and again to the same few zeros.
//
// The driver maps memory under as many addresses as one likes. Two rules of its
// documentation shape this file: a mapping begins at the first byte of its memory,
// and what was mapped by one call is unmapped by one call. A mapping of less than its
// memory is documented, but in words that contradict themselves (offset and size
// together must be "less than" the memory, which no whole mapping is), so there are
// blocks of two sizes, and each is always mapped whole.

package cuda

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// backdropPiece is the larger size of a block: a buffer of 8 GiB then takes 1024
// calls to map and not 4096. The smaller size is the granule.
const backdropPiece = 8 * device.MiB

// zeros is what all backdrops of a device are mapped to. It takes 10 MiB at most,
// is no user's memory and, like the memory that uploads pass through, does not
// count as such: the ledger holds what callers asked for, and nothing else.
type zeros struct {
	stream uintptr                  // that fills; it is nobody else's, so nobody captures it
	blocks map[device.Bytes]uintptr // handles by size
}

func (d *Device) Backdrop(b *device.Buffer) error {
	d.mustBeOpen("Backdrop")
	d.mustOwn(b, "put a backdrop behind")
	if err := d.err(); err != nil {
		return err
	}
	r, reserved := b.Mem.(*region)
	if !b.Live() || !reserved || b.Kind() != device.Accel {
		panic(fmt.Sprintf("cuda: %s cannot have a backdrop: it was freed, or is not reserved memory of the device", b))
	}
	d.growing.Lock()
	defer d.growing.Unlock()
	d.reap()
	if f := d.pools[b.Kind()].back(r, b.Size()); f != nil {
		return d.refused(f, b.Kind(), r.pieces(), "backdrop")
	}
	return nil
}

// back puts a backdrop behind a region, of which the first size bytes are in use.
// What the last granule holds beyond them may be anything, and becomes zero.
func (p *pool) back(r *region, size device.Bytes) *failure {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.backed {
		return nil
	}
	d := p.dev
	f := d.makeZeros(r)
	if f != nil && f.oom() && p.trim() {
		f = d.makeZeros(r)
	}
	if rest := r.mapped() - size; f == nil && rest > 0 {
		f = d.zero(r.addr+uintptr(size), rest)
	}
	if f == nil {
		f = r.hang(r.mapped(), r.limit)
	}
	r.backed = f == nil
	return f
}

// large is the larger size of a block.
func (d *Device) large() device.Bytes { return roundUp(backdropPiece, d.granule) }

// pieces is the size of all blocks that a region may need: a large piece becomes
// granules when the border moves into it.
func (r *region) pieces() device.Bytes {
	n := r.dev.granule
	if r.dev.large() <= r.limit {
		n += r.dev.large()
	}
	return n
}

// piece is the size of the backdrop's piece at an offset that one begins at. It
// follows from the offset alone, so nobody keeps a list: pieces are large where a
// multiple of the large size has room for one, and granules elsewhere.
func (r *region) piece(at device.Bytes) device.Bytes {
	if n := r.dev.large(); at%n == 0 && at+n <= r.limit {
		return n
	}
	return r.dev.granule
}

// hang maps pieces behind [from, to), or nothing if that fails.
func (r *region) hang(from, to device.Bytes) (f *failure) {
	d, at := r.dev, from
	for at < to && f == nil {
		n := r.piece(at)
		if f = d.try(&d.drv.memMap, r.addr+uintptr(at), uintptr(n), 0, d.zeros.blocks[n], 0); f == nil {
			at += n
		}
	}
	if f == nil && from < to {
		f = d.permit(r.kind, r.addr+uintptr(from), to-from)
	}
	if f != nil {
		if _, stuck := r.lift(from, at); stuck != nil {
			_ = d.broken(stuck)
		}
	}
	return f
}

// lift unmaps the pieces that begin in [from, to), and tells where the last ends.
func (r *region) lift(from, to device.Bytes) (end device.Bytes, f *failure) {
	d := r.dev
	for end = from; end < to; {
		n := r.piece(end)
		if f = d.try(&d.drv.memUnmap, r.addr+uintptr(end), uintptr(n)); f != nil {
			return end, f
		}
		end += n
	}
	return end, nil
}

// replace puts memory in the place of the backdrop behind [from, to), with zeros in
// it. The last piece may reach further: its rest is mapped anew, in granules. If it
// fails, the backdrop is as before; if that cannot be had, the device has failed,
// because what was readable no longer is.
func (r *region) replace(from, to device.Bytes, handle uintptr) *failure {
	d, at, n := r.dev, r.addr+uintptr(from), to-from
	end, f := r.lift(from, to)
	if f == nil {
		f = d.attach(r.kind, at, n, handle)
	}
	if f == nil {
		if f = d.zero(at, n); f == nil {
			f = r.hang(to, end)
		}
		if f == nil {
			return nil
		}
		d.insist(&d.drv.memUnmap, at, uintptr(n))
	}
	if hole := r.hang(from, end); hole != nil {
		_ = d.broken(hole)
	}
	return f
}

// drop unmaps the whole backdrop, on a failed device as well.
func (r *region) drop() {
	if r.dev.gone.Load() {
		return
	}
	if _, f := r.lift(r.mapped(), r.limit); f != nil {
		_ = r.dev.broken(f)
	}
}

// makeZeros makes what a backdrop of the region needs and is not there yet.
func (d *Device) makeZeros(r *region) (f *failure) {
	z := &d.zeros
	if z.stream == 0 {
		var s uint64
		d.Relaxed(func() { f = d.try(&d.drv.streamCreate, uintptr(pointer(&s)), streamNonBlocking) })
		if f != nil {
			return f
		}
		z.stream, z.blocks = uintptr(s), map[device.Bytes]uintptr{}
	}
	for _, n := range []device.Bytes{d.granule, d.large()} {
		if n > r.limit || z.blocks[n] != 0 {
			continue
		}
		handle, f := d.block(n)
		if f != nil {
			return f
		}
		z.blocks[n] = handle
	}
	return nil
}

// block makes memory that holds zeros. It has an address only while it is filled;
// the handle keeps it.
func (d *Device) block(n device.Bytes) (uintptr, *failure) {
	r, f := d.reserve(device.Accel, n)
	if f != nil {
		return 0, f
	}
	defer r.close()
	handle, f := d.create(device.Accel, n)
	if f != nil {
		return 0, f
	}
	if f = d.attach(device.Accel, r.addr, n, handle); f == nil {
		f = d.zero(r.addr, n)
		d.insist(&d.drv.memUnmap, r.addr, uintptr(n))
	}
	if f != nil {
		d.insist(&d.drv.memRelease, handle)
		return 0, f
	}
	return handle, nil
}

// zero fills memory of one chunk and waits for it, for no other stream, and whoever
// else may be capturing: this is no work of the caller's.
func (d *Device) zero(at uintptr, n device.Bytes) (f *failure) {
	d.Relaxed(func() {
		if f = d.try(&d.drv.memsetD8Async, at, 0, uintptr(n), d.zeros.stream); f == nil {
			f = d.try(&d.drv.streamSynchronize, d.zeros.stream)
		}
	})
	return f
}

// closeZeros gives the blocks back. Buffers that were never freed keep theirs mapped.
func (d *Device) closeZeros() {
	for _, handle := range d.zeros.blocks {
		d.insist(&d.drv.memRelease, handle)
	}
	if d.zeros.stream != 0 {
		d.insist(&d.drv.streamDestroy, d.zeros.stream)
	}
}
