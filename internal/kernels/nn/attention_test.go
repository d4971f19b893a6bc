// This file owns the tests of attention against plain attention in float64.

package nn

import (
	"math"
	"runtime"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// The reference is checked by finite differences of the loss.
func TestPlainAttentionGradients(t *testing.T) {
	for _, c := range []attentionCase{
		{batch: 2, seq: 7, heads: 4, kvHeads: 2, keyDim: 5, valueDim: 3},
		{batch: 1, seq: 9, heads: 2, kvHeads: 2, keyDim: 4, valueDim: 6, window: 3},
	} {
		p := newPlainAttention(c)
		p.forward()
		p.backward(p.o.want)
		for _, g := range []struct {
			name  string
			x, dx []float64
		}{{"dq", p.q, p.dq.want}, {"dk", p.k, p.dk.want}, {"dv", p.v, p.dv.want}} {
			for i := range g.x {
				const h = 1e-5
				was := g.x[i]
				g.x[i] = was + h
				up := p.loss()
				g.x[i] = was - h
				down := p.loss()
				g.x[i] = was
				if want := (up - down) / (2 * h); math.Abs(want-g.dx[i]) > 1e-7 {
					t.Fatalf("%v: %s[%d] is %g, differences give %g", c, g.name, i, g.dx[i], want)
				}
			}
		}
	}
}

var attentionResults = [5]string{"o", "lse", "dq", "dk", "dv"}

// near fails unless results differ from the reference by rounding alone.
func (p *plainAttention) near(t testing.TB, got [5][]float64) {
	t.Helper()
	p.forward()
	p.backward(got[0])
	for i, r := range [5]bounded{p.o, p.lse, p.dq, p.dk, p.dv} {
		last := lastRounding(p.typ)
		if i == 1 {
			last = unit // LSE is fp32
		}
		for k, want := range r.want {
			// One percent covers errors of second order.
			bound := 1.01*(r.bound[k]+last*(math.Abs(want)+r.bound[k])) + underflow
			if d := math.Abs(want - got[i][k]); !(d <= bound) {
				t.Fatalf("%v: %s[%d] is %g, want %g within %g", p.attentionCase, attentionResults[i], k, got[i][k], want, bound)
			}
		}
	}
}

func drawAttention(t *rapid.T) attentionCase {
	c := attentionCase{
		batch:    rapid.IntRange(1, 2).Draw(t, "batch"),
		seq:      rapid.OneOf(rapid.IntRange(1, 40), rapid.IntRange(1, 210)).Draw(t, "seq"),
		kvHeads:  rapid.IntRange(1, 2).Draw(t, "kv heads"),
		keyDim:   rapid.IntRange(1, 24).Draw(t, "key"),
		valueDim: rapid.IntRange(1, 24).Draw(t, "value"),
		typ:      rapid.SampledFrom([]kernels.Number{kernels.F32, kernels.BF16}).Draw(t, "type"),
		seed:     rapid.Uint64().Draw(t, "seed"),
	}
	c.heads = c.kvHeads * rapid.IntRange(1, 3).Draw(t, "group")
	if rapid.Bool().Draw(t, "windowed") {
		c.window = rapid.IntRange(1, c.seq+2).Draw(t, "window")
	}
	return c
}

func attentionDevice(t testing.TB) device.Device {
	t.Helper()
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := dev.Close(); err != nil {
			t.Error(err)
		}
	})
	return dev
}

func TestAttentionIsPlainAttention(t *testing.T) {
	dev := attentionDevice(t)
	rapid.Check(t, func(rt *rapid.T) {
		c := drawAttention(rt)
		x := newAttentionLab(t, dev, c)
		defer x.close()
		p := newPlainAttention(c)
		p.near(t, x.run(p))
		x.untouched()
	})
}

// The largest shapes of real models have many whole blocks.
func TestAttentionOfRealShapes(t *testing.T) {
	dev := attentionDevice(t)
	for _, c := range []attentionCase{
		{batch: 1, seq: 400, heads: 1, kvHeads: 1, keyDim: 128, valueDim: 128},
		{batch: 1, seq: 210, heads: 1, kvHeads: 1, keyDim: 192, valueDim: 128, window: 100},
		{batch: 1, seq: 192, heads: 2, kvHeads: 2, keyDim: 64, valueDim: 64, typ: kernels.BF16},
	} {
		x := newAttentionLab(t, dev, c)
		p := newPlainAttention(c)
		p.near(t, x.run(p))
		x.close()
	}
}

func TestAttentionDoesNotDependOnThreads(t *testing.T) {
	dev := attentionDevice(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(0))
	for _, c := range []attentionCase{
		{batch: 2, seq: 300, heads: 4, kvHeads: 2, keyDim: 48, valueDim: 32},
		{batch: 1, seq: 260, heads: 3, kvHeads: 3, keyDim: 32, valueDim: 32, window: 90, typ: kernels.BF16},
	} {
		p := newPlainAttention(c)
		var first [5][]float64
		for _, threads := range []int{1, 2, 4} {
			runtime.GOMAXPROCS(threads)
			x := newAttentionLab(t, dev, c)
			got := x.run(p)
			x.close()
			if threads == 1 {
				first = got
				continue
			}
			for i := range got {
				if !slices.Equal(got[i], first[i]) {
					t.Errorf("%v: %s differs between 1 and %d threads", c, attentionResults[i], threads)
				}
			}
		}
	}
}

// Large scores overflow exponentials unless the maximum is subtracted first.
func TestAttentionOfLargeScores(t *testing.T) {
	c := attentionCase{batch: 1, seq: 130, heads: 1, kvHeads: 1, keyDim: 8, valueDim: 4}
	x := newAttentionLab(t, attentionDevice(t), c)
	defer x.close()
	p := newPlainAttention(c)
	for i := range p.q {
		p.q[i] *= 60
	}
	p.forward()
	got := x.run(p)
	for i, want := range p.o.want {
		// A score of 300 has an error of about 2e-5, which is the relative error of the
		// weights.
		if !(math.Abs(got[0][i]-want) <= 2e-4) {
			t.Fatalf("o[%d] is %g, want %g", i, got[0][i], want)
		}
	}
	for i, r := range got {
		if slices.ContainsFunc(r, func(f float64) bool { return math.IsNaN(f) || math.IsInf(f, 0) }) {
			t.Errorf("%s has numbers that are not finite", attentionResults[i])
		}
	}
}

// Launches declare what they use. The checker fails if two accesses need an order and
// have none.
func TestAttentionUnderCheck(t *testing.T) {
	dev := check.New(check.Options{}).Wrap(attentionDevice(t))
	c := attentionCase{batch: 2, seq: 70, heads: 4, kvHeads: 2, keyDim: 8, valueDim: 12, window: 30}
	x := newAttentionLab(t, dev, c)
	defer x.close()
	p := newPlainAttention(c)
	p.near(t, x.run(p))
	x.untouched()
}

func TestAttentionRefuses(t *testing.T) {
	x := newAttentionLab(t, attentionDevice(t), attentionCase{batch: 1, seq: 4, heads: 2, kvHeads: 2, keyDim: 4, valueDim: 2})
	defer x.close()
	for name, spoil := range map[string]func(a *AttentionGrad){
		"heads that do not divide": func(a *AttentionGrad) { a.KVHeads = 3 },
		"too few tokens":           func(a *AttentionGrad) { a.Seq = 5 },
		"mixed types":              func(a *AttentionGrad) { a.DV.Type = kernels.BF16 },
		"short LSE":                func(a *AttentionGrad) { a.LSE = a.LSE.Slice(0, 4) },
		"short Delta":              func(a *AttentionGrad) { a.Delta = a.Delta.Slice(0, 4) },
		"a gradient of other rows": func(a *AttentionGrad) { a.DK = a.DK.Part(0, 3) },
		"a window below zero":      func(a *AttentionGrad) { a.Window = -1 },
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if recover() == nil {
					t.Error("the launch was made")
				}
			}()
			a := x.AttentionGrad
			spoil(&a)
			AttendGradLaunch(a, GradDelta)
		})
	}
}

// Heads get the first shape of their numbers that holds both widths, and beyond the largest the last one.
func TestShapesHoldTheirHeads(t *testing.T) {
	for _, kind := range []kernels.Number{kernels.BF16, kernels.F32} {
		for keys := 1; keys <= 300; keys++ {
			for _, values := range []int{1, 63, 64, 65, 127, 128, 129, 255, 256, 257} {
				var want *attendShape
				for i := range attendShapes {
					s := &attendShapes[i]
					if s.kind == kind && (want == nil || want.keys < keys || want.values < values) {
						want = s
					}
				}
				a := Attention{Q: Matrix{Type: kind}, KeyDim: keys, ValueDim: values}
				if got := a.shape(); got != want {
					t.Fatalf("%v, keys %d, values %d: the shape of %d and %d, want %d and %d", kind, keys, values, got.keys, got.values, want.keys, want.values)
				}
			}
		}
	}
}
