// This file owns the tests of what a launch carries and of the checks that
// devices make before they take work.

package device_test

import (
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
	"pgregory.net/rapid"
)

var kernel = &device.Kernel{Name: "k"}

func accesses(l *device.Launch) []device.Access {
	var as []device.Access
	l.Accesses(func(a device.Access) bool {
		as = append(as, a)
		return true
	})
	return as
}

func TestLaunchArgsAndAccesses(t *testing.T) {
	b := buffer(1 << 10)
	l := device.NewLaunch(kernel, 3, 128)
	l.Read(b.Slice(0, 16))
	l.Arg(42)
	l.Write(b.Slice(16, 32))
	l.Atomic(b.Slice(64, 8))
	l.Check()
	if l.Grid != [3]uint32{3, 1, 1} || l.Block != [3]uint32{128, 1, 1} {
		t.Errorf("shape is %v of %v", l.Grid, l.Block)
	}
	if got, want := l.Args(), []uint64{0x1000, 42, 0x1010, 0x1040}; !slices.Equal(got, want) {
		t.Errorf("args are %x, want %x", got, want)
	}
	want := []device.Access{device.Reads(b.Slice(0, 16)), device.Writes(b.Slice(16, 32)), device.Atomics(b.Slice(64, 8))}
	if got := accesses(&l); !slices.Equal(got, want) {
		t.Errorf("accesses are %v, want %v", got, want)
	}
}

// TestLaunchDeclares mixes Declare and DeclareAll: every declaration comes out
// once, however many there are, and prepared slices are left as they were.
func TestLaunchDeclares(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := buffer(1 << 20)
		var want []device.Access
		next := func() device.Access {
			a := device.Reads(b.Slice(memory.Bytes(len(want)), 1))
			want = append(want, a)
			return a
		}
		l := device.NewLaunch(kernel, 1, 1)
		var prepared, before [][]device.Access
		for range rapid.IntRange(0, 6).Draw(t, "steps") {
			n := rapid.IntRange(0, 9).Draw(t, "count")
			if rapid.Bool().Draw(t, "all at once") {
				as := make([]device.Access, 0, 2*n)
				for range n {
					as = append(as, next())
				}
				// Declaring more must not write into the spare capacity.
				prepared, before = append(prepared, as[:cap(as)]), append(before, slices.Clone(as[:cap(as)]))
				l.DeclareAll(as)
			} else {
				for range n {
					l.Declare(next())
				}
			}
		}
		if !slices.EqualFunc(prepared, before, slices.Equal[[]device.Access]) {
			t.Fatal("a prepared slice was changed")
		}
		got := accesses(&l)
		slices.SortFunc(got, func(a, b device.Access) int { return int(a.Off - b.Off) })
		if !slices.Equal(got, want) {
			t.Fatalf("%d accesses, want %d, or others", len(got), len(want))
		}
		stop := rapid.IntRange(0, len(want)).Draw(t, "stop")
		seen := 0
		l.Accesses(func(device.Access) bool { seen++; return seen < stop })
		if seen != min(max(stop, 1), len(want)) {
			t.Fatalf("asked to stop after %d of %d, saw %d", stop, len(want), seen)
		}
	})
}

// TestLaunchCopies: a launch is a value; completing a copy leaves the original
// alone, also where the declarations went beyond the inline ones.
func TestLaunchCopies(t *testing.T) {
	b := buffer(100)
	l := device.NewLaunch(kernel, 1, 1)
	for i := range 8 {
		l.Declare(device.Reads(b.Slice(memory.Bytes(i), 1)))
	}
	x, y := l, l
	x.Write(b.Slice(90, 1))
	y.Write(b.Slice(91, 1))
	if n := len(accesses(&l)); n != 8 || len(l.Args()) != 0 {
		t.Errorf("the original has %d accesses and %d args", n, len(l.Args()))
	}
	if got := accesses(&x); len(got) != 9 || got[8] != device.Writes(b.Slice(90, 1)) {
		t.Errorf("the first copy has %v", got)
	}
	if got := accesses(&y); len(got) != 9 || got[8] != device.Writes(b.Slice(91, 1)) {
		t.Errorf("the second copy has %v", got)
	}
}

func TestLaunchAllocatesNothing(t *testing.T) {
	b := buffer(1 << 10)
	table := make([]device.Access, 100)
	for i := range table {
		table[i] = device.Reads(b.Slice(memory.Bytes(i), 1))
	}
	var sum uint64
	n := testing.AllocsPerRun(100, func() {
		l := device.NewLaunch(kernel, 1, 1)
		for i := range memory.Bytes(6) {
			l.Write(b.Slice(i, 1))
		}
		for i := range uint64(10) {
			l.Arg(i)
		}
		l.DeclareAll(table)
		l.Check()
		l.Accesses(func(a device.Access) bool { sum += uint64(a.Off); return true })
	})
	if n != 0 {
		t.Errorf("building and checking a launch makes %v allocations", n)
	}
}

func TestLaunchPanics(t *testing.T) {
	b := buffer(100)
	full := device.NewLaunch(kernel, 1, 1)
	for i := range uint64(16) {
		full.Arg(i)
	}
	wantPanic(t, "kernel k has more than 16 arguments", func() { full.Arg(0) })
	wantPanic(t, "kernel k has more than 16 arguments", func() { full.Read(b.All()) })
	none := device.Launch{}
	wantPanic(t, "a launch without a kernel", none.Check)
	// The bad declaration sits behind good ones, inline and beyond.
	for _, n := range []int{0, 5, 6, 20} {
		l := device.NewLaunch(kernel, 1, 1)
		for range n {
			l.Declare(device.Reads(b.All()))
		}
		l.Declare(device.Access{Rect: device.Reads(b.All()).Rect})
		wantPanic(t, "an access without a mode", l.Check)
	}
	dead := buffer(10)
	l := device.NewLaunch(kernel, 1, 1)
	l.Read(dead.All())
	dead.Retire()
	wantPanic(t, "use after free", l.Check)
}

func TestModes(t *testing.T) {
	for m, want := range map[device.Mode]string{device.Read: "read", device.Write: "write", device.Atomic: "atomic access", 9: "Mode(9)"} {
		if got := m.String(); got != want {
			t.Errorf("mode %d is %q, want %q", uint8(m), got, want)
		}
	}
}

// A shape is launched if every GPU can run it.
func TestLaunchShape(t *testing.T) {
	for _, c := range []struct {
		grid, block [3]uint32
		words       string
	}{
		{[3]uint32{1, 1, 1}, [3]uint32{1, 1, 1}, ""},
		{[3]uint32{1<<31 - 1, 65535, 65535}, [3]uint32{1024, 1, 1}, ""},
		{[3]uint32{1, 1, 1}, [3]uint32{16, 8, 8}, ""},
		{[3]uint32{0, 1, 1}, [3]uint32{1, 1, 1}, "has no threads"},
		{[3]uint32{1, 1, 0}, [3]uint32{1, 1, 1}, "has no threads"},
		{[3]uint32{1, 1, 1}, [3]uint32{1, 0, 1}, "has no threads"},
		{[3]uint32{1 << 31, 1, 1}, [3]uint32{1, 1, 1}, "at most [2147483647 65535 65535] blocks"},
		{[3]uint32{1, 65536, 1}, [3]uint32{1, 1, 1}, "at most [2147483647 65535 65535] blocks"},
		{[3]uint32{1, 1, 65536}, [3]uint32{1, 1, 1}, "at most [2147483647 65535 65535] blocks"},
		{[3]uint32{1, 1, 1}, [3]uint32{1025, 1, 1}, "at most 1024 threads"},
		{[3]uint32{1, 1, 1}, [3]uint32{33, 32, 1}, "at most 1024 threads"},
		{[3]uint32{1, 1, 1}, [3]uint32{1 << 16, 1 << 16, 1}, "at most 1024 threads"},
	} {
		l := device.NewLaunch(kernel, 1, 1)
		l.Grid, l.Block = c.grid, c.block
		if c.words == "" {
			l.Check()
		} else {
			wantPanic(t, c.words, l.Check)
		}
	}
	for i := range 6 { // each size alone, and products that overflow
		l := device.NewLaunch(kernel, 1, 1)
		*[]*uint32{&l.Grid[0], &l.Grid[1], &l.Grid[2], &l.Block[0], &l.Block[1], &l.Block[2]}[i] = 0
		wantPanic(t, "has no threads", l.Check)
		if i >= 3 {
			continue
		}
		l = device.NewLaunch(kernel, 1, 1)
		l.Block[i] = 1024
		l.Check()
		for _, n := range []uint32{1025, 1 << 31} {
			l.Block[i], l.Block[(i+1)%3] = n, 1<<31
			wantPanic(t, "at most 1024 threads", l.Check)
			l.Block[(i+1)%3] = 1
			wantPanic(t, "at most 1024 threads", l.Check)
		}
	}
	for _, shape := range [][2]int{{-1, 1}, {1, -1}, {1 << 31, 1}, {1<<32 + 1, 1}, {1, 1025}} {
		wantPanic(t, "a launch of", func() { device.NewLaunch(kernel, shape[0], shape[1]) })
	}
}

func TestTensorMapsOfALaunch(t *testing.T) {
	good := device.TensorMap{Addr: 0x1000, Rows: 5, Cols: 12, Pitch: 16, BoxRows: 64}
	tuned := device.Tuned{Kernel: kernel}
	for range 8 {
		tuned.Map(good)
	}
	if got := tuned.Maps(); len(got) != 8 || got[7] != good {
		t.Errorf("maps are %v", got)
	}
	wantPanic(t, "more than 8", func() { tuned.Map(good) })
	most := device.Tuned{Kernel: kernel}
	most.Map(device.TensorMap{Addr: 16, Rows: 1, Cols: 16, Pitch: 16, BoxRows: 256})
	most.Map(device.TensorMap{Addr: 16, Rows: 1, Cols: 1, Pitch: 8, BoxRows: 1})
	for name, change := range map[string]func(m *device.TensorMap){
		"a skewed address": func(m *device.TensorMap) { m.Addr += 8 },
		"a skewed pitch":   func(m *device.TensorMap) { m.Pitch = 20 },
		"a short pitch":    func(m *device.TensorMap) { m.Pitch = 8 },
		"no rows":          func(m *device.TensorMap) { m.Rows = 0 },
		"no columns":       func(m *device.TensorMap) { m.Cols = 0 },
		"no box":           func(m *device.TensorMap) { m.BoxRows = 0 },
		"a box too high":   func(m *device.TensorMap) { m.BoxRows = 257 },
	} {
		bad := good
		change(&bad)
		t.Run(name, func(t *testing.T) {
			wantPanic(t, "expected rows at multiples", func() { (&device.Tuned{Kernel: kernel}).Map(bad) })
		})
	}
}
