// This file owns the tests of cost: what the checker keeps, and what it takes.

package check

import (
	"math/rand/v2"
	"runtime"
	"testing"
	"unsafe"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// rigged returns a checked device with streams and buffers.
func rigged(t testing.TB, o Options, streams int) (*Checker, device.Device, []device.Stream, []*device.Buffer) {
	t.Helper()
	inner, err := cpu.Open(cpu.Options{CopyThreads: 1})
	if err != nil {
		t.Fatal(err)
	}
	c := New(o)
	d := c.Wrap(inner)
	var ss []device.Stream
	var bs []*device.Buffer
	for range streams {
		s, err := d.NewStream("s")
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.Alloc(memory.Device, 1<<16, "b")
		if err != nil {
			t.Fatal(err)
		}
		ss, bs = append(ss, s), append(bs, b)
	}
	t.Cleanup(func() {
		if err := d.Sync(); err != nil {
			t.Error(err)
		}
		for _, b := range bs {
			ss[0].Free(b)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return c, d, ss, bs
}

// kept returns the number of segments and cells in all shadows of a device.
func kept(d device.Device) (n int) {
	for b := range d.(*dev).live {
		n += len(b.shadow.segs)
		for _, s := range b.shadow.segs {
			n += len(s.cells)
		}
	}
	return n
}

// SPEC S6.2: a long run without any wait of the host keeps a bounded shadow and
// bounded clocks; streams that come and go leave nothing behind.
func TestShadowStaysBounded(t *testing.T) {
	for _, o := range []Options{{}, {Schedule: &Schedule{Seed: 4}}} {
		c, d, ss, bs := rigged(t, o, 4)
		rng := rand.New(rand.NewPCG(1, 2))
		token, err := d.NewEvent(0)
		if err != nil {
			t.Fatal(err)
		}
		most := 0
		ops := 100_000
		if testing.Short() {
			ops = 20_000
		}
		for i := range ops {
			// The token goes round, so that each stream may use what it likes;
			// ranges start and end on a grid of 64, as tensors in a slab do.
			s := ss[i%4]
			s.Wait(token)
			b, off, n := bs[rng.IntN(4)], memory.Bytes(rng.IntN(512)*64), memory.Bytes(1+rng.IntN(512))*64
			switch rng.IntN(3) {
			case 0:
				s.Fill(b.Slice(off, n), 1)
			case 1:
				s.Host(func() {}, device.Reads(b.Slice(off, n)))
			case 2:
				s.Host(func() {}, device.Access{Rect: device.Rect{Range: b.Slice(off, 16), Pitch: 64, Rows: int(n / 64)}, Mode: device.Write})
			}
			s.Record(token)
			if i%1000 == 999 {
				most = max(most, kept(d))
			}
		}
		// A buffer has 1024 cells of the grid; on average one of them is where
		// something begins or ends, or has an access of its own.
		if most > 4*1024 {
			t.Errorf("the shadow kept %d segments and cells", most)
		}
		for range 100 {
			extra, err := d.NewStream("extra")
			if err != nil {
				t.Fatal(err)
			}
			extra.Wait(token)
			extra.Fill(bs[0].All(), 2)
			extra.Record(token)
			if err := extra.Close(); err != nil {
				t.Fatal(err)
			}
		}
		// What the host has waited for is dropped when the bytes are used next:
		// one segment and one read are left of each buffer.
		if err := d.Sync(); err != nil {
			t.Fatal(err)
		}
		for _, b := range bs {
			ss[0].Host(func() {}, device.Reads(b.All()))
		}
		if n := kept(d); n != 8 {
			t.Errorf("after a wait of the host %d segments and cells are kept, want 8", n)
		}
		if c.slots > 1+4+1 {
			t.Errorf("%d slots for five streams at a time", c.slots)
		}
		t.Logf("%d segments and cells at most", most)
	}
}

// Memory that is borrowed and given back again and again leaves nothing behind: views before their storage, and
// also beside a neighbour that stays.
func TestBorrowedMemoryLeavesNothing(t *testing.T) {
	for _, o := range []Options{{}, {Schedule: &Schedule{Seed: 5}}} {
		c, d, ss, _ := rigged(t, o, 1)
		own := make([]byte, 1<<16)
		at := uintptr(unsafe.Pointer(&own[0]))
		first := 0
		neighbours := []*device.Buffer{d.Borrow(memory.Host, at, 4096, "before"), d.Borrow(memory.Host, at+8192, 4096, "behind")}
		for i := range 50 {
			a := d.Borrow(memory.Host, at+4096, 4096, "storage")
			b := d.Borrow(memory.Host, at+4096+uintptr(64*i), 512, "view")
			ss[0].Fill(a.All(), 1)
			ss[0].Fill(b.All(), 2)
			for _, x := range []*device.Buffer{b, a} {
				ss[0].Free(x)
			}
			if err := ss[0].Sync(); err != nil {
				t.Fatal(err)
			}
			n := len(c.borrowed)
			for _, s := range c.borrowedShadow.segs {
				n += 1 + len(s.cells)
			}
			if i == 0 {
				first = n
			}
			if n > first {
				t.Fatalf("after %d times %d handles, segments and cells are kept, after the first %d", i+1, n, first)
			}
		}
		for _, x := range neighbours {
			ss[0].Free(x)
		}
		if len(c.borrowed) > 0 {
			t.Errorf("%d handles are kept", len(c.borrowed))
		}
		runtime.KeepAlive(own)
	}
}

// What one operation costs, beside the inner device's own work.
func BenchmarkCheckedCopy(b *testing.B) {
	for name, o := range map[string]Options{"races": {}, "scheduled": {Schedule: &Schedule{Seed: 3}}} {
		b.Run(name, func(b *testing.B) {
			_, _, ss, bs := rigged(b, o, 4)
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				j := memory.Bytes(i%512) * 64
				ss[0].Copy(bs[0].Slice(j, 64), bs[1].Slice(j, 64))
			}
		})
	}
}

// The inner device alone, to compare.
func BenchmarkPlainCopy(b *testing.B) {
	d, err := cpu.Open(cpu.Options{CopyThreads: 1})
	if err != nil {
		b.Fatal(err)
	}
	s, _ := d.NewStream("s")
	x, _ := d.Alloc(memory.Device, 1<<16, "x")
	y, _ := d.Alloc(memory.Device, 1<<16, "y")
	for i := 0; b.Loop(); i++ {
		j := memory.Bytes(i%512) * 64
		s.Copy(x.Slice(j, 64), y.Slice(j, 64))
	}
	s.Free(x)
	s.Free(y)
	if err := d.Close(); err != nil {
		b.Fatal(err)
	}
}

func BenchmarkCheckedReplay(b *testing.B) {
	_, _, ss, bs := rigged(b, Options{}, 2)
	ss[0].BeginCapture()
	for i := range 100 {
		ss[0].Copy(bs[0].Slice(memory.Bytes(i)*64, 64), bs[1].Slice(memory.Bytes(i)*64, 64))
	}
	g, err := ss[0].EndCapture()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		ss[0].Replay(g)
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/100, "ns/node")
}
