// This file owns the measurement of what a checkpoint in the background costs the steps
// beside it.

package train

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/checkpoint"
)

// BenchmarkSaveBeside trains rounds of steps in turns: without a checkpoint, with one in the
// background of its parameters and moments that is begun before the first step, and with one
// that the run waits for. It reports by how much the last two are longer than the first, as the
// median of all turns, by how much more processor time the second takes, which other programs
// disturb less, and how long steps stand still for the copy that is saved.
func BenchmarkSaveBeside(b *testing.B) {
	a := &model.Attention{Heads: 4, KVHeads: 4, HeadDim: 64, Rotary: true}
	l := model.Layer{Attention: a, Dense: &model.Dense{Width: 1024, Gated: true}}
	c := testConfig(b, &model.Model{Name: "wide", Hidden: 256, Vocab: 256, Layers: []model.Layer{l, l, l, l}})
	c.Layout, c.Batch = Layout{1, 1, 1, 1}, Batch{Micro: 2, Seq: 256, Microbatches: 2}
	tr, err := New(c)
	if err != nil {
		b.Fatal(err)
	}
	store, err := checkpoint.Open(checkpoint.Options{Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	const steps = 8
	s := &checkpoint.Saver{Options: store.Options, Store: store}
	var took, busy [3][]float64 // without, in the background, and waiting
	var copied []float64
	round := func(how int) {
		began, before := time.Now(), processorTime(b)
		if how > 0 {
			err = tr.Save(s)
			copied = append(copied, time.Since(began).Seconds())
		}
		if how == 2 {
			err = s.Wait()
		}
		for range steps {
			if _, e := tr.Step(); err != nil || e != nil {
				b.Fatal(err, e)
			}
			err = s.Poll()
		}
		took[how] = append(took[how], time.Since(began).Seconds())
		if e := s.Wait(); e != nil {
			b.Fatal(e)
		}
		busy[how] = append(busy[how], processorTime(b)-before)
	}
	for range 2 {
		round(1)
	}
	took, busy, copied = [3][]float64{}, [3][]float64{}, nil
	n := 0
	for b.Loop() {
		round(n % 3)
		n++
	}
	for i := n; i < 3; i++ {
		round(i)
	}
	median := func(x []float64) float64 { x = slices.Sorted(slices.Values(x)); return x[len(x)/2] }
	more := func(x [3][]float64, how int) float64 { // by percent, of rounds that followed each other
		var ratios []float64
		for i, y := range x[how] {
			ratios = append(ratios, y/x[0][i])
		}
		return 100 * (median(ratios) - 1)
	}
	b.ReportMetric(more(took, 1), "%beside")
	b.ReportMetric(more(took, 2), "%waiting")
	b.ReportMetric(more(busy, 1), "%processor")
	b.ReportMetric(1e3*median(took[0])/steps, "ms/step")
	b.ReportMetric(1e3*median(copied), "ms/copy")
	if err := tr.Close(); err != nil {
		b.Fatal(err)
	}
	if err := store.Close(); err != nil {
		b.Fatal(err)
	}
}

// processorTime returns the seconds that the process has used of all processors.
func processorTime(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}
