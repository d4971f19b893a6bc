// This file owns tensors, which are views of storages, and how sparse views are packed.

package offload

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// Tensor is a view of a storage.
type Tensor struct {
	Storage *Storage
	Offset  memory.Bytes // of the first element
	Element memory.Bytes // the size of one element
	Shape   []int
	Strides []int // in elements; nil means contiguous
	Stay    bool  // it must not be offloaded: it is a parameter, or the caller wants it so
}

// Bytes returns the size of the elements, one after the other.
func (t Tensor) Bytes() memory.Bytes {
	n := t.Element
	for _, d := range t.Shape {
		n *= memory.Bytes(d)
	}
	return n
}

// extent returns the number of bytes from the first element to past the last.
func (t Tensor) extent() memory.Bytes {
	if t.Strides == nil || t.Bytes() == 0 {
		return t.Bytes()
	}
	last := memory.Bytes(0)
	for i, d := range t.Shape {
		last += memory.Bytes(d-1) * memory.Bytes(t.Strides[i])
	}
	return (last + 1) * t.Element
}

// Range returns the bytes from the first element to past the last, where they are now. It
// panics if the storage is offloaded.
func (t Tensor) Range() device.Range { return t.Storage.Range().Slice(t.Offset, t.extent()) }

// check panics unless the view lies in its storage.
func (t Tensor) check() {
	bad := t.Element <= 0 || t.Offset < 0 || t.Strides != nil && len(t.Strides) != len(t.Shape) ||
		slices.ContainsFunc(t.Shape, func(n int) bool { return n < 0 }) || slices.ContainsFunc(t.Strides, func(n int) bool { return n < 0 })
	if bad || t.Offset+t.extent() > t.Storage.Size() {
		panic(fmt.Sprintf("offload: a tensor of shape %v, strides %v and %d bytes an element does not lie at %d of %v", t.Shape, t.Strides, t.Element, t.Offset, t.Storage.state))
	}
}

// same reports whether two views are equal.
func (t Tensor) same(u Tensor) bool {
	return t.Storage == u.Storage && t.Offset == u.Offset && t.Element == u.Element && slices.Equal(t.Shape, u.Shape) && slices.Equal(t.Strides, u.Strides)
}

// Saved is a tensor of a saved group.
type Saved struct {
	group  memory.GroupID
	tensor Tensor
	loaded bool
}

// Tensor returns the tensor that was saved, or a packed one of the same shape if that was
// sparse. It panics unless it is called between Load and Release of the group.
func (s *Saved) Tensor() Tensor {
	s.tensor.Storage.use()
	if !s.loaded {
		panic(fmt.Sprintf("offload: a tensor of %v is used before its Load or after its Release", s.group))
	}
	return s.tensor
}

// axis is one dimension of a view, in bytes.
type axis struct{ n, stride memory.Bytes }

// runs describes a view as rectangles of rows of width bytes, pitch bytes apart, with one
// rectangle for every index of the outer axes.
type runs struct {
	width, pitch memory.Bytes
	rows         int
	outer        []axis
}

// most is the number of copies that packing a view may take. A view in more pieces is
// offloaded with its whole storage.
const most = 64

// runs collapses a view's dimensions. It reports false if the view cannot be packed.
func (t Tensor) runs() (r runs, ok bool) {
	if t.Strides == nil || t.Bytes() == 0 {
		return runs{width: t.Bytes(), pitch: t.Bytes(), rows: 1}, t.Bytes() > 0
	}
	var axes []axis
	for i, n := range t.Shape {
		a := axis{memory.Bytes(n), memory.Bytes(t.Strides[i]) * t.Element}
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
	copies := memory.Bytes(1)
	for _, a := range r.outer {
		copies *= a.n
	}
	// If the pitch is below the width, elements overlap, and packing would make them more.
	ok = r.pitch >= r.width && copies <= most && !slices.ContainsFunc(r.outer, func(a axis) bool { return a.stride < t.Element })
	return r, ok
}

// pack issues the copies of a view's elements to dst, one after the other.
func (r runs) pack(s device.Stream, dst, src device.Range) {
	n := r.width * memory.Bytes(r.rows)
	index := make([]memory.Bytes, len(r.outer))
	for to := memory.Bytes(0); to < dst.Len; to += n {
		from := memory.Bytes(0)
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

// Save says that the forward pass of a group has been issued and that its tensors are
// needed again. The plan decides whether they are offloaded.
//
// If the views of a storage in the group are less than half of it, Save packs them on
// compute into storages of their own and saves these. That depends only on the tensors,
// never on the plan, so that a tape is valid under all plans.
func (m *Manager) Save(g memory.GroupID, ts ...Tensor) ([]*Saved, error) {
	m.must("save a group")
	saved, err := m.save(g, ts)
	if err == nil && m.scope != nil {
		m.scope.made(saveAgain(g, ts))
	}
	return saved, err
}

func (m *Manager) save(g memory.GroupID, ts []Tensor) (saved []*Saved, err error) {
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

// register saves a group in the machine.
func (m *Manager) register(g memory.GroupID, saved []*Saved, items []residency.Item) {
	var bytes memory.Bytes
	for _, it := range items {
		s := m.storages[it.ID]
		if s.saves++; s.saves == 1 {
			s.group = g
			bytes += s.state.Bytes
		}
	}
	n := m.name(g)
	n.Groups++
	n.Saved += bytes
	m.call(residency.Op{Kind: residency.OpSave, Group: g, Items: items})
	m.groups[g] = saved
	m.machine.Save(g, items...)
	m.traceSave(g, items, int64(bytes))
}

// gather packs the sparse views of a group. It returns a storage for each of them.
func (m *Manager) gather(g memory.GroupID, ts []Tensor) ([]*Storage, error) {
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

// sparse reports whether the views of a storage in a group should be packed: they are
// less than half of it, nobody else has saved it, and it may be offloaded at all.
func (m *Manager) sparse(s *Storage, ts []Tensor) bool {
	var bytes memory.Bytes
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
	return 2*bytes < s.Size() && bytes >= m.cfg.Least && s.saves == 0 && !s.fixed && m.cfg.ProvideMemory == nil
}
