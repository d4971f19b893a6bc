// This file owns the references for the scan, the convolution before it and the norm
// behind it: the same in float64, token by token. Their gradients are checked by finite
// differences of a loss.

package nn

import (
	"math"
	"math/rand/v2"
	"testing"

	"github.com/stowage-dev/stowage/internal/kernels"
)

// leaf has numbers and their gradient.
type leaf struct {
	name  string
	x, dx []float64
}

// newLeaf draws numbers that a type can represent.
func newLeaf(rng *rand.Rand, name string, typ kernels.Number, n int, mean, deviation float64) *leaf {
	l := &leaf{name: name, x: make([]float64, n), dx: make([]float64, n)}
	for i := range l.x {
		l.x[i] = float64(stored(typ, float32(mean+deviation*rng.NormFloat64())))
	}
	return l
}

// wantDifferences compares gradients with differences of the loss.
func wantDifferences(t *testing.T, loss func() float64, leaves ...*leaf) {
	t.Helper()
	for _, l := range leaves {
		for i, was := range l.x {
			const h = 1e-5
			l.x[i] = was + h
			up := loss()
			l.x[i] = was - h
			down := loss()
			l.x[i] = was
			if want := (up - down) / (2 * h); math.Abs(want-l.dx[i]) > 1e-7*(1+math.Abs(want)) {
				t.Fatalf("the gradient of %s[%d] is %g, differences give %g", l.name, i, l.dx[i], want)
			}
		}
	}
}

func product(a, b []float64) (sum float64) {
	for i := range a {
		sum += a[i] * b[i]
	}
	return sum
}

func logistic(x float64) float64 { return 1 / (1 + math.Exp(-x)) }

// plainScan computes the recurrence by its definition.
type plainScan struct {
	batch, seq, heads, headDim, groups, state int
	xbc, dt, aLog, d, bias                    *leaf
	y, dy                                     []float64
}

// newPlainScan draws numbers; dt is about softplus(step).
func newPlainScan(rng *rand.Rand, typ, params kernels.Number, p plainScan, step float64) *plainScan {
	tokens := p.batch * p.seq
	p.xbc = newLeaf(rng, "xbc", typ, tokens*(p.heads*p.headDim+2*p.groups*p.state), 0, 1)
	p.dt = newLeaf(rng, "dt", typ, tokens*p.heads, 0, 1)
	p.aLog = newLeaf(rng, "A_log", params, p.heads, 1, 1)
	p.d = newLeaf(rng, "D", params, p.heads, 1, 0.5)
	p.bias = newLeaf(rng, "dt_bias", params, p.heads, step, 0.5)
	p.dy = newLeaf(rng, "", typ, tokens*p.heads*p.headDim, 0, 1).x
	return &p
}

// forward returns the loss, the sum of y dy, and calls see with the state of every token.
func (p *plainScan) forward(see func(b, h, t int, s []float64)) float64 {
	p.y = make([]float64, len(p.dy))
	for b := range p.batch {
		for h := range p.heads {
			s := make([]float64, p.headDim*p.state)
			for t := range p.seq {
				dt, a := p.step(b, h, t)
				x, bt, ct := p.at(p.xbc.x, b, h, t)
				y := p.y[((b*p.seq+t)*p.heads+h)*p.headDim:]
				for i := range p.headDim {
					y[i] = p.d.x[h] * x[i]
					for j := range p.state {
						s[i*p.state+j] = math.Exp(dt*a)*s[i*p.state+j] + dt*x[i]*bt[j]
						y[i] += s[i*p.state+j] * ct[j]
					}
				}
				see(b, h, t, s)
			}
		}
	}
	return product(p.y, p.dy)
}

func (p *plainScan) loss() float64 { return p.forward(func(int, int, int, []float64) {}) }

func (p *plainScan) step(b, h, t int) (dt, a float64) {
	return math.Log1p(math.Exp(p.dt.x[(b*p.seq+t)*p.heads+h] + p.bias.x[h])), -math.Exp(p.aLog.x[h])
}

// at returns x, B and C of a token and head, or their gradients.
func (p *plainScan) at(xbc []float64, b, h, t int) (x, bt, ct []float64) {
	inner := p.heads * p.headDim
	row := xbc[(b*p.seq+t)*(inner+2*p.groups*p.state):]
	g := h / (p.heads / p.groups)
	return row[h*p.headDim:][:p.headDim], row[inner+g*p.state:][:p.state], row[inner+(p.groups+g)*p.state:][:p.state]
}

// backward sets all gradients.
func (p *plainScan) backward() {
	states := map[[3]int][]float64{}
	p.forward(func(b, h, t int, s []float64) { states[[3]int{b, h, t}] = append([]float64(nil), s...) })
	for b := range p.batch {
		for h := range p.heads {
			ds := make([]float64, p.headDim*p.state)
			for t := p.seq - 1; t >= 0; t-- {
				dt, a := p.step(b, h, t)
				before := states[[3]int{b, h, t - 1}]
				if t == 0 {
					before = make([]float64, len(ds))
				}
				p.token(b, h, t, dt, math.Exp(dt*a), a, before, states[[3]int{b, h, t}], ds)
			}
		}
	}
}

// token is the backward pass of one token. ds becomes the gradient of the state before
// it.
func (p *plainScan) token(b, h, t int, dt, decay, a float64, before, s, ds []float64) {
	x, bt, ct := p.at(p.xbc.x, b, h, t)
	dx, db, dc := p.at(p.xbc.dx, b, h, t)
	dy := p.dy[((b*p.seq+t)*p.heads+h)*p.headDim:]
	var ddt, dlog float64
	for i := range p.headDim {
		dx[i] += p.d.x[h] * dy[i]
		p.d.dx[h] += dy[i] * x[i]
		for j := range p.state {
			k := i*p.state + j
			ds[k] += dy[i] * ct[j]
			dc[j] += dy[i] * s[k]
			dx[i] += ds[k] * dt * bt[j]
			db[j] += ds[k] * dt * x[i]
			ddt += ds[k] * x[i] * bt[j]
			dlog += ds[k] * decay * before[k]
			ds[k] *= decay
		}
	}
	p.aLog.dx[h] += dlog * dt * a
	raw := p.dt.x[(b*p.seq+t)*p.heads+h] + p.bias.x[h]
	p.dt.dx[(b*p.seq+t)*p.heads+h] = (ddt + dlog*a) * logistic(raw)
	p.bias.dx[h] += (ddt + dlog*a) * logistic(raw)
}

func TestPlainScanGradients(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 1))
	p := newPlainScan(rng, kernels.F32, kernels.F32, plainScan{batch: 2, seq: 7, heads: 4, headDim: 3, groups: 2, state: 2}, -1)
	p.backward()
	wantDifferences(t, p.loss, p.xbc, p.dt, p.aLog, p.d, p.bias)
}

// plainConv computes the convolution by its definition.
type plainConv struct {
	seq, cols, taps int
	x, w, bias      *leaf
	y, dy           []float64
}

func newPlainConv(rng *rand.Rand, typ, params kernels.Number, batch, seq, cols, taps int) *plainConv {
	return &plainConv{
		seq: seq, cols: cols, taps: taps,
		x: newLeaf(rng, "x", typ, batch*seq*cols, 0, 1), w: newLeaf(rng, "w", params, cols*taps, 0, 1),
		bias: newLeaf(rng, "bias", params, cols, 0, 1), dy: newLeaf(rng, "", typ, batch*seq*cols, 0, 1).x,
	}
}

// sum returns the argument of SiLU.
func (p *plainConv) sum(i int) float64 {
	t, c := i/p.cols%p.seq, i%p.cols
	s := p.bias.x[c]
	for k := range p.taps {
		if back := p.taps - 1 - k; back <= t {
			s += p.w.x[c*p.taps+k] * p.x.x[i-back*p.cols]
		}
	}
	return s
}

func (p *plainConv) loss() float64 {
	p.y = make([]float64, len(p.dy))
	for i := range p.y {
		s := p.sum(i)
		p.y[i] = s * logistic(s)
	}
	return product(p.y, p.dy)
}

func (p *plainConv) backward() {
	p.loss()
	for i := range p.y {
		t, c, s := i/p.cols%p.seq, i%p.cols, p.sum(i)
		g := logistic(s)
		ds := p.dy[i] * (g + s*g*(1-g))
		p.bias.dx[c] += ds
		for k := range p.taps {
			if back := p.taps - 1 - k; back <= t {
				p.w.dx[c*p.taps+k] += ds * p.x.x[i-back*p.cols]
				p.x.dx[i-back*p.cols] += ds * p.w.x[c*p.taps+k]
			}
		}
	}
}

func TestPlainConvGradients(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 1))
	for _, seq := range []int{1, 3, 9} {
		p := newPlainConv(rng, kernels.F32, kernels.F32, 2, seq, 3, 4)
		p.backward()
		wantDifferences(t, p.loss, p.x, p.w, p.bias)
	}
}

// plainGated computes the gated norm by its definition.
type plainGated struct {
	cols, groups int
	epsilon      float64
	x, z, w      *leaf
	y, dy        []float64
	// The largest terms of the gradients of x and z, which may cancel.
	mostX, mostZ float64
}

func newPlainGated(rng *rand.Rand, typ, params kernels.Number, rows, cols, groups int) *plainGated {
	return &plainGated{
		cols: cols, groups: groups, epsilon: 1e-5,
		x: newLeaf(rng, "x", typ, rows*cols, 0, 1), z: newLeaf(rng, "z", typ, rows*cols, 0, 1),
		w: newLeaf(rng, "w", params, cols, 1, 0.5), dy: newLeaf(rng, "", typ, rows*cols, 0, 1).x,
	}
}

// run sets y and, if grads is set, all gradients.
func (p *plainGated) run(grads bool) float64 {
	p.y = make([]float64, len(p.dy))
	n := p.cols / p.groups
	for at := 0; at < len(p.y); at += n {
		var square, along float64
		gate := func(i int) (v float64) { return p.x.x[i] * p.z.x[i] * logistic(p.z.x[i]) }
		for i := at; i < at+n; i++ {
			square += gate(i) * gate(i) / float64(n)
			along += gate(i) * p.dy[i] * p.w.x[i%p.cols] / float64(n)
		}
		r := 1 / math.Sqrt(square+p.epsilon)
		for i := at; i < at+n; i++ {
			c := i % p.cols
			p.y[i] = gate(i) * r * p.w.x[c]
			if !grads {
				continue
			}
			dv := r*p.dy[i]*p.w.x[c] - gate(i)*r*r*r*along
			s := logistic(p.z.x[i])
			byX, byZ, term := p.z.x[i]*s, p.x.x[i]*(s+p.z.x[i]*s*(1-s)), math.Abs(r*p.dy[i]*p.w.x[c])
			p.x.dx[i], p.z.dx[i] = dv*byX, dv*byZ
			p.mostX, p.mostZ = max(p.mostX, math.Abs(term*byX)), max(p.mostZ, math.Abs(term*byZ))
			p.w.dx[c] += p.dy[i] * gate(i) * r
		}
	}
	return product(p.y, p.dy)
}

func TestPlainGatedGradients(t *testing.T) {
	p := newPlainGated(rand.New(rand.NewPCG(3, 1)), kernels.F32, kernels.F32, 3, 6, 2)
	p.run(true)
	wantDifferences(t, func() float64 { return p.run(false) }, p.x, p.z, p.w)
}
