// This file owns attention in Go: blocks of scores that stay in the cache, with the running
// maximum and sum of each query (online softmax). The result of a query depends only on
// where blocks of keys begin, which are multiples of attendTile.

package nn

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

// attendStrip queries of every head of a group are one piece of work. They are so many that
// transposing the keys costs little beside the products with them, and so few that a short
// batch still gives several pieces.
const attendStrip = 8 * attendRows

func attendTwin(l *device.Launch) {
	w := newAttendWork(l.Args())
	strips := (w.seq + attendStrip - 1) / attendStrip
	parallel.For(w.batch*w.kvHeads*strips, 1, func(i, _ int) {
		// The last strip sees most keys. The longest work begins first.
		w.strip(i/strips/w.kvHeads, i/strips%w.kvHeads, strips-1-i%strips)
	})
}

// strip computes the queries of one strip for the heads that share a head of keys.
func (w *attendWork) strip(batch, kv, strip int) {
	from := strip * attendStrip
	to := min(from+attendStrip, w.seq)
	first := w.firstKey(from)
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	row := batch*w.seq + first
	f := forward{
		attendWork: w, batch: batch, first: first,
		keys:   w.k.loadTransposed(room, row, kv*w.keyDim, to-first, w.keyDim),
		values: w.v.load(room, row, kv*w.valueDim, to-first, w.valueDim),
		q:      room.alloc(attendRows * w.keyDim),
		s:      room.alloc(attendRows * attendTile),
		o:      room.alloc(attendRows * w.valueDim),
	}
	group := w.heads / w.kvHeads
	for head := kv * group; head < (kv+1)*group; head++ {
		for at := from; at < to; at += attendRows {
			f.block(head, at, min(attendRows, to-at))
		}
	}
}

// firstKey returns where the first block of keys begins that a query sees.
func (w *attendWork) firstKey(query int) int {
	return max(0, query-w.window+1) / attendTile * attendTile
}

// forward is the state of a strip.
type forward struct {
	*attendWork
	batch        int
	first        int       // the first key that is loaded
	keys, values []float32 // turned, in blocks; rows
	q, s, o      []float32 // a block of queries, of scores, of the output
	max, sum     [attendRows]float32
	shrink       [attendRows]float32 // the factor that scales earlier sums to a new maximum
}

// block computes n queries of a head.
func (f *forward) block(head, at, n int) {
	row, kd, vd := f.batch*f.seq+at, f.keyDim, f.valueDim
	f.attendWork.q.readTimes(f.q, row, head*kd, n, kd, f.scale)
	for r := range n {
		f.max[r], f.sum[r] = float32(math.Inf(-1)), 0
	}
	begin := f.firstKey(at)
	for j := begin; j < at+n; j += attendTile {
		keys := min(attendTile, at+n-j)
		gemm.Block(f.s, attendTile, f.q, kd, false, f.keys[(j-f.first)*kd:], attendTile, false, n, keys, kd, false)
		f.softmax(at, j, n)
		if j > begin {
			for r, by := range f.shrink[:n] {
				if o := f.o[r*vd : (r+1)*vd]; by != 1 {
					vec.Scale(o, o, by)
				}
			}
		}
		gemm.Block(f.o, vd, f.s, attendTile, false, f.values[(j-f.first)*vd:], vd, false, n, vd, keys, j > begin)
	}
	lse := f.lse[(f.batch*f.heads+head)*f.seq+at:][:n]
	for r := range n {
		f.attendWork.o.writeTimes(f.o[r*vd:], row+r, head*vd, 1, vd, 1/f.sum[r])
		lse[r] = f.max[r] + float32(math.Log(float64(f.sum[r])))
	}
}

// softmax turns the scores of n queries with the keys from j on into exponentials relative
// to the running maxima.
func (f *forward) softmax(at, j, n int) {
	hidden := float32(math.Inf(-1))
	var seen [attendRows][]float32
	for r := range n {
		seen[r] = f.visible(f.s[r*attendTile:][:attendTile], at+r, j, hidden)
		f.shrink[r] = 0
		if top := vec.Max(seen[r]); top > f.max[r] {
			f.shrink[r] = f.max[r] - top
			f.max[r] = top
		}
	}
	vec.Exp(f.shrink[:n], f.shrink[:n], 0)
	for r := range n {
		f.sum[r] = f.sum[r]*f.shrink[r] + vec.ExpSum(seen[r], seen[r], f.max[r])
	}
}
