// This file owns the trace of a run: its laws, and what it costs.

package train

import (
	"bytes"
	"io"
	"testing"
	"time"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

// watch has the ranks of a run traced, as the command does.
func watch(c *Config, to func(rank int) io.Writer) []*trace.Writer {
	all := make([]*trace.Writer, c.Layout.Ranks())
	sinks := make([]trace.Sink, len(all))
	zero, began := device.Now(), time.Now().UnixNano()
	for i := range all {
		all[i] = trace.NewWriter(to(i), trace.Header{Rank: i, Began: began, Compute: "compute"}, 0)
		sinks[i] = trace.Since(zero, all[i])
	}
	c.Trace = func(rank int) trace.Sink { return sinks[rank] }
	c.Device = func(rank int) (device.Device, error) {
		return cpu.Open(cpu.Options{Observe: stowage.Observe(sinks[rank], rank)})
	}
	c.Measure = func() (device.Device, error) { return cpu.Open(cpu.Options{}) }
	return all
}

// SPEC S6.5: in the trace of every rank of a run everything adds up, and its peaks are
// those that the run reports.
func TestTraceOfARun(t *testing.T) {
	names := []string{"stash", "offload", "graphs", "budget"}
	if raceEnabled {
		names = names[1:2]
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			c := testConfig(t, smallMoE())
			var err error
			if c.Memory, err = NamedMemory(name, budgetFor(name)); err != nil {
				t.Fatal(err)
			}
			files := make([]bytes.Buffer, c.Layout.Ranks())
			writers := watch(&c, func(rank int) io.Writer { return &files[rank] })
			tr, err := New(c)
			if err != nil {
				t.Fatal(err)
			}
			const steps = 4
			for range steps {
				if _, err := tr.Step(); err != nil {
					t.Fatal(err)
				}
			}
			var peaks []int64
			for _, r := range tr.ranks {
				peaks = append(peaks, int64(r.rt.Summary(r.key()).Device))
			}
			usage := tr.Usage()
			if err := tr.Close(); err != nil {
				t.Fatal(err)
			}
			for i, w := range writers {
				if err := w.Close(); err != nil {
					t.Fatal(err)
				}
				got, err := trace.Read(&files[i])
				if err == nil {
					err = got.Check()
				}
				if err != nil {
					t.Fatalf("rank %d: %v", i, err)
				}
				holds(t, got, steps, peaks[i], usage[i])
			}
		})
	}
}

// holds holds a trace against what the run said.
func holds(t *testing.T, tr *trace.Trace, steps int, peak int64, u device.Usage) {
	t.Helper()
	seen, streams := map[trace.Kind]int{}, map[string]bool{}
	var most [2]int64
	var last int64
	for _, e := range tr.Events {
		seen[e.Kind]++
		switch {
		case e.Kind == trace.End:
			last = e.Bytes
		case e.Kind.Span():
			streams[e.Stream] = true
		case e.Storage == 0 && e.Kind == trace.Alloc:
			most[e.Tier] = max(most[e.Tier], e.InUse[e.Tier])
		}
	}
	if steps += seen[trace.Rerun]; seen[trace.Begin] != steps || seen[trace.End] != steps || last != peak {
		t.Errorf("%d steps with a last peak of %d; want %d with %d", seen[trace.End], last, steps, peak)
	}
	if want := [2]int64{int64(u.Kind[memory.Device].Peak), int64(u.Kind[memory.Host].Peak)}; most != want {
		t.Errorf("the owners have %v at most, the device %v", most, want)
	}
	if seen[trace.Launch] == 0 || seen[trace.Copy] == 0 || seen[trace.Wait] == 0 || !streams["compute"] || len(streams) < 3 {
		t.Errorf("streams %v did %v", streams, seen)
	}
}

// counted is a device that counts how often it is closed.
type counted struct {
	device.Device
	closed int
}

func (d *counted) Close() error {
	d.closed++
	return d.Device.Close()
}

// The links are measured on a device of its own, which is closed before the first step.
func TestMeasuringClosesItsDevice(t *testing.T) {
	c := testConfig(t, smallMoE())
	var err error
	if c.Memory, err = NamedMemory("offload", 0); err != nil {
		t.Fatal(err)
	}
	c.Memory.Links = memory.Links{}
	dev := &counted{}
	c.Measure = func() (device.Device, error) {
		inner, err := cpu.Open(cpu.Options{})
		dev.Device = inner
		return dev, err
	}
	tr, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	if dev.Device == nil || dev.closed != 1 {
		t.Errorf("the device of the measurement was opened: %v, and closed %d times", dev.Device != nil, dev.closed)
	}
	if err := tr.Close(); err != nil {
		t.Error(err)
	}
}
