// This file owns the scan in Go: what its passes share, and the forward pass.
//
// In a chunk of q tokens let L_ij, i >= j, be the decay from token j to token i, the
// product of the decays of tokens j+1 to i, and u = dt x. Then, with the state S
// that enters the chunk, as matrices,
//
//	y = (L ∘ C Bᵀ) u + diag(decay from the start) C Sᵀ + D x
//	S' = (decay of the chunk) S + uᵀ diag(decay to the end) B
//
// so that nearly all work is products, and C Bᵀ serves all heads of a group. Decays
// are multiplied up token by token: differences of a running sum of logarithms
// would lose digits where the sum is large.

package nn

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

// scanWork is what every launch shares.
type scanWork struct {
	seq, batch, heads, headDim, groups, state int
	chunk, chunks                             int            // tokens of a chunk, and chunks
	between                                   kernels.Number // the type of states
	xbc, dt                                   view
	a, bias                                   []float32 // of heads: -exp(ALog), DTBias
	params                                    kernels.Number
}

func newScanWork(xbc, dt, aLog, bias uint64, shape []uint64) *scanWork {
	low, high := func(i int) int { return int(uint32(shape[i])) }, func(i int) int { return int(shape[i] >> 32) }
	w := &scanWork{
		seq: low(0), batch: high(0), heads: low(1), headDim: high(1), groups: low(2), state: high(2),
		chunk: plainChunk, between: kernels.F32,
		xbc:    view{addr: xbc, typ: kernels.Number(low(4)), pitch: low(3)},
		dt:     view{addr: dt, typ: kernels.Number(low(4)), pitch: high(3)},
		params: kernels.Number(high(4)),
	}
	if onTensor(w.xbc.typ, w.headDim, w.state) {
		w.chunk, w.between = tensorChunk, kernels.BF16
	}
	w.chunks = runsOf(w.seq, w.chunk)
	w.a, w.bias = w.perHead(aLog), w.perHead(bias)
	for h, x := range w.a {
		w.a[h] = float32(-math.Exp(float64(x)))
	}
	return w
}

// perHead reads a parameter.
func (w *scanWork) perHead(addr uint64) []float32 {
	to := make([]float32, w.heads)
	view{addr: addr, typ: w.params}.read(to, 0, 0, 1, w.heads)
	return to
}

// colB and colC return the columns of XBC where B and C of a group begin.
func (w *scanWork) colB(g int) int { return w.heads*w.headDim + g*w.state }
func (w *scanWork) colC(g int) int { return w.colB(w.groups + g) }

// stateOf returns the state of a head behind a chunk, in the layout of States, as one row.
func (w *scanWork) stateOf(states uint64, b, chunk, h int) view {
	n := w.headDim * w.state
	at := (b*(w.chunks-1)+chunk)*w.heads + h
	return view{addr: states + uint64(int(w.between.Size())*at*n), typ: w.between}
}

// readState returns it as fp32, in room unless it is fp32.
func (w *scanWork) readState(room []float32, states uint64, b, chunk, h int) []float32 {
	return w.stateOf(states, b, chunk, h).rowPart(room, 0, 0)
}

// span returns the first row of a chunk and the number of its tokens.
func (w *scanWork) span(b, chunk int) (row, q int) {
	at := chunk * w.chunk
	return b*w.seq + at, min(w.chunk, w.seq-at)
}

// steps has what a chunk's tokens need for one head.
type steps struct {
	raw   [tensorChunk]float32 // dt before the softplus
	dt    [tensorChunk]float32
	decay [tensorChunk]float32 // exp(dt a)
}

// fill computes the steps from q numbers that lie stride apart.
func (s *steps) fill(raw []float32, stride, q int, bias, a float32) {
	for i := range q {
		s.raw[i] = raw[i*stride] + bias
	}
	vec.Exp(s.dt[:q], s.raw[:], 0)
	for i, x := range s.raw[:q] {
		// log(1 + e^x) = x + log(1 + e^-x), and e^-20 is below a rounding of 20.
		if x > 20 {
			s.dt[i] = x
		} else {
			s.dt[i] = float32(math.Log1p(float64(s.dt[i])))
		}
	}
	vec.Scale(s.decay[:q], s.dt[:], a)
	vec.Exp(s.decay[:q], s.decay[:], 0)
}

// faint is the decay below which products are left out: those with numbers below 1.2e-38
// take many times as long.
const faint = 1e-30

func dropFaint(x float32) float32 {
	if x < faint {
		return 0
	}
	return x
}

// toEnd sets, for each of q tokens, the decay from the token to the end of the chunk, and
// returns the decay of the whole chunk.
func (s *steps) toEnd(to []float32, q int) (all float32) {
	all = 1
	for i := q - 1; i >= 0; i-- {
		to[i] = all
		all = dropFaint(all * s.decay[i])
	}
	return all
}

// fromStart sets, for each of q tokens, the decay of the state that enters the chunk.
func (s *steps) fromStart(to []float32, q int) {
	all := float32(1)
	for i := range q {
		all = dropFaint(all * s.decay[i])
		to[i] = all
	}
}

// lower fills a square of rows apart with L. Numbers above the diagonal become zero.
func (s *steps) lower(l []float32, apart, q int) {
	first := 0 // the numbers of the row before it are zero: they grow towards the diagonal
	for i := range q {
		row := l[i*apart:][:q]
		clear(row[:first])
		if i > 0 {
			vec.Scale(row[first:i], l[(i-1)*apart+first:], s.decay[i])
		}
		for ; first < i && row[first] < faint; first++ {
			row[first] = 0
		}
		row[i] = 1
		clear(row[i+1:])
	}
}

// bands calls f for the bands of rows of a triangle. Products with it can then skip most of
// the zeros of its square.
func bands(q int, f func(from, to int)) {
	const rows = plainChunk / 2
	for at := 0; at < q; at += rows {
		f(at, min(at+rows, q))
	}
}

// scaleRows multiplies row i of n numbers by f[i].
func scaleRows(to, from, f []float32, n int) {
	for i, x := range f {
		vec.Scale(to[i*n:(i+1)*n], from[i*n:], x)
	}
}

func scanStateGo(l *device.Launch) {
	a := l.Args()
	w := newScanWork(a[1], a[2], a[3], a[4], a[5:10])
	parallel.For(w.batch*w.heads, 1, func(i, _ int) { w.carry(a[0], i/w.heads, i%w.heads) })
}

// carry computes the states of one head over a sequence. Only the last chunk can be short,
// and nothing needs the state behind it.
func (w *scanWork) carry(states uint64, b, h int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	q, g := w.chunk, h/(w.heads/w.groups)
	u, bt := room.alloc(q*w.headDim), room.alloc(q*w.state)
	raw, end := room.alloc(q), room.alloc(q)
	state := room.alloc(w.headDim * w.state)
	var s steps
	for chunk := range w.chunks - 1 {
		row, _ := w.span(b, chunk)
		w.dt.read(raw, row, h, q, 1)
		s.fill(raw, 1, q, w.bias[h], w.a[h])
		all := s.toEnd(end, q)
		vec.Mul(end, end, s.dt[:])
		w.xbc.read(u, row, h*w.headDim, q, w.headDim)
		scaleRows(u, u, end, w.headDim)
		w.xbc.read(bt, row, w.colB(g), q, w.state)
		if chunk > 0 {
			vec.Scale(state, state, all)
		}
		gemm.Block(state, w.state, u, w.headDim, true, bt, w.state, false, w.headDim, w.state, q, chunk > 0)
		w.stateOf(states, b, chunk, h).write(state, 0, 0, 1, len(state))
	}
}

func scanGo(l *device.Launch) {
	a := l.Args()
	f := scanForward{scanWork: newScanWork(a[1], a[2], a[3], a[5], a[7:12]), states: a[6]}
	f.d = f.perHead(a[4])
	f.y = view{addr: a[0], typ: f.xbc.typ, pitch: int(a[12])}
	parallel.For(f.batch*f.chunks*f.groups, 1, func(i, _ int) { f.compute(i/f.groups/f.chunks, i/f.groups%f.chunks, i%f.groups) })
}

type scanForward struct {
	*scanWork
	y      view
	d      []float32
	states uint64
}

// compute computes the output of the heads of a group in a chunk.
func (f *scanForward) compute(b, chunk, g int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	row, q := f.span(b, chunk)
	p, n, heads := f.headDim, f.state, f.heads/f.groups
	bt, ct, cs := room.alloc(q*n), room.alloc(q*n), room.alloc(q*n)
	x, u, y := room.alloc(q*p), room.alloc(q*p), room.alloc(q*p)
	cb, m := room.alloc(q*f.chunk), room.alloc(q*f.chunk)
	state := room.alloc(p * n)
	raw, start := room.alloc(q*heads), room.alloc(q)
	f.xbc.read(bt, row, f.colB(g), q, n)
	f.xbc.read(ct, row, f.colC(g), q, n)
	f.dt.read(raw, row, g*heads, q, heads)
	gemm.Block(cb, f.chunk, ct, n, false, bt, n, true, q, q, n, false)
	var s steps
	for i := range heads {
		h := g*heads + i
		s.fill(raw[i:], heads, q, f.bias[h], f.a[h])
		f.xbc.read(x, row, h*p, q, p)
		scaleRows(u, x, s.dt[:q], p)
		s.lower(m, f.chunk, q)
		for j := range q {
			vec.Mul(m[j*f.chunk:][:j+1], m[j*f.chunk:], cb[j*f.chunk:])
		}
		vec.Scale(y, x, f.d[h])
		bands(q, func(from, to int) {
			gemm.Block(y[from*p:], p, m[from*f.chunk:], f.chunk, false, u, p, false, to-from, p, to, true)
		})
		if chunk > 0 {
			s.fromStart(start, q)
			scaleRows(cs, ct, start, n)
			gemm.Block(y, p, cs, n, false, f.readState(state, f.states, b, chunk-1, h), n, true, q, p, n, true)
		}
		f.y.write(y, row, h*p, q, p)
	}
}
