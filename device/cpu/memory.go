// This file owns where the bytes come from: anonymous mappings outside of the
// Go heap, so that an address is a plain number that never moves and a
// reservation can grow in place.

package cpu

import (
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
)

// mapping is what stands behind a buffer: a mapping of the buffer's largest
// size, of which the pages in use are accessible. Imported memory has none.
type mapping struct {
	dev      *Device
	bytes    []byte
	reserved bool
	grow     sync.Mutex
}

func (m *mapping) imported() bool { return m.bytes == nil }

// own is the record behind a buffer of this device.
func (d *Device) own(b *device.Buffer) *mapping {
	m, ok := b.Mem.(*mapping)
	if !ok || m.dev != d {
		panic("cpu: " + b.String() + " is not memory of " + d.name + "; the device that made it frees and grows it")
	}
	return m
}

// hugeFrom is the size from which the kernel is asked for huge pages. A 2 MiB
// page must fit at least once whatever the alignment.
const hugeFrom = 4 * device.MiB

// mapMemory reserves addresses; a mapping of nothing still gets one of its own.
func mapMemory(n device.Bytes) ([]byte, error) {
	m, err := syscall.Mmap(-1, 0, int(max(n, 1)), syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE|mapNoReserve)
	if err != nil {
		return nil, fmt.Errorf("mmap of %v: %w", n, err)
	}
	if n >= hugeFrom {
		adviseHuge(m)
	}
	return m, nil
}

// open makes the first n bytes of a mapping accessible.
func (m *mapping) open(n device.Bytes) error {
	if n == 0 {
		return nil
	}
	return syscall.Mprotect(m.bytes[:n], syscall.PROT_READ|syscall.PROT_WRITE)
}

func (d *Device) Alloc(kind device.Kind, size device.Bytes, owner string) (*device.Buffer, error) {
	d.mustBeOpen(owner)
	if err := d.err(); err != nil {
		return nil, err
	}
	if err := d.ledger.Alloc(kind, size, owner); err != nil {
		return nil, err
	}
	b, err := d.mapBuffer(kind, size, size, owner)
	if err != nil {
		d.ledger.Undo(kind, size, owner)
	}
	return b, err
}

func (d *Device) Reserve(kind device.Kind, limit device.Bytes, owner string) (*device.Buffer, error) {
	d.mustBeOpen(owner)
	if err := d.err(); err != nil {
		return nil, err
	}
	if limit < 0 {
		panic(fmt.Sprintf("cpu: %q reserves %d bytes", owner, int64(limit)))
	}
	if err := d.ledger.Alloc(kind, 0, owner); err != nil {
		return nil, err
	}
	b, err := d.mapBuffer(kind, 0, limit, owner)
	if err == nil {
		d.own(b).reserved = true
	}
	return b, err
}

func (d *Device) mapBuffer(kind device.Kind, size, limit device.Bytes, owner string) (*device.Buffer, error) {
	raw, err := mapMemory(limit)
	if err != nil {
		return nil, d.ledger.OutOfMemory(kind, limit, 0, owner)
	}
	m := &mapping{dev: d, bytes: raw}
	if err := m.open(size); err != nil {
		_ = syscall.Munmap(raw)
		return nil, d.ledger.OutOfMemory(kind, size, 0, owner)
	}
	b := device.NewBuffer(kind, uintptr(unsafe.Pointer(unsafe.SliceData(raw))), size, limit, owner)
	b.Mem = m
	return b, nil
}

func (d *Device) Grow(b *device.Buffer, size device.Bytes) error {
	d.mustBeOpen(b.Owner())
	if err := d.err(); err != nil {
		return err
	}
	if !b.Live() || size > b.Max() {
		panic(fmt.Sprintf("cpu: %s cannot grow to %v: it was freed, or reserved for at most %v", b, size, b.Max()))
	}
	m := d.own(b)
	m.grow.Lock()
	defer m.grow.Unlock()
	more := size - b.Size()
	if more <= 0 {
		return nil
	}
	if err := d.ledger.Grow(b.Kind(), more, b.Owner()); err != nil {
		return err
	}
	if err := m.open(size); err != nil {
		d.ledger.Undo(b.Kind(), more, b.Owner())
		return d.ledger.OutOfMemory(b.Kind(), more, 0, b.Owner())
	}
	b.SetSize(size)
	return nil
}

// Backdrop opens the pages behind the buffer: until somebody writes to them, which
// nobody may, all are the kernel's page of zeros. A write is not made to fault: here as on
// a GPU it spoils zeros, and does not end the caller's process without a word. What the
// last page in use holds beyond the size was never written to, so it is zero too.
func (d *Device) Backdrop(b *device.Buffer) error {
	d.mustBeOpen(b.Owner())
	if err := d.err(); err != nil {
		return err
	}
	m := d.own(b)
	if !b.Live() || !m.reserved || b.Kind() != device.Accel {
		panic(fmt.Sprintf("cpu: %s cannot have a backdrop: it was freed, or is not reserved memory of the device", b))
	}
	m.grow.Lock()
	defer m.grow.Unlock()
	page := syscall.Getpagesize()
	from := (int(b.Size()) + page - 1) / page * page
	if from >= len(m.bytes) {
		return nil
	}
	if err := syscall.Mprotect(m.bytes[from:], syscall.PROT_READ|syscall.PROT_WRITE); err != nil {
		return d.ledger.OutOfMemory(b.Kind(), 0, 0, b.Owner())
	}
	return nil
}

func (d *Device) Import(kind device.Kind, addr uintptr, size device.Bytes, owner string) *device.Buffer {
	b := device.NewBuffer(kind, addr, size, size, owner)
	b.Mem = &mapping{dev: d}
	return b
}

func (d *Device) View(r device.Range, mode device.Mode) []byte {
	device.CheckAccess(device.Access{Rect: device.Rect{Range: r, Pitch: r.Len, Rows: 1}, Mode: mode})
	if r.Buf.Kind() != device.Host {
		panic("cpu: the host cannot look into " + r.String() + "; copy it to host memory or use Download")
	}
	return bytesOf(r)
}

// release gives the memory of a freed buffer back.
func (d *Device) release(b *device.Buffer) {
	m := d.own(b)
	if m.imported() {
		return
	}
	if err := syscall.Munmap(m.bytes); err != nil {
		panic("cpu: munmap of " + b.String() + ": " + err.Error())
	}
	d.ledger.Release(b.Kind(), b.Size(), b.Owner())
}

// bytesOf is a range as a slice.
func bytesOf(r device.Range) []byte {
	return device.Slice[byte](uint64(r.Addr()), int(r.Len))
}
