// This file owns the shelf: the live rows of tensors that somebody else allocates, one
// by one, in a store.

package stash

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/schedule"
)

// Shelf moves rows between the caller's tensors and a store, on two streams of its own.
// One goroutine drives it. In a step the host waits for nothing; a step may lie in one
// capture of compute if an earlier one put tensors of the same shapes.
type Shelf struct {
	dev     device.Device
	store   *Store
	lanes   *order.Set
	compute *order.Lane
	out, in *order.Lane
	own     []device.Stream
	counts  *device.Buffer // a line of row counts for every record
	free    map[rowShape][]*Item
	made    int
	put     []*Item // in this step
	marks   []*order.Mark
}

type rowShape struct {
	row   device.Bytes
	limit Rows
}

// Item is a tensor on the shelf:
//
//  1. put: its rows are on the way to pages. Away says that its memory is needed no more.
//  2. got: they are on the way back, to other memory.
//  3. used: they are there. It is over with the step.
type Item struct {
	shape     rowShape
	record    *Record
	count     device.Range
	put, back *order.Mark
	got       bool
}

// maxItems bounds the tensors that a shelf knows, by the memory of their counts: 16 MiB.
const maxItems = 1 << 16

// NewShelf makes a shelf with a store of its own for a loop that works on compute.
func NewShelf(dev device.Device, compute device.Stream, cfg Config) (*Shelf, error) {
	h := &Shelf{dev: dev, lanes: order.NewSet(dev), free: map[rowShape][]*Item{}}
	h.compute = h.lanes.Lane(compute)
	err := h.make(cfg)
	if err != nil {
		return nil, errors.Join(err, h.Close())
	}
	return h, nil
}

func (h *Shelf) make(cfg Config) (err error) {
	for _, name := range []string{"stash", "restore"} {
		s, err := h.dev.NewStream(name)
		if err != nil {
			return err
		}
		h.own = append(h.own, s)
	}
	h.out, h.in = h.lanes.Lane(h.own[0]), h.lanes.Lane(h.own[1])
	if h.counts, err = h.dev.Reserve(device.Accel, maxItems*device.Align, "row counts"); err != nil {
		return err
	}
	h.store, err = NewStore(h.dev, h.compute.Stream, cfg)
	return err
}

// Store is the shelf's store.
func (h *Shelf) Store() *Store { return h.store }

// Begin begins a step: every page is free.
func (h *Shelf) Begin() { h.store.Reset(h.compute.Stream, false) }

// Put stashes the first rows of a tensor, as many as the int64 in rows says, at most
// limit. Work that compute was given before has written both.
func (h *Shelf) Put(mem, rows device.Range, row device.Bytes, limit Rows) (*Item, error) {
	if mem.Len != row*device.Bytes(limit) || rows.Len != 8 {
		panic(fmt.Sprintf("stash: a tensor of %v has %d rows of %v, and %v count them", mem.Len, limit, row, rows.Len))
	}
	put, back, err := h.pair()
	if err != nil {
		return nil, err
	}
	x, err := h.item(rowShape{row, limit})
	if err != nil {
		return nil, err
	}
	x.put, x.back = put, back
	// The count is read in compute's order: it may be overwritten after this.
	st, r := h.store, x.record
	h.compute.Stream.Launch(kernels.AimLaunch(r.mem, x.count, mem, &rows))
	h.compute.Record(x.put)
	h.out.After(x.put)
	h.out.Flush()
	h.out.Stream.Launch(kernels.StashFarLaunch(st.memory(), r.mem, r.need, x.count, mem, st.seq, st.shape(r)))
	st.seq++
	st.assume(r)
	h.out.Record(x.put)
	h.put = append(h.put, x)
	return x, nil
}

// pair makes the marks of an item.
func (h *Shelf) pair() (put, back *order.Mark, err error) {
	for _, k := range []**order.Mark{&put, &back} {
		if *k, err = h.lanes.Mark(); err != nil {
			return nil, nil, err
		}
		h.marks = append(h.marks, *k)
	}
	return put, back, nil
}

// item is one of a shape that no other tensor of this step has.
func (h *Shelf) item(s rowShape) (*Item, error) {
	if list := h.free[s]; len(list) > 0 {
		x := list[len(list)-1]
		h.free[s] = list[:len(list)-1]
		x.got = false
		return x, nil
	}
	t := Tensor{Name: "rows", Row: s.row, MaxRows: s.limit}
	if _, err := NewLayout(t); err != nil {
		return nil, err
	}
	if h.compute.Stream.Capturing() {
		return nil, fmt.Errorf("stash: a tensor of %d rows of %v is stashed for the first time in a captured step; run the same step before the capture", s.limit, s.row)
	}
	if h.made == maxItems {
		return nil, fmt.Errorf("stash: more than %d tensors of different shapes; use few sizes of buffers", maxItems)
	}
	at := device.Bytes(h.made) * device.Align
	if err := h.dev.Grow(h.counts, at+device.Align); err != nil {
		return nil, err
	}
	// The counts lead a set of nothing else: the tensor is where it is aimed at.
	l := &Layout{Tensors: []Tensor{t}, Size: device.Align, counts: 1, offsets: []device.Bytes{0}}
	r, err := h.store.AddRecord(h.compute.Stream, l, l, schedule.Group{Name: t.Name, Layer: h.made})
	if err != nil {
		return nil, err
	}
	x := &Item{shape: s, record: r, count: h.counts.Slice(at, device.Align)}
	h.made++
	return x, nil
}

// Away makes compute come after the stash of an item: its memory may be freed in
// compute's order.
func (h *Shelf) Away(x *Item) {
	h.compute.After(x.put)
	h.compute.Flush()
}

// Get brings an item's rows back to memory of the same size, which compute may have
// used until now. What lies behind the rows is not written.
func (h *Shelf) Get(x *Item, mem device.Range) {
	if x.got {
		panic("stash: an item is got twice in a step")
	}
	x.got = true
	h.compute.Record(x.back)
	h.in.After(x.back)
	h.in.After(x.put)
	h.in.Flush()
	st, r := h.store, x.record
	h.in.Stream.Launch(kernels.AimLaunch(r.mem, x.count, mem, nil))
	h.in.Stream.Launch(kernels.RestoreFarLaunch(st.memory(), r.mem, x.count, mem, st.seq, st.shape(r)))
	h.in.Record(x.back)
}

// Use makes compute come after Get.
func (h *Shelf) Use(x *Item) {
	h.compute.After(x.back)
	h.compute.Flush()
}

// End ends a step: compute comes after everything.
func (h *Shelf) End() {
	for _, x := range h.put {
		h.compute.After(x.put)
		if x.got {
			h.compute.After(x.back)
		}
		h.free[x.shape] = append(h.free[x.shape], x)
	}
	h.compute.Flush()
	for _, k := range h.marks {
		h.lanes.Drop(k)
	}
	h.put, h.marks = h.put[:0], h.marks[:0]
}

// Need waits for the step that was issued or replayed last, and tells how many pages
// its tensors asked for and whether they got them.
func (h *Shelf) Need() (pages schedule.Pages, ok bool, err error) {
	r, err := h.store.Report(h.compute.Stream)
	for _, n := range r.Need {
		pages += n
	}
	if err == nil && r.OverBudget > 0 {
		err = &TooManyRows{Rows: int64(r.OverRows), Limit: Rows(r.OverLimit)}
	}
	return pages, r.Overflows == 0, err
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

// Close frees everything once the work issued is done.
func (h *Shelf) Close() (first error) {
	for _, s := range h.own {
		_ = s.Sync() // what went wrong comes back from Close
	}
	if h.counts != nil {
		h.compute.Stream.Free(h.counts)
	}
	if h.store != nil {
		h.store.Close(h.compute.Stream)
	}
	for _, s := range h.own {
		first = cmp.Or(first, s.Close())
	}
	return cmp.Or(first, h.lanes.Close())
}
