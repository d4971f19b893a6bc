// This file owns the tests of accounts: what a call does to the counts that later calls
// and later steps read.

package offload

import (
	"errors"
	"reflect"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/internal/schedule"
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

// Stats are the sums of what Last returned behind each step.
func TestStatsAreSums(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Host: 4096})
	a, b := memory.GroupID{Name: "a"}, memory.GroupID{Name: "b"}
	plan := leaves(a, b)
	plan.Schedule = &schedule.Schedule{}
	for _, g := range []memory.GroupID{a, b} {
		plan.Schedule.Save(g)
	}
	for _, g := range []memory.GroupID{b, a} {
		plan.Schedule.Load(g)
	}
	var want Stats
	for range 3 {
		r.m.Begin(plan)
		x, y := r.alloc(4096), r.alloc(4096)
		r.compute.Fill(x.Range(), 1)
		r.compute.Fill(y.Range(), 1)
		view := Tensor{Storage: y, Element: 1, Shape: []int{1000}}
		r.save(b, view, view) // packed, and not in the planned order
		r.save(a, flat(x))    // the host has no room for it
		x.Free()
		y.Free()
		for _, g := range []memory.GroupID{a, b} {
			r.ok(r.m.Load(g))
			r.m.Release(g)
		}
		r.ok(r.m.End())
		last := r.m.Last()
		if last.Out != 1 || last.In != 1 || last.OutBytes != 1000 || last.InBytes != 1000 || last.Late != 1 || last.Duplicates != 1 || last.HostFull != 1 || !last.Departed ||
			last.Departures != 1 || last.Packed != 1 || *last.Names["a"] != (Name{1, 4096, 0}) || *last.Names["b"] != (Name{1, 1000, 1000}) {
			t.Fatalf("a step: %+v, %+v, %+v", last, last.Names["a"], last.Names["b"])
		}
		want = last
	}
	want.Steps, want.Out, want.In, want.OutBytes, want.InBytes, want.Late = 3, 3, 3, 3000, 3000, 3
	want.Duplicates, want.HostFull, want.Departures, want.Packed = 3, 3, 3, 3
	want.Names = map[string]*Name{"a": {3, 3 * 4096, 0}, "b": {3, 3000, 3000}}
	if got := r.m.Stats(); !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	r.close()
}

// The trace of a save has an event for each storage that the group is the first to save,
// and one for the group. Events between which compute got no work are a nanosecond apart.
// Those of a scope belong to its graph. Borrowed memory has no place in the pool.
func TestTraceOfSaves(t *testing.T) {
	var tr lines
	r := newRig(t, openCPU(t), Config{Trace: &tr})
	first, second := memory.GroupID{Name: "first"}, memory.GroupID{Name: "second"}
	r.m.Begin(leaves(first, second))
	x, y := r.alloc(1000), r.alloc(2000)
	r.compute.Fill(x.Range(), 1)
	r.compute.Fill(y.Range(), 1)
	at := []int64{int64(x.state.Device), int64(y.state.Device)}
	type event struct {
		kind           trace.Kind
		group          string
		storage        int
		offset, length int64
	}
	events := func() (all []event) {
		for i, e := range tr {
			all = append(all, event{e.Kind, e.Name, e.Storage, e.Offset, e.Bytes})
			if i > 0 && e.First == tr[i-1].First && e.Time != tr[i-1].Time+1 {
				t.Errorf("event %d of the same moment is at %d, behind %d", i, e.Time, tr[i-1].Time)
			}
		}
		tr = nil
		return all
	}
	if got, want := events(), []event{
		{trace.Begin, "", 0, residency.None, 0}, {trace.Alloc, "", 1, at[0], 1024}, {trace.Alloc, "", 2, at[1], 2048},
	}; !slices.Equal(got, want) {
		t.Errorf("before saves: got %+v, want %+v", got, want)
	}
	r.save(first, flat(x))
	r.save(second, flat(x), flat(y))
	var saves []event
	for _, e := range events() {
		if e.kind == trace.Save {
			saves = append(saves, e)
		}
	}
	if want := []event{
		{trace.Save, "first", 1, at[0], 1000}, {trace.Save, "first", 0, residency.None, 1000},
		{trace.Save, "second", 2, at[1], 2000}, {trace.Save, "second", 0, residency.None, 2000},
	}; !slices.Equal(saves, want) {
		t.Errorf("saves: got %+v, want %+v", saves, want)
	}
	// Nothing leaves in this scope: it is one graph.
	from, issued := r.dev.Counters(), uint64(0)
	scope, err := r.m.Capture(func() error {
		z := r.alloc(100)
		r.compute.Fill(z.Range(), 1)
		z.Free()
		return nil
	})
	r.ok(err)
	issued = r.compute.Issued()
	if to := r.dev.Counters(); to.Replays != from.Replays+1 {
		t.Errorf("a scope without copies took %d graphs", to.Replays-from.Replays)
	}
	if len(tr) != 3 || tr[0].Kind != trace.Alloc || tr[1].Kind != trace.Free || tr[2].Kind != trace.Capture {
		t.Errorf("a scope: %+v", tr)
	}
	for _, e := range tr {
		if e.First != issued-1 {
			t.Errorf("an event of the scope belongs to %d, want %d", e.First, issued-1)
		}
	}
	r.ok(r.m.End())
	r.ok(scope.Close())
	r.close()

	tr = nil
	l := newLent(t, Config{Trace: &tr})
	l.m.Begin(leaves(lentGroup(0)))
	s := l.borrow()
	l.save(lentGroup(0), flat(s))
	s.Free()
	l.ok(l.m.End())
	places := 0
	for _, e := range tr {
		if e.Kind == trace.Offload || e.Kind == trace.Save || e.Kind == trace.Alloc && e.Tier == memory.Device {
			if places++; e.Offset != residency.None {
				t.Errorf("borrowed memory has a place: %+v", e)
			}
		}
	}
	if places != 4 {
		t.Errorf("%d events of a borrowed storage", places)
	}
	l.close()
}

// The events of a scope belong to its graph, also if compute waits before the graph for
// what the scope reloads.
func TestTraceOfAScopeThatWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // the copy takes longer than what the host does meanwhile
		dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Links: cpu.Links{In: cpu.Link{Latency: time.Second}}})
		if err != nil {
			t.Fatal(err)
		}
		var tr lines
		r := newRig(t, dev, Config{Trace: &tr})
		g := memory.GroupID{Name: "away"}
		r.m.Begin(leaves(g))
		s := r.alloc(1000)
		r.compute.Fill(s.Range(), 1)
		r.save(g, flat(s))
		s.Free()
		tr = nil
		before := r.compute.Issued()
		scope, err := r.m.Capture(func() error {
			if err := r.m.Load(g); err != nil {
				return err
			}
			r.compute.Fill(s.Range(), 2)
			r.m.Release(g)
			return nil
		})
		r.ok(err)
		graph := r.compute.Issued() - 1
		if graph <= before {
			t.Fatal("compute did not wait before the graph: the test shows nothing")
		}
		seen := map[trace.Kind]bool{}
		for _, e := range tr {
			seen[e.Kind] = true
			if e.First != graph {
				t.Errorf("%v belongs to %d, want %d", e.Kind, e.First, graph)
			}
		}
		if !seen[trace.Load] || !seen[trace.Release] || !seen[trace.Capture] {
			t.Errorf("the events are %+v", tr)
		}
		r.ok(r.m.End())
		r.ok(scope.Close())
		r.close()
	})
}

// Limit lowers and raises what steps may take. Memory moves only if more is held than the
// limit, or if the limit is above what was reserved.
func TestLimit(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Device: 8192})
	step := func(want bool) {
		t.Helper()
		r.m.Begin(nil)
		s, err := r.m.Alloc(8192)
		if (err == nil) != want {
			t.Errorf("8192 bytes are placed: %v", err)
		}
		if err == nil && !s.Here() {
			t.Error("a new storage is not here")
		}
		if ended := r.m.End(); (ended == nil) != want {
			t.Errorf("the step ends with %v", ended)
		}
	}
	held := func(limit, most memory.Bytes) {
		t.Helper()
		if dev, _ := r.m.Limits(); dev != limit {
			t.Errorf("the limit is %v, want %v", dev, limit)
		}
		if dev, _ := r.m.Memory(); dev > most {
			t.Errorf("%v are held, want at most %v", dev, most)
		}
	}
	for _, x := range []struct {
		limit memory.Bytes
		moved bool
		want  memory.Bytes // the limit afterwards
	}{
		{0, false, 8192},
		{-1, false, 8192},
		{1, false, 1}, // nothing is held yet
		{8192, false, 8192},
	} {
		moved, err := r.m.Limit(x.limit)
		r.ok(err)
		if moved != x.moved {
			t.Errorf("limit %d: moved is %v", x.limit, moved)
		}
		held(x.want, 0)
	}
	step(true)
	for _, x := range []struct {
		limit memory.Bytes
		moved bool
		fits  bool
	}{
		{8192, false, true},  // all that is held
		{8191, true, false},  // one byte less
		{8192, true, true},   // more than was reserved
		{16384, true, true},  // and again
		{16384, false, true}, // that is reserved
		{12288, false, true}, // less than reserved, more than held
	} {
		moved, err := r.m.Limit(x.limit)
		r.ok(err)
		if moved != x.moved {
			t.Errorf("limit %v: moved is %v", x.limit, moved)
		}
		held(x.limit, x.limit)
		step(x.fits)
	}
	most := r.dev.Info().Capacity[memory.Device]
	if _, err := r.m.Limit(2 * most); err != nil {
		t.Error(err)
	}
	held(most, most)
	r.close()
	l := newLent(t, Config{})
	if moved, err := l.m.Limit(4096); moved || err != nil {
		t.Errorf("all memory is borrowed: %v, %v", moved, err)
	}
	l.close()
}

// refusing is a device that reserves nothing for a while.
type refusing struct {
	device.Device
	on bool
}

func (d *refusing) Reserve(kind memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	if d.on {
		return nil, &device.OutOfMemory{Device: "cpu:0", Kind: kind, Owner: owner, Asked: limit}
	}
	return d.Device.Reserve(kind, limit, owner)
}

// If a heap cannot be made anew, steps fail without a panic until another limit is set.
func TestLimitThatFails(t *testing.T) {
	d := &refusing{Device: openCPU(t)}
	r := newRig(t, d, Config{Device: 8192})
	r.m.Begin(nil)
	r.alloc(8192).Free()
	r.ok(r.m.End())
	d.on = true
	var oom *device.OutOfMemory
	for range 2 {
		if moved, err := r.m.Limit(4096); !moved || !errors.As(err, &oom) {
			t.Errorf("a limit that cannot be set: %v, %v", moved, err)
		}
		if dev, _ := r.m.Memory(); dev != 0 {
			t.Errorf("%v are held", dev)
		}
		r.m.Begin(nil)
		_, err := r.m.Alloc(512)
		if ended := r.m.End(); err == nil || ended == nil {
			t.Errorf("a step without memory: %v, %v", err, ended)
		}
	}
	d.on = false
	moved, err := r.m.Limit(4096)
	if r.ok(err); !moved {
		t.Error("memory did not move")
	}
	r.m.Begin(nil)
	r.alloc(4096).Free()
	r.ok(r.m.End())
	r.close()
}

// A heap that is made anew gives its memory back before Limit returns, also while compute
// is busy: others may be given that memory next.
func TestLimitGivesMemoryBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, openCPU(t), Config{Device: 8192})
		r.m.Begin(nil)
		r.alloc(8192).Free()
		r.ok(r.m.End())
		r.compute.Host(func() { time.Sleep(time.Second) })
		moved, err := r.m.Limit(4096)
		r.ok(err)
		if n := r.dev.Memory().Kind[memory.Device].Current; !moved || n != 0 {
			t.Errorf("moved is %v, and %v are in use", moved, n)
		}
		r.close()
	})
}

// NoteRows puts a call on the tape of a step, outside of captured scopes. Here follows a
// storage out and back.
func TestNotedRows(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	op := residency.Op{Kind: residency.OpTake, Bytes: 7}
	r.m.NoteRows(op) // outside of a step there is no tape
	r.m.Begin(leaves(someGroup))
	r.m.NoteRows(op)
	scope, err := r.m.Capture(func() error { r.m.NoteRows(op); return nil })
	r.ok(err)
	s := r.alloc(1000)
	r.compute.Fill(s.Range(), 1)
	r.m.NoteRows(op)
	r.save(someGroup, flat(s))
	here := []bool{s.Here()}
	s.Free()
	here = append(here, s.Here())
	r.ok(r.m.Load(someGroup))
	if here = append(here, s.Here()); !slices.Equal(here, []bool{true, false, true}) {
		t.Errorf("saved, freed and loaded, it is here: %v", here)
	}
	r.m.Release(someGroup)
	r.ok(r.m.End())
	if n := len(slices.DeleteFunc(r.m.Tape().Ops, func(o residency.Op) bool { return o.Kind != op.Kind || o.Bytes != op.Bytes })); n != 2 {
		t.Errorf("%d calls are noted, want 2", n)
	}
	r.ok(scope.Close())
	r.close()
}
