package residency

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/memory"
)

// bytewise is the obvious heap: for every byte, its owner, or the give that freed it.
// Gives are numbered from one, and their mark is their number.
type bytewise struct {
	owner, give []int
	outs        map[int]int // of gives
	scopes      map[int]int
	live        map[int][2]memory.Bytes // by owner: offset and bytes asked for
	next, gives int
	followed    [Lanes]int
}

// fits reports whether n bytes are free in one run for a lane, at all or without waiting
// for one of the last copies out.
func (b *bytewise) fits(h *Heap, lane Lane, n memory.Bytes, ready bool) bool {
	run := memory.Bytes(0)
	for i := range h.limit {
		give := b.give[i]
		ok := b.owner[i] == 0 && (lane == Compute || h.scope == 0 || b.scopes[give] != h.scope)
		if ok && ready {
			ok = i < h.top && (b.outs[give] == 0 || h.outs-b.outs[give] >= h.window || b.outs[give] <= b.followed[lane])
		}
		if run++; !ok {
			run = 0
		}
		if run >= n {
			return true
		}
	}
	return false
}

func (b *bytewise) take(h *Heap, lane Lane, n memory.Bytes) error {
	size, top := h.Round(n), h.top
	could, ready := b.fits(h, lane, size, false), b.fits(h, lane, size, true)
	off, after, ok := h.Take(lane, n)
	switch {
	case ok != could:
		return fmt.Errorf("%d bytes for %v: %v, though it should be %v", n, lane, ok, could)
	case !ok:
		return nil
	case ready && h.top != top:
		return fmt.Errorf("the extent grew to %d for %d bytes, though they were free", h.top, n)
	case off%h.align != 0 || off < 0 || off+size > h.top:
		return fmt.Errorf("%d bytes at %d of %d", size, off, h.top)
	}
	b.next++
	var marks []Mark
	for i := off; i < off+size; i++ {
		if b.owner[i] != 0 {
			return fmt.Errorf("byte %d has an owner", i)
		}
		if g := b.give[i]; g != 0 && !slices.Contains(marks, Mark(g)) {
			marks = append(marks, Mark(g))
		}
		b.owner[i] = b.next
		b.followed[lane] = max(b.followed[lane], b.outs[b.give[i]])
	}
	if !slices.Equal(marks, after) {
		return fmt.Errorf("bytes that were given back with %v are taken after %v", marks, after)
	}
	b.live[b.next] = [2]memory.Bytes{off, n}
	return nil
}

func (b *bytewise) giveBack(h *Heap, id, out int) {
	b.gives++
	at := b.live[id]
	delete(b.live, id)
	for i := at[0]; i < at[0]+h.Round(at[1]); i++ {
		b.owner[i], b.give[i] = 0, b.gives
	}
	b.outs[b.gives], b.scopes[b.gives] = out, h.scope
	h.Give(at[0], at[1], out, Mark(b.gives))
}

// against runs a heap beside the model and returns the offsets that were taken.
func against(d draw, ops int) (offsets []memory.Bytes, err error) {
	h := NewHeap(memory.Bytes(d(200)), memory.Bytes(1+d(4)), 1+d(3))
	b := &bytewise{
		owner: make([]int, h.limit), give: make([]int, h.limit),
		outs: map[int]int{}, scopes: map[int]int{}, live: map[int][2]memory.Bytes{},
	}
	for range ops {
		switch k := d(10); {
		case k < 5:
			if err = b.take(h, Lane(d(Lanes)), memory.Bytes(d(30))); err != nil {
				return nil, err
			}
			offsets = append(offsets, b.live[b.next][0])
		case k < 9 && len(b.live) > 0:
			ids := make([]int, 0, len(b.live))
			for id := range b.live {
				ids = append(ids, id)
			}
			slices.Sort(ids)
			out := 0
			if d(2) == 0 {
				out = h.Out() - d(min(h.outs, 3))
			}
			b.giveBack(h, ids[d(len(ids))], max(out, 0))
		case k == 9 && h.scope == 0:
			h.BeginScope()
		case k == 9:
			h.EndScope()
		}
		h.Check()
		if live := memory.Bytes(len(b.owner)) - count(b.owner, 0); live != h.Live() {
			return nil, fmt.Errorf("%d bytes are live, and the heap says %d", live, h.Live())
		}
	}
	return offsets, nil
}

func count(list []int, v int) (n memory.Bytes) {
	for _, x := range list {
		if x == v {
			n++
		}
	}
	return n
}

// SPEC S5.3: nobody gets bytes that somebody has. Whoever gets freed bytes waits for
// those who freed them and for nobody else.
func TestHeapAgainstBytes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		if _, err := against(func(n int) int { return rapid.IntRange(0, n-1).Draw(t, "") }, rapid.IntRange(1, 80).Draw(t, "ops")); err != nil {
			t.Fatal(err)
		}
	})
	for seed := range uint64(300) {
		one, err := against(rand.New(rand.NewPCG(seed, 3)).IntN, 200)
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if two, _ := against(rand.New(rand.NewPCG(seed, 3)).IntN, 200); !slices.Equal(one, two) {
			t.Fatalf("seed %d: the same calls gave other offsets", seed)
		}
	}
}

func FuzzHeap(f *testing.F) {
	f.Add([]byte("a heap is a run of bytes"))
	f.Add([]byte{200, 0, 1, 0, 0, 9, 0, 0, 9, 5, 0, 0, 1, 9, 0, 2, 20})
	f.Fuzz(func(t *testing.T, data []byte) {
		d := func(n int) int {
			if len(data) == 0 {
				return 0
			}
			v := int(data[0]) % n
			data = data[1:]
			return v
		}
		if _, err := against(d, min(len(data), 300)); err != nil {
			t.Fatal(err)
		}
	})
}

// Memory grows instead of waiting for a copy that has just begun; once a window of
// copies lies behind it, freed memory is used.
func TestHeapGrowsBeforeItWaits(t *testing.T) {
	for window := 1; window <= 4; window++ {
		h := NewHeap(1000, 1, window)
		for range 20 { // every storage leaves at once
			off, _, ok := h.Take(Compute, 10)
			if !ok {
				t.Fatal("no room")
			}
			h.Give(off, 10, h.Out(), 1)
		}
		if want := memory.Bytes(10 * (window + 1)); h.Top() != want {
			t.Errorf("a window of %d: an extent of %d, want %d", window, h.Top(), want)
		}
	}
}

// If no memory is left, the heap takes the bytes whose copy out began first, and waits
// for no others.
func TestHeapWaitsForTheOldest(t *testing.T) {
	h := NewHeap(30, 1, 9)
	for range 3 {
		h.Take(Compute, 10)
	}
	for _, off := range []memory.Bytes{10, 20, 0} {
		h.Give(off, 10, h.Out(), Mark(off+1))
	}
	off, after, _ := h.Take(Compute, 10)
	if off != 10 || !slices.Equal(after, []Mark{11}) {
		t.Errorf("at %d after %v", off, after)
	}
	if off, after, _ = h.Take(Compute, 5); off != 20 || !slices.Equal(after, []Mark{21}) {
		t.Errorf("at %d after %v", off, after)
	}
}

// The last free bytes and new ones make one run.
func TestHeapGrowsFromWhatIsFree(t *testing.T) {
	h := NewHeap(100, 8, 1)
	h.Take(Compute, 8)
	a, _, _ := h.Take(Compute, 8)
	b, _, _ := h.Take(Compute, 1)
	h.Give(a, 8, 0, 1)
	h.Give(b, 1, 0, 2)
	if off, after, ok := h.Take(In, 30); !ok || off != 8 || !slices.Equal(after, []Mark{1, 2}) || h.Top() != 40 || h.Peak() != 40 {
		t.Errorf("at %d after %v, extent %d", off, after, h.Top())
	}
	if h.Extend = func(memory.Bytes) bool { return false }; h.Limit() != 96 {
		t.Error(h.Limit())
	}
	if _, _, ok := h.Take(In, 1); ok {
		t.Error("the extent grew without memory")
	}
}

// Of the free runs that are ready the smallest is taken, and of equal ones the first.
func TestHeapTakesTheSmallest(t *testing.T) {
	for name, x := range map[string]struct {
		free [][2]memory.Bytes // offset and size
		want memory.Bytes
	}{
		"the second":            {[][2]memory.Bytes{{0, 30}, {40, 20}, {70, 40}}, 40},
		"the last":              {[][2]memory.Bytes{{0, 30}, {40, 25}, {70, 20}}, 70},
		"the first of equals":   {[][2]memory.Bytes{{0, 20}, {40, 20}, {70, 20}}, 0},
		"the first of the last": {[][2]memory.Bytes{{0, 30}, {40, 20}, {70, 20}}, 40},
		"the one that fits":     {[][2]memory.Bytes{{0, 30}, {40, 10}, {70, 20}}, 40},
		"two that touch":        {[][2]memory.Bytes{{0, 30}, {40, 8}, {48, 8}, {70, 20}}, 40},
	} {
		h := NewHeap(200, 1, 1)
		h.Take(Compute, 200)
		for _, f := range x.free {
			h.Give(f[0], f[1], 0)
		}
		if off, _, ok := h.Take(Compute, 10); !ok || off != x.want {
			t.Errorf("%s: at %d, %v, want %d", name, off, ok, x.want)
		}
		h.Check()
	}
}

// Of the runs that a lane must wait for, the one whose copies are the oldest is taken. The
// bytes behind those that are taken do not count. Of equal runs the first is taken.
func TestHeapWaitsForNoMoreThanItTakes(t *testing.T) {
	for name, x := range map[string]struct {
		free [][3]memory.Bytes // offset, size and copy
		want memory.Bytes
	}{
		"with a newer one behind": {[][3]memory.Bytes{{0, 10, 1}, {10, 10, 5}, {40, 10, 3}}, 0},
		"with a newer one in it":  {[][3]memory.Bytes{{0, 5, 1}, {5, 10, 5}, {40, 10, 3}}, 40},
		"of the same copy":        {[][3]memory.Bytes{{0, 10, 4}, {40, 10, 4}, {60, 10, 4}}, 0},
	} {
		h := NewHeap(100, 1, 9)
		h.Take(Compute, 100)
		for range 5 {
			h.Out()
		}
		for _, f := range x.free {
			h.Give(f[0], f[1], int(f[2]))
		}
		if off, _, ok := h.Take(Compute, 10); !ok || off != x.want {
			t.Errorf("%s: at %d, %v, want %d", name, off, ok, x.want)
		}
	}
}

// The largest run counts free bytes that touch, and bytes never used behind them.
func TestHeapLargest(t *testing.T) {
	h := NewHeap(100, 1, 1)
	var tops []memory.Bytes
	h.Extend = func(top memory.Bytes) bool { tops = append(tops, top); return true }
	largest := func(want memory.Bytes) {
		t.Helper()
		if got := h.largest(); got != want {
			t.Errorf("the largest run has %d bytes, want %d", got, want)
		}
	}
	largest(100)
	h.Take(Compute, 40)
	largest(60)
	h.Take(Compute, 40)
	h.Take(Compute, 10)
	largest(10)
	h.Give(0, 10, 0)
	h.Give(20, 10, 0)
	largest(10)
	h.Give(10, 10, 0)
	largest(30) // [0,30)
	h.Give(50, 5, 0)
	largest(30)
	h.Give(60, 30, 0)
	largest(40) // [60,100), of which 10 were never used
	h.Take(In, 35)
	if want := []memory.Bytes{40, 80, 90, 95}; !slices.Equal(tops, want) {
		t.Errorf("memory was asked for up to %v, want %v", tops, want)
	}
	h = NewHeap(100, 1, 1)
	h.account = true
	h.Take(Compute, 30)
	largest(70)
}

func TestHeapPanics(t *testing.T) {
	for name, f := range map[string]func(h *Heap){
		"given twice":   func(h *Heap) { h.Give(0, 10, 0); h.Give(0, 10, 0) },
		"part of it":    func(h *Heap) { h.Give(0, 10, 0); h.Give(5, 10, 0) },
		"never taken":   func(h *Heap) { h.Give(15, 10, 0) },
		"negative":      func(h *Heap) { h.Take(Compute, -1) },
		"no alignment":  func(*Heap) { NewHeap(10, 0, 1) },
		"no window":     func(*Heap) { NewHeap(10, 1, 0) },
		"negative heap": func(*Heap) { NewHeap(-1, 1, 1) },
		"empty segment": func(h *Heap) { h.free = append(h.free, segment{off: 3}); h.Check() },
	} {
		t.Run(name, func(t *testing.T) {
			h := NewHeap(100, 1, 1)
			h.Take(Compute, 20)
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			f(h)
		})
	}
}

// A lower limit holds for the next bytes; those that are taken already stay.
func TestHeapLower(t *testing.T) {
	h := NewHeap(100, 10, 1)
	h.account = true
	take := func(n memory.Bytes, want bool) {
		t.Helper()
		if _, _, ok := h.Take(Compute, n); ok != want {
			t.Errorf("%d bytes beside %d of %d: %v", n, h.Live(), h.Limit(), ok)
		}
		h.Check()
	}
	take(60, true)
	h.Lower(45)
	take(10, false)
	h.Give(0, 60, 0)
	take(50, false)
	take(40, true)
	h.Lower(90) // is not lower
	take(10, false)
	if !h.Raise(50) {
		t.Error("the limit cannot be raised again")
	}
	take(10, true)
}

// A limit is always a whole number of places, however it is set, and it follows the last
// one that Raise and Lower were given in their direction.
func TestLimitsAreAligned(t *testing.T) {
	const align = 256
	for _, account := range []bool{false, true} {
		h := NewHeap(1000, align, 1)
		h.account = account
		want := memory.Bytes(768)
		for _, n := range []memory.Bytes{1, 767, 768, 769, 1023, 1024, 1500, 1024, 2047} {
			limit := n - n%align
			if higher := h.Raise(n); higher != (limit > want) {
				t.Errorf("raising %d to %d says %v", want, n, higher)
			}
			if want = max(want, limit); h.Limit() != want {
				t.Errorf("after %d the limit is %d, want %d", n, h.Limit(), want)
			}
		}
		for _, n := range []memory.Bytes{5000, 1700, 1000, 1200} {
			if !account {
				break
			}
			h.Lower(n)
			if want = min(want, n-n%align); h.Limit() != want {
				t.Errorf("after %d the limit is %d, want %d", n, h.Limit(), want)
			}
		}
	}
}

// The window is the plan's if it has one, else that of the configuration, else the default.
func TestWindowOfAPlan(t *testing.T) {
	for _, x := range []struct{ config, plan, want int }{
		{0, 0, DefaultWindow}, {1, 0, 1}, {5, 0, 5}, {0, 1, 1}, {5, 1, 1}, {1, 5, 5}, {5, 5, 5},
	} {
		for _, plan := range []*Plan{{Window: x.plan}, nil} {
			if plan == nil && x.plan != 0 {
				continue
			}
			m := New(Config{Device: 4096, Host: 2048, Align: 1, Window: x.config}, nil, plan)
			if m.device.window != x.want || m.host.window != x.want || m.cfg.Window != x.want {
				t.Errorf("%+v: windows of %d, %d and %d", x, m.device.window, m.host.window, m.cfg.Window)
			}
		}
	}
	for _, x := range []struct{ config, plan, want memory.Bytes }{{4096, 0, 4096}, {4096, 1000, 1000}, {4096, 5000, 4096}} {
		if m := New(Config{Device: x.config, Host: 2048, Align: 1}, nil, &Plan{Device: x.plan}); m.device.limit != x.want || m.host.limit != 2048 {
			t.Errorf("%+v: limits of %d and %d", x, m.device.limit, m.host.limit)
		}
	}
}
