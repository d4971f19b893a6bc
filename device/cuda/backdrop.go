// This file owns backdrops: the rest of a reserved buffer, from the end of its memory to
// the end of its addresses, is mapped repeatedly to the same few blocks of zeros.
//
// The driver maps memory under any number of addresses. Two rules of its documentation
// shape this file: a mapping begins at the first byte of its memory, and what one call
// mapped, one call unmaps. The documentation contradicts itself about mapping a part of
// memory (offset and size together must be "less than" the memory, which no whole mapping
// is), so there are blocks of two sizes, and each is always mapped whole.

package cuda

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// backdropPiece is the larger size of a block: a buffer of 8 GiB then takes 1024
// calls to map and not 4096. The smaller size is the granule.
const backdropPiece = 8 * memory.MiB

// zeros is what all backdrops of a device are mapped to. It takes 10 MiB at most. Like the
// staging memory of uploads, it is not in the ledger, which counts what callers asked for
// and nothing else.
type zeros struct {
	stream uintptr                  // that fills; it is nobody else's, so nobody captures it
	blocks map[memory.Bytes]uintptr // handles by size
}

// Backdrop implements [device.Device].
func (d *Device) Backdrop(b *device.Buffer) error {
	d.mustBeOpen("Backdrop")
	d.mustOwn(b, "put a backdrop behind")
	if err := d.err(); err != nil {
		return err
	}
	r, reserved := b.Mem.(*region)
	if !b.Live() || !reserved || b.Kind() != memory.Device {
		panic(fmt.Sprintf("cuda: %s cannot have a backdrop; it was freed, or is not reserved device memory", b))
	}
	d.growing.Lock()
	defer d.growing.Unlock()
	d.runPassed()
	if f := d.pools[b.Kind()].addBackdrop(r, b.Size()); f != nil {
		return d.refused(f, b.Kind(), r.pieces(), "backdrop")
	}
	return nil
}

// addBackdrop puts a backdrop behind a region of which the first size bytes are in use. It
// fills the rest of the last granule with zeros.
func (p *pool) addBackdrop(r *region, size memory.Bytes) *failure {
	p.mu.Lock()
	defer p.mu.Unlock()
	if r.backed {
		return nil
	}
	d := p.dev
	f := d.makeZeros(r)
	if f != nil && f.outOfMemory() && p.trim() {
		f = d.makeZeros(r)
	}
	if rest := r.mapped() - size; f == nil && rest > 0 {
		f = d.fillZeros(r.addr+uintptr(size), rest)
	}
	if f == nil {
		f = r.mapBackdrop(r.mapped(), r.limit)
	}
	r.backed = f == nil
	return f
}

// large returns the larger size of a block.
func (d *Device) large() memory.Bytes { return roundUp(backdropPiece, d.granule) }

// pieces returns the size of all blocks that a region may need: a large piece becomes
// granules when the border moves into it.
func (r *region) pieces() memory.Bytes {
	n := r.dev.granule
	if r.dev.large() <= r.limit {
		n += r.dev.large()
	}
	return n
}

// piece returns the size of the backdrop's piece that begins at an offset. It depends on the
// offset alone, so no list is kept: pieces are large at multiples of the large size that
// have room for one, and granules elsewhere.
func (r *region) piece(at memory.Bytes) memory.Bytes {
	if n := r.dev.large(); at%n == 0 && at+n <= r.limit {
		return n
	}
	return r.dev.granule
}

// mapBackdrop maps pieces behind [from, to), or nothing if that fails.
func (r *region) mapBackdrop(from, to memory.Bytes) (f *failure) {
	d, at := r.dev, from
	for at < to && f == nil {
		n := r.piece(at)
		if f = d.tryCall(&d.drv.memMap, r.addr+uintptr(at), uintptr(n), 0, d.zeros.blocks[n], 0); f == nil {
			at += n
		}
	}
	if f == nil && from < to {
		f = d.permit(r.kind, r.addr+uintptr(from), to-from)
	}
	if f != nil {
		if _, stuck := r.unmapBackdrop(from, at); stuck != nil {
			_ = d.broken(stuck)
		}
	}
	return f
}

// unmapBackdrop unmaps the pieces that begin in [from, to) and returns where the last ends.
func (r *region) unmapBackdrop(from, to memory.Bytes) (end memory.Bytes, f *failure) {
	d := r.dev
	for end = from; end < to; {
		n := r.piece(end)
		if f = d.tryCall(&d.drv.memUnmap, r.addr+uintptr(end), uintptr(n)); f != nil {
			return end, f
		}
		end += n
	}
	return end, nil
}

// replace replaces the backdrop of [from, to) with memory that holds zeros. The last piece
// may reach further; its rest is mapped again in granules. If replace fails, it restores the
// backdrop; if that is impossible, the device fails, because readable bytes no longer are.
func (r *region) replace(from, to memory.Bytes, handle uintptr) *failure {
	d, at, n := r.dev, r.addr+uintptr(from), to-from
	end, f := r.unmapBackdrop(from, to)
	if f == nil {
		f = d.attach(r.kind, at, n, handle)
	}
	if f == nil {
		if f = d.fillZeros(at, n); f == nil {
			f = r.mapBackdrop(to, end)
		}
		if f == nil {
			return nil
		}
		d.insist(&d.drv.memUnmap, at, uintptr(n))
	}
	if hole := r.mapBackdrop(from, end); hole != nil {
		_ = d.broken(hole)
	}
	return f
}

// unmapWholeBackdrop unmaps the whole backdrop, on a failed device too.
func (r *region) unmapWholeBackdrop() {
	if r.dev.gone.Load() {
		return
	}
	if _, f := r.unmapBackdrop(r.mapped(), r.limit); f != nil {
		_ = r.dev.broken(f)
	}
}

// makeZeros makes the blocks that a backdrop of the region needs, if they are missing.
func (d *Device) makeZeros(r *region) (f *failure) {
	z := &d.zeros
	if z.stream == 0 {
		var s uint64
		d.Relaxed(func() { f = d.tryCall(&d.drv.streamCreate, uintptr(pointer(&s)), streamNonBlocking) })
		if f != nil {
			return f
		}
		z.stream, z.blocks = uintptr(s), map[memory.Bytes]uintptr{}
	}
	for _, n := range []memory.Bytes{d.granule, d.large()} {
		if n > r.limit || z.blocks[n] != 0 {
			continue
		}
		handle, f := d.newZeroBlock(n)
		if f != nil {
			return f
		}
		z.blocks[n] = handle
	}
	return nil
}

// newZeroBlock returns a handle to memory that holds zeros. The memory has an address only
// while it is filled.
func (d *Device) newZeroBlock(n memory.Bytes) (uintptr, *failure) {
	r, f := d.reserve(memory.Device, n)
	if f != nil {
		return 0, f
	}
	defer r.close()
	handle, f := d.create(memory.Device, n)
	if f != nil {
		return 0, f
	}
	if f = d.attach(memory.Device, r.addr, n, handle); f == nil {
		f = d.fillZeros(r.addr, n)
		d.insist(&d.drv.memUnmap, r.addr, uintptr(n))
	}
	if f != nil {
		d.insist(&d.drv.memRelease, handle)
		return 0, f
	}
	return handle, nil
}

// fillZeros fills memory of one chunk and waits for it. It waits for no other stream and
// works while others capture, because this is no work of the caller.
func (d *Device) fillZeros(at uintptr, n memory.Bytes) (f *failure) {
	d.Relaxed(func() {
		if f = d.tryCall(&d.drv.memsetD8Async, at, 0, uintptr(n), d.zeros.stream); f == nil {
			f = d.tryCall(&d.drv.streamSynchronize, d.zeros.stream)
		}
	})
	return f
}

// closeZeros releases the blocks. Buffers that were never freed keep theirs mapped.
func (d *Device) closeZeros() {
	for _, handle := range d.zeros.blocks {
		d.insist(&d.drv.memRelease, handle)
	}
	if d.zeros.stream != 0 {
		d.insist(&d.drv.streamDestroy, d.zeros.stream)
	}
}
