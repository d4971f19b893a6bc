// This file owns buffers: where their memory comes from and how it is freed.

package cuda

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// carved marks a buffer that is a block of its pool's arena, and says where chunks end in
// it; the mapping under a block never changes. A reserved buffer has a *region of its own.
type carved struct {
	dev  *Device
	ends []memory.Bytes
}

// borrowed marks memory that the caller owns.
type borrowed struct{ dev *Device }

// mustOwn panics on a buffer of another device.
func (d *Device) mustOwn(b *device.Buffer, what string) {
	var maker *Device
	switch mem := b.Mem.(type) {
	case *carved:
		maker = mem.dev
	case *region:
		maker = mem.dev
	case *borrowed:
		maker = mem.dev
	}
	if maker != d {
		panic("cuda: " + d.name + " cannot " + what + " " + b.String() + ": another device made it; use that device")
	}
}

// freeMemory returns how much memory the GPU has left.
func (d *Device) freeMemory() memory.Bytes {
	var free, total uint64
	d.tryCall(&d.drv.memGetInfo, uintptr(pointer(&free)), uintptr(pointer(&total)))
	return memory.Bytes(free)
}

// measureGranule asks the driver for the unit of mapping.
func (d *Device) measureGranule() *failure {
	d.granule = granule
	for _, at := range []memLocation{{locationDevice, d.gpu}, {locationHostNuma, d.numa}} {
		prop := allocationProp{kind: allocationPinned, location: at}
		var n uint64
		if f := d.tryCall(&d.drv.memGetAllocationGranularity, uintptr(pointer(&n)), uintptr(pointer(&prop)), granularityMinimum); f != nil {
			return f
		}
		d.granule = max(d.granule, memory.Bytes(n))
	}
	return nil
}

// Alloc implements [device.Device].
func (d *Device) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	d.mustBeOpen("Alloc")
	if err := d.err(); err != nil {
		return nil, err
	}
	d.runPassed()
	if err := d.ledger.Alloc(kind, size, owner); err != nil {
		return nil, err
	}
	p := &d.pools[kind]
	addr, f := p.allocate(&p.buffers, size)
	if f != nil {
		d.ledger.Undo(kind, size, owner)
		return nil, d.refused(f, kind, size, owner)
	}
	b := device.NewBuffer(kind, addr, size, size, owner)
	b.Mem = &carved{d, p.buffers.region.borders(addr, size)}
	return b, nil
}

// Reserve implements [device.Device].
func (d *Device) Reserve(kind memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	d.mustBeOpen("Reserve")
	if err := d.err(); err != nil {
		return nil, err
	}
	if limit < 0 {
		panic(fmt.Sprintf("cuda: %q reserves %d bytes; expected a size of at least zero", owner, int64(limit)))
	}
	if err := d.ledger.Alloc(kind, 0, owner); err != nil {
		return nil, err
	}
	r, f := d.reserve(kind, limit)
	if f != nil {
		return nil, d.refused(f, kind, limit, owner)
	}
	b := device.NewBuffer(kind, r.addr, 0, limit, owner)
	b.Mem = r
	return b, nil
}

// Grow implements [device.Device].
func (d *Device) Grow(b *device.Buffer, size memory.Bytes) error {
	d.mustBeOpen("Grow")
	d.mustOwn(b, "grow")
	if err := d.err(); err != nil {
		return err
	}
	if !b.Live() || size > b.Max() {
		panic(fmt.Sprintf("cuda: %s cannot grow to %v; it was freed, or has a maximum of %v", b, size, b.Max()))
	}
	d.growing.Lock()
	defer d.growing.Unlock()
	more := size - b.Size()
	if more <= 0 {
		return nil
	}
	d.runPassed()
	if err := d.ledger.Grow(b.Kind(), more, b.Owner()); err != nil {
		return err
	}
	// What the last granule holds beyond the size is not the caller's and not
	// counted.
	if f := d.pools[b.Kind()].extend(b.Mem.(*region), size); f != nil {
		d.ledger.Undo(b.Kind(), more, b.Owner())
		return d.refused(f, b.Kind(), more, b.Owner())
	}
	b.SetSize(size)
	return nil
}

// Borrow implements [device.Device].
func (d *Device) Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *device.Buffer {
	b := device.NewBuffer(kind, addr, size, size, owner)
	b.Mem = &borrowed{d}
	return b
}

// View implements [device.Device].
func (d *Device) View(r device.Range, mode device.Mode) []byte {
	device.CheckAccess(device.Access{Rect: device.Rect{Range: r, Pitch: r.Len, Rows: 1}, Mode: mode})
	if r.Buf.Kind() != memory.Host {
		panic("cuda: the host cannot view " + r.String() + "; copy it to host memory or use Download")
	}
	return bytesAt(r.Addr(), r.Len)
}

func bytesAt(addr uintptr, n memory.Bytes) []byte { return device.Slice[byte](uint64(addr), int(n)) }

// release gives the memory of a freed buffer back.
func (d *Device) release(b *device.Buffer) {
	p := &d.pools[b.Kind()]
	if r, reserved := b.Mem.(*region); reserved {
		p.release(r)
	} else {
		p.freeBlock(&p.buffers, b.Addr(), b.Size())
	}
	d.ledger.Release(b.Kind(), b.Size(), b.Owner())
}
