// This file owns berths: the live rows of tensors that the caller allocates.

package stash

import (
	"cmp"
	"errors"
	"fmt"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Berths keeps the live rows of tensors whose row counts are on the device, each tensor in
// its own [Berth]. Rows are copied to a berth on compute and used there; nothing is copied
// back. Pages would let tensors share memory, but the copy back would take as much
// memory bandwidth as the first copy, and the tensor's whole memory again.
//
// Only one goroutine may use it. The host waits for nothing during a step, and a step may
// be captured.
type Berths struct {
	dev     device.Device
	compute device.Stream
	notes   *device.Buffer // the notes of all berths, in order
	of      map[rowShape][]*Berth
	all     []*Berth
	live    float64
}

type rowShape struct {
	row   memory.Bytes
	limit Rows
}

// Size returns the memory of all berths.
func (h *Berths) Size() (n memory.Bytes) {
	for _, b := range h.all {
		n += b.mem.Size()
	}
	return n
}

// Berth holds the rows of one tensor at a time. It has addresses for the whole tensor and
// memory for some rows. The addresses after those read as zeros and must not be written.
//
//  1. empty: It has no memory. The rows of a tensor are counted and stay in place.
//  2. ready: Settle gave it memory for the counted rows, and some to spare.
//  3. taken: It holds rows from Save to Release or the next Begin. Then it is ready again.
type Berth struct {
	shape rowShape
	mem   *device.Buffer
	note  device.Range
	room  Rows
	taken bool
	seen  bool // since Settle
}

// Holds reports whether the berth has the rows that were saved. If it does not, the
// tensor's memory must stay.
func (b *Berth) Holds() bool { return b.room > 0 }

// Addr returns the address of the rows.
func (b *Berth) Addr() uintptr { return b.mem.Addr() }

const (
	// maxBerths limits the tensors of a step: their notes take at most 1 MiB.
	maxBerths = 1 << 16
	// A berth has room for 1/spare more rows than were counted, because counts differ from
	// step to step. It grows before less than half of the spare room is left.
	spare = 16
)

// NewBerths returns berths for a training loop that works on compute. live is the share of a
// tensor's rows that a new berth has memory for. If it is zero, a new berth is empty until
// Settle.
func NewBerths(dev device.Device, compute device.Stream, live float64) (*Berths, error) {
	notes, err := dev.Reserve(memory.Device, maxBerths*kernels.ShelveNoteBytes, "row counts")
	if err != nil {
		return nil, err
	}
	return &Berths{dev: dev, compute: compute, notes: notes, of: map[rowShape][]*Berth{}, live: live}, nil
}

// Begin begins a step. It releases all berths.
func (h *Berths) Begin() {
	for _, b := range h.all {
		b.taken = false
	}
}

// Save copies the first rows of a tensor to a berth. The int64 in rows is the number of
// rows, which is at most limit. If the berth holds them, work that is issued on compute
// from now on may reuse the tensor's memory and the count. Save returns nil in a captured
// step that saves more tensors than the steps before it.
func (h *Berths) Save(mem, rows device.Range, row memory.Bytes, limit Rows) (*Berth, error) {
	if mem.Len != row*memory.Bytes(limit) || rows.Len != 8 {
		panic(fmt.Sprintf("stash: a tensor of %v cannot have %d rows of %v with a count of %v", mem.Len, limit, row, rows.Len))
	}
	b, err := h.find(rowShape{row, limit})
	if b == nil || err != nil {
		return nil, err
	}
	b.taken, b.seen = true, true
	h.compute.Launch(kernels.ShelveLaunch(b.mem.All(), mem, b.note, rows, row))
	return b, nil
}

// find returns the first berth that is not taken, so that a tensor has the same berth in
// every step. In a capture it returns the first that is also ready.
func (h *Berths) find(s rowShape) (*Berth, error) {
	captured := h.compute.Capturing()
	for _, b := range h.of[s] {
		if !b.taken && (b.Holds() || !captured) {
			return b, nil
		}
	}
	switch {
	case captured:
		return nil, nil
	case len(h.all) == maxBerths:
		return nil, fmt.Errorf("stash: a step stashes more than %d tensors; use fewer buffers", maxBerths)
	}
	at := memory.Bytes(len(h.all)) * kernels.ShelveNoteBytes
	if err := h.dev.Grow(h.notes, at+kernels.ShelveNoteBytes); err != nil {
		return nil, err
	}
	mem, err := h.dev.Reserve(memory.Device, align(s.row*memory.Bytes(s.limit)), "stash")
	if err != nil {
		return nil, err
	}
	b := &Berth{shape: s, mem: mem, note: h.notes.Slice(at, kernels.ShelveNoteBytes)}
	h.all, h.of[s] = append(h.all, b), append(h.of[s], b)
	if h.live > 0 {
		err = h.grow(b, min(Rows(h.live*float64(s.limit))+1, s.limit))
	}
	if errors.As(err, new(*device.OutOfMemory)) {
		err = nil // the berth stays empty
	}
	h.compute.Upload(b.note, asBytes(&kernels.ShelveNote{Fits: uint64(b.room)}))
	return b, err
}

// Release releases the berth. Work that is issued on compute from now on must not use the
// rows.
func (b *Berth) Release() { b.taken = false }

// Missed reports a step that had more rows than its berths have room for.
type Missed struct {
	Asked, Had memory.Bytes // bytes of the berths that were too small
}

// Settle waits for compute, and so for all steps issued or replayed since the last Settle,
// abandoned ones included. It gives berths memory for the rows that their tensors had,
// except berths for which stays returns true. If some berths were too small, it reports
// what was missed. The results of these steps are then invalid, and the steps can be run or
// replayed again. Nothing else may use berths meanwhile. Settle returns an error once.
func (h *Berths) Settle(stays func(*Berth) bool) (missed Missed, err error) {
	notes := make([]kernels.ShelveNote, len(h.all))
	if len(notes) == 0 {
		return missed, nil
	}
	all := h.notes.Slice(0, memory.Bytes(len(notes))*kernels.ShelveNoteBytes) // a berth that could not be allocated may have left more notes
	if err := h.compute.Download(bytesOf(notes), all); err != nil {
		return missed, err
	}
	for i, b := range h.all {
		if n := notes[i].Rows; n > uint64(b.shape.limit) {
			err = cmp.Or[error](err, &TooManyRows{Rows: int64(n), Limit: b.shape.limit})
		} else if Rows(n+n/(2*spare)) > b.room || b.seen && !b.Holds() {
			err = cmp.Or(err, h.fit(b, Rows(n), &missed, stays))
		}
		notes[i], b.seen = kernels.ShelveNote{Fits: uint64(b.room)}, false
	}
	h.compute.Upload(all, bytesOf(notes))
	// Steps may be replayed on any stream from now on. A step that ran before the upload
	// would use the old size, and its notes would be lost.
	return missed, cmp.Or(err, h.compute.Sync())
}

// fit gives a full or nearly full berth memory for n rows.
func (h *Berths) fit(b *Berth, n Rows, missed *Missed, stays func(*Berth) bool) (err error) {
	lost := b.Holds() && n > b.room
	if lost {
		missed.Asked += b.shape.row * memory.Bytes(n)
		missed.Had += b.shape.row * memory.Bytes(b.room)
	}
	if b.Holds() || !stays(b) {
		err = h.grow(b, min(n+n/spare+1, b.shape.limit))
	}
	// If memory is short, a tensor can stay in place, unless rows were lost.
	if !lost && errors.As(err, new(*device.OutOfMemory)) {
		return nil
	}
	return err
}

// grow gives a berth memory for some rows.
func (h *Berths) grow(b *Berth, rows Rows) error {
	if b.mem.Size() == 0 { // new memory before a backdrop is zero
		if err := h.dev.Backdrop(b.mem); err != nil {
			return err
		}
	}
	if err := h.dev.Grow(b.mem, align(b.shape.row*memory.Bytes(rows))); err != nil {
		return err
	}
	b.room = rows
	return nil
}

// TooManyRows reports a row count that is negative or larger than its tensor.
type TooManyRows struct {
	Rows  int64 // the count
	Limit Rows  // the rows of the tensor
}

// Error returns the count and the limit.
func (e *TooManyRows) Error() string {
	return fmt.Sprintf("stash: expected a count between 0 and the %[2]d rows of the tensor, got %[1]d", e.Rows, e.Limit)
}

func bytesOf(notes []kernels.ShelveNote) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(notes))), len(notes)*int(kernels.ShelveNoteBytes))
}

// Close frees all memory after the issued work is done.
func (h *Berths) Close() {
	for _, b := range h.all {
		h.compute.Free(b.mem)
	}
	h.compute.Free(h.notes)
}
