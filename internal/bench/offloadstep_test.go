// This file tests the synthetic step, its sizes and times, and the copies alone.

package bench

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

func makeStep(t *testing.T, o StepOptions) *step {
	t.Helper()
	s, err := newStep(o)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Llama 3 8B by hand: four products of attention and three of the feed-forward
// part, and half of a square of scores; in bf16 two norms' inputs and outputs,
// queries, keys, values, attention's output, and three widths of the feed-forward
// part, besides statistics in fp32.
func TestStepOfLlama(t *testing.T) {
	const tokens, h, kv, w = 96.0, 4096, 1024, 14336
	const memory = 1e3 // GB/s
	s := makeStep(t, StepOptions{Model: preset(t, "llama-3-8b"), Layers: 3, Seq: tokens, Micro: 1, Microbatches: 2, PP: 1, VPP: 1, TFLOPS: 2, MemoryGBps: memory})
	products := 2 * tokens * (2*h*h + 2*h*kv + 3*h*w)
	scores := 2 * tokens * tokens / 2 * 2 * h
	stats := 4.0 * tokens * (2 + 32)
	saved := tokens*2*(4*h+h+2*kv+h+3*w) + stats
	forward := 3 * ((products+scores)/2e12 + saved/(memory*1e9))
	if got := s.forward().Seconds(); math.Abs(got/forward-1) > 1e-6 {
		t.Errorf("forward passes take %g s, want %g", got, forward)
	}
	if got, want := s.computeTime(), 2*3*s.forward(); got != want {
		t.Errorf("two microbatches take %v, want %v", got, want)
	}
	if got, want := float64(s.bytes()), 3*saved; got != want {
		t.Errorf("a microbatch saves %.0f bytes, want %.0f", got, want)
	}
	s.scale(0.5)
	if got := s.forward().Seconds(); math.Abs(got/forward-0.5) > 1e-6 {
		t.Errorf("scaled forward passes take %g s, want half of %g", got, forward)
	}
}

// All of a rank's layers are in its chunks, halves of a layer come one after the
// other, and every kind of layer is known.
func TestStepsOfAllModels(t *testing.T) {
	for _, name := range model.Presets() {
		m := preset(t, name)
		o := StepOptions{Model: m, Seq: 32, Micro: 1, Microbatches: 4, PP: 2, VPP: 2, TFLOPS: 1, MemoryGBps: 1}
		layers, names := 0, []string{}
		for o.Rank = range 2 {
			s := makeStep(t, o)
			names = append(names, s.names()...)
			for _, c := range s.chunks {
				layers += len(c)
				for _, l := range c {
					if !slices.IsSortedFunc(l, func(a, b module) int { return int(a.half) - int(b.half) }) {
						t.Errorf("%s: the halves of a layer are mixed: %v", name, l)
					}
					for _, x := range l {
						_, inTable := memory.LookupModule(x.name)
						if _, known := outside[x.name]; !known && !inTable {
							t.Errorf("%s: the half of %s is unknown", name, x.name)
						}
					}
				}
			}
			if len(s.passes) != 2*2*4 || len(s.chunks) != 2 {
				t.Errorf("%s: %d passes over %d chunks", name, len(s.passes), len(s.chunks))
			}
		}
		if layers != len(m.Layers) {
			t.Errorf("%s: ranks hold %d layers of %d", name, layers, len(m.Layers))
		}
		if !slices.Contains(names, "mlp_norm") {
			t.Errorf("%s: no feed-forward part saves anything: %v", name, names)
		}
	}
}

func TestStepErrors(t *testing.T) {
	m := preset(t, "llama-3-8b")
	for want, o := range map[string]StepOptions{
		"Layers 99 is more than the 32 layers of llama-3-8b": {Model: m, Layers: 99, Seq: 8, Micro: 1, Microbatches: 1, PP: 1, VPP: 1, TFLOPS: 1, MemoryGBps: 1},
		"vpp 2 needs more than one":                          {Model: m, Layers: 4, Seq: 8, Micro: 1, Microbatches: 1, PP: 1, VPP: 2, TFLOPS: 1, MemoryGBps: 1},
		"rank 2 does not exist in a pipeline of 2 ranks":     {Model: m, Layers: 4, Seq: 8, Micro: 1, Microbatches: 1, PP: 2, VPP: 1, Rank: 2, TFLOPS: 1, MemoryGBps: 1},
	} {
		if _, err := newStep(o); err == nil || !strings.Contains(err.Error(), want) || strings.HasPrefix(err.Error(), "plan:") {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// The copies alone last as long as their order requires. One pass out and back takes the
// sum of both ways, and passes that do not need each other overlap.
func TestPlainLinks(t *testing.T) {
	const each = 8 * time.Millisecond
	size := memory.MiB
	out := func(layer, pass int) carried {
		return carried{group: memory.GroupID{Layer: layer}, bytes: int64(size), pass: pass}
	}
	in := func(layer, pass int) carried { c := out(layer, pass); c.in = true; return c }
	for name, c := range map[string]struct {
		copies []carried
		want   time.Duration
	}{
		"there and back":         {[]carried{out(0, 0), out(1, 0), in(1, 1), in(0, 1)}, 4 * each},
		"two microbatches":       {[]carried{out(0, 0), in(0, 1), out(1, 2), in(1, 3)}, 4 * each},
		"the second before need": {[]carried{out(0, 0), out(1, 1), in(0, 2), out(2, 1), in(1, 3), in(2, 4)}, 4 * each},
		"nothing":                {nil, 0},
	} {
		synctest.Test(t, func(t *testing.T) {
			link := cpu.Link{BytesPerSecond: float64(size) / each.Seconds()}
			dev, err := cpu.Open(cpu.Options{Links: cpu.Links{Out: link, In: link}})
			if err != nil {
				t.Fatal(err)
			}
			r, err := newLinkRig(dev, c.copies)
			if err != nil {
				t.Fatal(err)
			}
			took, err := r.run()
			if err := errors.Join(err, r.close(), dev.Close()); err != nil || took != c.want {
				t.Errorf("%s: %v (%v), want %v", name, took, err, c.want)
			}
		})
	}
}
