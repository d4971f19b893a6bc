// This file owns the benchmark that pytorch/bench/torch_kernels.py runs beside PyTorch's
// kernels: the same names, shapes and method. Every measured launch finds a cold L2 cache and
// random normal numbers, and lies between two timing events. The script asks for one
// run after the other, so that its own and ours take turns.
//
//	python3 pytorch/bench/torch_kernels.py --nn nn.test

package nn

import (
	"bufio"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

var askPeers = flag.Bool("ask", false, "run what standard input asks for: names, one a line for each run, in the order of the benchmark")

// peers measures launches.
type peers struct {
	gpuYard
	b          *testing.B
	tile       []byte // random normal numbers
	flush      *device.Buffer
	copied     *device.Buffer // copies beside what is bound by memory go from its first half to its second
	begin, end device.Event
	asked      *bufio.Scanner // nil: everything is measured
	next       string         // the name that was asked for and not reached yet
}

const (
	peerRuns  = 10
	peerArena = 8 << 30
	peerFlush = 256 << 20
	peerCopy  = 1 << 30 // the longest copy
)

func newPeers(b *testing.B) *peers {
	p := &peers{gpuYard: gpuYard{tensorGPU: newTensorGPU(b)}, b: b}
	p.buf, p.flush, p.copied = p.alloc(b, peerArena), p.alloc(b, peerFlush), p.alloc(b, 2*peerCopy)
	if *askPeers {
		p.asked = bufio.NewScanner(os.Stdin)
	}
	var err [2]error
	p.begin, err[0] = p.NewEvent(device.Timing)
	p.end, err[1] = p.NewEvent(device.Timing)
	if err[0] != nil || err[1] != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		p.Free(p.buf)
		p.Free(p.flush)
		p.Free(p.copied)
		_, _ = p.begin.Close(), p.end.Close()
	})
	return p
}

// fresh makes the whole arena normal numbers in bf16, which read as fp32 are of that size too.
func (p *peers) fresh() {
	const tile = 8 << 20
	rng := rand.New(rand.NewPCG(1, 2))
	for len(p.tile) < tile {
		v := math.Float32bits(float32(rng.NormFloat64())) >> 16
		p.tile = append(p.tile, byte(v), byte(v>>8))
	}
	p.Upload(p.buf.Slice(0, tile), p.tile)
	for n := memory.Bytes(tile); n < peerArena; n *= 2 {
		p.Copy(p.buf.Slice(n, n), p.buf.Slice(0, n))
	}
	p.at = 0
}

// wanted waits until a name is asked for, and reports whether it is this one.
func (p *peers) wanted(name string) bool {
	if p.asked == nil {
		return false
	}
	if p.next == "" && p.asked.Scan() {
		p.next = p.asked.Text()
	}
	if p.next != name {
		return false
	}
	p.next = ""
	return true
}

// measure prints the median of some runs, as TFLOP/s if there are FLOPs. Otherwise it prints
// GB/s, and what percentage that is of a copy that moves as many bytes, at most twice peerCopy.
// The copy takes turns with the runs. If somebody asks, it prints the microseconds of each run,
// and those of the copy.
func (p *peers) measure(name string, flops float64, moved memory.Bytes, issue func(s device.Stream)) {
	half := min(moved/2, peerCopy)
	alike := func(s device.Stream) { s.Copy(p.copied.Slice(peerCopy, half), p.copied.Slice(0, half)) }
	us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1e3 }
	for p.wanted(name) {
		took := []any{us(p.once(p.b, issue))}
		if flops == 0 {
			took = append(took, us(p.once(p.b, alike)))
		}
		fmt.Println(append([]any{"peer", name}, took...)...)
	}
	if p.asked != nil {
		return
	}
	p.b.Run(name, func(b *testing.B) {
		var took, copied []time.Duration
		for range peerRuns + 2 {
			took = append(took, p.once(b, issue))
			if flops == 0 {
				copied = append(copied, p.once(b, alike))
			}
		}
		d := middle(took[2:])
		b.ReportMetric(0, "ns/op")
		b.ReportMetric(us(d), "us")
		if flops > 0 {
			b.ReportMetric(flops/d.Seconds()/1e12, "TFLOP/s")
			return
		}
		rate := func(n memory.Bytes, d time.Duration) float64 { return float64(n) / d.Seconds() / 1e9 }
		b.ReportMetric(rate(moved, d), "GB/s")
		b.ReportMetric(100*rate(moved, d)/rate(2*half, middle(copied[2:])), "%copy")
	})
}

// once returns how long one run takes.
func (p *peers) once(b *testing.B, issue func(s device.Stream)) time.Duration {
	p.Fill(p.flush.All(), 0)
	p.Record(p.begin)
	issue(p.Stream)
	p.Record(p.end)
	if err := p.Stream.Sync(); err != nil {
		b.Fatal(err)
	}
	d, err := p.end.Since(p.begin)
	if err != nil {
		b.Fatal(err)
	}
	return d
}

// middle returns the median.
func middle(took []time.Duration) time.Duration {
	slices.Sort(took)
	return took[len(took)/2]
}

// peerGroups are products over experts: rows of x with k columns times n columns of each
// expert. torch_kernels.py has the same.
var peerGroups = []struct {
	name                string
	experts, rows, k, n int
	count               func(e int) float64 // share of the rows of an expert, up to a factor
}{
	{"wide8-2048", 8, 16384, 2048, 4096, func(int) float64 { return 1 }},
	{"wide8-4096", 8, 16384, 4096, 8192, func(int) float64 { return 1 }},
	{"wide8-4096-down", 8, 16384, 4096, 4096, func(int) float64 { return 1 }},
	{"small64", 64, 49152, 2048, 2048, func(int) float64 { return 1 }},
	{"small64-down", 64, 49152, 1024, 2048, func(int) float64 { return 1 }},
	{"small128", 128, 65536, 2048, 1536, func(int) float64 { return 1 }},
	{"skewed8", 8, 16384, 2048, 4096, func(e int) float64 { return 1 / float64(e+1) }},
	{"skewed64", 64, 49152, 2048, 2048, func(e int) float64 { return 1 / float64(e+1) }},
	{"empty64", 64, 49152, 2048, 2048, func(e int) float64 { return float64(max(0, e%4-2)) }},
	{"wide8-14336", 8, 8192, 4096, 14336, func(e int) float64 { return float64(1 + e%2) }},
	{"uneven32", 32, 16384, 7168, 4096, func(e int) float64 { return float64(1 + e%5) }},
	{"uneven256", 256, 65536, 1024, 2048, func(e int) float64 { return float64(1 + e%3) }},
	{"few16", 16, 4096, 2048, 2816, func(e int) float64 { return float64(1 + e%4) }},
	{"few64", 64, 2048, 2048, 1024, func(e int) float64 { return float64(1 + e%3) }},
}

// peerCounts divides rows by shares; the first expert that has any gets what is left over.
func peerCounts(experts, rows int, share func(e int) float64) []int {
	var all float64
	for e := range experts {
		all += share(e)
	}
	counts, left, first := make([]int, experts), rows, -1
	for e := range experts {
		counts[e] = int(float64(rows) * share(e) / all)
		left -= counts[e]
		if first < 0 && share(e) > 0 {
			first = e
		}
	}
	counts[first] += left
	return counts
}

func BenchmarkPeersOnGPU(b *testing.B) {
	p := newPeers(b)
	p.products()
	p.attention()
	p.rows()
	p.mambaRows()
}

func (p *peers) products() {
	for _, g := range peerGroups {
		p.fresh()
		x, y := p.matrix(g.rows, g.k), p.matrix(g.rows, g.n)
		w := p.matrix(g.experts*g.n, g.k)
		dw := NewMatrix(p.f32(g.experts*g.n*g.k), kernels.F32, g.experts*g.n, g.k)
		counts, first := peerCounts(g.experts, g.rows, g.count), 0
		seg := Segments{p.words(2*g.experts, func(i int) int {
			if i%2 == 1 {
				return counts[i/2]
			}
			at := first
			first += counts[i/2]
			return at
		}), g.experts}
		flops := 2 * float64(g.rows) * float64(g.k) * float64(g.n)
		p.measure("grouped/"+g.name+"/forward", flops, 0, func(s device.Stream) { GroupedGemm(s, Experts{A: x, B: w, C: y, TransB: true, Seg: seg}) })
		p.measure("grouped/"+g.name+"/input", flops, 0, func(s device.Stream) { GroupedGemm(s, Experts{A: y, B: w, C: x, Seg: seg}) })
		p.measure("grouped/"+g.name+"/weight", flops, 0, func(s device.Stream) {
			GroupedGrad(s, ExpertsGrad{A: y, B: x, C: dw, Seg: seg, First: true})
		})
		p.measure("grouped/"+g.name+"/weight-added", flops, 0, func(s device.Stream) { GroupedGrad(s, ExpertsGrad{A: y, B: x, C: dw, Seg: seg}) })
	}
	for _, d := range [][3]int{{4096, 4096, 4096}, {8192, 4096, 4096}, {8192, 7168, 2048}, {2048, 32000, 2048}, {8192, 8192, 8192}, {16384, 1024, 1024}, {8192, 512, 4096}, {8192, 1536, 7168}, {8192, 256, 4096}, {8192, 576, 7168}, {4096, 576, 2048}, {8192, 768, 3072}, {8192, 1024, 1024}, {8192, 144, 4096}} {
		p.fresh()
		m, n, k := d[0], d[1], d[2]
		x, w, y := p.matrix(m, k), p.matrix(n, k), p.matrix(m, n)
		dw := NewMatrix(p.f32(n*k), kernels.F32, n, k)
		name, flops := fmt.Sprintf("dense/%dx%dx%d/", m, n, k), 2*float64(m)*float64(n)*float64(k)
		p.measure(name+"forward", flops, 0, func(s device.Stream) { Gemm(s, Product{A: x, B: w, C: y, TransB: true}) })
		p.measure(name+"input", flops, 0, func(s device.Stream) { Gemm(s, Product{A: y, B: w, C: x}) })
		p.measure(name+"weight", flops, 0, func(s device.Stream) { Gemm(s, Product{A: y, B: x, C: dw, TransA: true}) })
		p.measure(name+"weight-added", flops, 0, func(s device.Stream) { Gemm(s, Product{A: y, B: x, C: dw, TransA: true, Plus: dw}) })
	}
}

func (p *peers) attention() {
	for _, h := range []struct {
		name               string
		heads, kv, key, in int
	}{{"head128", 16, 16, 128, 128}, {"gqa128", 32, 8, 128, 128}, {"head64", 32, 32, 64, 64}, {"mla", 16, 16, 192, 128}} {
		for _, seq := range []int{4096, 8192, 16384} {
			p.fresh()
			batch, tokens := 16384/seq, 16384
			a := Attention{
				Batch: batch, Seq: seq, Heads: h.heads, KVHeads: h.kv, KeyDim: h.key, ValueDim: h.in, Scale: float32(1 / math.Sqrt(float64(h.key))),
				Q: p.matrix(tokens, h.heads*h.key), K: p.matrix(tokens, h.kv*h.key), V: p.matrix(tokens, h.kv*h.in), O: p.matrix(tokens, h.heads*h.in),
				LSE: p.f32(tokens * h.heads),
			}
			g := AttentionGrad{
				Attention: a, DO: p.matrix(tokens, h.heads*h.in), DQ: p.matrix(tokens, h.heads*h.key), DK: p.matrix(tokens, h.kv*h.key), DV: p.matrix(tokens, h.kv*h.in),
				Delta: p.place(AttendScratch(a)),
			}
			pairs := float64(batch*h.heads) * float64(seq) * float64(seq) / 2
			name := fmt.Sprintf("attention/%s-%dk/", h.name, seq/1024)
			p.measure(name+"forward", 2*pairs*float64(h.key+h.in), 0, func(s device.Stream) { Attend(s, a) })
			p.measure(name+"backward", 2*pairs*float64(3*h.key+2*h.in), 0, func(s device.Stream) { AttendGrad(s, g) })
		}
	}
}

// rows measures what is bound by memory.
func (p *peers) rows() {
	const tokens, top, big = 8192, 6, 1 << 27
	p.fresh()
	from, to := p.place(1<<30), p.place(1<<30)
	p.measure("rows/copy", 0, 2<<30, func(s device.Stream) { s.Copy(to, from) })
	for _, cols := range []int{2048, 4096} {
		p.fresh()
		x, y, z, more, w := p.matrix(tokens, cols), p.matrix(tokens, cols), p.matrix(tokens, cols), p.matrix(tokens, cols), p.matrix(1, cols)
		wide, dwide := p.matrix(tokens, 2*cols), p.matrix(tokens, 2*cols)
		dw, spare := NewMatrix(p.f32(cols), kernels.F32, 1, cols), p.place(NormScratch(tokens, cols))
		unit, name := x.Len, func(what string) string { return fmt.Sprintf("rows/%s-%d", what, cols) }
		p.measure(name("copy"), 0, 2*unit, func(s device.Stream) { s.Copy(y.Range, x.Range) })
		p.measure(name("norm"), 0, 2*unit, func(s device.Stream) { RMSNorm(s, Norm{Y: y, X: x, W: w, Epsilon: 1e-5}) })
		p.measure(name("norm-grad"), 0, 3*unit, func(s device.Stream) {
			RMSNormGrad(s, NormGrad{DX: z, DW: dw, X: x, W: w, DY: y, Epsilon: 1e-5, Scratch: spare})
		})
		p.measure(name("norm-grad-add"), 0, 4*unit, func(s device.Stream) {
			RMSNormGrad(s, NormGrad{DX: z, DW: dw, X: x, W: w, DY: y, Plus: more, Epsilon: 1e-5, Scratch: spare})
		})
		p.measure(name("swiglu"), 0, 3*unit, func(s device.Stream) { SwiGLU(s, Gate{Y: y, X: wide}) })
		p.measure(name("swiglu-grad"), 0, 5*unit, func(s device.Stream) { SwiGLUGrad(s, GateGrad{DX: dwide, X: wide, DY: y}) })
		sorted, taken := p.matrix(tokens*top, cols), p.matrix(tokens*top, cols)
		at := rand.New(rand.NewPCG(1, 1)).Perm(tokens * top)
		back := make([]int, len(at))
		for i, j := range at {
			back[j] = i
		}
		source, place := p.words(len(at), func(i int) int { return at[i] }), p.words(len(at), func(i int) int { return back[i] })
		p.measure(name("take"), 0, 2*sorted.Len, func(s device.Stream) { TakeRows(s, Taking{Dst: taken, Src: sorted, Source: source, Every: 1}) })
		p.measure(name("spread"), 0, sorted.Len+unit, func(s device.Stream) { SpreadRows(s, Spreading{Dst: sorted, Src: x, Place: place, Every: top}) })
		p.measure(name("combine"), 0, sorted.Len+unit, func(s device.Stream) { CombineRows(s, Combining{Dst: y, Src: sorted, Place: place, Every: top}) })
	}
	for _, l := range []struct {
		name        string
		rows, vocab int
		kind        kernels.Number
	}{{"32000", tokens, 32000, kernels.BF16}, {"128256", 2048, 128256, kernels.BF16}, {"fp32-32000", tokens, 32000, kernels.F32}, {"fp32-128256", 2048, 128256, kernels.F32}} {
		p.fresh()
		logits, grad := NewMatrix(p.f32(l.rows*l.vocab), l.kind, l.rows, l.vocab), p.matrix(l.rows, l.vocab)
		ids, losses := p.words(l.rows, func(i int) int { return i * 7919 % l.vocab }), p.f32(l.rows)
		p.measure("rows/cross-entropy-"+l.name, 0, logits.Len+grad.Len, func(s device.Stream) {
			CrossEntropy(s, Loss{Logits: logits, Targets: ids, Losses: losses, Grad: grad, Scale: 1})
		})
	}
	p.fresh()
	a := Adam{W: p.f32(big), M: p.f32(big), V: p.f32(big), G: p.f32(big), GType: kernels.F32, Hyper: p.place(HyperBytes)}
	p.measure("rows/adamw", 0, 28*big, func(s device.Stream) { AdamW(s, a) })
}

// changed is a stream that changes launches.
type changed struct {
	device.Stream
	change func(l *device.Launch)
}

func (c changed) Launch(l device.Launch) {
	c.change(&l)
	c.Stream.Launch(l)
}

func untuned(l *device.Launch) { l.Tuned = device.Tuned{} }

// mambaRows measures kernels for the rows of Mamba-2 beside those that run without them.
func (p *peers) mambaRows() {
	const rows = 16384
	for _, wide := range []int{4352, 8448} {
		p.fresh()
		unit := memory.Bytes(2 * rows * wide)
		conv := Conv{Y: p.matrix(rows, wide), X: p.matrix(rows, 2*wide).Columns(0, wide), W: p.matrix(wide, 4), Bias: p.matrix(1, wide), Seq: 4096}
		old := func(l *device.Launch) {
			l.Kernel, l.Grid[0], l.Shared = &convKernels.wide, uint32(runsOf(rows, convRows/2)*runsOf(wide, convTile)), 0
		}
		p.measure(fmt.Sprintf("rows/conv-%d/old", wide), 0, 2*unit, func(s device.Stream) { Convolve(changed{s, old}, conv) })
		p.measure(fmt.Sprintf("rows/conv-%d/new", wide), 0, 2*unit, func(s device.Stream) { Convolve(s, conv) })
		grad := ConvGrad{
			Conv: conv, DY: conv.Y, DX: p.matrix(rows, 2*wide).Columns(0, wide), DW: NewMatrix(p.f32(wide*4), kernels.F32, wide, 4),
			DBias: NewMatrix(p.f32(wide), kernels.F32, 1, wide), Scratch: p.place(conv.ScratchBytes()),
		}
		p.measure(fmt.Sprintf("rows/conv-grad-%d/old", wide), 0, 3*unit, func(s device.Stream) { ConvolveGrad(changed{s, untuned}, grad) })
		p.measure(fmt.Sprintf("rows/conv-grad-%d/new", wide), 0, 3*unit, func(s device.Stream) { ConvolveGrad(s, grad) })
	}
	const cols = 4096
	for _, rows := range []int{8192, 16384} {
		p.fresh()
		grad := GatedNormGrad{
			GatedNorm: GatedNorm{X: p.matrix(rows, cols), Z: p.matrix(rows, cols), W: p.matrix(1, cols), Groups: 1, Epsilon: 1e-5},
			DY:        p.matrix(rows, cols), DX: p.matrix(rows, cols), DZ: p.matrix(rows, cols), DW: NewMatrix(p.f32(cols), kernels.F32, 1, cols),
			Scratch: p.place(GatedNormScratch(rows, cols)),
		}
		p.measure(fmt.Sprintf("rows/gated-grad-%d", rows), 0, 5*grad.X.Len, func(s device.Stream) { GatedRMSNormGrad(s, grad) })
	}
}
