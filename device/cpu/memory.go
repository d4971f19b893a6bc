// This file owns the memory: anonymous mappings outside of the Go heap. Their addresses
// never move, and a reservation can grow in place.

package cpu

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// mapping is the memory of a buffer: a mapping of the buffer's largest size, of which the
// pages in use are accessible. Borrowed memory has none.
type mapping struct {
	dev      *dev
	bytes    []byte
	reserved bool
	grow     sync.Mutex
}

func (m *mapping) borrowed() bool { return m.bytes == nil }

// mappingOf returns the record behind a buffer of this device.
func (d *dev) mappingOf(b *device.Buffer) *mapping {
	m, ok := b.Mem.(*mapping)
	if !ok || m.dev != d {
		panic("cpu: " + b.String() + " is not memory of " + d.name + "; free and grow it with the device that made it")
	}
	return m
}

// hugeFrom is the size from which the kernel is asked for huge pages. It is twice the
// size of a huge page (2 MiB), so that one fits at any alignment.
const hugeFrom = 4 * memory.MiB

// mapMemory reserves addresses. A mapping of no bytes has an address of its own too.
func mapMemory(n memory.Bytes) ([]byte, error) {
	m, err := syscall.Mmap(-1, 0, int(max(n, 1)), syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE|mapNoReserve)
	if err != nil {
		return nil, fmt.Errorf("mmap of %v: %w", n, err)
	}
	if n >= hugeFrom {
		adviseHuge(m)
	}
	return m, nil
}

// makeAccessible makes the first n bytes of a mapping accessible.
func (m *mapping) makeAccessible(n memory.Bytes) error {
	if n == 0 {
		return nil
	}
	return syscall.Mprotect(m.bytes[:n], syscall.PROT_READ|syscall.PROT_WRITE)
}

func (d *dev) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
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

func (d *dev) Reserve(kind memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	d.mustBeOpen(owner)
	if err := d.err(); err != nil {
		return nil, err
	}
	if limit < 0 {
		panic(fmt.Sprintf("cpu: %q reserves %d bytes; expected a size of at least zero", owner, int64(limit)))
	}
	if err := d.ledger.Alloc(kind, 0, owner); err != nil {
		return nil, err
	}
	b, err := d.mapBuffer(kind, 0, limit, owner)
	if err == nil {
		d.mappingOf(b).reserved = true
	}
	return b, err
}

func (d *dev) mapBuffer(kind memory.Kind, size, limit memory.Bytes, owner string) (*device.Buffer, error) {
	raw, err := mapMemory(limit)
	if err != nil {
		return nil, d.refused(kind, limit, owner, err)
	}
	m := &mapping{dev: d, bytes: raw}
	if err := m.makeAccessible(size); err != nil {
		_ = syscall.Munmap(raw)
		return nil, d.refused(kind, size, owner, err)
	}
	b := device.NewBuffer(kind, uintptr(unsafe.Pointer(unsafe.SliceData(raw))), size, limit, owner)
	b.Mem = m
	return b, nil
}

// refused returns the error for memory that the ledger has and the system refuses. The
// device's capacity says nothing about the reason.
func (d *dev) refused(kind memory.Kind, asked memory.Bytes, owner string, err error) *device.OutOfMemory {
	e := d.ledger.OutOfMemory(kind, asked, 0, owner)
	var number syscall.Errno
	if errors.As(err, &number) {
		err = number
	}
	if limits := sysinfo.Rlimits(); len(limits) > 0 && number == syscall.ENOMEM {
		e.Refused = fmt.Sprintf("%s; run it without this limit, or ask for less", limits[0])
	} else {
		e.Refused = fmt.Sprintf("%v; free memory of other programs or ask for less", err)
	}
	return e
}

func (d *dev) Grow(b *device.Buffer, size memory.Bytes) error {
	d.mustBeOpen(b.Owner())
	if err := d.err(); err != nil {
		return err
	}
	if !b.Live() || size > b.Max() {
		panic(fmt.Sprintf("cpu: %s cannot grow to %v; it was freed, or has a maximum of %v", b, size, b.Max()))
	}
	m := d.mappingOf(b)
	m.grow.Lock()
	defer m.grow.Unlock()
	more := size - b.Size()
	if more <= 0 {
		return nil
	}
	if err := d.ledger.Grow(b.Kind(), more, b.Owner()); err != nil {
		return err
	}
	if err := m.makeAccessible(size); err != nil {
		d.ledger.Undo(b.Kind(), more, b.Owner())
		return d.refused(b.Kind(), more, b.Owner(), err)
	}
	b.SetSize(size)
	return nil
}

// Backdrop makes the pages behind the buffer accessible. Until a write, which is a
// mistake, all of them are the kernel's page of zeros. A write does not fault: as on a
// GPU it spoils zeros and does not end the process. The last page in use was never
// written beyond the size, so that part is zero too.
func (d *dev) Backdrop(b *device.Buffer) error {
	d.mustBeOpen(b.Owner())
	if err := d.err(); err != nil {
		return err
	}
	m := d.mappingOf(b)
	if !b.Live() || !m.reserved || b.Kind() != memory.Device {
		panic(fmt.Sprintf("cpu: %s cannot have a backdrop; it was freed, or is not reserved device memory", b))
	}
	m.grow.Lock()
	defer m.grow.Unlock()
	page := syscall.Getpagesize()
	from := (int(b.Size()) + page - 1) / page * page
	if from >= len(m.bytes) {
		return nil
	}
	if err := syscall.Mprotect(m.bytes[from:], syscall.PROT_READ|syscall.PROT_WRITE); err != nil {
		return d.refused(b.Kind(), memory.Bytes(len(m.bytes)-from), b.Owner(), err)
	}
	return nil
}

func (d *dev) Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *device.Buffer {
	b := device.NewBuffer(kind, addr, size, size, owner)
	b.Mem = &mapping{dev: d}
	return b
}

func (d *dev) View(r device.Range, mode device.Mode) []byte {
	device.CheckAccess(device.Access{Rect: device.Rect{Range: r, Pitch: r.Len, Rows: 1}, Mode: mode})
	if r.Buf.Kind() != memory.Host {
		panic("cpu: the host cannot view " + r.String() + "; copy it to host memory or use Download")
	}
	return bytesOf(r)
}

// release gives the memory of a freed buffer back. If the system refuses, the device fails
// and the memory stays counted.
func (d *dev) release(b *device.Buffer) {
	m := d.mappingOf(b)
	if m.borrowed() {
		return
	}
	if err := syscall.Munmap(m.bytes); err != nil { // such as too many mappings, if it lies in the middle of one
		d.fail(&device.DriverError{Device: d.name, Call: "munmap", Text: b.String() + ": " + err.Error()})
		return
	}
	d.ledger.Release(b.Kind(), b.Size(), b.Owner())
}

// bytesOf returns a range as a slice.
func bytesOf(r device.Range) []byte {
	return device.Slice[byte](uint64(r.Addr()), int(r.Len))
}
