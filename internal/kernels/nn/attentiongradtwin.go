// This file owns the backward pass of attention in Go. Scores are computed again,
// block by block, from LSE. With P the weights, D the sums of O * DO along rows and
// Q already scaled,
//
//	dP = DO Vᵀ    dS = P dP - P D    dV = Pᵀ DO    dK = dSᵀ Q    dQ = Scale dS K
//
// A piece of work is a head of keys with all queries that use it: dK and dV are
// sums over its heads of queries and their blocks in order, dQ over blocks of keys
// in order. Each product is done once; pieces of single blocks would take two of the
// five twice.

package nn

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

func attendGradTwin(l *device.Launch) {
	w := newAttendWork(l.Args())
	parallel.For(w.batch*w.kvHeads, 1, func(i, _ int) {
		w.gradients(i/w.kvHeads, i%w.kvHeads)
	})
}

// gradients computes the gradients of one head of keys and values, and of the
// queries that use it.
func (w *attendWork) gradients(batch, kv int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	row, kd, vd := batch*w.seq, w.keyDim, w.valueDim
	b := backward{
		attendWork: w, batch: batch,
		keys:       w.k.load(room, row, kv*kd, w.seq, kd),
		turnedKeys: w.k.loadTransposed(room, row, kv*kd, w.seq, kd),
		turnedVals: w.v.loadTransposed(room, row, kv*vd, w.seq, vd),
		dk:         room.alloc(w.seq * kd),
		dv:         room.alloc(w.seq * vd),
		q:          room.alloc(attendRows * kd),
		dq:         room.alloc(attendRows * kd),
		o:          room.alloc(attendRows * vd),
		do:         room.alloc(attendRows * vd),
		p:          room.alloc(attendRows * attendTile),
		ds:         room.alloc(attendRows * attendTile),
	}
	clear(b.dk)
	clear(b.dv)
	group := w.heads / w.kvHeads
	for head := kv * group; head < (kv+1)*group; head++ {
		for at := 0; at < w.seq; at += attendRows {
			b.block(head, at, min(attendRows, w.seq-at))
		}
	}
	w.dk.write(b.dk, row, kv*kd, w.seq, kd)
	w.dv.write(b.dv, row, kv*vd, w.seq, vd)
}

// backward is the state of a head of keys.
type backward struct {
	*attendWork
	batch                  int
	keys                   []float32 // rows
	turnedKeys, turnedVals []float32 // in blocks
	dk, dv                 []float32 // sums so far
	q, dq, o, do           []float32 // blocks of queries
	p, ds                  []float32 // blocks of weights and of their gradients
}

// block adds the contribution of n queries of a head.
func (b *backward) block(head, at, n int) {
	row, kd, vd := b.batch*b.seq+at, b.keyDim, b.valueDim
	b.attendWork.q.readTimes(b.q, row, head*kd, n, kd, b.scale)
	b.attendWork.o.read(b.o, row, head*vd, n, vd)
	b.attendWork.do.read(b.do, row, head*vd, n, vd)
	rows := (b.batch*b.heads+head)*b.seq + at
	lse, delta := b.lse[rows:][:n], b.delta[rows:][:n]
	for r := range n {
		delta[r] = vec.Dot(b.o[r*vd:(r+1)*vd], b.do[r*vd:(r+1)*vd])
	}
	dq := b.dq[:n*kd]
	begin := b.firstKey(at)
	for j := begin; j < at+n; j += attendTile {
		keys := min(attendTile, at+n-j)
		gemm.Block(b.p, attendTile, b.q, kd, false, b.turnedKeys[j*kd:], attendTile, false, n, keys, kd, false)
		gemm.Block(b.ds, attendTile, b.do, vd, false, b.turnedVals[j*vd:], attendTile, false, n, keys, vd, false)
		for r := range n {
			p := b.visible(b.p[r*attendTile:][:attendTile], at+r, j, float32(math.Inf(-1)))
			ds := b.visible(b.ds[r*attendTile:][:attendTile], at+r, j, 0)
			vec.Exp(p, p, lse[r])
			vec.NormGrad(ds, ds, p, p, 1, delta[r])
		}
		gemm.Block(b.dv[j*vd:], vd, b.p, attendTile, true, b.do, vd, false, keys, vd, n, true)
		gemm.Block(b.dk[j*kd:], kd, b.ds, attendTile, true, b.q, kd, false, keys, kd, n, true)
		gemm.Block(dq, kd, b.ds, attendTile, false, b.keys[j*kd:], kd, false, n, kd, keys, j > begin)
	}
	b.attendWork.dq.writeTimes(dq, row, head*kd, n, kd, b.scale)
}
