// This file owns the layers of the models that the tests train: small kernels in Go with
// real gradients.

package fsdp

import (
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
)

// The sizes that all layers share: positions of a sequence, numbers of a position, and
// different tokens.
const (
	length = 5
	width  = 8
	vocab  = 11
)

// numbers are the n elements at an address, of fp32 or (if t is 1) of bf16. Go
// 1.26 fails to compile a copy of constant size from device.Slice if it sees
// through here.
//
//go:noinline
func numbers(addr, t uint64, n int) []float32 {
	if t == 0 {
		return device.Slice[float32](addr, n)
	}
	out := make([]float32, n)
	for i, x := range device.Slice[uint16](addr, n) {
		out[i] = math.Float32frombits(uint32(x) << 16)
	}
	return out
}

// store writes numbers in either format. It rounds to nearest even.
//
//go:noinline
func store(addr, t uint64, xs []float32) {
	if t == 0 {
		copy(device.Slice[float32](addr, len(xs)), xs)
		return
	}
	for i, x := range xs {
		b := math.Float32bits(x)
		device.Slice[uint16](addr, len(xs))[i] = uint16((b + 0x7fff + b>>16&1) >> 16)
	}
}

func tanh(x float32) float32    { return float32(math.Tanh(float64(x))) }
func sigmoid(x float32) float32 { return float32(1 / (1 + math.Exp(-float64(x)))) }
func exp(x float32) float32     { return float32(math.Exp(float64(x))) }

func dot(a, b []float32) (s float32) {
	for i := range a {
		s += a[i] * b[i]
	}
	return s
}

// axpy adds k times x to y.
func axpy(y []float32, k float32, x []float32) {
	for i := range x {
		y[i] += k * x[i]
	}
}

// row returns row i of a matrix.
func row(m []float32, i, n int) []float32 { return m[i*n : (i+1)*n] }

// The embedding: out = E[token].
var embedForward = device.Kernel{Name: "embed", Go: func(l *device.Launch) {
	a := l.Args() // E, tokens, out, type
	e, tok, out := numbers(a[0], a[3], vocab*width), device.Slice[uint32](a[1], length), numbers(a[2], 0, length*width)
	for t := range length {
		copy(row(out, t, width), row(e, int(tok[t]), width))
	}
}}

// Only the rows that were used are written. The rest of a gradient is zero.
var embedBackward = device.Kernel{Name: "embed backward", Go: func(l *device.Launch) {
	a := l.Args() // tokens, dout, gradient of E, type of the gradient
	scatterRows(device.Slice[uint32](a[0], length), numbers(a[1], 0, length*width), a[2], a[3])
}}

// scatterRows adds up the rows of each token and writes those of tokens that occur.
func scatterRows(tok []uint32, rows []float32, grad, t uint64) {
	sums := map[uint32][]float32{}
	for i, v := range tok {
		if sums[v] == nil {
			sums[v] = make([]float32, width)
		}
		axpy(sums[v], 1, row(rows, i, width))
	}
	for v, sum := range sums {
		store(grad+uint64(v)*width*(4-2*t), t, sum)
	}
}

// A feed-forward layer: out = in + W2 tanh(W1 in + b).
var mlpForward = device.Kernel{Name: "mlp", Go: func(l *device.Launch) {
	a := l.Args() // W1, W2, b, in, out, type, hidden
	n := int(a[6])
	w1, w2, b := numbers(a[0], a[5], n*width), numbers(a[1], a[5], n*width), numbers(a[2], a[5], n)
	in, out := numbers(a[3], 0, length*width), numbers(a[4], 0, length*width)
	for t := range length {
		copy(row(out, t, width), row(in, t, width))
		for j := range n {
			axpy(row(out, t, width), tanh(dot(row(w1, j, width), row(in, t, width))+b[j]), row(w2, j, width))
		}
	}
}}

var mlpBackward = device.Kernel{Name: "mlp backward", Go: func(l *device.Launch) {
	a := l.Args() // W1, W2, b, in, dout, din, gradients of W1, W2, b, type, type of gradients, hidden
	n := int(a[11])
	w1, w2, b := numbers(a[0], a[9], n*width), numbers(a[1], a[9], n*width), numbers(a[2], a[9], n)
	in, dout, din := numbers(a[3], 0, length*width), numbers(a[4], 0, length*width), numbers(a[5], 0, length*width)
	g1, g2, gb := make([]float32, n*width), make([]float32, n*width), make([]float32, n)
	for t := range length {
		x, dy, dx := row(in, t, width), row(dout, t, width), row(din, t, width)
		axpy(dx, 1, dy)
		for j := range n {
			h := tanh(dot(row(w1, j, width), x) + b[j])
			axpy(row(g2, j, width), h, dy)
			d := dot(row(w2, j, width), dy) * (1 - h*h)
			gb[j] += d
			axpy(row(g1, j, width), d, x)
			axpy(dx, d, row(w1, j, width))
		}
	}
	store(a[6], a[10], g1)
	store(a[7], a[10], g2)
	store(a[8], a[10], gb)
}}

// A scan over the sequence: h = sigmoid(a) h + b in; out = in + c h.
var scanForward = device.Kernel{Name: "scan", Go: func(l *device.Launch) {
	a := l.Args() // a, b, c, in, out, type
	ka, kb, kc := numbers(a[0], a[5], width), numbers(a[1], a[5], width), numbers(a[2], a[5], width)
	in, out := numbers(a[3], 0, length*width), numbers(a[4], 0, length*width)
	for d := range width {
		var h float32
		for i := d; i < length*width; i += width {
			h = sigmoid(ka[d])*h + kb[d]*in[i]
			out[i] = in[i] + kc[d]*h
		}
	}
}}

var scanBackward = device.Kernel{Name: "scan backward", Go: func(l *device.Launch) {
	a := l.Args() // a, b, c, in, dout, din, gradients of a, b, c, type, type of gradients
	ka, kb, kc := numbers(a[0], a[9], width), numbers(a[1], a[9], width), numbers(a[2], a[9], width)
	in, dout, din := numbers(a[3], 0, length*width), numbers(a[4], 0, length*width), numbers(a[5], 0, length*width)
	ga, gb, gc := make([]float32, width), make([]float32, width), make([]float32, width)
	for d := range width {
		s := sigmoid(ka[d])
		var h [length + 1]float32
		for t := range length {
			h[t+1] = s*h[t] + kb[d]*in[t*width+d]
		}
		var dh float32
		for t := length - 1; t >= 0; t-- {
			i := t*width + d
			gc[d] += dout[i] * h[t+1]
			dh = s*dh + kc[d]*dout[i]
			ga[d] += dh * h[t] * s * (1 - s)
			gb[d] += dh * in[i]
			din[i] += dout[i] + dh*kb[d]
		}
	}
	store(a[6], a[10], ga)
	store(a[7], a[10], gb)
	store(a[8], a[10], gc)
}}

// The projection of an MTP head: out = P [in ; E[next token]].
var joinForward = device.Kernel{Name: "join", Go: func(l *device.Launch) {
	a := l.Args() // P, E, tokens, in, out, type
	p, e := numbers(a[0], a[5], 2*width*width), numbers(a[1], a[5], vocab*width)
	tok, in, out := device.Slice[uint32](a[2], length+1), numbers(a[3], 0, length*width), numbers(a[4], 0, length*width)
	for t := range length {
		for j := range width {
			w := row(p, j, 2*width)
			out[t*width+j] = dot(w[:width], row(in, t, width)) + dot(w[width:], row(e, int(tok[t+1]), width))
		}
	}
}}

var joinBackward = device.Kernel{Name: "join backward", Go: func(l *device.Launch) {
	a := l.Args() // P, E, tokens, in, dout, din, gradients of P, E, type, type of gradients
	p, e := numbers(a[0], a[8], 2*width*width), numbers(a[1], a[8], vocab*width)
	tok, in := device.Slice[uint32](a[2], length+1), numbers(a[3], 0, length*width)
	dout, din := numbers(a[4], 0, length*width), numbers(a[5], 0, length*width)
	gp, ge := make([]float32, 2*width*width), make([]float32, length*width)
	for t := range length {
		for j := range width {
			w, g, d := row(p, j, 2*width), row(gp, j, 2*width), dout[t*width+j]
			axpy(g[:width], d, row(in, t, width))
			axpy(g[width:], d, row(e, int(tok[t+1]), width))
			axpy(row(din, t, width), d, w[:width])
			axpy(row(ge, t, width), d, w[width:])
		}
	}
	store(a[6], a[9], gp)
	scatterRows(tok[1:], ge, a[7], a[9])
}}

// The output, tied to the embedding: softmax of E in, and the cross entropy with
// the token some positions ahead.
var headForward = device.Kernel{Name: "head", Go: func(l *device.Launch) {
	a := l.Args() // E, tokens, in, loss, type, ahead
	e, in, loss := numbers(a[0], a[4], vocab*width), numbers(a[2], 0, length*width), numbers(a[3], 0, 1)
	tok := device.Slice[uint32](a[1], length+int(a[5]))
	for t := range length {
		p := softmax(e, row(in, t, width))
		loss[0] -= float32(math.Log(float64(p[tok[t+int(a[5])]]))) / length
	}
}}

func softmax(e, x []float32) []float32 {
	p, sum := make([]float32, vocab), float32(0)
	for v := range p {
		p[v] = exp(dot(row(e, v, width), x))
		sum += p[v]
	}
	for v := range p {
		p[v] /= sum
	}
	return p
}

var headBackward = device.Kernel{Name: "head backward", Go: func(l *device.Launch) {
	a := l.Args() // E, tokens, in, din, gradient of E, type, type of the gradient, ahead
	e, in, din := numbers(a[0], a[5], vocab*width), numbers(a[2], 0, length*width), numbers(a[3], 0, length*width)
	tok, ge := device.Slice[uint32](a[1], length+int(a[7])), make([]float32, vocab*width)
	for t := range length {
		p := softmax(e, row(in, t, width))
		p[tok[t+int(a[7])]]--
		for v := range p {
			axpy(row(ge, v, width), p[v]/length, row(in, t, width))
			axpy(row(din, t, width), p[v]/length, row(e, v, width))
		}
	}
	store(a[4], a[6], ge)
}}

// A routed layer of two experts: a router chooses one by softmax, and
// out = in + gate tanh(W in). Routing leaves the choice and the gate of each
// position; experts work on the positions of all ranks that share them.
var route = device.Kernel{Name: "route", Go: func(l *device.Launch) {
	a := l.Args() // R (fp32), in, choices and gates
	r, in, out := numbers(a[0], 0, 2*width), numbers(a[1], 0, length*width), numbers(a[2], 0, 2*length)
	for t := range length {
		one := sigmoid(dot(row(r, 1, width), row(in, t, width)) - dot(row(r, 0, width), row(in, t, width)))
		if out[2*t], out[2*t+1] = 0, 1-one; one > 0.5 {
			out[2*t], out[2*t+1] = 1, one
		}
	}
}}

var expertForward = device.Kernel{Name: "expert", Go: func(l *device.Launch) {
	a := l.Args() // W of the experts here, all in, all choices, all out, type, first expert, experts, positions
	n := int(a[7])
	in, r, out := numbers(a[1], 0, n*width), numbers(a[2], 0, 2*n), numbers(a[3], 0, n*width)
	w := numbers(a[0], a[4], int(a[6])*width*width)
	clear(out)
	for t := range n {
		e := int(r[2*t]) - int(a[5])
		for j := range width {
			if e >= 0 && e < int(a[6]) {
				out[t*width+j] = r[2*t+1] * tanh(dot(row(row(w, e, width*width), j, width), row(in, t, width)))
			}
		}
	}
}}

var expertBackward = device.Kernel{Name: "expert backward", Go: func(l *device.Launch) {
	a := l.Args() // W, all in, all choices, all dout, all din and dgate, gradient of W, type, type of the gradient, first expert, experts, positions
	n, size := int(a[10]), width*width
	in, r, dout := numbers(a[1], 0, n*width), numbers(a[2], 0, 2*n), numbers(a[3], 0, n*width)
	din := numbers(a[4], 0, n*(width+1))
	w := numbers(a[0], a[6], int(a[9])*size)
	clear(din)
	for here := range int(a[9]) {
		g, used := make([]float32, size), false
		for t := range n {
			if int(r[2*t]) != here+int(a[8]) {
				continue
			}
			used = true
			x, dx := row(in, t, width), row(din, t, width+1)
			for j := range width {
				h, dy := tanh(dot(row(row(w, here, size), j, width), x)), dout[t*width+j]
				dx[width] += dy * h
				d := dy * r[2*t+1] * (1 - h*h)
				axpy(row(g, j, width), d, x)
				axpy(dx, d, row(row(w, here, size), j, width))
			}
		}
		if used { // an expert without positions writes no gradient
			store(a[5]+uint64(here*size)*(4-2*a[7]), a[7], g)
		}
	}
}}

var routeBackward = device.Kernel{Name: "route backward", Go: func(l *device.Launch) {
	a := l.Args() // R, in, choices and gates, dout, din and dgate of the experts, din, gradient of R, type of the gradient
	r, in, c := numbers(a[0], 0, 2*width), numbers(a[1], 0, length*width), numbers(a[2], 0, 2*length)
	dout, de, din := numbers(a[3], 0, length*width), numbers(a[4], 0, length*(width+1)), numbers(a[5], 0, length*width)
	g := make([]float32, 2*width)
	for t := range length {
		dx, from := row(din, t, width), row(de, t, width+1)
		axpy(dx, 1, row(dout, t, width))
		axpy(dx, 1, from[:width])
		// The gate is sigmoid(z), z = (R[choice] - R[other]) in.
		k := int(c[2*t])
		d := from[width] * c[2*t+1] * (1 - c[2*t+1])
		axpy(row(g, k, width), d, row(in, t, width))
		axpy(row(g, 1-k, width), -d, row(in, t, width))
		axpy(dx, d, row(r, k, width))
		axpy(dx, -d, row(r, 1-k, width))
	}
	store(a[6], a[7], g)
}}

var addInto = device.Kernel{Name: "add", Go: func(l *device.Launch) {
	a := l.Args() // in, more, out
	in, more, out := numbers(a[0], 0, length*width), numbers(a[1], 0, length*width), numbers(a[2], 0, length*width)
	for i := range out {
		out[i] = in[i] + more[i]
	}
}}

// A penalty on the size of a parameter is added to the loss at the beginning and at the
// end of a use, so that the parameter is read, and its gradient written, all the time.
var penalty = device.Kernel{Name: "penalty", Go: func(l *device.Launch) {
	a := l.Args() // w, loss, type, elements
	w := numbers(a[0], a[2], int(a[3]))
	numbers(a[1], 0, 1)[0] += 0.0025 * dot(w, w)
}}

var penaltyBackward = device.Kernel{Name: "penalty backward", Go: func(l *device.Launch) {
	a := l.Args() // w, gradient, type, type of the gradient, elements
	n := int(a[4])
	sum := append([]float32(nil), numbers(a[1], a[3], n)...)
	axpy(sum, 0.01, numbers(a[0], a[2], n))
	store(a[1], a[3], sum)
}}

// Momentum: m = 0.9 m + g; w -= 0.05 m.
var momentum = device.Kernel{Name: "momentum", Go: func(l *device.Launch) {
	a := l.Args() // w, g, m, type of g, elements
	n := int(a[4])
	w, g, m := numbers(a[0], 0, n), numbers(a[1], a[3], n), numbers(a[2], 0, n)
	for i := range w {
		m[i] = 0.9*m[i] + g[i]
		w[i] -= 0.05 * m[i]
	}
}}

// The reference for reductions adds up the ranks' values in fp32 in their order, and
// rounds once.
var combine = device.Kernel{Name: "combine", Go: func(l *device.Launch) {
	a := l.Args() // sum, gradients of each rank, type, ranks, comm.Sum or comm.Mean, elements
	a, b := a[:len(a)-4], a[len(a)-4:]
	n := int(b[3])
	sum := append([]float32(nil), numbers(a[1], b[0], n)...)
	for _, more := range a[2:] {
		axpy(sum, 1, numbers(more, b[0], n))
	}
	for i := range sum {
		if comm.Op(b[2]) == comm.Mean {
			sum[i] /= float32(b[1])
		}
	}
	store(a[0], b[0], sum)
}}

// Reference for main gradients: main += part.
var accumulate = device.Kernel{Name: "accumulate", Go: func(l *device.Launch) {
	a := l.Args() // main, part, type of main, type of part, elements
	n := int(a[4])
	main, part := numbers(a[0], a[2], n), numbers(a[1], a[3], n)
	sum := make([]float32, n)
	for i := range sum {
		sum[i] = main[i] + part[i]
	}
	store(a[0], a[2], sum)
}}

var castDown = device.Kernel{Name: "cast", Go: func(l *device.Launch) {
	a := l.Args() // bf16, fp32, elements
	store(a[0], 1, numbers(a[1], 0, int(a[2])))
}}
