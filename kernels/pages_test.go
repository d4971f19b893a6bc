// This file owns the tests of the page kernels.

package kernels

import (
	"encoding/binary"
	"errors"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
)

// pageCase is one draw: a pool, a run, and a table between them.
type pageCase struct {
	page, pages int // bytes of a page, pages of the pool
	at, n       int // where the run begins, how long it is
	table       []uint32
	counted     bool
	count       uint64
}

const (
	tableAt = 80 * device.KiB // in the buffer of the run
	countAt = 95 * device.KiB
	runMost = 70000
)

// drawPages draws a case whose pool and run fit the lab. A table for scatter
// names no page twice, one for gather may.
func drawPages(t *rapid.T, repeat bool) pageCase {
	c := pageCase{
		page: 16 * rapid.OneOf(rapid.IntRange(1, 40), rapid.SampledFrom([]int{64, 255, 256, 257, 512, 1024})).Draw(t, "vectors of a page"),
		at:   start().Draw(t, "run"),
	}
	c.pages = rapid.IntRange(1, min(int(room)/c.page, 3000)).Draw(t, "pages")
	most := min(runMost, c.page*c.pages)
	c.n = min(most, length(most).Draw(t, "length"))
	c.table = make([]uint32, (c.n+c.page-1)/c.page)
	numbers := rapid.Permutation(upTo(c.pages)).Draw(t, "numbers")
	for k := range c.table {
		c.table[k] = uint32(numbers[k])
		if repeat {
			c.table[k] = uint32(numbers[rapid.IntRange(0, c.pages-1).Draw(t, "entry")])
		}
	}
	if c.counted = rapid.Bool().Draw(t, "counted"); c.counted {
		c.count = rapid.OneOf(rapid.Uint64Range(0, uint64(c.n)), rapid.Uint64()).Draw(t, "count")
	}
	return c
}

func upTo(n int) []int {
	s := make([]int, n)
	for i := range s {
		s[i] = i
	}
	return s
}

// live is how many bytes a case copies.
func (c pageCase) live() int {
	if c.counted && c.count < uint64(c.n) {
		return int(c.count)
	}
	return c.n
}

// move is the model: byte by byte, calling f with the offset in the run and the
// offset in the pool.
func (c pageCase) move(f func(run, paged int)) {
	for i := range c.live() {
		f(i, int(c.table[i/c.page])*c.page+i%c.page)
	}
}

// describe puts table and count behind the run and says where everything is.
// Entries beyond the live pages are garbage that must not be looked at.
func (c pageCase) describe(pool, run *device.Buffer, text []byte) Paged {
	live := (c.live() + c.page - 1) / c.page
	for k, number := range c.table {
		if k >= live {
			number = 0xdeadbeef
		}
		binary.LittleEndian.PutUint32(text[int(tableAt)+4*k:], number)
	}
	p := Paged{
		Pool:  pool.Slice(0, device.Bytes(c.page*c.pages)),
		Page:  device.Bytes(c.page),
		Table: run.Slice(tableAt, device.Bytes(4*len(c.table))),
	}
	if c.counted {
		binary.LittleEndian.PutUint64(text[countAt:], c.count)
		p.Count = run.Slice(countAt, 8)
	}
	return p
}

// SPEC S1.1: rows whose number only the device knows, exactly the live bytes.
func TestScatterPages(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		rapid.Check(t, func(t *rapid.T) {
			c := drawPages(t, false)
			pool, run := x.buf[rapid.IntRange(0, 1).Draw(t, "pool")][0], x.buf[rapid.IntRange(0, 1).Draw(t, "from")][1]
			inPool, inRun := noise(room, 20), noise(room, 21)
			p := c.describe(pool, run, inRun)
			x.Upload(pool.All(), inPool)
			x.Upload(run.All(), inRun)
			l := ScatterPagesLaunch(p, run.Slice(device.Bytes(c.at), device.Bytes(c.n)))
			grid(t, &l)
			x.Launch(l)
			c.move(func(i, paged int) { inPool[paged] = inRun[c.at+i] })
			x.want(t, pool, inPool)
			x.want(t, run, inRun)
		})
	})
}

func TestGatherPages(t *testing.T) {
	each(t, func(t *testing.T, x *lab) {
		rapid.Check(t, func(t *rapid.T) {
			c := drawPages(t, true)
			pool, run := x.buf[rapid.IntRange(0, 1).Draw(t, "pool")][0], x.buf[rapid.IntRange(0, 1).Draw(t, "to")][1]
			inPool, inRun := noise(room, 22), noise(room, 23)
			p := c.describe(pool, run, inRun)
			x.Upload(pool.All(), inPool)
			x.Upload(run.All(), inRun)
			l := GatherPagesLaunch(run.Slice(device.Bytes(c.at), device.Bytes(c.n)), p)
			grid(t, &l)
			x.Launch(l)
			c.move(func(i, paged int) { inRun[c.at+i] = inPool[paged] })
			x.want(t, pool, inPool)
			x.want(t, run, inRun)
		})
	})
}

// More than the blocks that fit on a GPU at once, in each of the shapes that a
// launch can choose: out through one table and back, with a count in between.
func TestPagesThereAndBack(t *testing.T) {
	const page, n = 64 * device.KiB, 20*device.MiB + 12345
	each(t, func(t *testing.T, x *lab) {
		pages := int((n + page - 1) / page)
		pool, src, dst := x.alloc(device.Accel, page*device.Bytes(pages)), x.alloc(device.Accel, n), x.alloc(device.Accel, n)
		data, table := noise(n, 24), make([]byte, 4*pages)
		for k := range pages {
			binary.LittleEndian.PutUint32(table[4*k:], uint32((k*7+3)%pages)) // 321 pages: 7 divides them not
		}
		small := x.buf[device.Accel][0]
		x.Upload(src.All(), data)
		x.Upload(small.Slice(0, device.Bytes(len(table))), table)
		p := Paged{Pool: pool.All(), Page: page, Table: small.Slice(0, device.Bytes(len(table)))}
		for _, count := range []device.Bytes{n, n / 3, 0} {
			x.Upload(small.Slice(8192, 8), binary.LittleEndian.AppendUint64(nil, uint64(count)))
			x.Stream.Fill(dst.All(), 0)
			q := p
			q.Count = small.Slice(8192, 8)
			ScatterPages(x.Stream, p, src.All())
			GatherPages(x.Stream, dst.All(), q)
			want := make([]byte, n)
			copy(want[:count], data)
			x.want(t, dst, want)
		}
		for _, b := range []*device.Buffer{pool, src, dst} {
			x.Stream.Free(b)
		}
	})
}

// An entry that is no page of the pool fails the device instead of touching
// memory that belongs to others. On a GPU that ends the process's context, so
// that this test stays on the CPU.
func TestPageNumberOutsideThePool(t *testing.T) {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := d.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	b, err := d.Alloc(device.Accel, device.KiB, "test")
	if err != nil {
		t.Fatal(err)
	}
	s.Upload(b.Slice(512, 8), []byte{1, 0, 0, 0, 4, 0, 0, 0})
	ScatterPages(s, Paged{Pool: b.Slice(0, 256), Page: 64, Table: b.Slice(512, 8)}, b.Slice(600, 100))
	var failed *device.DriverError
	if err := s.Sync(); !errors.As(err, &failed) || !strings.Contains(err.Error(), "entry 1 of a page table is page 4 of a pool of 4 pages") {
		t.Errorf("error %v", err)
	}
	s.Free(b)
	_ = s.Close() // says the same again
	_ = d.Close()
}

func FuzzPages(f *testing.F) {
	f.Add([]byte{2, 0, 1}, []byte("forty-eight bytes that are scattered into pages."), uint8(1), uint64(100))
	f.Add([]byte{0}, []byte("x"), uint8(3), uint64(0))
	f.Fuzz(func(t *testing.T, order, data []byte, vectors uint8, count uint64) {
		c := pageCase{page: 16 * (int(vectors)%64 + 1), pages: 256, counted: count%2 == 0, count: count / 2}
		for _, number := range order {
			if !slices.Contains(c.table, uint32(number)) {
				c.table = append(c.table, uint32(number))
			}
		}
		c.n = min(len(data), c.page*len(c.table))
		c.table = c.table[:(c.n+c.page-1)/c.page]
		// The pool must begin at a multiple of 16, which Go promises for large
		// slices only.
		src, dst, pool := append([]byte(nil), data[:c.n]...), make([]byte, c.n), make([]byte, c.page*c.pages+64<<10)
		side := make([]byte, room)
		p := c.describe(rangeOf(t, pool, 0, len(pool)).Buf, rangeOf(t, side, 0, len(side)).Buf, side)
		run(ScatterPagesLaunch(p, rangeOf(t, src, 0, c.n)))
		run(GatherPagesLaunch(rangeOf(t, dst, 0, c.n), p))
		want := make([]byte, c.n)
		copy(want, src[:c.live()])
		if string(dst) != string(want) {
			t.Fatalf("%q came back as %q", src, dst)
		}
	})
}
