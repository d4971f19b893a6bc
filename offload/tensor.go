// This file owns tensors: views of storages, what of them is worth moving, and how
// sparse ones are packed.

package offload

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// Tensor is a view of a storage.
type Tensor struct {
	Storage *Storage
	Offset  device.Bytes // of the first element
	Element device.Bytes // size of one
	Shape   []int
	Strides []int // in elements; nil is contiguous
	Stay    bool  // not to be moved: a parameter, or asked for
}

// Bytes is the size of the elements, one after the other.
func (t Tensor) Bytes() device.Bytes {
	n := t.Element
	for _, d := range t.Shape {
		n *= device.Bytes(d)
	}
	return n
}

// extent is the bytes from the first element to past the last.
func (t Tensor) extent() device.Bytes {
	if t.Strides == nil || t.Bytes() == 0 {
		return t.Bytes()
	}
	last := device.Bytes(0)
	for i, d := range t.Shape {
		last += device.Bytes(d-1) * device.Bytes(t.Strides[i])
	}
	return (last + 1) * t.Element
}

// Range is the bytes from the first element to past the last, where they are now.
func (t Tensor) Range() device.Range { return t.Storage.Range().Slice(t.Offset, t.extent()) }

// check panics unless the view lies in its storage.
func (t Tensor) check() {
	bad := t.Element <= 0 || t.Offset < 0 || t.Strides != nil && len(t.Strides) != len(t.Shape) ||
		slices.ContainsFunc(t.Shape, func(n int) bool { return n < 0 }) || slices.ContainsFunc(t.Strides, func(n int) bool { return n < 0 })
	if bad || t.Offset+t.extent() > t.Storage.Size() {
		panic(fmt.Sprintf("offload: a tensor of shape %v, strides %v and %d bytes an element does not lie at %d of %v", t.Shape, t.Strides, t.Element, t.Offset, t.Storage.state))
	}
}

// same tells whether two views are one.
func (t Tensor) same(u Tensor) bool {
	return t.Storage == u.Storage && t.Offset == u.Offset && t.Element == u.Element && slices.Equal(t.Shape, u.Shape) && slices.Equal(t.Strides, u.Strides)
}

// Saved is a tensor of a saved group.
type Saved struct {
	group  schedule.Group
	tensor Tensor
	loaded bool
}

// Tensor is the tensor, usable between Load and Release of its group. It is the one
// that was saved, or a packed one of the same shape if that was sparse.
func (s *Saved) Tensor() Tensor {
	s.tensor.Storage.use()
	if !s.loaded {
		panic(fmt.Sprintf("offload: a tensor of %v is used before its Load or after its Release", s.group))
	}
	return s.tensor
}

// axis is one dimension of a view, in bytes.
type axis struct{ n, stride device.Bytes }

// runs is a view as rectangles: each of rows of width bytes, pitch apart; there is
// one for every index of the outer axes.
type runs struct {
	width, pitch device.Bytes
	rows         int
	outer        []axis
}

// most is the copies that packing a view may take; a view in more pieces moves with
// its storage.
const most = 64

// runs collapses a view's dimensions, or tells that it cannot be packed.
func (t Tensor) runs() (r runs, ok bool) {
	if t.Strides == nil || t.Bytes() == 0 {
		return runs{width: t.Bytes(), pitch: t.Bytes(), rows: 1}, t.Bytes() > 0
	}
	var axes []axis
	for i, n := range t.Shape {
		a := axis{device.Bytes(n), device.Bytes(t.Strides[i]) * t.Element}
		if n == 1 {
			continue
		}
		if k := len(axes) - 1; k >= 0 && axes[k].stride == a.n*a.stride {
			axes[k] = axis{axes[k].n * a.n, a.stride}
			continue
		}
		axes = append(axes, a)
	}
	r = runs{width: t.Element, rows: 1}
	if k := len(axes) - 1; k >= 0 && axes[k].stride == t.Element {
		r.width, axes = axes[k].n*t.Element, axes[:k]
	}
	r.pitch = r.width
	if k := len(axes) - 1; k >= 0 {
		r.rows, r.pitch, r.outer = int(axes[k].n), axes[k].stride, axes[:k]
	}
	copies := device.Bytes(1)
	for _, a := range r.outer {
		copies *= a.n
	}
	// A pitch below the width is elements that overlap: packed they would be more.
	ok = r.pitch >= r.width && copies <= most && !slices.ContainsFunc(r.outer, func(a axis) bool { return a.stride < t.Element })
	return r, ok
}

// pack issues the copies of a view's elements to dst, one after the other.
func (r runs) pack(s device.Stream, dst, src device.Range) {
	n := r.width * device.Bytes(r.rows)
	index := make([]device.Bytes, len(r.outer))
	for to := device.Bytes(0); to < dst.Len; to += n {
		from := device.Bytes(0)
		for i, a := range r.outer {
			from += index[i] * a.stride
		}
		s.Copy2D(device.Rect{Range: device.Range{Buf: dst.Buf, Off: dst.Off + to, Len: r.width}, Pitch: r.width, Rows: r.rows},
			device.Rect{Range: device.Range{Buf: src.Buf, Off: src.Off + from, Len: r.width}, Pitch: r.pitch, Rows: r.rows})
		for i := len(index) - 1; i >= 0; i-- {
			if index[i]++; index[i] < r.outer[i].n {
				break
			}
			index[i] = 0
		}
	}
}

// Save says that the forward pass of a group has been issued, and that the tensors
// are needed again. Whether they leave, the plan says.
//
// A view that is less than half of its storage, with all others of the group, is
// packed into a storage of its own on compute, and that is saved in its place. This
// depends on the tensors only, never on the plan, so that a tape holds under all
// plans.
func (m *Manager) Save(g schedule.Group, ts ...Tensor) ([]*Saved, error) {
	m.must("save a group")
	saved, err := m.save(g, ts)
	if err == nil && m.scope != nil {
		m.scope.made(saveAgain(g, ts))
	}
	return saved, err
}

func (m *Manager) save(g schedule.Group, ts []Tensor) (saved []*Saved, err error) {
	defer m.guard(&err)
	m.poll()
	for _, t := range ts {
		t.Storage.use()
		t.check()
	}
	packed, err := m.gather(g, ts)
	if err != nil {
		return nil, err
	}
	var items []residency.Item
	place := map[*Storage]int{}
	for i, t := range ts {
		if p := packed[i]; p != nil {
			t = Tensor{Storage: p, Element: t.Element, Shape: t.Shape}
		}
		saved = append(saved, &Saved{group: g, tensor: t})
		k, twice := place[t.Storage]
		if twice {
			m.last.Duplicates++
		} else {
			k = len(items)
			place[t.Storage] = k
			items = append(items, residency.Item{ID: t.Storage.state.ID})
		}
		items[k].Stay = items[k].Stay || t.Stay || t.Storage.fixed
	}
	m.register(g, saved, items)
	for i, p := range packed {
		if p != nil && slices.Index(packed, p) == i {
			m.give(p)
		}
	}
	m.settle()
	return saved, nil
}

// register tells the machine.
func (m *Manager) register(g schedule.Group, saved []*Saved, items []residency.Item) {
	var bytes int64
	for _, it := range items {
		s := m.storages[it.ID]
		if s.saves++; s.saves == 1 {
			s.group = g
			bytes += s.state.Bytes
		}
	}
	n := m.name(g)
	n.Groups++
	n.Saved += device.Bytes(bytes)
	m.call(residency.Op{Kind: residency.OpSave, Group: g, Items: items})
	m.groups[g] = saved
	m.machine.Save(g, items...)
	m.traceSave(g, items, bytes)
}

// gather packs the sparse views. The result has a storage for each of them.
func (m *Manager) gather(g schedule.Group, ts []Tensor) ([]*Storage, error) {
	packed := make([]*Storage, len(ts))
	for i, t := range ts {
		if j := slices.IndexFunc(ts[:i], t.same); j >= 0 {
			packed[i] = packed[j]
			continue
		}
		r, ok := t.runs()
		if !ok || !m.sparse(t.Storage, ts) {
			continue
		}
		p, err := m.take(t.Bytes())
		if err != nil {
			return nil, m.fail(g, "pack a tensor of "+g.String(), err)
		}
		if m.scope == nil || !m.scope.replays {
			r.pack(m.lane[residency.Compute].Stream, p.here(), t.Range())
		}
		packed[i] = p
		m.last.Packed++
	}
	return packed, nil
}

// sparse tells whether the views of a storage in a group are worth packing: they are
// less than half of it, nobody else has saved it, and it may leave at all.
func (m *Manager) sparse(s *Storage, ts []Tensor) bool {
	var bytes device.Bytes
	for i, t := range ts {
		if t.Storage != s {
			continue
		}
		if _, ok := t.runs(); t.Stay || !ok {
			return false
		}
		if !slices.ContainsFunc(ts[:i], t.same) {
			bytes += t.Bytes()
		}
	}
	return 2*bytes < s.Size() && bytes >= m.cfg.Least && s.saves == 0 && !s.fixed && m.cfg.Lend == nil
}
