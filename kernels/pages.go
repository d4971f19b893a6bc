// This file owns the page kernels: copies between a dense run of bytes and the
// pages of a pool, with the page numbers and, if need be, the number of bytes read
// on the device.

package kernels

import (
	_ "embed"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/memcopy"
)

//go:embed pages_sm80.ptx
var pagesPTX string

var (
	pagesImage    = image("pages.cu", pagesPTX)
	scatterKernel = device.Kernel{Name: "stowage_scatter_pages", Image: pagesImage, Go: scatterGo}
	gatherKernel  = device.Kernel{Name: "stowage_gather_pages", Image: pagesImage, Go: gatherGo}
)

// Paged says where the pages of a run of bytes are. Bytes [k*Page, (k+1)*Page) of
// the run live in the page of the pool whose number is entry k of the table; the
// last page may be used in part. An entry that is used must be the number of a
// page of the pool: anything else fails the device.
type Paged struct {
	Pool  device.Range // begins at a multiple of 16 bytes; a last piece that fills no page is not used
	Page  device.Bytes // size of a page, a multiple of 16
	Table device.Range // uint32 entries
	// Count, if it has a buffer, is a uint64 on the device: the number of bytes
	// to copy. More than the run holds counts as all of it.
	Count device.Range
}

// ScatterPagesLaunch copies src into pages of the pool. The whole pool is
// declared, because only the table knows which pages it will be.
func ScatterPagesLaunch(p Paged, src device.Range) device.Launch {
	l := p.launch(&scatterKernel, src)
	l.Write(p.Pool)
	l.Read(src)
	p.args(&l, src.Len)
	return l
}

// GatherPagesLaunch copies pages of the pool to dst. What lies behind the counted
// bytes of dst stays as it is. A page may be gathered more than once.
func GatherPagesLaunch(dst device.Range, p Paged) device.Launch {
	l := p.launch(&gatherKernel, dst)
	l.Write(dst)
	l.Read(p.Pool)
	p.args(&l, dst.Len)
	return l
}

// ScatterPages issues [ScatterPagesLaunch].
func ScatterPages(s device.Stream, p Paged, src device.Range) { s.Launch(ScatterPagesLaunch(p, src)) }

// GatherPages issues [GatherPagesLaunch].
func GatherPages(s device.Stream, dst device.Range, p Paged) { s.Launch(GatherPagesLaunch(dst, p)) }

// maxPage keeps the offset of an element in a page, and a batch of elements
// behind it, within 32 bits.
const maxPage = device.GiB

func (p Paged) launch(k *device.Kernel, run device.Range) device.Launch {
	if p.Page <= 0 || p.Page > maxPage || p.Page%16 != 0 {
		panic(fmt.Sprintf("kernels: pages of %d bytes; a page is a multiple of 16 bytes, at most %v", int64(p.Page), maxPage))
	}
	mustAlign("a page pool", p.Pool, 16)
	mustAlign("a page table", p.Table, 4)
	mustHold("a page table", p.Table, p.tableBytes(run.Len))
	if run.Addr() < p.Pool.Addr()+uintptr(p.Pool.Len) && p.Pool.Addr() < run.Addr()+uintptr(run.Len) {
		panic(fmt.Sprintf("kernels: the pages in %s and the run in %s overlap", p.Pool, run))
	}
	return device.NewLaunch(k, blocksFor(run.Len, p.part(run.Len), p.Pool, run), moveThreads)
}

func (p Paged) tableBytes(n device.Bytes) device.Bytes { return 4 * ((n + p.Page - 1) / p.Page) }

// args appends what both kernels take behind the two addresses.
func (p Paged) args(l *device.Launch, n device.Bytes) {
	l.Read(p.Table.Slice(0, p.tableBytes(n)))
	l.Arg(uint64(n))
	if p.Count.Buf == nil {
		l.Arg(0)
	} else {
		mustAlign("a count", p.Count, 8)
		mustHold("a count", p.Count, 8)
		l.Read(p.Count.Slice(0, 8))
	}
	l.Arg(uint64(p.Page))
	l.Arg(uint64(p.Pool.Len / p.Page))
	l.Arg(uint64(p.part(n)))
}

// part is how many of at most n bytes a block moves at a time. As long as all
// blocks fit on the GPU at once, the least takes the shortest time; beyond that
// 16 KiB are fastest. Where only the device knows the number of bytes, the grid
// must suffice for all n, and blocks that find nothing to do cost 0.6 ns each: with
// an eighth of 1 GiB to move, 32 KiB a block ran at 3.5 TB/s and 16 KiB at 2.7.
func (p Paged) part(n device.Bytes) device.Bytes {
	switch {
	case n <= 2048*moveChunk:
		return moveChunk
	case p.Count.Buf == nil:
		return 4 * moveChunk
	}
	return 8 * moveChunk
}

func scatterGo(l *device.Launch) {
	a := l.Args()
	eachPage(a, func(paged, run uint64, n int) {
		memcopy.Copy(device.Slice[byte](a[0]+paged, n), device.Slice[byte](a[1]+run, n))
	})
}

func gatherGo(l *device.Launch) {
	a := l.Args()
	eachPage(a, func(paged, run uint64, n int) {
		memcopy.Copy(device.Slice[byte](a[0]+run, n), device.Slice[byte](a[1]+paged, n))
	})
}

// eachPage calls move with the offsets in pool and run of the n bytes of every
// page that is used.
func eachPage(args []uint64, move func(paged, run uint64, n int)) {
	table, n, count, page, limit := args[2], args[3], args[4], args[5], args[6]
	if count != 0 {
		n = min(n, device.Slice[uint64](count, 1)[0])
	}
	entries := device.Slice[uint32](table, int((n+page-1)/page))
	for k, number := range entries {
		if uint64(number) >= limit {
			panic(fmt.Sprintf("entry %d of a page table is page %d of a pool of %d pages", k, number, limit))
		}
		run := uint64(k) * page
		move(uint64(number)*page, run, int(min(page, n-run)))
	}
}
