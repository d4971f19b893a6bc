// This file owns the tests of the device itself and of its memory: allocation,
// exact accounting, running out, the freeze, views and borrowed memory.

package devicetest

import (
	"bytes"
	"errors"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var deviceCases = []testCase{
	{name: "Info", fn: testInfo},
	{name: "CloseReportsLeaks", fn: testCloseReportsLeaks},
	{name: "CloseWaitsForWork", fn: testCloseWaitsForWork},
	{name: "CountersOfAStep", fn: testCountersOfAStep},
	{name: "CountersOfTheHost", fn: testCountersOfTheHost},
	{name: "Issued", fn: testIssued},
}

var memoryCases = []testCase{
	{name: "Alloc", fn: testAlloc},
	{name: "ZeroSize", fn: testZeroSize},
	{name: "Accounting", fn: testAccounting},
	{name: "OutOfMemory", fn: testOutOfMemory},
	{name: "BadSizesPanic", fn: testBadSizes},
	{name: "Freeze", fn: testFreeze},
	{name: "View", fn: testView},
	{name: "Borrow", fn: testBorrow},
}

// limit is small enough to be filled up and not a multiple of any page.
var limit = [memory.Kinds]memory.Bytes{memory.MiB + 100, 512*memory.KiB + 50}

var limitedCases = []testCase{
	{name: "ExactFit", fn: testExactFit, limit: &limit},
	{name: "PendingIsNotWaitedFor", fn: testPendingNotWaitedFor, limit: &limit},
	{name: "GrowOutOfMemory", fn: testGrowOutOfMemory, limit: &limit},
	{name: "BackdropRefusedGrowth", fn: testBackdropRefusedGrowth, limit: &limit},
}

func testInfo(e *env) {
	i := e.dev.Info()
	if i.Backend == "" || i.Name == "" || i.Units <= 0 || i.Ordinal < 0 {
		e.Errorf("the device says of itself %+v", i)
	}
	u := e.dev.Memory()
	for _, k := range bothKinds {
		if i.Capacity[k] <= 0 {
			e.Errorf("capacity of %v memory is %v", k, i.Capacity[k])
		}
		if want := (device.KindUsage{Capacity: i.Capacity[k]}); u.Kind[k] != want {
			e.Errorf("a new device has %v memory %+v, want %+v", k, u.Kind[k], want)
		}
	}
	if len(u.Owners) != 0 {
		e.Errorf("a new device has owners: %v", u.Owners)
	}
	if c := e.dev.Counters(); c != (device.Counters{}) {
		e.Errorf("a new device has counted %+v", c)
	}
}

// testAlloc: every size gives a buffer of exactly that size, aligned, apart
// from all others, and usable from its first to its last byte.
func testAlloc(e *env) {
	s := e.stream("s")
	sizes := []memory.Bytes{1, 7, 255, 256, 257, 4096, 70001, memory.MiB + 1}
	for _, k := range bothKinds {
		for i, n := range sizes {
			b := e.allocFor(k, n, "alloc")
			if b.Kind() != k || b.Size() != n || b.Max() != n || b.Owner() != "alloc" || !b.Live() {
				e.Errorf("asked for %v of %v memory, got %v with max %v", n, k, b, b.Max())
			}
			if b.Addr() == 0 || b.Addr()%uintptr(device.Align) != 0 {
				e.Errorf("%v is not aligned to %d", b, device.Align)
			}
			s.Upload(b.All(), pattern(i+int(k), int(n)))
		}
	}
	byAddress := slices.SortedFunc(slices.Values(e.buffers), func(a, b *device.Buffer) int {
		return int(a.Addr()>>8) - int(b.Addr()>>8)
	})
	for i, b := range byAddress[1:] {
		if before := byAddress[i]; before.Addr()+uintptr(before.Size()) > b.Addr() {
			e.Errorf("%v and %v overlap", before, b)
		}
	}
	for i, b := range e.buffers {
		e.want(s, b.All(), pattern(i%len(sizes)+int(b.Kind()), int(b.Size())), "buffer %d", i)
	}
}

// testZeroSize: buffers of nothing are buffers, and work on nothing is work.
func testZeroSize(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b, other := e.alloc(k, 0), e.alloc(memory.Device, 64)
		if b.Size() != 0 || !b.Live() || b.All().Len != 0 {
			e.Errorf("asked for nothing, got %v", b)
		}
		s.Upload(other.All(), pattern(1, 64))
		s.Fill(b.All(), 1)
		s.Upload(b.All(), nil)
		s.Copy(b.All(), other.Slice(64, 0))
		s.Copy(other.Slice(0, 0), b.All())
		s.Copy2D(device.Rect{Range: b.All(), Rows: 5}, device.Rect{Range: other.Slice(0, 0), Rows: 5})
		s.Copy2D(device.Rect{Range: other.Slice(0, 8), Pitch: 8}, device.Rect{Range: other.Slice(8, 8), Pitch: 8})
		e.want(s, b.All(), nil, "nothing")
		e.want(s, other.All(), pattern(1, 64), "a buffer beside work on nothing")
		s.Free(b)
	}
}

// wantKind compares the use of one kind of memory.
func (e *env) wantKind(when string, k memory.Kind, current, pending, peak memory.Bytes) {
	e.Helper()
	want := device.KindUsage{Current: current, Pending: pending, Peak: peak, Capacity: e.dev.Info().Capacity[k]}
	if got := e.dev.Memory().Kind[k]; got != want {
		e.Errorf("%s: %v memory is %+v, want %+v", when, k, got, want)
	}
}

// wantOwner compares the use by one owner.
func (e *env) wantOwner(when, owner string, k memory.Kind, current, peak memory.Bytes) {
	e.Helper()
	want := device.OwnerUsage{Owner: owner, Kind: k, Current: current, Peak: peak}
	for _, o := range e.dev.Memory().Owners {
		if o.Owner == owner && o.Kind == k {
			if o != want {
				e.Errorf("%s: owner has %+v, want %+v", when, o, want)
			}
			return
		}
	}
	e.Errorf("%s: no owner %q of %v memory in %v", when, owner, k, e.dev.Memory().Owners)
}

// testAccounting: bytes are counted as they were asked for, without rounding,
// by kind and owner, and those freed stay counted until their stream gets there.
func testAccounting(e *env) {
	const acc, host = memory.Device, memory.Host
	s := e.stream("s")
	a, b := e.allocFor(acc, 1000, "weights"), e.allocFor(acc, 3001, "stash")
	c, d := e.allocFor(host, 777, "stash"), e.allocFor(acc, 5, "weights")
	e.wantKind("after four allocations", acc, 4006, 0, 4006)
	e.wantKind("after four allocations", host, 777, 0, 777)
	e.wantOwner("after four allocations", "weights", acc, 1005, 1005)
	e.wantOwner("after four allocations", "stash", host, 777, 777)

	g := e.gate(s)
	s.Free(b)
	s.Free(c)
	e.wantKind("freed behind a gate", acc, 4006, 3001, 4006)
	e.wantKind("freed behind a gate", host, 777, 777, 777)
	e.wantOwner("freed behind a gate", "stash", acc, 3001, 3001)
	g.release()
	e.sync(s)
	e.wantKind("after the gate", acc, 1005, 0, 4006)
	e.wantKind("after the gate", host, 0, 0, 777)
	e.wantOwner("after the gate", "stash", acc, 0, 3001)

	f := e.allocFor(acc, 2000, "stash")
	e.wantKind("allocated below the peak", acc, 3005, 0, 4006)
	e.wantOwner("allocated below the peak", "stash", acc, 2000, 3001)
	for _, b := range []*device.Buffer{a, d, f} {
		s.Free(b)
	}
	e.sync(s)
	e.wantKind("at the end", acc, 0, 0, 4006)
	var order []string
	for _, o := range e.dev.Memory().Owners {
		order = append(order, o.Kind.String()+" "+o.Owner)
	}
	if want := []string{"device stash", "device weights", "host stash"}; !slices.Equal(order, want) {
		e.Errorf("owners are listed as %v, want %v", order, want)
	}
}

// testOutOfMemory: the error is typed, names the holders, and changes nothing.
func testOutOfMemory(e *env) {
	for _, k := range bothKinds {
		e.allocFor(k, 3000, "small")
		e.allocFor(k, memory.MiB, "large")
		capacity := e.dev.Info().Capacity[k]
		before := e.dev.Memory().Kind[k]
		for range 100 {
			b, err := e.dev.Alloc(k, capacity-before.Current+1, "greedy")
			if e.outOfMemory(err, k, "greedy", capacity-before.Current+1, capacity-before.Current); b != nil {
				e.Fatalf("a buffer came with the error: %v", b)
			}
		}
		if got := e.dev.Memory().Kind[k]; got != before {
			e.Errorf("refused allocations changed %v memory from %+v to %+v", k, before, got)
		}
		e.alloc(k, 100)
	}
}

// outOfMemory checks every field of the error.
func (e *env) outOfMemory(err error, k memory.Kind, owner string, asked, free memory.Bytes) {
	e.Helper()
	var oom *device.OutOfMemory
	if !errors.As(err, &oom) {
		e.Fatalf("asked for %v with %v free and got %v; want a *device.OutOfMemory", asked, free, err)
	}
	capacity := e.dev.Info().Capacity[k]
	if oom.Kind != k || oom.Owner != owner || oom.Asked != asked || oom.Free != free || oom.Capacity != capacity || oom.Device == "" {
		e.Errorf("the error is %+v; want %q to ask for %v of %v memory with %v of %v free", *oom, owner, asked, k, free, capacity)
	}
	var held memory.Bytes
	for i, o := range oom.Owners {
		if held += o.Current; o.Kind != k || i > 0 && o.Current > oom.Owners[i-1].Current {
			e.Errorf("the holders are %v; want those of %v memory, largest first", oom.Owners, k)
		}
	}
	if held != capacity-free {
		e.Errorf("the holders of the error have %v, but %v is in use", held, capacity-free)
	}
}

// testExactFit fills memory to the last byte.
func testExactFit(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		if got := e.dev.Info().Capacity[k]; got != limit[k] {
			e.Fatalf("capacity of %v memory is %v, want %v", k, got, limit[k])
		}
		part := e.allocFor(k, 1000, "part")
		rest := e.allocFor(k, limit[k]-1000, "rest")
		_, err := e.dev.Alloc(k, 1, "one more")
		e.outOfMemory(err, k, "one more", 1, 0)
		if !strings.Contains(err.Error(), `"rest"`) {
			e.Errorf("the error does not name the largest holder: %v", err)
		}
		s.Free(e.alloc(k, 0))
		s.Free(part)
		e.sync(s)
		_, err = e.dev.Alloc(k, 1001, "too large")
		e.outOfMemory(err, k, "too large", 1001, 1000)
		s.Free(e.allocFor(k, 1000, "part"))
		s.Free(rest)
		e.sync(s)
		whole := e.allocFor(k, limit[k], "whole")
		s.Upload(whole.All(), pattern(3, int(limit[k])))
		e.want(s, whole.All(), pattern(3, int(limit[k])), "all of %v memory", k)
		s.Free(whole)
		e.sync(s)
		e.wantKind("at the end", k, 0, 0, limit[k])
	}
}

// testPendingNotWaitedFor: pending memory cannot be allocated yet. The error says so at
// once, and the allocation succeeds after a synchronisation.
func testPendingNotWaitedFor(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b := e.allocFor(k, limit[k], "all")
		g := e.gate(s)
		s.Free(b)
		_, err := e.dev.Alloc(k, 1, "next")
		g.release()
		e.outOfMemory(err, k, "next", 1, 0)
		var oom *device.OutOfMemory
		if errors.As(err, &oom) && (oom.Pending != limit[k] || !strings.Contains(err.Error(), "synchronise and try again")) {
			e.Errorf("with all memory pending the error has %v pending: %v", oom.Pending, err)
		}
		e.sync(s)
		s.Free(e.allocFor(k, limit[k], "next"))
		e.sync(s)
	}
}

func testBadSizes(e *env) {
	for _, k := range bothKinds {
		e.panics("Alloc of -1 bytes", "", func() { _, _ = e.dev.Alloc(k, -1, "bad") })
		e.panics("Reserve of -1 bytes", "", func() { _, _ = e.dev.Reserve(k, -1, "bad") })
	}
	e.panics("Alloc of a third kind", "", func() { _, _ = e.dev.Alloc(memory.Kinds, 1, "bad") })
}

// testFreeze: after the freeze only what was reserved grows; all else goes on.
func testFreeze(e *env) {
	pool, old := e.reserve(memory.Device, memory.MiB, "pool"), e.alloc(memory.Host, 100)
	e.dev.Freeze()
	e.panics("Alloc after the freeze", "", func() { _, _ = e.dev.Alloc(memory.Device, 1, "late") })
	e.panics("Alloc of nothing after the freeze", "", func() { _, _ = e.dev.Alloc(memory.Host, 0, "late") })
	e.panics("Reserve after the freeze", "", func() { _, _ = e.dev.Reserve(memory.Host, 100, "late") })
	e.wantKind("after refused allocations", memory.Device, 0, 0, 0)
	e.ok(e.dev.Grow(pool, 10_000))
	e.wantKind("grown after the freeze", memory.Device, 10_000, 0, 10_000)
	s, ev := e.stream("s"), e.event(0)
	s.Fill(pool.All(), 7)
	s.Record(ev)
	alias := e.dev.Borrow(memory.Device, pool.Addr()+50, 100, "alias")
	s.Copy(old.All(), alias.All())
	e.want(s, old.All(), filled(7, 100), "copied after the freeze")
	s.Free(alias)
	s.Free(old)
}

// testView: the host sees host memory itself, and nothing of device memory.
func testView(e *env) {
	s := e.stream("s")
	h, back, a := e.alloc(memory.Host, 1000), e.alloc(memory.Host, 1000), e.alloc(memory.Device, 1000)
	copy(e.dev.View(h.All(), device.Write), pattern(1, 1000))
	s.Copy(a.All(), h.All())
	s.Copy(back.All(), a.All())
	e.sync(s)
	if diff := firstDifference(e.dev.View(back.All(), device.Read), pattern(1, 1000)); diff != "" {
		e.Errorf("the view after the copies: %s", diff)
	}
	part := e.dev.View(h.Slice(100, 50), device.Write)
	if len(part) != 50 || cap(part) != 50 {
		e.Errorf("a view of 50 bytes has length %d and capacity %d", len(part), cap(part))
	}
	copy(part, filled(0xAB, 50))
	want := pattern(1, 1000)
	copy(want[100:], filled(0xAB, 50))
	if got := e.dev.View(h.All(), device.Read); !bytes.Equal(got, want) {
		e.Error("two views of the same memory differ")
	}
	e.want(s, h.All(), want, "written through a view")
	if got := e.dev.View(h.Slice(1000, 0), device.Read); len(got) != 0 {
		e.Errorf("a view of nothing has %d bytes", len(got))
	}
	e.panics("View of device memory", "", func() { e.dev.View(a.All(), device.Read) })
	e.panics("View without a mode", "mode", func() { e.dev.View(h.All(), 0) })
	s.Free(h)
	e.panics("View of freed memory", "use after free", func() { e.dev.View(h.All(), device.Read) })
}

// testBorrow: a borrowed buffer is the memory at its address, counted nowhere,
// and ending the handle leaves the memory alone.
func testBorrow(e *env) {
	s := e.stream("s")
	for _, k := range bothKinds {
		b := e.alloc(k, 4096)
		s.Upload(b.All(), pattern(1, 4096))
		before := e.dev.Memory()
		in := e.dev.Borrow(k, b.Addr()+1000, 77, "theirs")
		if in.Kind() != k || in.Addr() != b.Addr()+1000 || in.Size() != 77 || in.Max() != 77 || in.Owner() != "theirs" || !in.Live() {
			e.Errorf("borrowed 77 bytes and got %v", in)
		}
		e.want(s, in.Slice(7, 70), pattern(1, 4096)[1007:1077], "read through the import")
		s.Fill(in.All(), 0x5A)
		s.Free(in)
		e.sync(s)
		want := pattern(1, 4096)
		copy(want[1000:], filled(0x5A, 77))
		e.want(s, b.All(), want, "written through the import")
		if after := e.dev.Memory(); after.Kind != before.Kind || !slices.Equal(after.Owners, before.Owners) {
			e.Errorf("an import changed the ledger from %+v to %+v", before, after)
		}
		e.panics("a second free of an import", "double free", func() { s.Free(in) })
		e.panics("use of a freed import", "use after free", func() { s.Fill(in.All(), 0) })
	}
}
