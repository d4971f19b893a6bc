// This file owns the layout of a set: the worst-case buffers in which one group
// is computed, in one run of bytes.

package stash

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/schedule"
)

// Rows is a number of rows.
type Rows int64

// Tensor is one tensor of a group: up to MaxRows rows of Row bytes each. How
// many are live is known only on the device, in one of the set's row counts.
type Tensor struct {
	Name    string
	Row     device.Bytes
	MaxRows Rows
	Count   int // which row count applies
}

// Layout is where the row counts (uint64, from offset 0) and the tensors lie in
// a set. All sets of a group have the same layout, so that what was stashed from
// one can be restored into another.
type Layout struct {
	Tensors []Tensor
	Size    device.Bytes

	counts  int
	offsets []device.Bytes
}

// NewLayout lays tensors out one after the other, each aligned.
func NewLayout(tensors ...Tensor) (*Layout, error) {
	l := &Layout{Tensors: tensors}
	if len(tensors) == 0 || len(tensors) > kernels.StashMaxTensors {
		return nil, fmt.Errorf("stash: a group of %d tensors; it must have 1 to %d", len(tensors), kernels.StashMaxTensors)
	}
	for _, t := range tensors {
		if t.Row <= 0 || t.MaxRows <= 0 || t.Count < 0 || t.Count >= kernels.StashMaxTensors || device.Bytes(t.MaxRows) > (1<<40)/t.Row {
			return nil, fmt.Errorf("stash: tensor %q of %d rows of %d bytes under row count %d; rows and bytes must be positive and together at most 1 TiB",
				t.Name, t.MaxRows, int64(t.Row), t.Count)
		}
		l.counts = max(l.counts, t.Count+1)
	}
	at := align(device.Bytes(8 * l.counts))
	for _, t := range tensors {
		l.offsets = append(l.offsets, at)
		at += align(t.Row * device.Bytes(t.MaxRows))
	}
	l.Size = at
	return l, nil
}

func align(n device.Bytes) device.Bytes { return (n + device.Align - 1) &^ (device.Align - 1) }

// Counts are the row counts of a set.
func (l *Layout) Counts(set device.Range) device.Range { return set.Slice(0, device.Bytes(8*l.counts)) }

// Tensor is the memory of tensor i in a set.
func (l *Layout) Tensor(set device.Range, i int) device.Range {
	return set.Slice(l.offsets[i], l.Tensors[i].Row*device.Bytes(l.Tensors[i].MaxRows))
}

// Pages is the number of pages that the group takes with so many rows by count.
func (l *Layout) Pages(page device.Bytes, rows ...Rows) schedule.Pages {
	var n schedule.Pages
	for _, t := range l.Tensors {
		n += schedule.PagesOf(int64(page), int64(t.Row)*int64(min(rows[t.Count], t.MaxRows)))
	}
	return n
}

// maxPages is the most pages that the group can take.
func (l *Layout) maxPages(page device.Bytes) schedule.Pages {
	var n schedule.Pages
	for _, t := range l.Tensors {
		n += schedule.PagesOf(int64(page), int64(t.Row)*int64(t.MaxRows))
	}
	return n
}

// table is what the kernels read of the layout.
func (l *Layout) table() []kernels.StashTensor {
	ts := make([]kernels.StashTensor, len(l.Tensors))
	for i, t := range l.Tensors {
		ts[i] = kernels.StashTensor{
			Offset: uint64(l.offsets[i]), RowBytes: uint64(t.Row),
			MaxRows: uint64(t.MaxRows), RowsAt: uint64(8 * t.Count),
		}
	}
	return ts
}
