// This file owns the benchmarks: a million events of eight ranks.

package export

import (
	"io"
	"testing"

	"github.com/stowage-dev/stowage/observe/trace"
)

// million returns the traces of a run with a million events.
func million() (traces []*trace.Trace) {
	const ranks, steps = 8, 40
	for rank := range ranks {
		traces = append(traces, aRun(rank, steps, 1_000_000/ranks/steps/events))
	}
	return traces
}

// events is the number of events of a layer in a step of aRun: 6 about memory, 3 decisions,
// 4 spans.
const events = 13

type counted struct{ n int64 }

func (c *counted) Write(b []byte) (int, error) {
	c.n += int64(len(b))
	return len(b), nil
}

func benchmark(b *testing.B, export func(io.Writer, []*trace.Trace) error) {
	traces := million()
	n := 0
	for _, t := range traces {
		n += len(t.Events)
	}
	var out counted
	b.ReportAllocs()
	for b.Loop() {
		out.n = 0
		if err := export(&out, traces); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n), "events")
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(n), "ns/event")
	b.ReportMetric(float64(out.n)/float64(n), "B/event")
}

func BenchmarkPerfetto(b *testing.B)  { benchmark(b, Perfetto) }
func BenchmarkMemoryViz(b *testing.B) { benchmark(b, MemoryViz) }
