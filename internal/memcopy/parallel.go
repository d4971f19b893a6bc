// This file owns copies over several goroutines.

package memcopy

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/stowage-dev/stowage/internal/parallel"
)

// chunkBytes is what a goroutine takes at a time: a multiple of every kernel's
// block, so that only the last chunk has a tail. Of 64 KiB, 128 KiB, 256 KiB and
// 1 MiB, 64 KiB lost 6 % at 64 MiB and 1 MiB lost all of the gain at 2 MiB.
const chunkBytes = 256 << 10

// Parallel is Copy over several goroutines, the caller's among them; threads <= 0
// means parallel.Threads. It returns when everything is copied. It panics if a helper reaches
// memory that is not there.
//
// Chunks are taken, not dealt: where a core is busy with something else, the
// others do its share. Goroutines are started afresh (0.5 µs) rather than kept,
// so there is nothing to shut down.
//
// Two threads over one: 2 MiB 1.3, 4 MiB 1.6, 16 MiB 1.8, 64 MiB 1.9. Below
// StreamFrom one thread is best: 1 MiB 0.9 and 512 KiB 0.7 on buffers copied
// again and again, since the helper's core has to fetch what lies in the caller's cache.
func Parallel(dst, src []byte, threads int) {
	n := min(len(dst), len(src))
	dst, src = dst[:n], src[:n]
	if threads == 1 || n < StreamFrom {
		Copy(dst, src)
		return
	}
	if threads <= 0 {
		threads = parallel.Threads() // takes a lock, hence after the small copies
	}
	if same(dst, src) {
		return
	}
	j := jobs.Get().(*job)
	j.dst, j.src = dst, src
	j.spread((n-lineGap(dst)+chunkBytes-1)/chunkBytes, threads)
	j.dst, j.src = nil, nil // the pool must not keep a caller's memory alive
	jobs.Put(j)
}

// Pieces copies n pieces that together have the given number of bytes, as one
// copy: from StreamFrom bytes in all on they are streamed, and spread over
// goroutines. It is for rows that lie in pages, each page a piece. Pieces must
// not overlap; piece is called from several goroutines at once, and the two
// slices it returns have the same length.
func Pieces(n, bytes, threads int, piece func(i int) (dst, src []byte)) {
	if bytes < StreamFrom {
		for i := range n {
			dst, src := piece(i)
			copy(dst, src)
		}
		return
	}
	if threads <= 0 {
		threads = parallel.Threads()
	}
	j := jobs.Get().(*job)
	j.piece, j.pieces, j.batch = piece, n, max(1, chunkBytes/max(bytes/n, 1))
	j.spread((n+j.batch-1)/j.batch, threads)
	j.piece = nil
	jobs.Put(j)
}

// jobs keeps finished jobs, so that a call allocates nothing.
var jobs = sync.Pool{New: func() any {
	j := new(job)
	j.crew = parallel.NewCrew(j.work)
	return j
}}

// job is one parallel copy. It is taken from the pool, the caller and its helpers work on
// it, and it is returned when all of them are done.
type job struct {
	dst, src []byte
	piece    func(i int) (dst, src []byte) // or this: pieces, a batch to a chunk
	pieces   int
	batch    int
	chunks   int
	next     atomic.Int64 // chunks taken so far, may run past chunks
	crew     *parallel.Crew
}

// spread copies the job's chunks with a number of goroutines, including the caller's.
func (j *job) spread(chunks, threads int) {
	j.chunks = chunks
	j.next.Store(0)
	j.crew.Run(min(threads, chunks) - 1)
}

// work copies chunks until none is left.
func (j *job) work() {
	for {
		c := int(j.next.Add(1)) - 1
		if c >= j.chunks {
			return
		}
		if j.piece != nil {
			copyPieces(c*j.batch, min((c+1)*j.batch, j.pieces), j.piece)
			continue
		}
		from, to := j.chunk(c)
		copyLarge(j.dst[from:to], j.src[from:to])
	}
}

// chunk returns the bytes of a chunk. All but the first start on a cache line of dst, so no
// two goroutines write to one line.
func (j *job) chunk(c int) (from, to int) {
	from = lineGap(j.dst) + c*chunkBytes
	to = min(from+chunkBytes, len(j.dst))
	if c == 0 {
		from = 0
	}
	return from, to
}

// copyPieces copies a range of pieces. It joins pieces that follow each other on both
// sides, as pages from a fresh pool do.
func copyPieces(from, to int, piece func(i int) (dst, src []byte)) {
	dst, src := piece(from)
	for i := from + 1; i < to; i++ {
		d, s := piece(i)
		if best != kindPlain && follows(dst, d) && follows(src, s) {
			dst, src = unsafe.Slice(&dst[0], len(dst)+len(d)), unsafe.Slice(&src[0], len(src)+len(s))
			continue
		}
		copyUnfenced(dst, src)
		dst, src = d, s
	}
	copyUnfenced(dst, src)
	if best != kindPlain {
		storeFence()
	}
}

// follows reports whether b begins where a ends.
func follows(a, b []byte) bool { return len(a) > 0 && address(a)+uintptr(len(a)) == address(b) }

func copyUnfenced(dst, src []byte) {
	if best == kindPlain {
		copyPiece(dst, src)
	} else {
		streamUnfenced(best, dst, src)
	}
}
