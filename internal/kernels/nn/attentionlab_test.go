// This file owns the equipment of the attention tests: plain attention in float64, which
// is the reference, and a device with the memory of a case.

package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// attentionCase has the shapes of attention.
type attentionCase struct {
	batch, seq, heads, kvHeads, keyDim, valueDim, window int
	typ                                                  kernels.Number
	seed                                                 uint64
}

func (c attentionCase) String() string {
	return fmt.Sprintf("%d x %d, %d heads on %d of %d and %d, window %d, type %d", c.batch, c.seq, c.heads, c.kvHeads, c.keyDim, c.valueDim, c.window, c.typ)
}

// sizes returns attention of these shapes without matrices.
func (c attentionCase) sizes() Attention {
	return Attention{
		Q: Matrix{Type: c.typ}, Batch: c.batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads,
		KeyDim: c.keyDim, ValueDim: c.valueDim, Window: c.window, Scale: float32(1 / math.Sqrt(float64(c.keyDim))),
	}
}

// plainAttention computes attention in float64 with all scores. Its results are the
// reference for kernels. Each result comes with a bound of the error that a kernel in
// float32 can make.
type plainAttention struct {
	attentionCase
	q, k, v, do []float64
	o, lse      bounded
	dq, dk, dv  bounded
}

// bounded holds results, and how far float32 results may be from them. Every bound is the
// sum of the rounding errors of all operations, to first order. A sum of n products
// rounds every term at most n times, in whatever order it is added up. Bounds hold for
// all inputs, so a result beyond its bound is always a mistake in the kernel.
type bounded struct{ want, bound []float64 }

func newBounded(n int) bounded { return bounded{make([]float64, n), make([]float64, n)} }

func (b bounded) add(i int, want, bound float64) {
	b.want[i] += want
	b.bound[i] += bound
}

// attentionRow is what one query of one head contributes to all keys.
type attentionRow struct {
	weights []float64
	lse     float64
	// The relative errors of the weights in the forward pass and in the backward pass,
	// which computes them again from the LSE, and the error of the LSE.
	forwardError, backwardError, lseError float64
}

func (p *plainAttention) row(b, h, i int) attentionRow {
	kv := h / (p.heads / p.kvHeads)
	scores, scale := make([]float64, p.seq), 1/math.Sqrt(float64(p.keyDim))
	least, most, size := math.Inf(1), math.Inf(-1), 0.
	first := 0
	if p.window > 0 {
		first = max(0, i-p.window+1)
	}
	for j := first; j <= i; j++ {
		var s, terms float64
		for d := range p.keyDim {
			t := p.q[((b*p.seq+i)*p.heads+h)*p.keyDim+d] * p.k[((b*p.seq+j)*p.kvHeads+kv)*p.keyDim+d] * scale
			s, terms = s+t, terms+math.Abs(t)
		}
		scores[j] = s
		least, most, size = min(least, s), max(most, s), max(size, terms)
	}
	weights, sum := make([]float64, p.seq), 0.
	for j := first; j <= i; j++ {
		weights[j] = math.Exp(scores[j] - most)
		sum += weights[j]
	}
	for j := range weights {
		weights[j] /= sum
	}
	r := attentionRow{weights: weights, lse: most + math.Log(sum)}
	keys, blocks := float64(i+1-first), float64(p.seq/attendTile+2)
	// A score has the error of its sum, of the rounded scale, and of the scaled query.
	score := float64(p.keyDim+2) * unit * size
	// The maximum is subtracted in as many parts as there are blocks of keys. Each part
	// is an exponential and a product.
	r.forwardError = score + unit*(most-least) + blocks*(expError+unit)
	// The LSE adds the sum of the exponentials, its logarithm, and the maximum.
	r.lseError = r.forwardError + keys*unit + unit*(math.Abs(math.Log(sum))+math.Abs(r.lse))
	r.backwardError = score + r.lseError + unit*max(math.Abs(most-r.lse), math.Abs(least-r.lse)) + expError
	return r
}

// forward computes O and the LSE.
func (p *plainAttention) forward() {
	tokens := p.batch * p.seq
	p.o, p.lse = newBounded(tokens*p.heads*p.valueDim), newBounded(tokens*p.heads)
	for b := range p.batch {
		for h := range p.heads {
			kv := h / (p.heads / p.kvHeads)
			for i := range p.seq {
				r := p.row(b, h, i)
				p.lse.add((b*p.heads+h)*p.seq+i, r.lse, r.lseError)
				o := ((b*p.seq+i)*p.heads + h) * p.valueDim
				// The weights in numerator and denominator, the two sums, the reciprocal,
				// and the product with it.
				relative := 2*r.forwardError + 2*float64(i+1)*unit + 2*unit
				for j, w := range r.weights[:i+1] {
					v := ((b*p.seq+j)*p.kvHeads + kv) * p.valueDim
					for d := range p.valueDim {
						p.o.add(o+d, w*p.v[v+d], w*math.Abs(p.v[v+d])*relative)
					}
				}
			}
		}
	}
}

// backward computes DQ, DK and DV from an O as it is stored. A kernel that stores bf16
// reads back what it rounded, and a number close to the middle of two bf16 may be rounded
// to either. Rounding our own O would compare the gradients of two different outputs, one
// part in 128 apart.
func (p *plainAttention) backward(stored []float64) {
	p.dq, p.dk, p.dv = newBounded(len(p.q)), newBounded(len(p.k)), newBounded(len(p.v))
	scale := 1 / math.Sqrt(float64(p.keyDim))
	group := p.heads / p.kvHeads
	queries := float64(group * p.seq) // from which one key gets gradients
	for b := range p.batch {
		for h := range p.heads {
			for i := range p.seq {
				r := p.row(b, h, i)
				q := ((b*p.seq+i)*p.heads + h) * p.keyDim
				o := ((b*p.seq+i)*p.heads + h) * p.valueDim
				var mean, meanTerms float64 // of the gradients of the weights
				for d := range p.valueDim {
					mean += stored[o+d] * p.do[o+d]
					meanTerms += math.Abs(stored[o+d] * p.do[o+d])
				}
				for j, w := range r.weights[:i+1] {
					k := ((b*p.seq+j)*p.kvHeads + h/group) * p.keyDim
					v := ((b*p.seq+j)*p.kvHeads + h/group) * p.valueDim
					var dw, terms float64
					for d := range p.valueDim {
						do := p.do[o+d]
						dw, terms = dw+do*p.v[v+d], terms+math.Abs(do*p.v[v+d])
						p.dv.add(v+d, w*do, w*math.Abs(do)*(r.backwardError+queries*unit))
					}
					// Two sums, two products with the weight, the weight itself, and the
					// difference.
					ds := w * (dw - mean) * scale
					dsError := scale * (w*float64(p.valueDim+1)*unit*(terms+meanTerms) + w*math.Abs(dw-mean)*(r.backwardError+unit))
					// The sum, the rounded scale, and the product with it.
					dsError += math.Abs(ds) * (max(queries, float64(p.seq)) + 2) * unit
					for d := range p.keyDim {
						p.dq.add(q+d, ds*p.k[k+d], dsError*math.Abs(p.k[k+d]))
						p.dk.add(k+d, ds*p.q[q+d], dsError*math.Abs(p.q[q+d]))
					}
				}
			}
		}
	}
}

// stored rounds a number to the nearest one of the case's type.
func (c attentionCase) stored(f float64) float64 {
	if c.typ == kernels.F32 {
		return f
	}
	b := math.Float32bits(float32(f))
	return float64(math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff))
}

// loss returns the sum of O * DO, whose gradients the tests compare.
func (p *plainAttention) loss() (sum float64) {
	for b := range p.batch {
		for h := range p.heads {
			kv := h / (p.heads / p.kvHeads)
			for i := range p.seq {
				for j, w := range p.row(b, h, i).weights {
					for d := range p.valueDim {
						sum += w * p.v[((b*p.seq+j)*p.kvHeads+kv)*p.valueDim+d] * p.do[((b*p.seq+i)*p.heads+h)*p.valueDim+d]
					}
				}
			}
		}
	}
	return sum
}

// newPlainAttention draws numbers that the case's type can represent.
func newPlainAttention(c attentionCase) *plainAttention {
	rng := rand.New(rand.NewPCG(c.seed, 3))
	draw := func(n int) []float64 {
		x := make([]float64, n)
		for i := range x {
			x[i] = c.stored(float64(float32(rng.NormFloat64())))
		}
		return x
	}
	tokens := c.batch * c.seq
	return &plainAttention{
		attentionCase: c,
		q:             draw(tokens * c.heads * c.keyDim), k: draw(tokens * c.kvHeads * c.keyDim),
		v: draw(tokens * c.kvHeads * c.valueDim), do: draw(tokens * c.heads * c.valueDim),
	}
}

// attentionLab is a device with the memory of a case. Queries, keys and values are
// columns of one matrix with a spare column on both sides, and so are their gradients.
type attentionLab struct {
	t      testing.TB
	dev    device.Device
	stream device.Stream
	bufs   []*device.Buffer
	AttentionGrad
	all []Matrix // the packed matrices
}

// attentionSpare is the byte that spare columns are filled with.
const attentionSpare = 0x42

func newAttentionLab(t testing.TB, dev device.Device, c attentionCase) *attentionLab {
	s, err := dev.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	x := &attentionLab{t: t, dev: dev, stream: s}
	tokens := c.batch * c.seq
	matrix := func(cols int) Matrix {
		m := NewMatrix(x.alloc(c.typ.Size()*memory.Bytes(tokens*(cols+2))), c.typ, tokens, cols+2)
		x.all = append(x.all, m)
		return m.Columns(1, cols)
	}
	nq, nk, nv := c.heads*c.keyDim, c.kvHeads*c.keyDim, c.kvHeads*c.valueDim
	in, grad := matrix(nq+nk+nv), matrix(nq+nk+nv)
	x.AttentionGrad = AttentionGrad{
		Attention: c.sizes(),
		DO:        matrix(c.heads * c.valueDim), Delta: x.alloc(AttendScratch(c.sizes())),
		DQ: grad.Columns(0, nq), DK: grad.Columns(nq, nk), DV: grad.Columns(nq+nk, nv),
	}
	x.Q, x.K, x.V, x.O = in.Columns(0, nq), in.Columns(nq, nk), in.Columns(nq+nk, nv), matrix(c.heads*c.valueDim)
	x.LSE = x.alloc(memory.Bytes(4 * c.batch * c.heads * c.seq))
	return x
}

func (x *attentionLab) alloc(n memory.Bytes) device.Range {
	x.t.Helper()
	b, err := x.dev.Alloc(memory.Device, n, "test")
	if err != nil {
		x.t.Fatal(err)
	}
	x.stream.Fill(b.All(), attentionSpare)
	x.bufs = append(x.bufs, b)
	return b.All()
}

func (x *attentionLab) close() {
	x.t.Helper()
	for _, b := range x.bufs {
		x.stream.Free(b)
	}
	if err := x.stream.Close(); err != nil {
		x.t.Error(err)
	}
}

// put copies numbers in float64 to a matrix on the device, and get copies them back.
func (x *attentionLab) put(m Matrix, from []float64) {
	x.stream.Upload(m.used("x"), x.bytes(m, from))
}

// bytes returns what the memory of a matrix should hold. Columns between rows keep their
// bytes.
func (x *attentionLab) bytes(m Matrix, from []float64) []byte {
	to := make([]byte, m.extent())
	if err := x.stream.Download(to, m.used("x")); err != nil {
		x.t.Fatal(err)
	}
	size := int(m.Type.Size())
	for i, f := range from {
		at := to[(i/m.Cols*m.pitch()+i%m.Cols)*size:]
		b := math.Float32bits(float32(f))
		if size == 2 {
			at[0], at[1] = byte(b>>16), byte(b>>24)
			continue
		}
		at[0], at[1], at[2], at[3] = byte(b), byte(b>>8), byte(b>>16), byte(b>>24)
	}
	return to
}

func (x *attentionLab) get(m Matrix) (to []float64) {
	from := make([]byte, m.extent())
	if err := x.stream.Download(from, m.used("x")); err != nil {
		x.t.Fatal(err)
	}
	size := int(m.Type.Size())
	for r := range m.Rows {
		for c := range m.Cols {
			at := from[(r*m.pitch()+c)*size:]
			b := uint32(at[0])<<16 | uint32(at[1])<<24
			if size == 4 {
				b = uint32(at[0]) | uint32(at[1])<<8 | uint32(at[2])<<16 | uint32(at[3])<<24
			}
			to = append(to, float64(math.Float32frombits(b)))
		}
	}
	return to
}

// run computes O, LSE, DQ, DK and DV from the inputs of a plain attention.
func (x *attentionLab) run(p *plainAttention) [5][]float64 {
	x.put(x.Q, p.q)
	x.put(x.K, p.k)
	x.put(x.V, p.v)
	x.put(x.DO, p.do)
	Attend(x.stream, x.Attention)
	AttendGrad(x.stream, x.AttentionGrad)
	lse := NewMatrix(x.LSE, kernels.F32, 1, p.batch*p.heads*p.seq)
	return [5][]float64{x.get(x.O), x.get(lse), x.get(x.DQ), x.get(x.DK), x.get(x.DV)}
}

// untouched fails if a spare column changed.
func (x *attentionLab) untouched() {
	x.t.Helper()
	for i, m := range x.all {
		want := float64(math.Float32frombits(attentionSpare * 0x01010101))
		if m.Type == kernels.BF16 {
			want = float64(math.Float32frombits(attentionSpare * 0x01010000))
		}
		for _, edge := range [][]float64{x.get(m.Columns(0, 1)), x.get(m.Columns(m.Cols-1, 1))} {
			if slices.ContainsFunc(edge, func(f float64) bool { return f != want }) {
				x.t.Fatalf("a column beside matrix %d was written", i)
			}
		}
	}
}
