// This file owns the benchmarks of all kernels but products and attention on a GPU, at
// the sizes of models with 2048 to 7168 columns and microbatches of 8192 tokens.

package nn

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// gpuYard is memory from which benchmarks allocate.
type gpuYard struct {
	*tensorGPU
	buf *device.Buffer
	at  memory.Bytes
}

func (y *gpuYard) place(n memory.Bytes) device.Range {
	r := y.buf.Slice(y.at, n)
	y.at += (n + 255) / 256 * 256
	return r
}

func (y *gpuYard) f32(n int) device.Range { return y.place(memory.Bytes(4 * n)) }

func (y *gpuYard) matrix(rows, cols int) Matrix {
	return NewMatrix(y.place(memory.Bytes(2*rows*cols)), kernels.BF16, rows, cols)
}

func (y *gpuYard) words(n int, f func(i int) int) device.Range {
	data := make([]byte, 0, 4*n)
	for i := range n {
		v := f(i)
		data = append(data, byte(v), byte(v>>8), byte(v>>16), byte(v>>24))
	}
	r := y.place(memory.Bytes(4 * n))
	y.Upload(r, data)
	return r
}

// measure runs work many times. moved is the number of bytes that the work must read and
// write.
func (y *gpuYard) measure(b *testing.B, name string, moved memory.Bytes, issue func(s device.Stream)) {
	b.Run(name, func(b *testing.B) {
		const times = 10
		best := time.Hour
		for b.Loop() {
			began := time.Now()
			for range times {
				issue(y.Stream)
			}
			if err := y.Stream.Sync(); err != nil {
				b.Fatal(err)
			}
			best = min(best, time.Since(began)/times)
		}
		b.ReportMetric(float64(best.Nanoseconds())/1e3, "us")
		b.ReportMetric(float64(moved)/best.Seconds()/1e9, "GB/s")
	})
}

const gpuTokens, gpuCols = 8192, 4096

func newGPUYard(b *testing.B) *gpuYard {
	y := &gpuYard{tensorGPU: newTensorGPU(b)}
	y.buf = y.alloc(b, 5<<30)
	b.Cleanup(func() { y.Free(y.buf) })
	y.Fill(y.buf.All(), 0)
	return y
}

// coldSets is how many copies of its operands a benchmark uses in turn, so that L2 has none of
// them: 50 MB on an H200.
const coldSets = 4

// cold measures work on another copy of its operands each time.
func (y *gpuYard) cold(b *testing.B, name string, moved memory.Bytes, issue func(s device.Stream, i int)) {
	i := 0
	y.measure(b, name, moved, func(s device.Stream) {
		issue(s, i%coldSets)
		i++
	})
}

// copies returns copies of a matrix.
func (y *gpuYard) copies(rows, cols int) (m [coldSets]Matrix) {
	for i := range m {
		m[i] = y.matrix(rows, cols)
	}
	return m
}

func BenchmarkRowsOnGPU(b *testing.B) {
	y := newGPUYard(b)
	for _, cols := range []int{2048, 4096, 7168} {
		y.at = 0
		p, q, r, wide, w := y.copies(gpuTokens, cols), y.copies(gpuTokens, cols), y.copies(gpuTokens, cols), y.copies(gpuTokens, 2*cols), y.matrix(1, cols)
		dw, spare, unit := NewMatrix(y.f32(cols), kernels.F32, 1, cols), y.place(64<<20), p[0].Len
		cold := func(name string, moved memory.Bytes, issue func(s device.Stream, i int)) {
			y.cold(b, fmt.Sprintf("%s %d", name, cols), moved, issue)
		}
		cold("copy", 2*unit, func(s device.Stream, i int) { s.Copy(q[i].Range, p[i].Range) })
		cold("norm", 2*unit, func(s device.Stream, i int) { RMSNorm(s, Norm{Y: q[i], X: p[i], W: w, Epsilon: 1e-5}) })
		cold("norm grad", 4*unit, func(s device.Stream, i int) {
			RMSNormGrad(s, NormGrad{DX: r[i], DW: dw, X: p[i], W: w, DY: q[i], Plus: r[i], Epsilon: 1e-5, Scratch: spare})
		})
		cold("rope", 2*unit, func(s device.Stream, i int) {
			Rope(s, Rotation{X: p[i], Heads: cols / 128, Head: 128, Width: 128, Seq: 4096, Table: spare})
		})
		cold("swiglu", 3*unit, func(s device.Stream, i int) { SwiGLU(s, Gate{Y: q[i], X: wide[i]}) })
		cold("swiglu grad", 6*unit, func(s device.Stream, i int) {
			SwiGLUGrad(s, GateGrad{DX: wide[i], X: wide[i], DY: q[i], Y: q[i]})
		})
		cold("add", 3*unit, func(s device.Stream, i int) { Add(s, Sum{Y: r[i], A: p[i], B: q[i]}) })
	}

	y.at = 0
	spare := y.place(64 << 20)
	for _, vocab := range []int{32000, 50304, 128256} {
		const rows = 1024
		at := y.at
		ids := y.words(gpuTokens, func(i int) int { return i * 7919 % vocab })
		logits, grad := NewMatrix(y.f32(rows*vocab), kernels.F32, rows, vocab), y.matrix(rows, vocab)
		y.measure(b, fmt.Sprintf("cross entropy %d", vocab), 6*rows*memory.Bytes(vocab), func(s device.Stream) {
			CrossEntropy(s, Loss{Logits: logits, Targets: ids, Losses: spare, Grad: grad, Scale: 1})
		})
		y.at = at
	}
	const vocab = 65536
	table, q, unit := y.matrix(vocab, gpuCols), y.matrix(gpuTokens, gpuCols), memory.Bytes(2*gpuTokens*gpuCols)
	// One id in eight is equal.
	ids := y.words(gpuTokens, func(i int) int { return i * 7919 % vocab * min(i%8, 1) })
	y.measure(b, "embed", 2*unit, func(s device.Stream) { Embed(s, Lookup{Y: q, Table: table, IDs: ids}) })
	y.measure(b, "embed grad", 3*unit, func(s device.Stream) {
		EmbedGrad(s, LookupGrad{DTable: table, DY: q, IDs: ids, Scratch: spare})
	})

	const big = 1 << 27
	a := Adam{W: y.f32(big), M: y.f32(big), V: y.f32(big), G: y.place(2 * big), GType: kernels.BF16, Hyper: y.place(HyperBytes)}
	a.Param, a.ParamType = y.place(2*big), kernels.BF16
	y.measure(b, "adamw", 28*big, func(s device.Stream) { AdamW(s, a) })
	y.measure(b, "squares", 2*big, func(s device.Stream) {
		AddSquares(s, Squares{Sum: a.Hyper.Slice(0, 4), X: a.G, Type: kernels.BF16, Scratch: spare})
	})
}

func BenchmarkExpertsOnGPU(b *testing.B) {
	const experts, topK = 64, 8
	const room = gpuTokens * topK
	y := newGPUYard(b)
	x, to, sorted := y.matrix(gpuTokens, gpuCols), y.matrix(gpuTokens, gpuCols), y.matrix(room, gpuCols)
	logits, scores := NewMatrix(y.f32(gpuTokens*experts), kernels.F32, gpuTokens, experts), NewMatrix(y.f32(gpuTokens*experts), kernels.F32, gpuTokens, experts)
	index := y.words(room, func(i int) int { return (i*31 + i/topK) % experts })
	source, place, spare := y.f32(room), y.f32(room), y.place(16<<20)
	seg := Segments{y.place(SegmentsBytes(experts)), experts}
	y.measure(b, "route", 2*scores.Len, func(s device.Stream) {
		Route(s, Routing{Logits: logits, TopK: topK, Normalise: true, Factor: 1, Scores: scores, Index: spare, Weight: place})
	})
	y.measure(b, "sort", 3*index.Len, func(s device.Stream) {
		SortRows(s, Sorting{Index: index, Tokens: gpuTokens, TopK: topK, Experts: experts, Group: 1, Room: room, Seg: seg, Source: source, Place: place, Scratch: spare})
	})
	y.measure(b, "spread", sorted.Len+x.Len, func(s device.Stream) { SpreadRows(s, Spreading{Dst: sorted, Src: x, Place: place, Every: topK}) })
	y.measure(b, "take", sorted.Len+x.Len, func(s device.Stream) { TakeRows(s, Taking{Dst: sorted, Src: x, Source: source, Every: topK}) })
	y.measure(b, "combine", sorted.Len+x.Len, func(s device.Stream) { CombineRows(s, Combining{Dst: to, Src: sorted, Place: place, Every: topK}) })
}

// random fills a matrix of bf16 with numbers between -1 and 1: zeros alone would draw less
// power.
func (y *gpuYard) random(m Matrix) Matrix {
	rng, data := rand.New(rand.NewPCG(1, 2)), make([]byte, m.Len)
	for i := 1; i < len(data); i += 2 {
		data[i-1], data[i] = byte(rng.Uint32()), 0x3f|byte(rng.Uint32())&0x80
	}
	y.Upload(m.Range, data)
	return m
}

// each measures work, and then each of its launches by itself.
func (y *gpuYard) each(b *testing.B, name string, moved memory.Bytes, issue func(s device.Stream)) {
	y.measure(b, name, moved, issue)
	var t tape
	issue(&t)
	for _, op := range t.ops {
		y.measure(b, name+"/"+strings.TrimPrefix(op.Kernel.Name, "stowage_nn_"), 0, func(s device.Stream) { s.Launch(op.Launch) })
	}
}

func BenchmarkMambaOnGPU(b *testing.B) {
	for _, groups := range []int{1, 8} {
		b.Run(fmt.Sprintf("groups=%d", groups), func(b *testing.B) { benchmarkMamba(b, groups) })
	}
}

func benchmarkMamba(b *testing.B, groups int) {
	y := newGPUYard(b)
	c := Scan{Seq: 4096, Heads: 64, HeadDim: 64, Groups: groups, State: 128, Y: y.matrix(gpuTokens, gpuCols)}
	c.XBC, c.DT = y.random(y.matrix(gpuTokens, c.inner()+2*groups*c.State)), y.random(y.matrix(gpuTokens, c.Heads))
	c.ALog, c.D, c.DTBias = y.matrix(1, c.Heads), y.matrix(1, c.Heads), y.matrix(1, c.Heads)
	c.States = y.place(c.StateBytes(gpuTokens))
	d := ScanGrad{Scan: c, DY: y.random(y.matrix(gpuTokens, gpuCols)), DXBC: y.matrix(gpuTokens, c.XBC.Cols), DDT: y.matrix(gpuTokens, c.Heads)}
	d.DALog, d.DD, d.DDTBias = y.matrix(1, c.Heads), y.matrix(1, c.Heads), y.matrix(1, c.Heads)
	d.Scratch = y.place(c.ScratchBytes(gpuTokens))
	unit := c.Y.Len
	y.each(b, "scan", 2*unit, func(s device.Stream) { Recur(s, c) })
	y.each(b, "scan grad", 3*unit, func(s device.Stream) { RecurGrad(s, d) })

	v := Conv{Y: d.DXBC, X: c.XBC, W: y.matrix(c.XBC.Cols, 4), Bias: y.matrix(1, c.XBC.Cols), Seq: c.Seq}
	y.each(b, "conv", 2*v.X.Len, func(s device.Stream) { Convolve(s, v) })
	g := ConvGrad{Conv: v, DY: y.random(y.matrix(gpuTokens, c.XBC.Cols)), DX: d.DXBC, DW: y.matrix(c.XBC.Cols, 4), DBias: y.matrix(1, c.XBC.Cols)}
	g.Scratch = y.place(v.ScratchBytes())
	y.each(b, "conv grad", 3*v.X.Len, func(s device.Stream) { ConvolveGrad(s, g) })
	x, z, w := y.random(y.matrix(gpuTokens, gpuCols)), y.random(y.matrix(gpuTokens, gpuCols)), y.matrix(1, gpuCols)
	n := GatedNorm{Y: c.Y, X: x, Z: z, W: w, Groups: groups, Epsilon: 1e-5}
	y.each(b, "gated norm", 3*unit, func(s device.Stream) { GatedRMSNorm(s, n) })
	m := GatedNormGrad{GatedNorm: n, DY: d.DY, DX: c.Y, DZ: z, DW: y.matrix(1, gpuCols), Scratch: y.place(GatedNormScratch(gpuTokens, gpuCols))}
	y.each(b, "gated norm grad", 5*unit, func(s device.Stream) { GatedRMSNormGrad(s, m) })
}
