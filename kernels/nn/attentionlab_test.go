// This file owns what the tests of attention stand on: plain attention in float64,
// which is the truth, and a device with the memory of a case.

package nn

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/kernels"
)

// attentionCase is shapes of attention.
type attentionCase struct {
	batch, seq, heads, kvHeads, keyDim, valueDim, window int
	typ                                                  kernels.Number
	seed                                                 uint64
}

func (c attentionCase) String() string {
	return fmt.Sprintf("%d x %d, %d heads on %d of %d and %d, window %d, type %d", c.batch, c.seq, c.heads, c.kvHeads, c.keyDim, c.valueDim, c.window, c.typ)
}

// plainAttention is the same in float64 with all scores, and the truth.
type plainAttention struct {
	attentionCase
	q, k, v, do, o, dq, dk, dv []float64
	lse                        []float64
}

// scores are the weights that a query of a head gives to all keys.
func (p *plainAttention) scores(b, h, i int) (weights []float64, lse float64) {
	kv := h / (p.heads / p.kvHeads)
	weights = make([]float64, p.seq)
	var sum float64
	for j := range i + 1 {
		if p.window > 0 && j <= i-p.window {
			continue
		}
		var s float64
		for d := range p.keyDim {
			s += p.q[((b*p.seq+i)*p.heads+h)*p.keyDim+d] * p.k[((b*p.seq+j)*p.kvHeads+kv)*p.keyDim+d]
		}
		weights[j] = math.Exp(s / math.Sqrt(float64(p.keyDim)))
		sum += weights[j]
	}
	for j := range weights {
		weights[j] /= sum
	}
	return weights, math.Log(sum)
}

func (p *plainAttention) run() {
	tokens := p.batch * p.seq
	p.o, p.lse = make([]float64, tokens*p.heads*p.valueDim), make([]float64, tokens*p.heads)
	p.dq, p.dk, p.dv = make([]float64, len(p.q)), make([]float64, len(p.k)), make([]float64, len(p.v))
	scale := 1 / math.Sqrt(float64(p.keyDim))
	for b := range p.batch {
		for h := range p.heads {
			kv := h / (p.heads / p.kvHeads)
			for i := range p.seq {
				weights, lse := p.scores(b, h, i)
				p.lse[(b*p.heads+h)*p.seq+i] = lse
				q := ((b*p.seq+i)*p.heads + h) * p.keyDim
				o := ((b*p.seq+i)*p.heads + h) * p.valueDim
				dw := make([]float64, p.seq)
				for j, w := range weights[:i+1] {
					v := ((b*p.seq+j)*p.kvHeads + kv) * p.valueDim
					for d := range p.valueDim {
						p.o[o+d] += w * p.v[v+d]
						p.dv[v+d] += w * p.do[o+d]
						dw[j] += p.do[o+d] * p.v[v+d]
					}
				}
				// The mean of dw, as it follows from what is stored.
				var mean float64
				for d := range p.valueDim {
					mean += p.stored(p.o[o+d]) * p.do[o+d]
				}
				for j, w := range weights[:i+1] {
					k := ((b*p.seq+j)*p.kvHeads + kv) * p.keyDim
					ds := w * (dw[j] - mean) * scale
					for d := range p.keyDim {
						p.dq[q+d] += ds * p.k[k+d]
						p.dk[k+d] += ds * p.q[q+d]
					}
				}
			}
		}
	}
}

// stored is a number rounded to nearest even as the case's type holds it.
func (c attentionCase) stored(f float64) float64 {
	if c.typ == kernels.F32 {
		return f
	}
	b := math.Float32bits(float32(f))
	return float64(math.Float32frombits((b + 0x7fff + b>>16&1) &^ 0xffff))
}

// loss is what the gradients belong to: the sum of O * DO.
func (p *plainAttention) loss() (sum float64) {
	for b := range p.batch {
		for h := range p.heads {
			kv := h / (p.heads / p.kvHeads)
			for i := range p.seq {
				weights, _ := p.scores(b, h, i)
				for j, w := range weights {
					for d := range p.valueDim {
						sum += w * p.v[((b*p.seq+j)*p.kvHeads+kv)*p.valueDim+d] * p.do[((b*p.seq+i)*p.heads+h)*p.valueDim+d]
					}
				}
			}
		}
	}
	return sum
}

// newPlainAttention draws numbers that the case's type holds.
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

// attentionLab is a device with the memory of a case: queries, keys and values are
// columns of one matrix with a column to spare on both sides, and so are their
// gradients.
type attentionLab struct {
	t      testing.TB
	dev    device.Device
	stream device.Stream
	bufs   []*device.Buffer
	AttentionGrad
	all []Matrix // the packed matrices
}

// attentionSpare is what the columns to spare hold.
const attentionSpare = 0x42

func newAttentionLab(t testing.TB, dev device.Device, c attentionCase) *attentionLab {
	s, err := dev.NewStream("test")
	if err != nil {
		t.Fatal(err)
	}
	x := &attentionLab{t: t, dev: dev, stream: s}
	tokens := c.batch * c.seq
	matrix := func(cols int) Matrix {
		m := NewMatrix(x.alloc(c.typ.Size()*device.Bytes(tokens*(cols+2))), c.typ, tokens, cols+2)
		x.all = append(x.all, m)
		return m.Columns(1, cols)
	}
	nq, nk, nv := c.heads*c.keyDim, c.kvHeads*c.keyDim, c.kvHeads*c.valueDim
	in, grad := matrix(nq+nk+nv), matrix(nq+nk+nv)
	rows := device.Bytes(4 * c.batch * c.heads * c.seq)
	x.AttentionGrad = AttentionGrad{
		Attention: Attention{
			Q: in.Columns(0, nq), K: in.Columns(nq, nk), V: in.Columns(nq+nk, nv), O: matrix(c.heads * c.valueDim),
			LSE: x.alloc(rows), Batch: c.batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads,
			KeyDim: c.keyDim, ValueDim: c.valueDim, Window: c.window, Scale: float32(1 / math.Sqrt(float64(c.keyDim))),
		},
		DO: matrix(c.heads * c.valueDim), Delta: x.alloc(rows),
		DQ: grad.Columns(0, nq), DK: grad.Columns(nq, nk), DV: grad.Columns(nq+nk, nv),
	}
	return x
}

func (x *attentionLab) alloc(n device.Bytes) device.Range {
	x.t.Helper()
	b, err := x.dev.Alloc(device.Accel, n, "test")
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

// put and get move a matrix between the device and float64.
func (x *attentionLab) put(m Matrix, from []float64) {
	x.stream.Upload(m.used("x"), x.bytes(m, from))
}

// bytes is what the memory of a matrix should hold; columns between rows keep what
// they have.
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

// run gives O, LSE, DQ, DK and DV of what a plain attention begins with.
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

// untouched fails unless the columns to spare are as they were.
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
