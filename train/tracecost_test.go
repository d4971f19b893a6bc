//go:build linux

// This file owns what a trace costs a step.

package train

import (
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/plan/model"
)

// BenchmarkTrace compares steps with a trace to steps without, in turns, by their medians
// (SPEC S6.5 wants less than 1 %): the time on the wall, and the processor's, which other
// programs disturb less.
//
// The command's own model on its four ranks; and one of a quarter of its width on one
// rank, in which an event comes every 20 µs.
func BenchmarkTrace(b *testing.B) {
	tiny, err := model.Preset("tiny-moe")
	if err != nil {
		b.Fatal(err)
	}
	b.Run("tiny-moe", func(b *testing.B) {
		traced(b, tiny, Layout{PP: 2, VPP: 1, EP: 2, DP: 2}, Batch{Micro: 8, Seq: 128, Microbatches: 2})
	})
	b.Run("small-moe", func(b *testing.B) {
		traced(b, smallMoE(), Layout{PP: 1, VPP: 1, EP: 1, DP: 1}, Batch{Micro: 4, Seq: 128, Microbatches: 2})
	})
}

func traced(b *testing.B, m *model.Model, l Layout, batch Batch) {
	var written bytesWritten
	open := func(traced bool) (*Trainer, []*trace.Writer) {
		c := testConfig(b, m)
		c.Layout, c.Batch, c.Memory.Offload = l, batch, []string{"core_attn", "expert_fc1"}
		var ws []*trace.Writer
		if traced {
			ws = watch(&c, func(int) io.Writer { return &written })
		}
		t, err := New(c)
		if err != nil {
			b.Fatal(err)
		}
		return t, ws
	}
	with, writers := open(true)
	without, _ := open(false)
	for range 5 {
		cost(b, with)
		cost(b, without)
	}
	var on, off [2][]float64
	before := written.Load()
	for i := 0; b.Loop(); i++ {
		for k := range 2 {
			t, to := with, &on
			if (i+k)%2 == 1 {
				t, to = without, &off
			}
			for j, x := range cost(b, t) {
				to[j] = append(to[j], x)
			}
		}
	}
	median := func(d []float64) float64 { return slices.Sorted(slices.Values(d))[len(d)/2] }
	b.ReportMetric(median(off[0])*1e3, "ms/step")
	b.ReportMetric(100*(median(on[0])/median(off[0])-1), "%wall")
	b.ReportMetric(100*(median(on[1])/median(off[1])-1), "%cpu")
	b.ReportMetric(float64(written.Load()-before)/float64(b.N), "B/step")
	err := errors.Join(with.Close(), without.Close())
	for _, w := range writers {
		err = errors.Join(err, w.Close())
	}
	if err != nil {
		b.Fatal(err)
	}
}

// cost is what one step takes of the wall's and of the processor's time, in seconds.
func cost(b *testing.B, t *Trainer) [2]float64 {
	used := func() float64 {
		var u syscall.Rusage
		if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
	}
	from, before := time.Now(), used()
	if _, err := t.Step(); err != nil {
		b.Fatal(err)
	}
	return [2]float64{time.Since(from).Seconds(), used() - before}
}

// bytesWritten counts.
type bytesWritten struct{ atomic.Int64 }

func (n *bytesWritten) Write(p []byte) (int, error) { n.Add(int64(len(p))); return len(p), nil }
