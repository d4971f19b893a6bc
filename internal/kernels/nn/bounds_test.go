// This file owns bounds of rounding errors: how far a float32 result may be from the
// reference in float64. A test that compares within bounds gives the same verdict for all
// inputs. A tolerance relative to the largest result does not, because the terms of a sum
// may be larger than every result.

package nn

import (
	"math"

	"github.com/stowage-dev/stowage/internal/kernels"
)

const (
	unit     = 1. / (1 << 24) // the largest relative error of one rounding in float32
	expError = 1.2e-7         // the relative error of vec.Exp
	// Exponentials below e^-87.33 are zero, and numbers below 2^-126 lose digits.
	underflow = 1e-36
)

// lastRounding returns the relative error of storing a number in a type.
func lastRounding(t kernels.Number) float64 {
	if t == kernels.BF16 {
		return 1. / 256 // 8 bits
	}
	return unit
}

// withinBounds fails unless a matrix holds the given numbers, up to the given bounds and
// the rounding to its type.
func withinBounds(t failing, what string, m Matrix, want, bounds []float64) {
	t.Helper()
	last := lastRounding(m.Type)
	for i, w := range want {
		// One percent covers errors of second order.
		bound := 1.01*(bounds[i]+last*(math.Abs(w)+bounds[i])) + underflow
		if got := float64(m.get(i/m.Cols, i%m.Cols)); !(math.Abs(got-w) <= bound) {
			t.Fatalf("%s[%d] is %g, want %g within %g", what, i, got, w, bound)
		}
	}
}

// approx is a number that a kernel computes. size is the sum of the absolute values of
// its terms, and err bounds its error without that of additions. A sum of n terms rounds
// each at most n times, in whatever order it is added up; see bound.
type approx struct{ size, err float64 }

func stored64(x float64) approx { return approx{size: math.Abs(x)} }

func (a approx) plus(b approx) approx { return approx{a.size + b.size, a.err + b.err} }

func (a approx) times(b approx) approx {
	return approx{a.size * b.size, a.size*b.err + a.err*b.size + unit*a.size*b.size}
}

// bound returns the bound of the error of a number whose terms were rounded by the given
// number of additions.
func (a approx) bound(additions int) float64 { return a.err + float64(additions)*unit*a.size }

func boundsOf(of []approx, additions int) []float64 {
	to := make([]float64, len(of))
	for i, a := range of {
		to[i] = a.bound(additions)
	}
	return to
}

// scanBounds has the bounds of all results of a scan.
type scanBounds struct{ y, xbc, dt, aLog, d, bias []float64 }

// bounds follows the recurrence and its backward pass with approximate numbers. States
// between chunks are rounded to a type.
func (p *plainScan) bounds(chunk int, between kernels.Number) scanBounds {
	round := func(states []approx, end int) {
		for k := range states {
			if between == kernels.BF16 && end%chunk == 0 {
				states[k].err += lastRounding(between) * states[k].size
			}
		}
	}
	y, xbc, dt := make([]approx, len(p.dy)), make([]approx, len(p.xbc.x)), make([]approx, len(p.dt.x))
	aLog, d, bias := make([]approx, p.heads), make([]approx, p.heads), make([]approx, p.heads)
	for h := range p.heads {
		// Gradients of parameters start at no more than one; see begun.
		aLog[h], d[h], bias[h] = approx{size: 1}, approx{size: 1}, approx{size: 1}
	}
	for b := range p.batch {
		for h := range p.heads {
			states := make([][]approx, p.seq+1)
			states[0] = make([]approx, p.headDim*p.state)
			for t := range p.seq {
				step, _, decay := p.approxStep(b, h, t)
				x, bt, ct := p.at(p.xbc.x, b, h, t)
				s := make([]approx, p.headDim*p.state)
				for i := range p.headDim {
					to := &y[((b*p.seq+t)*p.heads+h)*p.headDim+i]
					*to = stored64(p.d.x[h]).times(stored64(x[i]))
					for j := range p.state {
						k := i*p.state + j
						s[k] = decay.times(states[t][k]).plus(step.times(stored64(x[i])).times(stored64(bt[j])))
						*to = to.plus(s[k].times(stored64(ct[j])))
					}
				}
				round(s, t+1)
				states[t+1] = s
			}
			ds := make([]approx, p.headDim*p.state)
			for t := p.seq - 1; t >= 0; t-- {
				round(ds, t+1)
				p.boundToken(b, h, t, states, ds, xbc, dt, aLog, d, bias)
			}
		}
	}
	// The number of additions that round a term: states over the tokens of a sequence;
	// products over a chunk, the state or the head; gradients of B and C over heads; and
	// those of parameters over chunks too.
	inChunk, chunks := min(p.seq, chunk), p.batch*runsOf(p.seq, chunk)
	each := p.seq + 3*inChunk + 2*p.state + p.headDim + 4
	all := each + inChunk + chunks
	return scanBounds{
		y: boundsOf(y, p.seq+p.state+2), xbc: boundsOf(xbc, p.seq+inChunk+p.state+p.headDim+p.heads), dt: boundsOf(dt, each),
		aLog: boundsOf(aLog, all), d: boundsOf(d, p.headDim+inChunk+chunks+1), bias: boundsOf(bias, all),
	}
}

// approxStep returns dt, a and the decay of a token.
func (p *plainScan) approxStep(b, h, t int) (dt, a, decay approx) {
	step, slope := p.step(b, h, t)
	raw := math.Abs(p.dt.x[(b*p.seq+t)*p.heads+h] + p.bias.x[h])
	// The sum of dt and its bias, its exponential, and the rounded logarithm.
	dt = approx{step, step * (unit*raw + expError + 2*unit)}
	a = approx{-slope, -slope * unit}
	z := dt.times(a)
	value := math.Exp(-z.size)
	// A decay below 1e-30 counts as zero.
	return dt, a, approx{value, value*(z.err+expError) + faint}
}

// boundToken does the same as token with approximate numbers.
func (p *plainScan) boundToken(b, h, t int, states [][]approx, ds, xbc, dts, aLog, d, bias []approx) {
	dt, a, decay := p.approxStep(b, h, t)
	x, bt, ct := p.at(p.xbc.x, b, h, t)
	inner := p.heads * p.headDim
	row := xbc[(b*p.seq+t)*(inner+2*p.groups*p.state):]
	g := h / (p.heads / p.groups)
	dx, db, dc := row[h*p.headDim:], row[inner+g*p.state:], row[inner+(p.groups+g)*p.state:]
	dy := p.dy[((b*p.seq+t)*p.heads+h)*p.headDim:]
	var ddt, dlog approx
	for i := range p.headDim {
		dyi, xi := stored64(dy[i]), stored64(x[i])
		dx[i] = dx[i].plus(stored64(p.d.x[h]).times(dyi))
		d[h] = d[h].plus(dyi.times(xi))
		for j := range p.state {
			k := i*p.state + j
			bj := stored64(bt[j])
			ds[k] = ds[k].plus(dyi.times(stored64(ct[j])))
			dc[j] = dc[j].plus(dyi.times(states[t+1][k]))
			dx[i] = dx[i].plus(ds[k].times(dt).times(bj))
			db[j] = db[j].plus(ds[k].times(dt).times(xi))
			ddt = ddt.plus(ds[k].times(xi).times(bj))
			dlog = dlog.plus(ds[k].times(decay).times(states[t][k]))
			ds[k] = ds[k].times(decay)
		}
	}
	aLog[h] = aLog[h].plus(dlog.times(dt).times(a))
	raw := p.dt.x[(b*p.seq+t)*p.heads+h] + p.bias.x[h]
	// The sigmoid has its argument, an exponential, a sum and a quotient.
	slope := approx{logistic(raw), logistic(raw) * (unit*math.Abs(raw) + expError + 2*unit)}
	grad := ddt.plus(dlog.times(a)).times(slope)
	dts[(b*p.seq+t)*p.heads+h] = grad
	bias[h] = bias[h].plus(grad)
}

// convBounds has the bounds of all results of a convolution.
type convBounds struct{ y, x, w, bias []float64 }

func (p *plainConv) bounds() convBounds {
	y, x := make([]approx, len(p.y)), make([]approx, len(p.y))
	w, bias := make([]approx, len(p.w.x)), make([]approx, p.cols)
	for i := range w {
		w[i] = approx{size: 1} // see begun
	}
	for i := range bias {
		bias[i] = approx{size: 1}
	}
	for i := range p.y {
		t, c, s := i/p.cols%p.seq, i%p.cols, p.sum(i)
		terms := stored64(p.bias.x[c])
		for k := range p.taps {
			if back := p.taps - 1 - k; back <= t {
				terms = terms.plus(stored64(p.w.x[c*p.taps+k]).times(stored64(p.x.x[i-back*p.cols])))
			}
		}
		sum := terms.bound(p.taps + 1)
		// The slope of SiLU is at most 1.1. A sigmoid has an exponential, a sum and a
		// quotient; one more product follows.
		sigmoid := expError + 2*unit
		y[i] = approx{math.Abs(p.y[i]), 1.1*sum + math.Abs(p.y[i])*(sigmoid+unit)}
		// The slope changes by at most half of what its argument does. It is
		// g (1 + s (1 - g)): two products and two sums beside the sigmoid, which counts
		// twice.
		g := logistic(s)
		slope := approx{math.Abs(g + s*g*(1-g)), 0.5*sum + (2*sigmoid+4*unit)*(1+math.Abs(s))}
		ds := stored64(p.dy[i]).times(slope)
		bias[c] = bias[c].plus(ds)
		for k := range p.taps {
			if back := p.taps - 1 - k; back <= t {
				w[c*p.taps+k] = w[c*p.taps+k].plus(ds.times(stored64(p.x.x[i-back*p.cols])))
				x[i-back*p.cols] = x[i-back*p.cols].plus(ds.times(stored64(p.w.x[c*p.taps+k])))
			}
		}
	}
	rows := len(p.y)/p.cols + 1
	return convBounds{boundsOf(y, 0), boundsOf(x, p.taps), boundsOf(w, rows), boundsOf(bias, rows)}
}
