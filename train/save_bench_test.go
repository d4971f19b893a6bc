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

// BenchmarkSaveBeside trains rounds of steps, every other one with a checkpoint of its
// parameters and moments that is begun before its first step. It reports by how much the
// median round with a checkpoint is longer, the same if the run waits for the disk, and by
// how much more processor time a round takes, which other programs disturb less.
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
	round := func(how int) {
		began, before := time.Now(), processorTime(b)
		if how > 0 {
			err = tr.Save(s)
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
	took, busy = [3][]float64{}, [3][]float64{}
	n := 0
	for b.Loop() {
		round(n % 3)
		n++
	}
	for i := n; i < 3; i++ {
		round(i)
	}
	median := func(x []float64) float64 { slices.Sort(x); return x[len(x)/2] }
	b.ReportMetric(100*(median(took[1])/median(took[0])-1), "%beside")
	b.ReportMetric(100*(median(took[2])/median(took[0])-1), "%waiting")
	b.ReportMetric(100*(median(busy[1])/median(busy[0])-1), "%processor")
	b.ReportMetric(1e3*median(took[0])/steps, "ms/step")
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
