// This file owns the benchmarks of products and attention on a GPU.

package nn

import (
	"encoding/binary"
	"math"
	"strconv"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// measure runs launches many times and reports the operations in a second.
func (g *tensorGPU) measure(b *testing.B, flops float64, launches ...device.Launch) {
	const times = 20
	best := time.Duration(math.MaxInt64)
	for b.Loop() {
		began := time.Now()
		for range times {
			for _, l := range launches {
				g.Launch(l)
			}
		}
		if err := g.Stream.Sync(); err != nil {
			b.Fatal(err)
		}
		best = min(best, time.Since(began)/times)
	}
	b.ReportMetric(flops/best.Seconds()/1e12, "TFLOP/s")
	b.ReportMetric(float64(best.Microseconds()), "us/launch")
}

// fresh returns a matrix of small numbers. Zeros alone would draw less power.
func (g *tensorGPU) fresh(b *testing.B, kind kernels.Number, rows, cols int) Matrix {
	m := NewMatrix(g.alloc(b, kind.Size()*memory.Bytes(rows*cols)).All(), kind, rows, cols)
	b.Cleanup(func() { g.Free(m.Buf) })
	bytes := make([]byte, m.Len)
	state := uint32(1)
	for i := 0; i < len(bytes); i += int(kind.Size()) {
		state = state*1664525 + 1013904223
		v := math.Float32bits(float32(int32(state)) / (1 << 31))
		if kind == kernels.BF16 {
			binary.LittleEndian.PutUint16(bytes[i:], uint16(v>>16))
		} else {
			binary.LittleEndian.PutUint32(bytes[i:], v)
		}
	}
	g.Upload(m.Range, bytes)
	return m
}

func BenchmarkGemmOnGPU(b *testing.B) {
	g := newTensorGPU(b)
	const n = 4096
	half, full := kernels.BF16, kernels.F32
	for _, c := range []struct {
		name           string
		in, out        kernels.Number
		transA, transB bool
	}{
		{"bf16 nn", half, half, false, false},
		{"bf16 nt", half, half, false, true},
		{"bf16 tn to fp32", half, full, true, false},
		{"bf16 tt", half, half, true, true},
		{"fp32 nn", full, full, false, false},
		{"fp32 nt", full, full, false, true},
		{"fp32 tn", full, full, true, false},
	} {
		b.Run(c.name, func(b *testing.B) {
			p := Product{A: g.fresh(b, c.in, n, n), B: g.fresh(b, c.in, n, n), C: g.fresh(b, c.out, n, n), TransA: c.transA, TransB: c.transB}
			g.measure(b, 2*n*n*n, GemmLaunch(p))
		})
	}
}

// The gradient of a router is thin: some experts, and sums over all tokens.
func BenchmarkThinOnGPU(b *testing.B) {
	g := newTensorGPU(b)
	const tokens, cols = 8192, 2048
	for _, experts := range []int{8, 64, 256} {
		b.Run(strconv.Itoa(experts), func(b *testing.B) {
			c := g.fresh(b, kernels.F32, experts, cols)
			p := Product{A: g.fresh(b, kernels.F32, tokens, experts), B: g.fresh(b, kernels.BF16, tokens, cols), C: c, TransA: true, Plus: c}
			g.measure(b, 2*tokens*cols*float64(experts), GemmLaunch(p))
		})
	}
}

// Eight experts have 1024 rows each.
func BenchmarkGroupedOnGPU(b *testing.B) {
	g := newTensorGPU(b)
	const experts, each, n = 8, 1024, 4096
	seg := Segments{Range: g.alloc(b, SegmentsBytes(experts)).All(), Experts: experts}
	defer g.Free(seg.Buf)
	var pairs []byte
	for e := range uint32(experts) {
		pairs = binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(pairs, e*each), each)
	}
	g.Upload(seg.Range, pairs)
	for name, kind := range map[string]kernels.Number{"bf16": kernels.BF16, "fp32": kernels.F32} {
		b.Run(name, func(b *testing.B) {
			p := Experts{A: g.fresh(b, kind, experts*each, n), B: g.fresh(b, kind, experts*n, n), C: g.fresh(b, kind, experts*each, n), TransB: true, Seg: seg}
			g.measure(b, 2*experts*each*n*n, GroupedGemmLaunch(p))
		})
		b.Run("gradient "+name, func(b *testing.B) {
			p := ExpertsGrad{A: g.fresh(b, kind, experts*each, n), B: g.fresh(b, kind, experts*each, n), C: g.fresh(b, kernels.F32, experts*n, n), Seg: seg}
			g.measure(b, 2*experts*each*n*n, GroupedGradLaunch(p))
		})
	}
}

func BenchmarkAttentionOnGPU(b *testing.B) {
	g := newTensorGPU(b)
	for _, c := range []struct {
		name                             string
		kind                             kernels.Number
		heads, kvHeads, keyDim, valueDim int
		seq                              int
	}{
		{"bf16 64", kernels.BF16, 32, 8, 64, 64, 4096},
		{"bf16 128", kernels.BF16, 32, 8, 128, 128, 4096},
		{"bf16 192", kernels.BF16, 16, 16, 192, 128, 4096},
		{"bf16 256", kernels.BF16, 16, 4, 256, 256, 4096},
		{"fp32 128", kernels.F32, 8, 2, 128, 128, 2048},
	} {
		const batch = 2
		tokens := batch * c.seq
		row := func(b *testing.B) device.Range { return g.fresh(b, kernels.F32, 1, batch*c.heads*c.seq).Range }
		attention := func(b *testing.B) Attention {
			return Attention{
				Q: g.fresh(b, c.kind, tokens, c.heads*c.keyDim), K: g.fresh(b, c.kind, tokens, c.kvHeads*c.keyDim),
				V: g.fresh(b, c.kind, tokens, c.kvHeads*c.valueDim), O: g.fresh(b, c.kind, tokens, c.heads*c.valueDim),
				LSE: row(b), Batch: batch, Seq: c.seq, Heads: c.heads, KVHeads: c.kvHeads, KeyDim: c.keyDim, ValueDim: c.valueDim,
				Scale: float32(1 / math.Sqrt(float64(c.keyDim))),
			}
		}
		// Half of the scores are visible. Each is a product of KeyDim numbers, and
		// multiplies ValueDim.
		pairs := float64(batch*c.heads) * float64(c.seq) * float64(c.seq) / 2
		b.Run(c.name+" forward", func(b *testing.B) {
			g.measure(b, pairs*2*float64(c.keyDim+c.valueDim), AttendLaunch(attention(b)))
		})
		b.Run(c.name+" backward", func(b *testing.B) {
			forward := attention(b)
			scratch := g.fresh(b, kernels.F32, 1, int(AttendScratch(forward)/4))
			a := AttentionGrad{
				Attention: forward, DO: g.fresh(b, c.kind, tokens, c.heads*c.valueDim), DQ: g.fresh(b, c.kind, tokens, c.heads*c.keyDim),
				DK: g.fresh(b, c.kind, tokens, c.kvHeads*c.keyDim), DV: g.fresh(b, c.kind, tokens, c.kvHeads*c.valueDim), Delta: scratch.Range,
			}
			g.Launch(AttendLaunch(a.Attention))
			var launches []device.Launch
			for step := range gradSteps {
				launches = append(launches, AttendGradLaunch(a, step))
			}
			g.measure(b, pairs*2*float64(3*c.keyDim+2*c.valueDim), launches...)
		})
	}
}
