package nn

import (
	"bytes"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// placeMatrix returns a matrix of the yard with the given numbers.
func placeMatrix(y *yard, typ kernels.Number, cols int, x []float64) Matrix {
	m := y.matrix(typ, len(x)/cols, cols)
	i := 0
	y.fill(m, func() float32 { i++; return float32(x[i-1]) })
	return m
}

// solid returns a matrix without gaps, with rows of cols numbers.
func solid(y *yard, typ kernels.Number, cols int, x []float64) Matrix {
	m := NewMatrix(place[float32](y, len(x)), typ, len(x)/cols, cols)
	i := 0
	y.fill(m, func() float32 { i++; return float32(x[i-1]) })
	return m
}

// begun returns the gradient of parameters, which already holds something.
func begun(y *yard, typ kernels.Number, cols int, l *leaf) Matrix {
	was := make([]float64, len(l.dx))
	for i := range was {
		was[i] = 1 - 0.25*float64(i%7)
		l.dx[i] += was[i]
	}
	return solid(y, typ, cols, was)
}

// near fails unless a matrix has the given numbers, up to the rounding of its type and of
// sums. The tolerance is relative to the largest number, or to the largest term of a sum
// if that is given.
func near(t failing, what string, m Matrix, want []float64, tolerance float64, terms ...float64) {
	t.Helper()
	most := slices.Max(append(terms, 0))
	for _, w := range want {
		most = max(most, math.Abs(w))
	}
	part := 0.0
	if m.Type == kernels.BF16 {
		part = 1.0 / 256
	}
	for i, w := range want {
		if got := float64(m.get(i/m.Cols, i%m.Cols)); !(math.Abs(got-w) <= tolerance*most+part*math.Abs(w)) {
			t.Fatalf("%s[%d] is %g, want %g; the largest is %g", what, i, got, w, most)
		}
	}
}

var numbers = []kernels.Number{kernels.F32, kernels.BF16}

// scanOf places a scan and its backward pass in a yard.
func scanOf(y *yard, typ, params, grads kernels.Number, p *plainScan) ScanGrad {
	tokens, cols := p.batch*p.seq, p.heads*p.headDim+2*p.groups*p.state
	c := ScanGrad{Scan: Scan{
		Y: y.matrix(typ, tokens, p.heads*p.headDim), XBC: placeMatrix(y, typ, cols, p.xbc.x), DT: placeMatrix(y, typ, p.heads, p.dt.x),
		ALog: solid(y, params, p.heads, p.aLog.x), D: solid(y, params, p.heads, p.d.x), DTBias: solid(y, params, p.heads, p.bias.x),
		Seq: p.seq, Heads: p.heads, HeadDim: p.headDim, Groups: p.groups, State: p.state,
	}}
	if n := int(c.StateBytes(tokens)); n > 0 {
		c.States = place[float32](y, (n+3)/4).Slice(0, memory.Bytes(n))
	}
	c.Scratch = place[[4]float32](y, int(c.ScratchBytes(tokens)+15)/16)
	c.DY = placeMatrix(y, typ, p.heads*p.headDim, p.dy)
	c.DXBC, c.DDT = y.matrix(typ, tokens, cols), y.matrix(typ, tokens, p.heads)
	c.DALog, c.DD, c.DDTBias = begun(y, grads, p.heads, p.aLog), begun(y, grads, p.heads, p.d), begun(y, grads, p.heads, p.bias)
	return c
}

// The scan and its gradients follow the recurrence for all shapes and types, for
// sequences shorter than a chunk, of whole chunks, and of others.
func TestScan(t *testing.T) {
	y := newYard(t, 4<<20)
	rapid.Check(t, func(t *rapid.T) {
		y.reset(t)
		y.strict = rapid.IntRange(0, 9).Draw(t, "strict") == 0
		typ, params, grads := rapid.SampledFrom(numbers).Draw(t, "type"), rapid.SampledFrom(numbers).Draw(t, "parameters"), rapid.SampledFrom(numbers).Draw(t, "gradients")
		shape := plainScan{
			batch: rapid.IntRange(1, 2).Draw(t, "batch"), seq: rapid.OneOf(rapid.IntRange(1, 20), rapid.SampledFrom([]int{63, 64, 65, 127, 128, 130, 200, 260})).Draw(t, "seq"),
			headDim: rapid.IntRange(1, 9).Draw(t, "head"), groups: rapid.IntRange(1, 2).Draw(t, "groups"), state: rapid.IntRange(1, 9).Draw(t, "state"),
		}
		shape.heads = shape.groups * rapid.IntRange(1, 3).Draw(t, "heads")
		step := rapid.SampledFrom([]float64{-6, -2, 1, 4}).Draw(t, "step")
		p := newPlainScan(rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 1)), typ, params, shape, step)
		p.backward()
		c := scanOf(y, typ, params, grads, p)
		Recur(y, c.Scan)
		bounds := p.bounds(c.chunk(), c.states())
		withinBounds(t, "y", c.Y, p.y, bounds.y)
		if rapid.Bool().Draw(t, "in place") {
			c.DXBC = c.XBC
		}
		RecurGrad(y, c)
		withinBounds(t, "dxbc", c.DXBC, p.xbc.dx, bounds.xbc)
		withinBounds(t, "ddt", c.DDT, p.dt.dx, bounds.dt)
		withinBounds(t, "dA_log", c.DALog, p.aLog.dx, bounds.aLog)
		withinBounds(t, "dD", c.DD, p.d.dx, bounds.d)
		withinBounds(t, "ddt_bias", c.DDTBias, p.bias.dx, bounds.bias)
	})
}

// A backward pass that recomputes states gets those of the forward pass.
func TestScanStates(t *testing.T) {
	y := newYard(t, 4<<20)
	p := newPlainScan(rand.New(rand.NewPCG(4, 1)), kernels.BF16, kernels.F32, plainScan{batch: 2, seq: 300, heads: 4, headDim: 5, groups: 2, state: 7}, -2)
	states := map[[3]int][]float64{}
	p.forward(func(b, h, t int, s []float64) { states[[3]int{b, h, t}] = append([]float64(nil), s...) })
	c := scanOf(y, kernels.BF16, kernels.F32, kernels.F32, p)
	Recur(y, c.Scan)
	first := bytes.Clone(numbersAt[byte](c.States))
	y.Fill(c.States, 0xff)
	ScanStates(y, c.Scan)
	if !bytes.Equal(first, numbersAt[byte](c.States)) {
		t.Error("states made again differ")
	}
	var want []float64
	for b := range p.batch {
		for chunk := range 2 {
			for h := range p.heads {
				want = append(want, states[[3]int{b, h, chunk*c.chunk() + c.chunk() - 1}]...)
			}
		}
	}
	near(t, "states", NewMatrix(c.States, kernels.BF16, 1, len(want)), want, 1e-6)
}

// mixer returns all kernels of a Mamba layer on shapes of some size, in one yard.
func mixer(y *yard, typ kernels.Number) (run func(s device.Stream), results []Matrix) {
	rng := rand.New(rand.NewPCG(5, 1))
	p := newPlainScan(rng, typ, kernels.F32, plainScan{batch: 2, seq: 200, heads: 4, headDim: 16, groups: 2, state: 24}, -2)
	c := scanOf(y, typ, kernels.F32, kernels.F32, p)
	v := convOf(y, typ, kernels.F32, kernels.F32, newPlainConv(rng, typ, kernels.F32, 2, 200, 160, 4))
	g := gatedOf(y, typ, kernels.F32, kernels.F32, newPlainGated(rng, typ, kernels.F32, 400, 64, 2))
	run = func(s device.Stream) {
		Convolve(s, v.Conv)
		Recur(s, c.Scan)
		GatedRMSNorm(s, g.GatedNorm)
		GatedRMSNormGrad(s, g)
		RecurGrad(s, c)
		ConvolveGrad(s, v)
	}
	return run, []Matrix{c.Y, c.DXBC, c.DDT, c.DALog, c.DD, c.DDTBias, v.Y, v.DX, v.DW, v.DBias, g.Y, g.DX, g.DZ, g.DW}
}

// The number of threads changes no bit. SPEC S6.3
func TestMixerThreads(t *testing.T) {
	for _, typ := range numbers {
		y := newYard(t, 4<<20)
		y.strict = false
		run, results := mixer(y, typ)
		start := bytes.Clone(y.memory)
		threads(t, func() (all []byte) {
			copy(y.memory, start)
			run(y)
			for _, m := range results {
				all = append(all, numbersAt[byte](m.used("x"))...)
			}
			return all
		})
	}
}

// On the CPU device under the race checker, consecutive launches on a stream compute what
// the yard computes. SPEC S6.2
func TestMixerOnDevice(t *testing.T) {
	const room = 4 << 20
	here := newYard(t, room)
	here.strict = false
	run, results := mixer(here, kernels.BF16)
	start := bytes.Clone(here.memory)
	run(here)

	d, s := checked(t)
	b, err := d.Alloc(memory.Device, room, "test")
	if err != nil {
		t.Fatal(err)
	}
	// Yards that start equal place things equally.
	there := newYard(t, room)
	there.buf, there.memory = b, device.Slice[byte](uint64(b.Addr()), room)
	run, _ = mixer(there, kernels.BF16)
	s.Upload(b.All(), start)
	run(s)
	got := make([]byte, room)
	if err := s.Download(got, b.All()); err != nil {
		t.Fatal(err)
	}
	for i, m := range results {
		if r := m.used("x"); !bytes.Equal(numbersAt[byte](r), got[r.Off:][:r.Len]) {
			t.Errorf("result %d differs", i)
		}
	}
	s.Free(b)
}

func BenchmarkMixer(b *testing.B) {
	for _, typ := range numbers {
		rng := rand.New(rand.NewPCG(5, 1))
		y := newYard(b, 64<<20)
		y.strict = false
		p := newPlainScan(rng, typ, kernels.F32, plainScan{batch: 4, seq: 256, heads: 4, headDim: 64, groups: 1, state: 64}, -2)
		c := scanOf(y, typ, kernels.F32, kernels.F32, p)
		v := convOf(y, typ, kernels.F32, kernels.F32, newPlainConv(rng, typ, kernels.F32, 4, 256, 384, 4))
		g := gatedOf(y, typ, kernels.F32, kernels.F32, newPlainGated(rng, typ, kernels.F32, 1024, 256, 1))
		for _, k := range []struct {
			name string
			f    func()
		}{
			{"scan", func() { Recur(y, c.Scan) }},
			{"scan grad", func() { RecurGrad(y, c) }},
			{"conv", func() { Convolve(y, v.Conv) }},
			{"conv grad", func() { ConvolveGrad(y, v) }},
			{"gated norm", func() { GatedRMSNorm(y, g.GatedNorm) }},
			{"gated norm grad", func() { GatedRMSNormGrad(y, g) }},
		} {
			b.Run(fmt.Sprintf("%s/%d", k.name, typ), func(b *testing.B) {
				for b.Loop() {
					k.f()
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/1024, "ns/token")
			})
		}
	}
}

// Shapes and types that do not match panic.
func TestMixerPanics(t *testing.T) {
	y := newYard(t, 1<<20)
	rng := rand.New(rand.NewPCG(6, 1))
	c := scanOf(y, 0, 0, 0, newPlainScan(rng, 0, 0, plainScan{batch: 1, seq: 70, heads: 2, headDim: 3, groups: 1, state: 2}, 0))
	v := convOf(y, 0, 0, 0, newPlainConv(rng, 0, 0, 1, 5, 3, 4))
	g := gatedOf(y, 0, 0, 0, newPlainGated(rng, 0, 0, 4, 6, 2))
	for want, f := range map[string]func(){
		"in sequences of 69": func() { c := c; c.Seq = 69; Recur(y, c.Scan) },
		"in 3 groups":        func() { c := c; c.Groups = 3; Recur(y, c.Scan) },
		"states of a scan":   func() { c := c; c.States = device.Range{}; RecurGrad(y, c) },
		"scratch of a scan":  func() { c := c; c.Scratch.Len--; RecurGrad(y, c) },
		"types 0 and 1":      func() { c := c; c.DT.Type = kernels.BF16; Recur(y, c.Scan) },
		"the scan's output: expected a matrix of 70 x 6":         func() { c := c; c.Y.Cols--; Recur(y, c.Scan) },
		"expected a Seq that divides 5 rows, got 2":              func() { v := v; v.Seq = 2; Convolve(y, v.Conv) },
		"expected rows without gaps":                             func() { v := v; v.W.Pitch = 5; Convolve(y, v.Conv) },
		"scratch of a convolution":                               func() { v := v; v.Scratch.Len--; ConvolveGrad(y, v) },
		"a convolution's bias":                                   func() { v := v; v.Bias.Cols--; ConvolveGrad(y, v) },
		"expected groups that divide 6 columns, got 4":           func() { g := g; g.Groups = 4; GatedRMSNorm(y, g.GatedNorm) },
		"scratch of a gated norm":                                func() { g := g; g.Scratch.Len--; GatedRMSNormGrad(y, g) },
		"a gradient of a gated norm: expected a matrix of 4 x 6": func() { g := g; g.DZ.Rows--; GatedRMSNormGrad(y, g) },
	} {
		func() {
			defer func() {
				if p := fmt.Sprint(recover()); !strings.Contains(p, want) {
					t.Errorf("panic %q, want one with %q", p, want)
				}
			}()
			f()
		}()
	}
}
