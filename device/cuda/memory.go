// This file owns buffers: where their memory comes from, and when freed memory
// is given back.

package cuda

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

// carved marks a buffer that is a block of its pool's arena, and tells where in
// it chunks end: memory under a block stays as it is. A reserved buffer has a
// *region of its own, and an imported one nothing of ours.
type carved []device.Bytes

// free is what the GPU has left.
func (d *Device) free() device.Bytes {
	var free, total uint64
	d.try(&d.drv.memGetInfo, uintptr(pointer(&free)), uintptr(pointer(&total)))
	return device.Bytes(free)
}

// measureGranule asks the driver for the unit of mapping.
func (d *Device) measureGranule() *failure {
	d.granule = granule
	for _, at := range []memLocation{{locationDevice, d.gpu}, {locationHostNuma, d.numa}} {
		prop := allocationProp{kind: allocationPinned, location: at}
		var n uint64
		if f := d.try(&d.drv.memGetAllocationGranularity, uintptr(pointer(&n)), uintptr(pointer(&prop)), granularityMinimum); f != nil {
			return f
		}
		d.granule = max(d.granule, device.Bytes(n))
	}
	return nil
}

func (d *Device) Alloc(kind device.Kind, size device.Bytes, owner string) (*device.Buffer, error) {
	if err := d.err(); err != nil {
		return nil, err
	}
	d.reap()
	if err := d.ledger.Alloc(kind, size, owner); err != nil {
		return nil, err
	}
	p := &d.pools[kind]
	addr, f := p.take(&p.buffers, size)
	if f != nil {
		d.ledger.Undo(kind, size, owner)
		return nil, d.refused(f, kind, size, owner)
	}
	b := device.NewBuffer(kind, addr, size, size, owner)
	b.Mem = carved(p.buffers.region.borders(addr, size))
	return b, nil
}

func (d *Device) Reserve(kind device.Kind, limit device.Bytes, owner string) (*device.Buffer, error) {
	if err := d.err(); err != nil {
		return nil, err
	}
	if limit < 0 {
		panic(fmt.Sprintf("cuda: %q reserves %d bytes", owner, int64(limit)))
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

func (d *Device) Grow(b *device.Buffer, size device.Bytes) error {
	if err := d.err(); err != nil {
		return err
	}
	if !b.Live() || size > b.Max() {
		panic(fmt.Sprintf("cuda: %s cannot grow to %v: it was freed, or reserved for at most %v", b, size, b.Max()))
	}
	d.growing.Lock()
	defer d.growing.Unlock()
	more := size - b.Size()
	if more <= 0 {
		return nil
	}
	d.reap()
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

func (d *Device) Import(kind device.Kind, addr uintptr, size device.Bytes, owner string) *device.Buffer {
	return device.NewBuffer(kind, addr, size, size, owner)
}

func (d *Device) View(r device.Range, mode device.Mode) []byte {
	device.CheckAccess(device.Access{Rect: device.Rect{Range: r, Pitch: r.Len, Rows: 1}, Mode: mode})
	if r.Buf.Kind() != device.Host {
		panic("cuda: the host cannot look into " + r.String() + "; copy it to host memory or use Download")
	}
	return bytesAt(r.Addr(), r.Len)
}

func bytesAt(addr uintptr, n device.Bytes) []byte { return device.Slice[byte](uint64(addr), int(n)) }

// pending is something to be done once its event has passed.
type pending struct {
	event   uintptr
	staging bool // it frees staging memory
	then    func()
}

// after runs fn once the work issued on the stream so far is done. It runs in
// some later call of the device, not at once.
func (d *Device) after(s *stream, staging bool, fn func()) {
	e := d.event()
	d.do(&d.drv.eventRecord, e, s.handle)
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pending = append(d.pending, pending{e, staging, fn})
}

// event is an event without timing that nobody uses.
func (d *Device) event() uintptr {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.events); n > 0 {
		e := d.events[n-1]
		d.events = d.events[:n-1]
		return e
	}
	var e uint64
	if f := d.try(&d.drv.eventCreate, uintptr(pointer(&e)), eventDisableTiming); f != nil {
		d.broken(f)
	}
	return uintptr(e)
}

// reap does what waited for events that have passed. On a device that failed
// nothing is waited for: no work touches memory any more.
func (d *Device) reap() {
	d.mu.Lock()
	var done []func()
	var left []pending
	for _, p := range d.pending {
		if !d.passed(p.event) {
			left = append(left, p)
			continue
		}
		done = append(done, p.then)
		d.events = append(d.events, p.event)
	}
	d.pending = left
	d.mu.Unlock()
	for _, then := range done {
		then()
	}
}

func (d *Device) passed(event uintptr) bool {
	if d.failed.Load() != nil {
		return true
	}
	r := d.call(&d.drv.eventQuery, event)
	if r != success && r != errNotReady {
		d.broken(&failure{&d.drv.eventQuery, r})
	}
	return r != errNotReady
}

// release gives the memory of a freed buffer back.
func (d *Device) release(b *device.Buffer) {
	p := &d.pools[b.Kind()]
	if r, reserved := b.Mem.(*region); reserved {
		p.release(r)
	} else {
		p.give(&p.buffers, b.Addr(), b.Size())
	}
	d.ledger.Release(b.Kind(), b.Size(), b.Owner())
}
