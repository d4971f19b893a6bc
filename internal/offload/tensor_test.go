// This file owns the tests of views: what is copied of them, and that they come back
// with the same elements.

package offload

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// elements are a view's elements in order, from the bytes of its storage.
func elements(t Tensor, storage []byte) (out []byte) {
	strides := t.Strides
	if strides == nil {
		strides = make([]int, len(t.Shape))
		n := 1
		for i := len(strides) - 1; i >= 0; i-- {
			strides[i] = n
			n *= t.Shape[i]
		}
	}
	var walk func(dim, at int)
	walk = func(dim, at int) {
		if dim == len(t.Shape) {
			from := int(t.Offset) + at*int(t.Element)
			out = append(out, storage[from:from+int(t.Element)]...)
			return
		}
		for i := range t.Shape[dim] {
			walk(dim+1, at+i*strides[dim])
		}
	}
	walk(0, 0)
	return out
}

// round saves views of a storage, loads them and compares. It tells what left.
func (r *rig) round(plan bool, size memory.Bytes, views ...Tensor) (Stats, error) {
	raw := make([]byte, size)
	for i := range raw {
		raw[i] = byte(i*7 + i>>8)
	}
	g := memory.GroupID{Name: "views"}
	p := leaves()
	if plan {
		p = leaves(g)
	}
	r.m.Begin(p)
	s := r.alloc(size)
	r.compute.Upload(s.Range(), raw)
	for i := range views {
		views[i].Storage = s
	}
	saved, err := r.m.Save(g, views...)
	if err != nil {
		return Stats{}, err
	}
	s.Free()
	if err := r.m.Load(g); err != nil {
		return Stats{}, err
	}
	for i, v := range saved {
		u := v.Tensor()
		whole := make([]byte, u.Storage.Size())
		if err := r.compute.Download(whole, u.Storage.Range()); err != nil {
			return Stats{}, err
		}
		packed := u.Storage != s
		switch {
		case !slices.Equal(u.Shape, views[i].Shape) || u.Element != views[i].Element:
			return Stats{}, fmt.Errorf("view %d came back with shape %v", i, u.Shape)
		case !packed && (!slices.Equal(u.Strides, views[i].Strides) || u.Offset != views[i].Offset):
			return Stats{}, fmt.Errorf("view %d came back with strides %v", i, u.Strides)
		case packed && (u.Strides != nil || u.Storage.Size() != views[i].Bytes()):
			return Stats{}, fmt.Errorf("view %d came back packed, with strides %v in %v", i, u.Strides, u.Storage.Size())
		case !bytes.Equal(elements(u, whole), elements(views[i], raw)):
			return Stats{}, fmt.Errorf("view %d came back with other elements", i)
		}
	}
	r.m.Release(g)
	err = r.m.End()
	return r.m.Last(), err
}

// SPEC S4.1: views of one storage are copied once and come back with their strides;
// of sparse ones only their elements are copied.
func TestViews(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		r := newRig(t, open(t), Config{Least: 16})
		defer r.close()
		whole := Tensor{Element: 2, Shape: []int{2048}}
		half := Tensor{Element: 2, Shape: []int{1024}, Offset: 2048}
		matrix := Tensor{Element: 2, Shape: []int{64, 32}, Strides: []int{1, 64}}             // a transpose of all
		columns := Tensor{Element: 2, Shape: []int{32, 8}, Strides: []int{64, 1}, Offset: 20} // 512 bytes
		boxes := Tensor{Element: 4, Shape: []int{4, 3, 5}, Strides: []int{200, 40, 2}}        // 240 bytes in 12 rectangles
		many := Tensor{Element: 1, Shape: []int{9, 9, 2, 2}, Strides: []int{400, 40, 9, 3}}   // in 162
		spread := Tensor{Element: 1, Shape: []int{10, 16}, Strides: []int{0, 1}}              // one row, seen ten times
		small := Tensor{Element: 1, Shape: []int{15}}
		stays := columns
		stays.Stay = true
		none := Tensor{Element: 4, Shape: []int{0, 7}}
		staying := func(i int) []Tensor {
			views := []Tensor{whole, matrix, half}
			views[i].Stay = true
			return views
		}
		for _, x := range []struct {
			name              string
			views             []Tensor
			moved             memory.Bytes
			packed, duplicate int
		}{
			{"a whole storage", []Tensor{whole}, 4096, 0, 0},
			{"half of it", []Tensor{half}, 4096, 0, 0},
			{"transposed", []Tensor{matrix}, 4096, 0, 0},
			{"two views", []Tensor{whole, matrix, half}, 4096, 0, 2},
			{"sparse", []Tensor{columns}, 512, 1, 0},
			{"sparse, in three dimensions", []Tensor{boxes}, 240, 1, 0},
			{"sparse, twice", []Tensor{columns, columns}, 512, 1, 1},
			{"two sparse ones", []Tensor{columns, boxes}, 752, 2, 0},
			{"a sparse one with all of it", []Tensor{columns, whole}, 4096, 0, 1},
			{"in too many pieces", []Tensor{many}, 4096, 0, 0},
			{"seen many times", []Tensor{spread}, 4096, 0, 0},
			{"too small to leave by itself", []Tensor{small}, 4096, 0, 0},
			{"to stay", []Tensor{stays}, 0, 0, 0},
			{"the first to stay", staying(0), 0, 0, 2},
			{"the second to stay", staying(1), 0, 0, 2},
			{"the last to stay", staying(2), 0, 0, 2},
			{"nothing", []Tensor{none}, 4096, 0, 0},
		} {
			for _, plan := range []bool{true, false} {
				st, err := r.round(plan, 4096, slices.Clone(x.views)...)
				want := x.moved
				if !plan {
					want = 0
				}
				if err != nil || st.OutBytes != want || st.InBytes != want || st.Packed != x.packed || st.Duplicates != x.duplicate {
					t.Errorf("%s, leaving %v: %+v, error %v", x.name, plan, st, err)
				}
			}
		}
	})
}

// Any view comes back with its elements, and never more is copied than its storage.
func TestAnyView(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	defer r.close()
	rapid.Check(t, func(t *rapid.T) {
		dims := rapid.IntRange(0, 4).Draw(t, "dims")
		v := Tensor{Element: memory.Bytes(rapid.SampledFrom([]int{1, 2, 4, 8}).Draw(t, "element"))}
		v.Offset = memory.Bytes(rapid.IntRange(0, 9).Draw(t, "offset")) * v.Element
		for i := range dims {
			v.Shape = append(v.Shape, rapid.IntRange(0, 6).Draw(t, fmt.Sprint("n", i)))
			v.Strides = append(v.Strides, rapid.IntRange(0, 30).Draw(t, fmt.Sprint("stride", i)))
		}
		if dims > 0 && rapid.Bool().Draw(t, "contiguous") {
			v.Strides = nil
		}
		size := v.Offset + v.extent() + memory.Bytes(rapid.IntRange(1, 2000).Draw(t, "more"))
		st, err := r.round(true, size, v)
		if err != nil {
			t.Fatal(err)
		}
		if st.OutBytes != size && (st.OutBytes != v.Bytes() || 2*st.OutBytes >= size) {
			t.Fatalf("%d bytes of %d were copied for a view of %d", st.OutBytes, size, v.Bytes())
		}
	})
}

// SPEC S4.1: parameters, memory of another kind and what was opted out pass through
// by identity, and are counted nowhere.
func TestPassThrough(t *testing.T) {
	onDevices(t, func(t *testing.T, open func(testing.TB) device.Device) {
		r := newRig(t, open(t), Config{})
		defer r.close()
		var bufs []*device.Buffer
		for _, k := range []memory.Kind{memory.Device, memory.Host} {
			b, err := r.dev.Alloc(k, 4096, "test")
			r.ok(err)
			bufs = append(bufs, b)
		}
		r.m.Begin(leaves(someGroup))
		told := 0
		x, err := r.m.Borrow(bufs[0].All(), func() { told++ })
		r.ok(err)
		y, err := r.m.Borrow(bufs[1].All(), func() { told++ })
		r.ok(err)
		a, b := flat(x), flat(y)
		a.Stay = true
		r.save(someGroup, a, b)
		x.Free()
		y.Free()
		r.ok(r.m.Load(someGroup))
		for i, s := range r.m.Saved(someGroup) {
			if got := s.Tensor().Range(); got != bufs[i].All() {
				t.Errorf("tensor %d is %v", i, got)
			}
		}
		if told != 0 {
			t.Error("the owner was told while a group needed the memory")
		}
		r.m.Release(someGroup)
		if told != 2 {
			t.Errorf("%d owners were told when nobody needed the memory", told)
		}
		r.ok(r.m.End())
		if d, h := r.m.Memory(); r.m.Last().Out+r.m.Last().In > 0 || d+h > 0 {
			t.Errorf("%+v, %v and %v held", r.m.Last(), d, h)
		}
		for _, b := range bufs {
			r.compute.Free(b)
		}
	})
}

// Views are described by as few rectangles as they have, and not at all if packing would
// take too many copies or repeat elements.
func TestRuns(t *testing.T) {
	view := func(element memory.Bytes, shape, strides []int) Tensor {
		return Tensor{Element: element, Shape: shape, Strides: strides}
	}
	for name, x := range map[string]struct {
		view   Tensor
		want   runs
		ok     bool
		extent memory.Bytes
	}{
		"contiguous":              {view(4, []int{2, 3}, nil), runs{24, 24, 1, nil}, true, 24},
		"contiguous by strides":   {view(4, []int{2, 3}, []int{3, 1}), runs{24, 24, 1, nil}, true, 24},
		"nothing":                 {view(4, []int{0, 3}, nil), runs{0, 0, 1, nil}, false, 0},
		"nothing, by strides":     {view(4, []int{0, 3}, []int{9, 2}), runs{0, 0, 1, nil}, false, 0},
		"one element":             {view(4, []int{1, 1}, []int{7, 9}), runs{4, 4, 1, nil}, true, 4},
		"columns":                 {view(2, []int{32, 8}, []int{64, 1}), runs{16, 128, 32, nil}, true, 2 * (31*64 + 7 + 1)},
		"apart":                   {view(4, []int{5}, []int{3}), runs{4, 12, 5, nil}, true, 4 * (4*3 + 1)},
		"boxes":                   {view(4, []int{4, 3, 5}, []int{200, 40, 2}), runs{4, 8, 5, []axis{{4, 800}, {3, 160}}}, true, 4 * (600 + 80 + 8 + 1)},
		"two axes that are one":   {view(1, []int{3, 4, 2}, []int{40, 10, 1}), runs{2, 10, 12, nil}, true, 80 + 30 + 1 + 1},
		"transposed":              {view(2, []int{2, 3}, []int{1, 10}), runs{2, 20, 3, []axis{{2, 2}}}, true, 2 * (1 + 20 + 1)},
		"as many as may be":       {view(1, []int{most, 2, 2}, []int{100, 9, 3}), runs{1, 3, 2, []axis{{most, 100}, {2, 9}}}, false, 63*100 + 9 + 3 + 1},
		"just as many":            {view(1, []int{most, 2}, []int{100, 9}), runs{1, 9, 2, []axis{{most, 100}}}, true, 63*100 + 9 + 1},
		"one too many":            {view(1, []int{most + 1, 2}, []int{100, 9}), runs{1, 9, 2, []axis{{most + 1, 100}}}, false, 64*100 + 9 + 1},
		"seen twice":              {view(1, []int{2, 16}, []int{0, 1}), runs{16, 0, 2, nil}, false, 16},
		"seen twice, from afar":   {view(2, []int{2, 4, 3}, []int{0, 10, 1}), runs{6, 20, 4, []axis{{2, 0}}}, false, 2 * (30 + 2 + 1)},
		"rows that touch exactly": {view(1, []int{4, 3}, []int{3, 1}), runs{12, 12, 1, nil}, true, 12},
	} {
		if got, ok := x.view.runs(); ok != x.ok || got.width != x.want.width || got.pitch != x.want.pitch || got.rows != x.want.rows || !slices.Equal(got.outer, x.want.outer) {
			t.Errorf("%s: got %+v, %v, want %+v, %v", name, got, ok, x.want, x.ok)
		}
		if got := x.view.extent(); got != x.extent {
			t.Errorf("%s: it reaches over %d bytes, want %d", name, got, x.extent)
		}
	}
}

// A view may end where its storage ends, and not a byte behind. A view of nothing is not
// packed, even if everything may leave.
func TestViewsAtTheEnd(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	defer r.close()
	strided := Tensor{Element: 4, Shape: []int{2, 3}, Strides: []int{10, 2}} // 60 bytes
	if _, err := r.round(true, 60, strided); err != nil {
		t.Error(err)
	}
	r.m.Begin(nil)
	for name, x := range map[string]struct {
		size memory.Bytes
		view Tensor
	}{
		"too long":              {59, strided},
		"without element size":  {59, Tensor{Shape: []int{2}}},
		"before the first byte": {59, Tensor{Element: 1, Offset: -1, Shape: []int{2}}},
	} {
		x.view.Storage = r.alloc(x.size)
		func() {
			defer func() {
				if got := fmt.Sprint(recover()); !strings.Contains(got, "does not lie") {
					t.Errorf("%s: got the panic %s", name, got)
				}
			}()
			_, _ = r.m.Save(someGroup, x.view)
		}()
	}
	r.ok(r.m.End())
	st, err := r.round(true, 4096, Tensor{Element: 4, Shape: []int{0, 7}})
	if err != nil || st.Packed != 0 || st.OutBytes != 4096 {
		t.Errorf("nothing is packed: %+v, %v", st, err)
	}
	r.m.Begin(nil)
	if s := r.alloc(0); s.Size() != 0 || !s.Here() {
		t.Errorf("an empty storage has %v", s.Size())
	}
	r.ok(r.m.End())
}
