// This file owns --report of the benchmarks: their figures, and where the runtime or a
// device told what it did the trace of it, as a page.

package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/cmd/stowage/internal/bench"
	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	sizes "github.com/stowage-dev/stowage/plan/page"
	"github.com/stowage-dev/stowage/report"
	"github.com/stowage-dev/stowage/report/page"
	"github.com/stowage-dev/stowage/trace"
)

// benchPage is the page that a benchmark was asked for; without a file it is none, and
// nothing is traced.
type benchPage struct {
	cmd  *cobra.Command
	file string
	data bytes.Buffer
	w    *trace.Writer
}

// reportFlag adds the flag.
func reportFlag(cmd *cobra.Command) *benchPage {
	p := &benchPage{cmd: cmd}
	cmd.Flags().StringVar(&p.file, "report", "", "write a page with the figures to a `file` of HTML")
	return p
}

// linkOwner is whose memory it is that links are measured with.
const linkOwner = "measuring the links"

// mostTraced is the memory for a benchmark's trace: a million events or so.
const mostTraced = 16 << 20

// trace is a sink for the page; without one it is nil.
func (p *benchPage) trace(compute string, budget int64) trace.Sink {
	if p.file == "" {
		return nil
	}
	p.w = trace.NewWriter(&p.data, trace.Header{Began: time.Now().UnixNano(), Compute: compute, Budget: budget}, mostTraced)
	return trace.From(device.Now(), p.w)
}

// both is a sink that hands events on to two, each of which may be nil.
func both(a, b trace.Sink) trace.Sink {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	return twice{a, b}
}

// observer is who tells a sink of a device, if there is one.
func observer(sink trace.Sink) device.Observer {
	if sink == nil {
		return nil
	}
	return stowage.Observe(sink, 0)
}

type twice [2]trace.Sink

func (t twice) Emit(e trace.Event) {
	t[0].Emit(e)
	t[1].Emit(e)
}

// ranks are what the trace came to.
func (p *benchPage) ranks(run *report.Run) error {
	if p.w == nil {
		return nil
	}
	if err := p.w.Close(); err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	t, err := trace.Read(&p.data)
	if err != nil {
		return fmt.Errorf("--report: %w", err)
	}
	if t.Dropped > 0 {
		run.Missing = append(run.Missing, fmt.Sprintf("the trace was full: it lacks %d events, those after the last that are shown", t.Dropped))
	}
	// Links are measured on the same device, with buffers that are larger than a step.
	t.Events = slices.DeleteFunc(t.Events, func(e trace.Event) bool { return !e.What.Span() && e.Name == linkOwner })
	run.Ranks = append(run.Ranks, report.FromTrace(t))
	return nil
}

// run is an empty run of this command.
func (p *benchPage) run(name string) report.Run {
	m := sysinfo.Read()
	return report.Run{
		Name: name, Command: p.command(), Figures: []report.Figure{}, Ranks: []report.Rank{}, Missing: []string{},
		Environment: map[string]string{
			"cpu": m.CPU.Model, "threads": fmt.Sprint(m.CPU.Threads), "memory": sizes.Size(int64(m.Memory.Total)), "os": runtime.GOOS + "/" + runtime.GOARCH, "go": runtime.Version(),
		},
	}
}

// command is what was typed, with its flags in the order of their names.
func (p *benchPage) command() string {
	var args []string
	p.cmd.Flags().Visit(func(f *pflag.Flag) { args = append(args, "--"+f.Name+"="+strings.Trim(f.Value.String(), "[]")) })
	return commandLine(p.cmd, args)
}

// write makes the page.
func (p *benchPage) write(runs ...report.Run) error {
	r := &report.Report{Title: p.cmd.CommandPath(), Runs: runs, Missing: []string{}}
	stamp(r)
	if err := trainrun.WriteFile(p.file, func(w io.Writer) error { return page.Write(w, r) }); err != nil {
		return fmt.Errorf("--report: %w; name a file in a folder that may be written", err)
	}
	return nil
}

// figures are those of a result.
func figures(v any) []report.Figure {
	text, err := json.Marshal(v)
	if err != nil {
		panic("bench: a result does not marshal: " + err.Error())
	}
	return report.FiguresOf(text)
}

// one writes the page of a result with its trace, if a page was asked for.
func (p *benchPage) one(name string, result any) error {
	if p.file == "" {
		return nil
	}
	run := p.run(name)
	run.Figures = figures(result)
	if err := p.ranks(&run); err != nil {
		return err
	}
	return p.write(run)
}

// offload writes the page of the step without and with offloading, side by side.
func (p *benchPage) offload(res bench.Offload) error {
	if p.file == "" {
		return nil
	}
	figure := func(name, label string, unit report.Unit, value, said float64) report.Figure {
		f := report.Figure{Name: name, Label: label, Unit: unit, Value: value}
		if said > 0 {
			f.Predicted = &said
		}
		return f
	}
	without, with := p.run("without offloading"), p.run("with offloading")
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
	if err := p.ranks(&with); err != nil {
		return err
	}
	for i := range with.Ranks {
		for _, g := range res.Groups {
			c := report.Choice{Group: g.Name, Units: map[string]int{}, Saved: g.Bytes, Moved: g.Moved}
			for choice, n := range g.Units {
				c.Units[choice.String()] = n
			}
			with.Ranks[i].Policy = append(with.Ranks[i].Policy, c)
		}
	}
	with.Missing = append(with.Missing, "memory over time is that of the whole benchmark: both steps hold theirs at once, and peaks above are of each alone")
	return p.write(without, with)
}

// pools writes the page of what pools take, models side by side.
func (p *benchPage) pools(res *bench.Pools) error {
	if p.file == "" {
		return nil
	}
	var runs []report.Run
	for _, m := range res.Models {
		run := p.run(m.Model)
		for _, side := range []struct {
			name string
			bench.PoolSide
		}{{"weights", m.Weights}, {"gradients", m.Gradients}} {
			add := func(pool string, n device.Bytes) {
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

// copies writes the page of how fast copies are.
func (p *benchPage) copies(res bench.Result) error {
	if p.file == "" {
		return nil
	}
	run := p.run("copies")
	for _, c := range res.Copies {
		name := fmt.Sprintf("%s %s of %s, GB/s", c.Direction, c.Via, sizes.Size(int64(c.Size)))
		run.Figures = append(run.Figures, report.Figure{Name: name, Label: name, Unit: report.Count, Value: c.GBps})
	}
	for _, o := range res.Overheads {
		run.Figures = append(run.Figures, report.Figure{Name: o.What, Label: o.What, Unit: report.Millis, Value: o.Elapsed / 1e3})
	}
	return p.write(run)
}
