// This file owns what the flags of `stowage bench offload` mean together, and the
// device that it runs on.

package main

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/device/cuda"
	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
	"github.com/stowage-dev/stowage/train/run"
)

// options returns the checked flags.
func (x *offloadFlags) options() (o bench.OffloadOptions, err error) {
	o = x.o
	if o.Step.Model, err = loadModel(x.model); err != nil {
		return o, err
	}
	for _, check := range []func(*bench.OffloadOptions) error{x.checkStep, x.checkPolicy, x.checkGraph} {
		if err := check(&o); err != nil {
			return o, err
		}
	}
	return o, nil
}

func (x *offloadFlags) changed(flag string) bool { return x.cmd.Flags().Changed(flag) }

// leastRate and mostRate bound speeds. A step at a lower speed would last for hours.
const leastRate, mostRate = 0.001, 1e6

func (x *offloadFlags) checkStep(o *bench.OffloadOptions) error {
	st := &o.Step
	chunks := max(st.PP*st.VPP, 1)
	layers, seq, tflops, memory := cpuLayers, cpuSeq, float64(cpuTFLOPS), float64(cpuMemory)
	if x.dev.backend != "cpu" {
		layers, seq, tflops, memory = gpuLayers, gpuSeq, gpuTFLOPS, gpuMemory
	}
	if !x.changed("layers") {
		st.Layers = min(layers*chunks, len(st.Model.Layers))
	}
	if !x.changed("seq") {
		st.Seq = seq
	}
	if !x.changed("tflops") {
		st.TFLOPS = tflops
	}
	if !x.changed("memory-gbps") {
		st.MemoryGBps = memory
	}
	for _, n := range []struct {
		flag  string
		value int
		most  int
	}{
		{"layers", st.Layers, len(st.Model.Layers)}, {"seq", st.Seq, 1 << 20}, {"mbs", st.Micro, 1 << 10}, {"microbatches", st.Microbatches, mostMicrobatches},
		{"pp", st.PP, 256}, {"vpp", st.VPP, 64}, {"steps", o.Rounds, 1000},
	} {
		if n.value < 1 || n.value > n.most {
			return usagef("--%s must be between 1 and %d, not %d", n.flag, n.most, n.value)
		}
	}
	switch {
	case st.Rank < 0 || st.Rank >= st.PP:
		return usagef("--rank must be between 0 and %d for --pp %d, not %d", st.PP-1, st.PP, st.Rank)
	case st.VPP > 1 && st.PP == 1:
		return usagef("--vpp %d needs at least two pipeline ranks; give --pp 2 or more", st.VPP)
	case st.Layers < st.PP*st.VPP:
		return usagef("--layers %d leave some of %d chunks empty; give at least %d", st.Layers, st.PP*st.VPP, st.PP*st.VPP)
	case !(st.TFLOPS >= leastRate && st.TFLOPS <= mostRate):
		return usagef("--tflops must be between %g and %.0f, not %g", leastRate, mostRate, st.TFLOPS)
	case !(st.MemoryGBps >= leastRate && st.MemoryGBps <= mostRate):
		return usagef("--memory-gbps must be between %g and %.0f, not %g", leastRate, mostRate, st.MemoryGBps)
	case x.changed("intensity") && !(o.Intensity > 0 && o.Intensity <= 1000):
		return usagef("--intensity must be above 0 and at most 1000, not %g", o.Intensity)
	case x.changed("intensity") && (x.changed("tflops") || x.changed("memory-gbps")):
		return usagef("--intensity sets how long compute lasts, and so do --tflops and --memory-gbps; keep one of them")
	}
	return nil
}

// byHand are the flags that choose what leaves by hand.
var byHand = offloadSections[2].names

func (x *offloadFlags) checkPolicy(o *bench.OffloadOptions) (err error) {
	h := &o.ByHand
	for _, s := range []struct {
		flag, text string
		to         *memory.Bytes
		unit       int64 // what a plain number counts
	}{
		{"budget", x.budget, &o.Budget, 1},
		{"min-offloaded-tensor-size", x.least, &h.MinBytes, 2},
		{"delta-offload-bytes-across-pp-ranks", x.delta, &h.DeltaBytes, 1},
	} {
		if !x.changed(s.flag) {
			continue
		}
		n, err := parseBytes(s.text, s.unit)
		if err != nil {
			return usagef("--%s: %w", s.flag, err)
		}
		*s.to = memory.Bytes(n)
	}
	for _, flag := range byHand {
		if !x.changed(flag) {
			continue
		}
		none := len(h.OffloadModules)+len(h.RecomputeModules) == 0
		switch {
		case x.changed("budget"):
			return usagef("--%s chooses by hand what --budget lets the runtime choose; keep one of them", flag)
		case none:
			return usagef("--%s needs --offload-modules or --recompute-modules beside it", flag)
		}
		o.Hand = true
	}
	if x.changed("budget") && o.Budget == 0 {
		return usagef("--budget must be at least 1B, not %s", x.budget)
	}
	if o.NoRecompute && o.Budget == 0 {
		return usagef("--no-recompute says how to meet a --budget; give one")
	}
	names, err := bench.OffloadNames(o.Step)
	if err != nil {
		return err
	}
	if err := h.Check(); err != nil {
		return &run.InputError{Err: err}
	}
	for _, c := range []struct {
		flag    string
		modules []string
		alone   func(name string) policy.ByHand
	}{
		{"offload-modules", h.OffloadModules, func(n string) policy.ByHand { return policy.ByHand{OffloadModules: []string{n, "core_attn"}} }},
		{"recompute-modules", h.RecomputeModules, func(n string) policy.ByHand { return policy.ByHand{RecomputeModules: []string{n}} }},
	} {
		for _, m := range c.modules {
			if !slices.Contains(names, m) {
				// Those of the step's names that the flag takes.
				could := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return c.alone(n).Check() != nil })
				return usagef("--%s: no layer of this step saves %s; of what they save the flag takes %s", c.flag, m, cmp.Or(strings.Join(could, ", "), "nothing"))
			}
		}
	}
	if o.Step.Stash && !slices.Contains(names, bench.StashedModule) {
		return usagef("--stash needs layers with experts, and the first %d of %s have none; give more --layers or another --model", o.Step.Layers, o.Step.Model.Name)
	}
	return nil
}

// parseBytes reads a size with a unit, or a plain number that counts units of so
// many bytes.
func parseBytes(text string, unit int64) (int64, error) {
	if n, err := strconv.ParseInt(text, 10, 64); err == nil {
		if n < 0 || n > math.MaxInt64/2/unit {
			return 0, fmt.Errorf("%s is out of range; give a number of bytes, such as 64MiB", text)
		}
		return n * unit, nil
	}
	n, err := memory.ParseBytes(text)
	return int64(n), err
}

func (x *offloadFlags) checkGraph(o *bench.OffloadOptions) (err error) {
	scopes := x.scopes
	switch x.graph {
	case "none", "full":
		if x.changed("cuda-graph-scope") && x.graph == "none" && x.changed("graph") {
			return usagef("--graph none captures nothing, and --cuda-graph-scope %s says what to capture; keep one of them", scopes)
		}
		if x.graph == "full" {
			scopes = cmp.Or(scopes, memory.FullIteration.String())
		}
	case "scopes":
		scopes = cmp.Or(scopes, defaultScopes)
	default:
		return usagef("--graph must be none, scopes or full, not %q", x.graph)
	}
	if o.Scopes, err = memory.ParseScopes(scopes); err != nil {
		return usagef("--cuda-graph-scope: %w", err)
	}
	if full := o.Scopes.Has(memory.FullIteration); x.changed("graph") && full != (x.graph == "full") {
		return usagef("--graph %s and --cuda-graph-scope %s contradict each other; keep one of them", x.graph, scopes)
	}
	if o.ByHand.Delay && o.Scopes == 0 {
		return usagef("--delay-offload-until-cuda-graph needs captured scopes; add --graph scopes, or leave it out")
	}
	return nil
}

// open opens the device: on the CPU with modelled links, on a GPU with a kernel
// for copies in graphs.
func (x *offloadFlags) open(watch device.Observer) (device.Device, error) {
	if x.dev.backend != "cpu" {
		if x.changed("link-gbps") {
			return nil, usagef("--link-gbps models the links of the CPU device; a GPU has its own")
		}
		d, err := cuda.Open(cuda.Options{Ordinal: x.dev.ordinal, CopyKernel: kernels.GraphCopy, Observe: watch})
		if err != nil {
			return nil, err
		}
		return d, nil
	}
	var rates []float64
	for part := range strings.SplitSeq(x.links, ",") {
		f, ok := input.Number(strings.TrimSpace(part))
		if !ok || !(f >= leastRate && f <= mostRate) {
			return nil, usagef("--link-gbps must be one or two numbers between %g and %.0f, such as 1 or 1,2, not %q", leastRate, mostRate, x.links)
		}
		rates = append(rates, f*1e9)
	}
	if len(rates) > 2 {
		return nil, usagef("--link-gbps must be one or two numbers between %g and %.0f, such as 1 or 1,2, not %q", leastRate, mostRate, x.links)
	}
	d, err := cpu.Open(cpu.Options{Observe: watch, Links: cpu.Links{
		Out: cpu.Link{BytesPerSecond: rates[0], Latency: cpuLatency},
		In:  cpu.Link{BytesPerSecond: rates[len(rates)-1], Latency: cpuLatency},
	}})
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (x *offloadFlags) bench(o bench.OffloadOptions) (err error) {
	p := x.page()
	if err := checkFiles([]flagFile{{"report", p.Path()}, {"trace", x.trace}}, flagFile{"model", x.model}); err != nil {
		return err
	}
	shown := p.Trace("compute", int64(o.Budget))
	dev, err := x.open(bench.Observe(shown))
	if err != nil {
		return err
	}
	defer func() { err = cmp.Or(err, dev.Close()) }()
	save := func() error { return nil }
	if x.trace != "" {
		f, stop, err := createUntilSignal(x.trace, raise)
		if err != nil {
			return fmt.Errorf("--trace: %w", err)
		}
		defer f.Discard()
		defer stop()
		lines := trace.NewWriter(f, trace.Header{Began: time.Now().UnixNano(), Compute: "compute", Budget: int64(o.Budget)}, 0)
		o.Trace = trace.Since(device.Now(), lines)
		save = func() error {
			if err := cmp.Or(lines.Close(), f.Commit()); err != nil {
				return fmt.Errorf("--trace: %w", err)
			}
			return nil
		}
		defer lines.Close() // ends its goroutine, if the work fails
	}
	o.Trace = bench.BothSinks(o.Trace, shown)
	m := measure(x.cmd, "measuring")
	o.Progress = m.at
	res, err := bench.Offloads(dev, o)
	m.end()
	var bad *bench.OffloadRefused
	if errors.As(err, &bad) {
		if x.changed("budget") && !errors.As(err, new(*memory.BudgetError)) {
			bad.Err = &memory.SettingError{Setting: "Budget", Err: bad.Err}
		}
		return &run.InputError{Err: bad.Err}
	}
	if err != nil {
		return err
	}
	if !*x.asJSON {
		bench.OffloadText(x.cmd.OutOrStdout(), res)
	} else if err := printResult(x.cmd, res); err != nil {
		return err
	}
	if err := save(); err != nil {
		return err
	}
	written(x.cmd, *x.asJSON, "the trace is in", x.trace)
	if err := pageDone(x.cmd, p, *x.asJSON, p.WriteOffload(res)); err != nil {
		return err
	}
	if !res.Equal {
		return errors.New("tensors came back with other bits than without offloading: this is a bug; report it with the command and its output")
	}
	return nil
}
