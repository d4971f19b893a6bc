// This file owns settings, limits and sentences: what a manager refuses, what it makes of a
// limit, what it says where memory runs out, and who may call it when.

package offload

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Every setting may be zero and not negative.
func TestNegativeSettings(t *testing.T) {
	dev := openCPU(t)
	compute, err := dev.NewStream("compute")
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range []Config{{Device: -1}, {Host: -1}, {Window: -1}, {Cap: -1}, {Least: -1}} {
		if m, err := New(dev, compute, c); m != nil || err == nil || !strings.Contains(err.Error(), "must not be negative") {
			t.Errorf("setting %d: %v", i, err)
		}
	}
	if err := errors.Join(compute.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// poor is a device that makes a number of streams and gives a number of bytes.
type poor struct {
	device.Device
	streams int
	most    memory.Bytes
	err     error
}

func (d *poor) NewStream(name string) (device.Stream, error) {
	if d.streams--; d.streams < 0 {
		return nil, d.err
	}
	return d.Device.NewStream(name)
}

func (d *poor) Grow(b *device.Buffer, n memory.Bytes) error {
	if b.Kind() == memory.Device && d.most > 0 && n > d.most {
		return d.err
	}
	return d.Device.Grow(b, n)
}

func TestStreamsMayBeShort(t *testing.T) {
	for n := 1; n < 3; n++ {
		d := &poor{Device: openCPU(t), streams: n, err: errors.New("no streams")}
		compute, err := d.NewStream("compute")
		if err != nil {
			t.Fatal(err)
		}
		if m, err := New(d, compute, Config{}); m != nil || !errors.Is(err, d.err) {
			t.Errorf("%d streams: %v", n, err)
		}
		if err := errors.Join(compute.Close(), d.Device.Close()); err != nil {
			t.Error(err)
		}
	}
}

// A limit is at most what the device has, and what is prepared at most the limit.
func TestLimitsAndPreparing(t *testing.T) {
	const has = 64 * memory.KiB
	dev, err := cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{has, 2 * has}})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range []struct{ dev, host, wantDev, wantHost memory.Bytes }{
		{0, 0, has, 2 * has}, {has, 2 * has, has, 2 * has}, {has + 1, 3 * has, has, 2 * has}, {has - 1, 5, has - 1, 5},
	} {
		compute, err := dev.NewStream("compute")
		if err != nil {
			t.Fatal(err)
		}
		m, err := New(dev, compute, Config{Device: x.dev, Host: x.host})
		if err != nil {
			t.Fatal(err)
		}
		if d, h := m.Limits(); d != x.wantDev || h != x.wantHost {
			t.Errorf("limits of %d and %d are %d and %d", x.dev, x.host, d, h)
		}
		if err := m.Prepare(3*has, 4*has); err != nil {
			t.Error(err)
		}
		if d, h := m.Memory(); d != x.wantDev || h != x.wantHost {
			t.Errorf("%d and %d are prepared under limits of %d and %d", d, h, x.wantDev, x.wantHost)
		}
		if err := errors.Join(m.Close(), compute.Close()); err != nil {
			t.Error(err)
		}
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}

	x := newLent(t, Config{})
	x.ok(x.m.Prepare(100, 256))
	if d, h := x.m.Memory(); d != 0 || h != 256 {
		t.Errorf("%d and %d are prepared where device memory is the caller's", d, h)
	}
	x.close()

	d := &poor{Device: openCPU(t), streams: 3, most: 100, err: errors.New("nothing left")}
	r := newRig(t, d, Config{Rank: 3})
	if err := r.m.Prepare(101, 0); fmt.Sprint(err) != "offload: rank 3 cannot prepare 101 B of device memory: nothing left" || !errors.Is(err, d.err) {
		t.Error(err)
	}
	r.close()
}

// Where the device has no more, what it holds becomes the limit, with what it says is free
// and too little; a scope that was captured before it must be captured again, and an error
// tells of both.
func TestDeviceGivesNoMore(t *testing.T) {
	for _, x := range []struct {
		err   error
		limit memory.Bytes
	}{
		{errors.New("broken"), 1024},
		{&device.OutOfMemory{Kind: memory.Device, Free: 256}, 1280},
		{&device.OutOfMemory{Kind: memory.Device, Free: memory.GiB}, 2047},
	} {
		d := &poor{Device: openCPU(t), streams: 3, most: 1024, err: x.err}
		r := newRig(t, d, Config{Rank: 5})
		r.m.Begin(nil)
		s := r.alloc(1024)
		before := r.m.digest.sum
		_, err := r.m.Alloc(1024)
		var full *residency.Full
		if !errors.As(err, &full) || !errors.Is(err, x.err) || full.Limit != x.limit || full.Run > x.limit-1024 || full.Live != 1024 {
			t.Errorf("%v: %v, %+v", x.err, err, full)
		}
		if l, _ := r.m.Limits(); l != x.limit {
			t.Errorf("%v: the limit becomes %d, want %d", x.err, l, x.limit)
		}
		if r.m.digest.sum == before {
			t.Errorf("%v: later scopes are thought to lie where they lay", x.err)
		}
		s.Free()
		if err := r.m.End(); err == nil {
			t.Error("the step ends well")
		}
		r.close()
	}
	// Without that the limit is the one that was given.
	r := newRig(t, openCPU(t), Config{Device: 1024})
	r.m.Begin(nil)
	a, b := r.alloc(256), r.alloc(256)
	a.Free()
	_, err := r.m.Alloc(2048)
	var full *residency.Full
	if !errors.As(err, &full) || full.Limit != 1024 || full.Run != 512 || strings.Contains(err.Error(), "no more") {
		t.Errorf("%v, %+v", err, full)
	}
	b.Free()
	_ = r.m.End()
	r.close()
}

// Calls outside of a step, scopes inside of scopes, and what is dead or lies nowhere: each
// panics with a sentence that says so.
func TestCallsOutOfPlace(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	panics := func(want string, f func()) {
		t.Helper()
		defer func() {
			t.Helper()
			if x := recover(); !strings.Contains(fmt.Sprint(x), want) {
				t.Errorf("panics with %v, want %q", x, want)
			}
		}()
		f()
	}
	nothing := func() error { return nil }
	r.m.Begin(nil)
	scope, err := r.m.Capture(nothing)
	r.ok(err)
	capture := func() error {
		panics("captured inside of a scope", func() { _, _ = r.m.Capture(nothing) })
		panics("replayed inside of a scope", func() { _ = scope.Replay() })
		return nil
	}
	inner, err := r.m.Capture(capture)
	r.ok(err)
	r.ok(r.m.Eager(capture))
	r.ok(r.m.Eager(func() error { return r.m.Eager(nothing) }))
	old := r.alloc(100)
	panics("does not lie", func() {
		_, _ = r.m.Save(someGroup, Tensor{Storage: old, Element: 1, Shape: []int{-1, -1}})
	})
	panics("does not lie", func() {
		_, _ = r.m.Save(someGroup, Tensor{Storage: old, Element: 1, Shape: []int{2, 2}, Strides: []int{-1, 1}})
	})
	r.ok(r.m.End())
	for want, f := range map[string]func(){
		"capture a scope": func() { _, _ = r.m.Capture(nothing) }, "replay a scope": func() { _ = scope.Replay() }, "begin a scope": func() { _ = r.m.Eager(nothing) },
		"borrow memory": func() { _, _ = r.m.Borrow(device.Range{}, nil) }, "drain": func() { r.m.Drain() }, "load a group": func() { _ = r.m.Load(someGroup) },
		"release a group": func() { r.m.Release(someGroup) }, "save a group": func() { _, _ = r.m.Save(someGroup) }, "allocate": func() { _, _ = r.m.Alloc(1) },
		"end a step": func() { _ = r.m.End() },
	} {
		panics("offload: cannot "+want+" outside of a step; call Begin first", f)
	}
	r.m.Begin(nil)
	panics("after its step", func() { _, _ = r.m.Save(someGroup, flat(old)) })
	for range 2 { // a second Close does nothing
		r.ok(errors.Join(scope.Close(), inner.Close()))
	}
	panics("closed scope", func() { _ = scope.Replay() })
	panics("ended inside of a scope", func() { _ = r.m.Eager(r.m.End) })
	r.close()
}

// A scope that is captured while the whole step is says which stream, and what to do.
func TestScopeInACapturedStep(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Rank: 2})
	r.compute.BeginCapture()
	r.m.Begin(nil)
	_, err := r.m.Capture(func() error { return nil })
	var why *device.CaptureError
	if !errors.As(err, &why) || why.Stream != "compute" || why.Why == "" || why.Do == "" {
		t.Errorf("%v", err)
	}
	if end := r.m.End(); end != err {
		t.Errorf("the step ends with %v", end)
	}
	g, _ := r.compute.EndCapture()
	if g != nil {
		r.ok(g.Close())
	}
	r.close()
}

// Views are the same if all that describes them is: only then they are packed once.
func TestViewsThatDifferArePackedEach(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	r.m.Begin(nil)
	s, other := r.alloc(4096), r.alloc(4096)
	base := Tensor{Storage: s, Offset: 8, Element: 2, Shape: []int{4, 6}, Strides: []int{12, 1}}
	change := func(f func(*Tensor)) Tensor { u := base; f(&u); return u }
	for name, u := range map[string]Tensor{
		"storage": change(func(t *Tensor) { t.Storage = other }), "offset": change(func(t *Tensor) { t.Offset = 0 }), "element": change(func(t *Tensor) { t.Element = 1 }),
		"shape": change(func(t *Tensor) { t.Shape = []int{4, 5} }), "strides": change(func(t *Tensor) { t.Strides = []int{13, 1} }),
	} {
		if !base.same(base) || base.same(u) || u.same(base) {
			t.Errorf("views with another %s are the same", name)
		}
	}
	r.save(someGroup, base, base, change(func(t *Tensor) { t.Offset = 0 }), Tensor{Storage: other, Element: 1, Shape: []int{4096}}, Tensor{Storage: other, Element: 1, Shape: []int{4096}})
	r.ok(r.m.End())
	if l := r.m.Last(); l.Packed != 2 || l.Duplicates != 2 { // the packed view and the other storage, each twice
		t.Errorf("%d views are packed, %d are saved twice", l.Packed, l.Duplicates)
	}
	r.close()
}

// A storage of the group beside it does not count where the share of a storage is: the views
// of each are packed by themselves. A view that cannot be packed keeps the others of its
// storage.
func TestSparseStorages(t *testing.T) {
	overlapping := func(s *Storage) Tensor {
		return Tensor{Storage: s, Element: 1, Shape: []int{4, 4}, Strides: []int{1, 1}}
	}
	view := func(s *Storage, n int) Tensor { return Tensor{Storage: s, Element: 1, Shape: []int{n}} }
	for name, x := range map[string]struct {
		views  func(a, b *Storage) []Tensor
		packed int
	}{
		"a sparse one beside a full one":  {func(a, b *Storage) []Tensor { return []Tensor{view(a, 100), flat(b)} }, 1},
		"a full one before a sparse one":  {func(a, b *Storage) []Tensor { return []Tensor{flat(b), view(a, 100)} }, 1},
		"one that stays beside it":        {func(a, b *Storage) []Tensor { v := flat(b); v.Stay = true; return []Tensor{v, view(a, 100)} }, 1},
		"one that cannot be packed":       {func(a, b *Storage) []Tensor { return []Tensor{view(a, 100), overlapping(a)} }, 0},
		"one that cannot be packed first": {func(a, b *Storage) []Tensor { return []Tensor{overlapping(a), view(a, 100)} }, 0},
		"of another storage":              {func(a, b *Storage) []Tensor { return []Tensor{overlapping(b), view(a, 100)} }, 1},
	} {
		r := newRig(t, openCPU(t), Config{})
		r.m.Begin(nil)
		a, b := r.alloc(4096), r.alloc(4096)
		r.save(someGroup, x.views(a, b)...)
		r.ok(r.m.End())
		if n := r.m.Last().Packed; n != x.packed {
			t.Errorf("%s: %d views are packed, want %d", name, n, x.packed)
		}
		r.close()
	}
}

// A packed view that finds no room fails its save, and says whose it is.
func TestNoRoomToPack(t *testing.T) {
	r := newRig(t, openCPU(t), Config{Device: 4096})
	r.m.Begin(nil)
	s := r.alloc(4096)
	saved, err := r.m.Save(someGroup, Tensor{Storage: s, Element: 1, Shape: []int{256}})
	var full *residency.Full
	if saved != nil || !errors.As(err, &full) || r.m.Saved(someGroup) != nil {
		t.Errorf("%v is saved, %v", saved, err)
	}
	if end := r.m.End(); end == nil {
		t.Error("the step ends well")
	}
	r.close()
}

// Events of others are traced with their group and size, and with the order of the manager's.
func TestTraceOfOthers(t *testing.T) {
	var tr lines
	r := newRig(t, openCPU(t), Config{Trace: &tr, Rank: 4})
	r.m.Begin(nil)
	r.m.Trace(trace.Event{Kind: trace.Stash, Name: "fc1", Chunk: 1, Layer: 2, Microbatch: 3, Bytes: 77})
	r.ok(r.m.End())
	e := tr[1]
	if e.Kind != trace.Stash || e.Name != "fc1" || e.Chunk != 1 || e.Layer != 2 || e.Microbatch != 3 || e.Bytes != 77 || e.Rank != 4 || e.Step != 1 || e.Time != tr[0].Time+1 {
		t.Errorf("%+v after %+v", e, tr[0])
	}
	r.close()
}

// What a scope traced is told once, also if its step fails, and not in the next step.
func TestTraceOfABrokenScope(t *testing.T) {
	var tr lines
	r := newRig(t, openCPU(t), Config{Trace: &tr})
	r.m.Begin(nil)
	_, err := r.m.Capture(func() error {
		r.save(someGroup, flat(r.alloc(512)))
		return errors.New("broken")
	})
	if err == nil || r.m.End() == nil {
		t.Error("the scope is captured")
	}
	count := func() int {
		return len(slices.DeleteFunc(slices.Clone(tr), func(e trace.Event) bool { return e.Kind != trace.Save || e.Storage != 0 }))
	}
	if n := count(); n != 1 || tr[len(tr)-1].Kind != trace.End {
		t.Errorf("%d saves are told before the step ends with %v", n, tr[len(tr)-1].Kind)
	}
	r.m.Begin(nil)
	r.ok(r.m.End())
	if n := count(); n != 1 {
		t.Errorf("%d saves are told in two steps", n)
	}
	r.close()
}

// The counts of all steps stay what they were when others change.
func TestStatsAreCopies(t *testing.T) {
	r := newRig(t, openCPU(t), Config{})
	step := func() {
		r.m.Begin(nil)
		r.save(someGroup, flat(r.alloc(512)))
		r.ok(r.m.End())
	}
	step()
	all, last := r.m.Stats(), r.m.Last()
	all.Names[someGroup.Name].Groups, last.Names[someGroup.Name].Groups = 50, 50
	before := r.m.Stats()
	step()
	if n := r.m.Last().Names[someGroup.Name].Groups; n != 1 {
		t.Errorf("%d groups in a step", n)
	}
	if n, m := before.Names[someGroup.Name].Groups, r.m.Stats().Names[someGroup.Name].Groups; n != 1 || m != 2 {
		t.Errorf("%d groups after a step, %d after two", n, m)
	}
	r.close()
}

// A limit that lies below what is taken is kept from the next storage on.
func TestLowerLimit(t *testing.T) {
	x := newLent(t, Config{})
	x.m.Begin(&residency.Plan{Device: 4 * lentSize})
	a := x.borrow()
	x.save(someGroup, flat(a))
	a.Free()
	x.m.LowerLimit(x.m.Live())
	b := x.borrow()
	x.save(memory.GroupID{Name: "other"}, flat(b))
	if n := x.m.machine.Counts().Evicted; n != 1 {
		t.Errorf("%d storages are evicted", n)
	}
	x.ok(x.m.End())
	x.close()
}
