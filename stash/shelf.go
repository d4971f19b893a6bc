// This file owns the shelf: the live rows of tensors that somebody else allocates.

package stash

import (
	"cmp"
	"errors"
	"fmt"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// Shelf keeps the live rows of tensors whose row counts are on the device, each in a
// [Berth] of its own. Rows are copied there, on compute, and used there: nothing is copied
// back. In a store's pages tensors share the room that they do not need; a copy back
// would take as much memory bandwidth as the copy there, and the tensor's whole memory
// again.
//
// One goroutine drives it. In a step the host waits for nothing, and a step may be captured.
type Shelf struct {
	dev     device.Device
	compute device.Stream
	notes   *device.Buffer // of all berths, in their order
	of      map[rowShape][]*Berth
	berths  []*Berth
	live    float64
}

type rowShape struct {
	row   device.Bytes
	limit Rows
}

// Size is the memory of all berths.
func (h *Shelf) Size() (all device.Bytes) {
	for _, b := range h.berths {
		all += b.mem.Size()
	}
	return all
}

// Berth is a place for one tensor at a time. It has the addresses of the whole tensor
// and memory for so many rows; behind those it reads as zeros, and nobody may write.
//
//  1. empty: it has no memory. A tensor that is put there is only counted, and stays.
//  2. ready: Settle has given it memory for what was counted, and some to spare.
//  3. taken: from Put to Leave, or the next Begin. Then it is ready again.
type Berth struct {
	shape rowShape
	mem   *device.Buffer
	note  device.Range
	room  Rows
	taken bool
	seen  bool // since Settle
}

// Holds tells whether the berth has the rows that were put there. If not the tensor's
// memory must stay.
func (b *Berth) Holds() bool { return b.room > 0 }

// Addr is where the rows are.
func (b *Berth) Addr() uintptr { return b.mem.Addr() }

const (
	// maxBerths bounds the tensors of a step, by the memory of their notes: 1 MiB.
	maxBerths = 1 << 16
	// spare is what a berth gets beyond the rows that were seen: a sixteenth, since
	// counts differ from step to step. It grows before less than half of that is left.
	spare = 16
)

// NewShelf makes a shelf for a loop that works on compute. Berths begin with memory for a
// share of their tensors' rows; without one they are empty until Settle.
func NewShelf(dev device.Device, compute device.Stream, live float64) (*Shelf, error) {
	notes, err := dev.Reserve(device.Accel, maxBerths*kernels.ShelveNoteBytes, "row counts")
	if err != nil {
		return nil, err
	}
	return &Shelf{dev: dev, compute: compute, notes: notes, of: map[rowShape][]*Berth{}, live: live}, nil
}

// Begin begins a step: no berth is taken.
func (h *Shelf) Begin() {
	for _, b := range h.berths {
		b.taken = false
	}
}

// Put copies the first rows of a tensor, as many as the int64 in rows says, at most limit,
// to a berth. Memory and count are compute's: they may be used again by work that
// compute is given from now on, if the berth holds the rows. There may be none in a
// captured step that puts more than the steps before it.
func (h *Shelf) Put(mem, rows device.Range, row device.Bytes, limit Rows) (*Berth, error) {
	if mem.Len != row*device.Bytes(limit) || rows.Len != 8 {
		panic(fmt.Sprintf("stash: a tensor of %v has %d rows of %v, and %v count them", mem.Len, limit, row, rows.Len))
	}
	b, err := h.find(rowShape{row, limit})
	if b == nil || err != nil {
		return nil, err
	}
	b.taken, b.seen = true, true
	h.compute.Launch(kernels.ShelveLaunch(b.mem.All(), mem, b.note, rows, row))
	return b, nil
}

// find is the first berth that is not taken, so that a tensor has the same one in every
// step; in captures, of those that are ready.
func (h *Shelf) find(s rowShape) (*Berth, error) {
	captured := h.compute.Capturing()
	for _, b := range h.of[s] {
		if !b.taken && (b.Holds() || !captured) {
			return b, nil
		}
	}
	switch {
	case captured:
		return nil, nil
	case len(h.berths) == maxBerths:
		return nil, fmt.Errorf("stash: more than %d tensors of different shapes; use few sizes of buffers", maxBerths)
	}
	at := device.Bytes(len(h.berths)) * kernels.ShelveNoteBytes
	if err := h.dev.Grow(h.notes, at+kernels.ShelveNoteBytes); err != nil {
		return nil, err
	}
	mem, err := h.dev.Reserve(device.Accel, align(s.row*device.Bytes(s.limit)), "stash")
	if err != nil {
		return nil, err
	}
	b := &Berth{shape: s, mem: mem, note: h.notes.Slice(at, kernels.ShelveNoteBytes)}
	h.berths, h.of[s] = append(h.berths, b), append(h.of[s], b)
	if h.live > 0 {
		err = h.grow(b, min(Rows(h.live*float64(s.limit))+1, s.limit))
	}
	if errors.As(err, new(*device.OutOfMemory)) {
		err = nil // it stays empty
	}
	h.compute.Upload(b.note, asBytes(&kernels.ShelveNote{Fits: uint64(b.room)}))
	return b, err
}

// Leave says that work which compute is given from now on does not use what is there.
func (b *Berth) Leave() { b.taken = false }

// Missed is a step that had more rows than its berths have room for.
type Missed struct {
	Asked, Had device.Bytes // of the berths that were too small
}

// Settle waits for compute, and so for all steps issued or replayed since the last Settle,
// also those that were given up, and gives berths memory for what their tensors had, those
// aside that are not worth it. If some were too small the results of these steps mean
// nothing; now they can be run, or replayed, again. Nothing else may use berths meanwhile.
// What an error says is said once.
func (h *Shelf) Settle(stays func(*Berth) bool) (missed Missed, err error) {
	notes := make([]kernels.ShelveNote, len(h.berths))
	if len(notes) == 0 {
		return missed, nil
	}
	all := h.notes.Slice(0, device.Bytes(len(notes))*kernels.ShelveNoteBytes) // there is more behind a berth that could not be made
	if err := h.compute.Download(bytesOf(notes), all); err != nil {
		return missed, err
	}
	for i, b := range h.berths {
		if n := notes[i].Rows; n > uint64(b.shape.limit) {
			err = cmp.Or[error](err, &TooManyRows{Rows: int64(n), Limit: b.shape.limit})
		} else if Rows(n+n/(2*spare)) > b.room || b.seen && !b.Holds() {
			err = cmp.Or(err, h.fit(b, Rows(n), &missed, stays))
		}
		notes[i], b.seen = kernels.ShelveNote{Fits: uint64(b.room)}, false
	}
	h.compute.Upload(all, bytesOf(notes))
	// Steps may be replayed on any stream from now on: one that ran before the upload would
	// find the berth small, and what it noted would be lost.
	return missed, cmp.Or(err, h.compute.Sync())
}

// fit gives a berth that is too small, or nearly so, memory for n rows.
func (h *Shelf) fit(b *Berth, n Rows, missed *Missed, stays func(*Berth) bool) (err error) {
	lost := b.Holds() && n > b.room
	if lost {
		missed.Asked += b.shape.row * device.Bytes(n)
		missed.Had += b.shape.row * device.Bytes(b.room)
	}
	if b.Holds() || !stays(b) {
		err = h.grow(b, min(n+n/spare+1, b.shape.limit))
	}
	// Without memory a tensor stays where it is; only rows that were lost need it.
	if !lost && errors.As(err, new(*device.OutOfMemory)) {
		return nil
	}
	return err
}

// grow gives a berth memory for so many rows.
func (h *Shelf) grow(b *Berth, rows Rows) error {
	if b.mem.Size() == 0 { // what grows in front of a backdrop is zero, to the end of its line
		if err := h.dev.Backdrop(b.mem); err != nil {
			return err
		}
	}
	if err := h.dev.Grow(b.mem, align(b.shape.row*device.Bytes(rows))); err != nil {
		return err
	}
	b.room = rows
	return nil
}

// TooManyRows is a count of more rows than its tensor has: a wrong count, or a tensor
// that is too small.
type TooManyRows struct {
	Rows  int64 // that were counted
	Limit Rows
}

func (e *TooManyRows) Error() string {
	return fmt.Sprintf("stash: a count says %d rows of a tensor that has %d; give counts from zero to the tensor's rows", e.Rows, e.Limit)
}

func bytesOf(notes []kernels.ShelveNote) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(notes))), len(notes)*int(kernels.ShelveNoteBytes))
}

// Close frees everything once the work issued is done.
func (h *Shelf) Close() {
	for _, b := range h.berths {
		h.compute.Free(b.mem)
	}
	h.compute.Free(h.notes)
}
