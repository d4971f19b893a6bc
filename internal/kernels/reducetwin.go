// This file owns the twin of the reduction kernel. It uses a block of fp32 that stays in
// the first-level cache: it fills the block from the first run, combines every further
// run into it, and writes it out once.

package kernels

import (
	"math"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/parallel"
)

const (
	// twinBlock fp32 numbers take 8 KiB of the 32 to 48 KiB of such a cache; a
	// block of as many of a source and of the result fit beside it.
	twinBlock = 2048
	// twinChunk is what a goroutine takes at a time, and twinSpread the bytes
	// moved from which on there is more than one. Two threads over one on a
	// two-core machine, sum of two sources, fastest of 400 runs:
	//
	//	       768K  1.5M  3M    6M    12M
	//	f32    0.91  0.95  0.98  1.04  1.27
	//	bf16   1.06  1.51  1.27  1.64
	twinChunk  = 16 * twinBlock
	twinSpread = 3 << 19
)

// reduceTwin returns the twin for two formats.
func reduceTwin(from, to Number) func(l *device.Launch) {
	return func(l *device.Launch) {
		a := l.Args()
		w := reduceWork{
			from: from, to: to, op: ReduceOp(a[3]), over: math.Float32frombits(uint32(a[3] >> 32)),
			dst: a[0], acc: a[1], n: int(a[2]), count: int(uint8(a[3] >> 8)),
		}
		copy(w.src[:], a[4:])
		if w.n*(w.count*int(from.Size())+int(to.Size())) < twinSpread {
			w.span(0, w.n)
			return
		}
		j := reduceJobs.Get().(*reduceJob)
		j.reduceWork = w
		j.run()
		reduceJobs.Put(j)
	}
}

// reduceWork is the work of one launch.
type reduceWork struct {
	from, to Number
	op       ReduceOp
	over     float32
	dst, acc uint64
	src      [MaxReduceSources]uint64
	count, n int
}

// reduceJob divides one launch over several goroutines, which take chunks of elements.
type reduceJob struct {
	reduceWork
	next atomic.Int64 // chunks taken so far, may run past the end
	crew *parallel.Crew
}

// reduceJobs keeps finished jobs, so that a launch allocates nothing.
var reduceJobs = sync.Pool{New: func() any {
	j := new(reduceJob)
	j.crew = parallel.NewCrew(j.takeChunks)
	return j
}}

func (j *reduceJob) run() {
	j.next.Store(0)
	j.crew.Run(min(parallel.Threads(), (j.n+twinChunk-1)/twinChunk) - 1)
}

func (j *reduceJob) takeChunks() {
	for {
		at := (int(j.next.Add(1)) - 1) * twinChunk
		if at >= j.n {
			return
		}
		j.span(at, min(at+twinChunk, j.n))
	}
}

// span reduces the elements from at up to end.
func (w *reduceWork) span(at, end int) {
	var room [twinBlock]float32
	for ; at < end; at += twinBlock {
		w.block(at, room[:min(twinBlock, end-at)])
	}
}

// block reduces as many elements from at on as the room holds.
func (w *reduceWork) block(at int, room []float32) {
	n, srcs := len(room), w.src[:w.count]
	f32 := func(p uint64) []float32 { return device.Slice[float32](p+4*uint64(at), n) }
	bf16 := func(p uint64) []uint16 { return device.Slice[uint16](p+2*uint64(at), n) }
	first := room // where the numbers so far are
	switch {
	case w.acc != 0:
		first = f32(w.acc)
	case w.from == F32:
		first, srcs = f32(srcs[0]), srcs[1:]
	default:
		widen(room, bf16(srcs[0]))
		srcs = srcs[1:]
	}
	if w.from == BF16 || w.op == Max || len(srcs) == 0 {
		copy(room, first)
		first = room
	}
	for _, p := range srcs {
		switch {
		case w.from == F32 && w.op == Max:
			maxF32(room, f32(p))
		case w.from == F32:
			addF32(room, first, f32(p))
			first = room
		case w.op == Max:
			maxBF16(room, bf16(p))
		default:
			addBF16(room, bf16(p))
		}
	}
	if w.op == Mean {
		divide(room, w.over)
	}
	if w.to == F32 {
		storeF32(f32(w.dst), room)
	} else {
		storeBF16(bf16(w.dst), room)
	}
}

// There is one loop below for each format and operation, so that none has a branch in
// the common case. Each leaves as many numbers as it can to the assembly.

func widen(a []float32, x []uint16) {
	x = x[:len(a)]
	n := vectors(len(a))
	if n > 0 {
		widenAVX2(&a[0], &x[0], n)
	}
	for i := n; i < len(a); i++ {
		a[i] = math.Float32frombits(uint32(x[i]) << 16)
	}
}

// addF32 computes to = a + x.
func addF32(to, a, x []float32) {
	a, x = a[:len(to)], x[:len(to)]
	n := vectors(len(to))
	if n > 0 {
		addF32AVX2(&to[0], &a[0], &x[0], n)
	}
	for i := n; i < len(to); i++ {
		to[i] = a[i] + x[i]
	}
}

func addBF16(a []float32, x []uint16) {
	x = x[:len(a)]
	n := vectors(len(a))
	if n > 0 {
		addBF16AVX2(&a[0], &x[0], n)
	}
	for i := n; i < len(a); i++ {
		a[i] += math.Float32frombits(uint32(x[i]) << 16)
	}
}

// maxF32 computes a = max(a, x). It keeps the first of two zeros, and every NaN.
func maxF32(a, x []float32) {
	x = x[:len(a)]
	n := vectors(len(a))
	if n > 0 {
		maxF32AVX2(&a[0], &x[0], n)
	}
	for i := n; i < len(a); i++ {
		if v := x[i]; v > a[i] || v != v {
			a[i] = v
		}
	}
}

func maxBF16(a []float32, x []uint16) {
	var wide [256]float32
	for len(a) > 0 {
		n := min(len(wide), len(a))
		widen(wide[:n], x)
		maxF32(a[:n], wide[:n])
		a, x = a[n:], x[n:]
	}
}

func divide(a []float32, over float32) {
	n := vectors(len(a))
	if n > 0 {
		divideAVX2(&a[0], n, over)
	}
	for i := n; i < len(a); i++ {
		a[i] /= over
	}
}

const (
	nanF32  = 0x7fffffff
	nanBF16 = 0x7fff
)

func storeF32(to, a []float32) {
	to = to[:len(a)]
	n := vectors(len(a))
	if n > 0 {
		storeF32AVX2(&to[0], &a[0], n)
	}
	for i := n; i < len(a); i++ {
		v := a[i]
		if v != v {
			v = math.Float32frombits(nanF32)
		}
		to[i] = v
	}
}

// storeBF16 rounds to nearest even: it adds a little less than half of the last
// place kept, or exactly half if that place is odd, and cuts. A NaN would be
// carried into the sign.
func storeBF16(to []uint16, a []float32) {
	to = to[:len(a)]
	n := vectors(len(a))
	if n > 0 {
		storeBF16AVX2(&to[0], &a[0], n)
	}
	for i := n; i < len(a); i++ {
		b := math.Float32bits(a[i])
		b += 0x7fff + b>>16&1
		if a[i] != a[i] {
			b = nanBF16 << 16
		}
		to[i] = uint16(b >> 16)
	}
}
