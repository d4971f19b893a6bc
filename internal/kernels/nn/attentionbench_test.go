// This file owns the speed of attention, beside that of products of blocks and of
// plain loops:
//
//	go test -run '^$' -bench Attention ./internal/kernels/nn

package nn

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/gemm"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/parallel"
)

// pairs returns the number of scores that the mask does not hide.
func (c attentionCase) pairs() float64 {
	return float64(c.batch*c.heads) * float64(c.seq) * float64(c.seq+1) / 2
}

func (x *attentionLab) floats(m Matrix) []float32 {
	return device.Slice[float32](uint64(m.Addr()), int(m.extent()/4))
}

// plainLoop computes attention in fp32 in the shortest way, one row of scores at a time.
func (x *attentionLab) plainLoop() {
	parallel.For(x.Batch*x.Heads, 1, func(i, _ int) {
		b, h := i/x.Heads, i%x.Heads
		kv := h / (x.Heads / x.KVHeads)
		q, k, v, o := x.floats(x.Q), x.floats(x.K), x.floats(x.V), x.floats(x.O)
		scores := make([]float32, x.Seq)
		for t := range x.Seq {
			row := b*x.Seq + t
			qt := q[row*x.Q.pitch()+h*x.KeyDim:][:x.KeyDim]
			var sum float32
			for j := range t + 1 {
				kj := k[(b*x.Seq+j)*x.K.pitch()+kv*x.KeyDim:][:x.KeyDim]
				var s float32
				for d, y := range kj {
					s += qt[d] * y
				}
				scores[j] = float32(math.Exp(float64(s * x.Scale)))
				sum += scores[j]
			}
			ot := o[row*x.O.pitch()+h*x.ValueDim:][:x.ValueDim]
			clear(ot)
			for j := range t + 1 {
				p := scores[j] / sum
				for d, y := range v[(b*x.Seq+j)*x.V.pitch()+kv*x.ValueDim:][:x.ValueDim] {
					ot[d] += p * y
				}
			}
		}
	})
}

func BenchmarkAttention(b *testing.B) {
	dev := attentionDevice(b)
	// The fastest run counts, because other work of the machine only makes runs slower.
	rate := func(b *testing.B, flops float64, f func()) {
		best := time.Hour
		for b.Loop() {
			begin := time.Now()
			f()
			best = min(best, time.Since(begin))
		}
		b.ReportMetric(flops/best.Seconds()/1e9, "GFLOP/s")
	}
	for _, c := range []attentionCase{
		{batch: 8, seq: 128, heads: 4, kvHeads: 2, keyDim: 32, valueDim: 32},
		{batch: 2, seq: 256, heads: 8, kvHeads: 8, keyDim: 96, valueDim: 64},
		{batch: 2, seq: 512, heads: 8, kvHeads: 2, keyDim: 64, valueDim: 64},
		{batch: 2, seq: 512, heads: 8, kvHeads: 2, keyDim: 64, valueDim: 64, typ: kernels.BF16},
		{batch: 1, seq: 1024, heads: 8, kvHeads: 8, keyDim: 128, valueDim: 128},
	} {
		name := fmt.Sprintf("%dx%d,%d-%d,%d-%d,%d", c.batch, c.seq, c.heads, c.kvHeads, c.keyDim, c.valueDim, c.typ)
		x := newAttentionLab(b, dev, c)
		p := newPlainAttention(c)
		x.run(p)
		b.Run(name+"/product", func(b *testing.B) {
			x, y := make([]float32, 64*c.keyDim), make([]float32, 64*c.keyDim)
			const runs, times = 16, 32
			rate(b, runs*times*2*64*64*float64(c.keyDim), func() {
				parallel.For(runs, 1, func(int, int) {
					z := make([]float32, 64*64)
					for range times {
						gemm.Block(z, 64, x, c.keyDim, false, y, 64, false, 64, 64, c.keyDim, false)
					}
				})
			})
		})
		sync := func() {
			if err := x.stream.Sync(); err != nil {
				b.Fatal(err)
			}
		}
		b.Run(name+"/forward", func(b *testing.B) {
			rate(b, 2*float64(c.keyDim+c.valueDim)*c.pairs(), func() { Attend(x.stream, x.Attention); sync() })
		})
		b.Run(name+"/backward", func(b *testing.B) {
			rate(b, 2*float64(3*c.keyDim+2*c.valueDim)*c.pairs(), func() { AttendGrad(x.stream, x.AttentionGrad); sync() })
		})
		if c.typ == kernels.F32 {
			b.Run(name+"/plain", func(b *testing.B) {
				rate(b, 2*float64(c.keyDim+c.valueDim)*c.pairs(), x.plainLoop)
			})
		}
		x.close()
	}
}
