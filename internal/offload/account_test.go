// This file owns the tests of accounts: what a call does to the counts that later calls
// and later steps read.

package offload

import (
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// lent is a manager of borrowed memory on a device that says when copies are over.
type lent struct {
	*rig
	over bool // what the host sees of copies
	left int  // storages whose memory was returned
	bufs []*device.Buffer
}

func newLent(t *testing.T, c Config) *lent {
	t.Helper()
	x := &lent{}
	dev := &told{Device: openCPU(t), over: func() bool { return x.over }}
	c.ProvideMemory = func(*Storage) (device.Range, error) { return x.block(), nil }
	x.rig = newRig(t, dev, c)
	return x
}

func (x *lent) block() device.Range {
	b, err := x.dev.Alloc(memory.Device, lentSize, "block")
	x.ok(err)
	x.bufs = append(x.bufs, b)
	return b.All()
}

func (x *lent) borrow() *Storage {
	x.t.Helper()
	r := x.block()
	x.compute.Fill(r, 1)
	s, err := x.m.Borrow(r, func() { x.left++ })
	x.ok(err)
	return s
}

func (x *lent) close() {
	x.t.Helper()
	x.ok(x.m.Close())
	for _, b := range x.bufs {
		x.compute.Free(b)
	}
	x.ok(errors.Join(x.compute.Close(), x.dev.Close()))
}

// Borrow, Save and Load return borrowed memory whose copy out the host sees to be over,
// with no wait on compute. Until then it stays.
func TestCallsReturnWhatIsOver(t *testing.T) {
	for name, call := range map[string]func(x *lent, kept *Storage){
		"borrow": func(x *lent, _ *Storage) { x.borrow() },
		"save":   func(x *lent, kept *Storage) { x.save(lentGroup(2), flat(kept)) },
		"load":   func(x *lent, _ *Storage) { x.ok(x.m.Load(lentGroup(1))) },
	} {
		t.Run(name, func(t *testing.T) {
			x := newLent(t, Config{})
			x.m.Begin(leaves(lentGroup(0)))
			kept := x.borrow()
			x.save(lentGroup(1), flat(kept))
			s := x.borrow()
			x.save(lentGroup(0), flat(s))
			s.Free()
			if n, _ := x.m.machine.Flight(); n != 1 || x.left != 0 {
				t.Fatalf("%d copies are under way and %d blocks returned", n, x.left)
			}
			x.over = true
			call(x, kept)
			if n, _ := x.m.machine.Flight(); n != 0 || x.left != 1 {
				t.Errorf("%d copies are under way and %d blocks returned", n, x.left)
			}
			x.ok(x.m.End())
			x.close()
		})
	}
}

// Busy follows the groups that hold a storage: while two do, one may still be evicted, and
// after the release of one of them nothing reads the bytes any more.
func TestBusyUntilReleased(t *testing.T) {
	x := newLent(t, Config{})
	x.m.Begin(nil)
	s := x.borrow()
	for i, want := range []bool{false, true, true} {
		x.save(lentGroup(i), flat(s))
		if s.Busy() != want {
			t.Errorf("saved by %d groups: busy is %v", i+1, s.Busy())
		}
	}
	s.Free()
	for i, want := range []bool{true, false, false} {
		x.ok(x.m.Load(lentGroup(i)))
		x.m.Release(lentGroup(i))
		if s.Busy() != want || s.Over() != (i == 2) {
			t.Errorf("released by %d groups: busy is %v, over is %v", i+1, s.Busy(), s.Over())
		}
	}
	x.ok(x.m.End())
	x.close()
}

// Sparse views are packed where that saves memory: not if another group has saved the
// storage and holds it still, not if it lies in host memory, and not if memory is the
// caller's.
func TestWhatIsPacked(t *testing.T) {
	const size = 4096
	view := func(s *Storage, n int) Tensor { return Tensor{Storage: s, Element: 1, Shape: []int{n}} }
	other := memory.GroupID{Name: "other"}
	packed := func(r *rig, s *Storage, n int) int {
		before := r.m.last.Packed
		r.save(someGroup, view(s, n))
		return r.m.last.Packed - before
	}
	for name, x := range map[string]struct {
		n, want int
		before  func(r *rig, s *Storage)
	}{
		"as little as may leave": {16, 1, nil},
		"less than may leave":    {15, 0, nil},
		"just less than half":    {size/2 - 1, 1, nil},
		"half":                   {size / 2, 0, nil},
		"another group holds it": {100, 0, func(r *rig, s *Storage) { r.save(other, flat(s)) }},
		"another group held it":  {100, 1, func(r *rig, s *Storage) { r.save(other, flat(s)); r.ok(r.m.Load(other)); r.m.Release(other) }},
		"a group of the same name held it": {100, 1, func(r *rig, s *Storage) {
			r.save(someGroup, flat(s))
			r.ok(r.m.Load(someGroup))
			r.m.Release(someGroup)
		}},
	} {
		r := newRig(t, openCPU(t), Config{Least: 16})
		r.m.Begin(nil)
		s := r.alloc(size)
		r.compute.Fill(s.Range(), 1)
		if x.before != nil {
			x.before(r, s)
		}
		if got := packed(r, s, x.n); got != x.want {
			t.Errorf("%s: %d views are packed, want %d", name, got, x.want)
		}
		r.ok(r.m.End())
		r.close()
	}
	for name, kind := range map[string]memory.Kind{"borrowed": memory.Device, "in host memory": memory.Host} {
		r := newRig(t, openCPU(t), Config{Least: 16})
		b, err := r.dev.Alloc(kind, size, "test")
		r.ok(err)
		r.m.Begin(nil)
		s, err := r.m.Borrow(b.All(), nil)
		r.ok(err)
		if got := packed(r, s, 100) == 1; got != (kind == memory.Device) {
			t.Errorf("%s: packed is %v", name, got)
		}
		r.ok(r.m.End())
		r.compute.Free(b)
		r.close()
	}
	x := newLent(t, Config{Least: 16})
	x.m.Begin(nil)
	if packed(x.rig, x.borrow(), 100) != 0 {
		t.Error("a view of the caller's memory is packed")
	}
	x.ok(x.m.End())
	x.close()
}

// A step's trace and figures are its own: a step behind a larger one tells its own
// evictions and its own peak.
func TestStepsCountAnew(t *testing.T) {
	var tr lines
	r := newRig(t, openCPU(t), Config{Trace: &tr})
	g := func(i int) memory.GroupID { return memory.GroupID{Name: "mlp", Layer: i} }
	var ends []trace.Event
	for _, groups := range []int{6, 2, 4} {
		tr = nil
		r.m.Begin(&residency.Plan{Device: 4096}) // room for one group
		for i := range groups {
			s := r.alloc(4096)
			r.compute.Fill(s.Range(), byte(i))
			r.save(g(i), flat(s))
			s.Free()
		}
		for i := groups - 1; i >= 0; i-- {
			r.ok(r.m.Load(g(i)))
			r.m.Release(g(i))
		}
		r.ok(r.m.End())
		evicted := 0
		for _, e := range tr {
			switch e.Kind {
			case trace.Evict:
				evicted++
			case trace.End:
				ends = append(ends, e)
			case trace.Begin:
				if e.InUse != [2]int64{} {
					t.Errorf("%d groups: a step begins with %v in use", groups, e.InUse)
				}
			}
		}
		last, end := r.m.Last(), ends[len(ends)-1]
		if evicted != groups-1 || last.Evicted != groups-1 || last.Names["mlp"].Groups != groups || last.Names["mlp"].Saved != memory.Bytes(4096*groups) {
			t.Errorf("%d groups: %d evictions are traced, %+v", groups, evicted, last)
		}
		if end.Bytes != int64(last.Device) || end.Offset != int64(last.Host) || last.Host != memory.Bytes(4096*(groups-1)) {
			t.Errorf("%d groups: the trace ends with %d and %d bytes, the figures are %v and %v", groups, end.Bytes, end.Offset, last.Device, last.Host)
		}
	}
	if all := r.m.Stats(); all.Steps != 3 || all.Evicted != 5+1+3 || all.Names["mlp"].Groups != 12 {
		t.Errorf("%+v", all)
	}
	r.close()
}
