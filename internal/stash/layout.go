// This file owns the layout of a set: the offsets of one group's worst-case buffers in
// one range of memory.

package stash

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
)

// Rows is a number of rows.
type Rows int64

// Tensor describes one tensor of a group: up to MaxRows rows of Row bytes each. Only the
// device knows how many are live, in one of the set's row counts.
type Tensor struct {
	Name    string
	Row     memory.Bytes
	MaxRows Rows
	Count   int // the index of its row count
}

// Layout holds the offsets of the row counts (uint64, from offset 0) and the tensors in a
// set. All sets of a group have the same layout, so that rows from one set can be
// restored into another.
type Layout struct {
	Tensors []Tensor
	Size    memory.Bytes

	counts  int
	offsets []memory.Bytes
}

// NewLayout returns a layout with aligned tensors in the given order. It returns an error
// if a size is out of range.
func NewLayout(tensors ...Tensor) (*Layout, error) {
	l := &Layout{Tensors: tensors}
	if len(tensors) == 0 || len(tensors) > kernels.StashMaxTensors {
		return nil, fmt.Errorf("stash: expected 1 to %d tensors in a group, got %d", kernels.StashMaxTensors, len(tensors))
	}
	for _, t := range tensors {
		if t.Row <= 0 || t.MaxRows <= 0 || t.Count < 0 || t.Count >= kernels.StashMaxTensors || memory.Bytes(t.MaxRows) > (1<<40)/t.Row {
			return nil, fmt.Errorf("stash: tensor %q has %d rows of %d bytes and row count %d; give positive numbers of rows and bytes, at most 1 TiB in all",
				t.Name, t.MaxRows, int64(t.Row), t.Count)
		}
		l.counts = max(l.counts, t.Count+1)
	}
	at := align(memory.Bytes(8 * l.counts))
	for _, t := range tensors {
		l.offsets = append(l.offsets, at)
		at += align(t.Row * memory.Bytes(t.MaxRows))
	}
	l.Size = at
	return l, nil
}

func align(n memory.Bytes) memory.Bytes { return (n + device.Align - 1) &^ (device.Align - 1) }

// Counts returns the memory of a set's row counts.
func (l *Layout) Counts(set device.Range) device.Range { return set.Slice(0, memory.Bytes(8*l.counts)) }

// Tensor returns the memory of tensor i in a set.
func (l *Layout) Tensor(set device.Range, i int) device.Range {
	return set.Slice(l.offsets[i], l.Tensors[i].Row*memory.Bytes(l.Tensors[i].MaxRows))
}

// Pages returns the number of pages that the group takes. rows holds the value of each row
// count.
func (l *Layout) Pages(page memory.Bytes, rows ...Rows) schedule.Pages {
	var n schedule.Pages
	for _, t := range l.Tensors {
		n += schedule.PagesOf(page, t.Row*memory.Bytes(min(rows[t.Count], t.MaxRows)))
	}
	return n
}

// maxPages returns the most pages that the group can take.
func (l *Layout) maxPages(page memory.Bytes) schedule.Pages {
	var n schedule.Pages
	for _, t := range l.Tensors {
		n += schedule.PagesOf(page, t.Row*memory.Bytes(t.MaxRows))
	}
	return n
}

// table returns the layout as the kernels read it.
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
