// This file owns the pages of benchmarks: their figures as runs of a report, with the
// trace of what the runtime or the device did.

package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/atomicfile"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/report"
	"github.com/stowage-dev/stowage/observe/report/page"
	"github.com/stowage-dev/stowage/observe/trace"
)

// Page is a page that shows the result of a benchmark. The methods of a nil page do
// nothing.
type Page struct {
	Title   string // of the page: the command without its flags
	Command string // with its flags
	Version string
	File    string // that the page is written to

	data bytes.Buffer
	w    *trace.Writer
}

// linkOwner owns the memory that links are measured with.
const linkOwner = "measuring the links"

// mostTraced limits the memory of a benchmark's trace to about a million events.
const mostTraced = 16 << 20

// Trace returns a sink for the events that the page shows, or nil for a nil page.
func (p *Page) Trace(compute string, budget int64) trace.Sink {
	if p == nil {
		return nil
	}
	p.w = trace.NewWriter(&p.data, trace.Header{Began: time.Now().UnixNano(), Compute: compute, Budget: budget}, mostTraced)
	return trace.Since(device.Now(), p.w)
}

// BothSinks returns a sink that passes events on to two sinks, each of which may be nil.
func BothSinks(a, b trace.Sink) trace.Sink {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return bothSinks{a, b}
}

type bothSinks [2]trace.Sink

func (t bothSinks) Emit(e trace.Event) {
	t[0].Emit(e)
	t[1].Emit(e)
}

// Observe returns an observer that reports a device to a sink, or nil for a nil sink.
func Observe(sink trace.Sink) device.Observer {
	if sink == nil {
		return nil
	}
	return engine.Observe(sink, 0)
}

// addRanks adds what the trace shows to a run.
func (p *Page) addRanks(run *report.Run) error {
	if p.w == nil {
		return nil
	}
	if err := p.w.Close(); err != nil {
		return err
	}
	t, err := trace.Read(&p.data)
	if err != nil {
		return err
	}
	if t.Dropped > 0 {
		run.Missing = append(run.Missing, fmt.Sprintf("the trace was full: it lacks the last %d events", t.Dropped))
	}
	// Links are measured on the same device, with buffers that are larger than a step.
	t.Events = slices.DeleteFunc(t.Events, func(e trace.Event) bool { return !e.Kind.Span() && e.Name == linkOwner })
	run.Ranks = append(run.Ranks, report.NewRank(t))
	return nil
}

// newRun returns a run without figures.
func (p *Page) newRun(name string) report.Run {
	m := sysinfo.Read()
	return report.Run{
		Name: name, Command: p.Command, Figures: []report.Figure{}, Ranks: []report.Rank{}, Missing: []string{},
		Environment: map[string]string{
			"cpu": m.CPU.Model, "threads": fmt.Sprint(m.CPU.Threads), "memory": m.Memory.Total.Short(), "os": runtime.GOOS + "/" + runtime.GOARCH, "go": runtime.Version(),
		},
	}
}

// Path returns the file of the page, or "" for a nil page.
func (p *Page) Path() string {
	if p == nil {
		return ""
	}
	return p.File
}

// write writes the page.
func (p *Page) write(runs ...report.Run) error {
	r := &report.Report{Title: p.Title, Runs: runs, Missing: []string{}, Made: time.Now().UTC().Format(time.RFC3339), Version: p.Version}
	return atomicfile.Write(p.File, func(w io.Writer) error { return page.Write(w, r) })
}

// figures returns the numbers of a result.
func figures(v any) []report.Figure {
	text, err := json.Marshal(v)
	if err != nil {
		panic("bench: a result does not marshal: " + err.Error())
	}
	return report.ParseFigures(text)
}

// WriteResult writes the page of a result with its trace.
func (p *Page) WriteResult(name string, result any) error {
	if p == nil {
		return nil
	}
	run := p.newRun(name)
	run.Figures = figures(result)
	if err := p.addRanks(&run); err != nil {
		return err
	}
	return p.write(run)
}

// WriteOffload writes the page of a step without and with offloading, side by side.
func (p *Page) WriteOffload(res Offload) error {
	if p == nil {
		return nil
	}
	figure := func(name, label string, unit report.Unit, value, said float64) report.Figure {
		f := report.Figure{Name: name, Label: label, Unit: unit, Value: value}
		if said > 0 {
			f.Predicted = &said
		}
		return f
	}
	without, with := p.newRun("without offloading"), p.newRun("with offloading")
	without.Figures = append(without.Figures, figure("peak_device_bytes", "device memory for saved tensors", report.Bytes, float64(res.PeakBytes), 0),
		figure("step_ms", "step time", report.Millis, res.StepMS, 0))
	with.Figures = append(with.Figures, figure("peak_device_bytes", "device memory for saved tensors", report.Bytes, float64(res.OffloadPeakBytes), float64(res.PeakBytes-res.ExpectedBytes)),
		figure("step_ms", "step time", report.Millis, res.OffloadStepMS, res.PredictedMS),
		figure("peak_host_bytes", "host peak", report.Bytes, float64(res.HostBytes), 0))
	for _, f := range figures(res) {
		switch f.Name {
		case "peak_bytes", "offload_peak_bytes", "step_ms", "offload_step_ms", "host_bytes", "rank", "pp", "vpp":
		default:
			with.Figures = append(with.Figures, f)
		}
	}
	if err := p.addRanks(&with); err != nil {
		return err
	}
	for i := range with.Ranks {
		for _, g := range res.Groups {
			c := report.PolicyRow{Group: g.Name, Units: map[string]int{}, Saved: g.Bytes, Moved: g.Moved}
			for choice, n := range g.Units {
				c.Units[choice.String()] = n
			}
			with.Ranks[i].Policy = append(with.Ranks[i].Policy, c)
		}
	}
	with.Missing = append(with.Missing, "memory over time is that of the whole benchmark, where both steps hold their memory at once; the peaks above are those of each step alone")
	return p.write(without, with)
}

// WritePools writes the page of the bytes that pools take, models side by side.
func (p *Page) WritePools(res *Pools) error {
	if p == nil {
		return nil
	}
	var runs []report.Run
	for _, m := range res.Models {
		run := p.newRun(m.Model)
		for _, side := range []struct {
			name string
			PoolSide
		}{{"weights", m.Weights}, {"gradients", m.Gradients}} {
			add := func(pool string, n memory.Bytes) {
				run.Figures = append(run.Figures, report.Figure{
					Name: side.name + "_" + pool + "_bytes", Label: side.name + ", " + pool, Unit: report.Bytes, Value: float64(n),
				})
			}
			for _, x := range side.Pools {
				add(x.Pool, x.Bytes)
			}
			add("at least", side.Lower)
		}
		runs = append(runs, run)
	}
	return p.write(runs...)
}

// WriteCopies writes the page of the speeds of copies.
func (p *Page) WriteCopies(res Result) error {
	if p == nil {
		return nil
	}
	run := p.newRun("copies")
	for _, c := range res.Copies {
		name := fmt.Sprintf("%s %s of %s, GB/s", c.Direction, c.Via, c.Size.Short())
		run.Figures = append(run.Figures, report.Figure{Name: name, Label: name, Unit: report.Count, Value: c.GBps})
	}
	for _, o := range res.Overheads {
		run.Figures = append(run.Figures, report.Figure{Name: o.What, Label: o.What, Unit: report.Millis, Value: o.Elapsed / 1e3})
	}
	return p.write(run)
}
