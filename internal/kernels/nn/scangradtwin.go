// This file owns the backward pass of the scan in Go.
//
// With the words of scantwin.go, M = L ∘ C Bᵀ and dS' the gradient of the state that
// leaves the chunk:
//
//	du = Mᵀ dy + diag(decay to the end) B dS'ᵀ
//	dC = (L ∘ dy uᵀ) B + diag(decay from the start) dy S
//	dB = (L ∘ dy uᵀ)ᵀ C + diag(decay to the end) u dS'
//	dS = (decay of the chunk) dS' + dyᵀ diag(decay from the start) C
//
// The logarithm of token t's decay counts in all that passes t: from a token j < t
// to a token i >= t, from the state that enters to i, from j to the state that
// leaves, and from state to state. Its gradient is the sum of these four.

package nn

import (
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
	"github.com/stowage-dev/stowage/internal/vec"
)

func scanGradStateGo(l *device.Launch) {
	a := l.Args()
	w := newScanWork(a[1], a[2], a[3], a[4], a[5:10])
	dy := view{addr: a[10], typ: w.xbc.typ, pitch: int(a[11])}
	parallel.For(w.batch*w.heads, 1, func(i, _ int) { w.carryBack(a[0], dy, i/w.heads, i%w.heads) })
}

// carryBack computes the gradients of the states of one head over a sequence, the last one
// first.
func (w *scanWork) carryBack(grads uint64, dy view, b, h int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	g := h / (w.heads / w.groups)
	d, ct := room.alloc(w.chunk*w.headDim), room.alloc(w.chunk*w.state)
	raw, start := room.alloc(w.chunk), room.alloc(w.chunk)
	state := room.alloc(w.headDim * w.state)
	var s steps
	for chunk := w.chunks - 1; chunk > 0; chunk-- {
		row, q := w.span(b, chunk)
		w.dt.read(raw, row, h, q, 1)
		s.fill(raw, 1, q, w.bias[h], w.a[h])
		s.fromStart(start, q)
		dy.read(d, row, h*w.headDim, q, w.headDim)
		scaleRows(d, d, start[:q], w.headDim)
		w.xbc.read(ct, row, w.colC(g), q, w.state)
		last := chunk == w.chunks-1
		if !last {
			vec.Scale(state, state, start[q-1])
		}
		gemm.Block(state, w.state, d, w.headDim, true, ct, w.state, false, w.headDim, w.state, q, !last)
		w.stateOf(grads, b, chunk-1, h).write(state, 0, 0, 1, len(state))
	}
}

func scanGradGo(l *device.Launch) {
	a := l.Args()
	f := scanBackward{scanWork: newScanWork(a[1], a[2], a[3], a[5], a[7:12]), states: a[6], grads: a[0]}
	f.d = f.perHead(a[4])
	for i, v := range []*view{&f.dy, &f.dxbc, &f.ddt} {
		*v = view{addr: a[12+i], typ: f.xbc.typ, pitch: int(a[15] >> (pitchBits * i) & (1<<pitchBits - 1))}
	}
	states := int(f.between.Size()) * f.batch * (f.chunks - 1) * f.heads * f.headDim * f.state
	f.sums = device.Slice[float32](a[0]+uint64((states+15)/16*16), f.batch*f.chunks*scanSums*f.heads)
	parallel.For(f.batch*f.chunks*f.groups, 1, func(i, _ int) { f.compute(i/f.groups/f.chunks, i/f.groups%f.chunks, i%f.groups) })
}

// scanSums is the number of sums of a chunk and head: the gradients of ALog, D and
// DTBias.
const scanSums = 3

type scanBackward struct {
	*scanWork
	dy, dxbc, ddt view
	d             []float32
	states, grads uint64
	sums          []float32
}

// scanTile is the memory for one chunk of a group.
type scanTile struct {
	b, c, db, dc, n []float32 // q x State; n is for passing results
	x, u, dy, du, p []float32 // q x HeadDim
	cb, l, m, dm    []float32 // q x tokens of a chunk
	dcb             []float32 // the gradient of C Bᵀ, of all heads so far
	raw, draw       []float32 // q x heads of the group
	start, end      []float32
	in, out         []float32 // states
	s               steps
	da              [tensorChunk]float32 // gradients of the logarithms of decays
}

// compute computes all gradients of the heads of a group in a chunk.
func (f *scanBackward) compute(b, chunk, g int) {
	room := attendRooms.Get().(*attendRoom)
	defer attendRooms.Put(room)
	room.reset()
	row, q := f.span(b, chunk)
	p, n, heads := f.headDim, f.state, f.heads/f.groups
	var t scanTile
	for _, to := range []*[]float32{&t.b, &t.c, &t.db, &t.dc, &t.n} {
		*to = room.alloc(q * n)
	}
	for _, to := range []*[]float32{&t.x, &t.u, &t.dy, &t.du, &t.p} {
		*to = room.alloc(q * p)
	}
	for _, to := range []*[]float32{&t.cb, &t.l, &t.m, &t.dm, &t.dcb} {
		*to = room.alloc(q * f.chunk)
	}
	t.raw, t.draw, t.start, t.end = room.alloc(q*heads), room.alloc(q*heads), room.alloc(q), room.alloc(q)
	t.in, t.out = room.alloc(p*n), room.alloc(p*n)

	f.xbc.read(t.b, row, f.colB(g), q, n)
	f.xbc.read(t.c, row, f.colC(g), q, n)
	f.dt.read(t.raw, row, g*heads, q, heads)
	gemm.Block(t.cb, f.chunk, t.c, n, false, t.b, n, true, q, q, n, false)
	clear(t.dcb)
	clear(t.db)
	clear(t.dc)
	for i := range heads {
		h := g*heads + i
		t.s.fill(t.raw[i:], heads, q, f.bias[h], f.a[h])
		f.xbc.read(t.x, row, h*p, q, p)
		f.dy.read(t.dy, row, h*p, q, p)
		scaleRows(t.u, t.x, t.s.dt[:q], p)
		f.inside(&t, q)
		f.outside(&t, b, chunk, h, q)
		f.finish(&t, b*f.chunks+chunk, h, i, q)
		f.dxbc.write(t.x, row, h*p, q, p)
	}
	gemm.Block(t.dc, n, t.dcb, f.chunk, false, t.b, n, false, q, n, q, true)
	gemm.Block(t.db, n, t.dcb, f.chunk, true, t.c, n, false, q, n, q, true)
	f.dxbc.write(t.db, row, f.colB(g), q, n)
	f.dxbc.write(t.dc, row, f.colC(g), q, n)
	f.ddt.write(t.draw, row, g*heads, q, heads)
}

// inside computes what tokens of the chunk do to each other. It sets du and da, and adds to
// the gradient of C Bᵀ.
func (f *scanBackward) inside(t *scanTile, q int) {
	p := f.headDim
	t.s.lower(t.l, f.chunk, q)
	bands(q, func(from, to int) {
		gemm.Block(t.dm[from*f.chunk:], f.chunk, t.dy[from*p:], p, false, t.u, p, true, to-from, to, p, false)
	})
	// These are sums over rows from the last one on. With the sums down to row i, the
	// numbers left of column i belong to pairs of tokens on both sides of i's decay.
	var below [tensorChunk]float32
	for i := q - 1; i >= 0; i-- {
		l, cb, dm := t.l[i*f.chunk:][:q], t.cb[i*f.chunk:][:i+1], t.dm[i*f.chunk:][:i+1]
		m := t.m[i*f.chunk:][:q]
		vec.Mul(m[:i+1], l, cb)
		clear(m[i+1:])
		vec.Mul(dm, dm, l)
		vec.Add(t.dcb[i*f.chunk:][:i+1], t.dcb[i*f.chunk:], dm)
		vec.AddMul(below[:i], dm, cb, 1)
		t.da[i] = vec.Sum(below[:i])
	}
	bands(q, func(from, to int) {
		gemm.Block(t.du[from*p:], p, t.m[from*f.chunk+from:], f.chunk, true, t.dy[from*p:], p, false, to-from, p, q-from, false)
	})
}

// outside adds what the states do that enter and leave the chunk.
func (f *scanBackward) outside(t *scanTile, b, chunk, h, q int) {
	p, n := f.headDim, f.state
	var in, out []float32
	if chunk > 0 {
		in = f.readState(t.in, f.states, b, chunk-1, h)
		t.s.fromStart(t.start, q)
		scaleRows(t.p, t.dy, t.start, p)
		gemm.Block(t.n, n, t.p, p, false, in, n, false, q, n, p, false)
		vec.Add(t.dc, t.dc, t.n)
		var sum float32
		for i := q - 1; i >= 0; i-- {
			sum += vec.Dot(t.c[i*n:][:n], t.n[i*n:])
			t.da[i] += sum
		}
	}
	if chunk < f.chunks-1 {
		out = f.readState(t.out, f.grads, b, chunk, h)
		t.s.toEnd(t.end, q)
		scaleRows(t.p, t.u, t.end, p)
		gemm.Block(t.n, n, t.p, p, false, out, n, false, q, n, p, false)
		vec.Add(t.db, t.db, t.n)
		var sum float32
		for i := range q {
			t.da[i] += sum
			sum += vec.Dot(t.b[i*n:][:n], t.n[i*n:])
		}
		scaleRows(t.n, t.b, t.end, n)
		gemm.Block(t.du, p, t.n, n, false, out, n, true, q, p, n, true)
	}
	if in != nil && out != nil {
		through := vec.Dot(in, out) * t.start[q-1]
		for i := range q {
			t.da[i] += through
		}
	}
}

// finish computes the gradient of x from du and da, in the place of x, and that of column i
// of steps. It writes what the chunk adds to the gradients of parameters.
func (f *scanBackward) finish(t *scanTile, chunk, h, i, q int) {
	p, heads := f.headDim, f.heads/f.groups
	var da, dd, dbias float32
	var slope [tensorChunk]float32 // of the softplus
	vec.Sigmoid(slope[:q], t.s.raw[:])
	for j := range q {
		x, dy, du := t.x[j*p:][:p], t.dy[j*p:][:p], t.du[j*p:][:p]
		dt := t.s.dt[j]
		grad := (vec.Dot(x, du) + f.a[h]*t.da[j]) * slope[j]
		da += t.da[j] * dt
		dd += vec.Dot(dy, x)
		vec.Scale(x, du, dt)
		vec.Axpy(x, f.d[h], dy)
		t.draw[j*heads+i] = grad
		dbias += grad
	}
	sums := f.sums[chunk*scanSums*f.heads:]
	// a = -exp(ALog) is its own derivative.
	sums[h], sums[f.heads+h], sums[2*f.heads+h] = da*f.a[h], dd, dbias
}

// scanGradSumGo adds up the chunks.
func scanGradSumGo(l *device.Launch) {
	a := l.Args()
	chunks, heads := int(a[4]), int(a[5])
	sums := device.Slice[float32](a[3], chunks*scanSums*heads)
	total := make([]float32, heads)
	for i := range scanSums {
		to := view{addr: a[i], typ: kernels.Number(a[6])}
		to.read(total, 0, 0, 1, heads)
		for c := range chunks {
			vec.Add(total, total, sums[(c*scanSums+i)*heads:])
		}
		to.write(total, 0, 0, 1, heads)
	}
}
