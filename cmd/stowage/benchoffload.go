// This file owns `stowage bench offload`: its flags, and what they mean together.

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/internal/bench"
	"github.com/stowage-dev/stowage/internal/policy"
)

// Defaults of flags on the CPU and on a GPU: the same model, with tokens and speeds such
// that a step takes half a second and can hide the copies of about half of what it saves.
const (
	offloadModel     = "mixtral-8x7b"
	cpuLayers        = 4
	gpuLayers        = 8
	cpuSeq           = 16
	gpuSeq           = 4096
	cpuTFLOPS        = 1.25
	gpuTFLOPS        = 400
	cpuMemory        = 1 // GB/s; writing and checking tensors takes a third of that time
	gpuMemory        = 2000
	cpuLink          = "0.25"
	cpuLatency       = 20 * time.Microsecond
	defaultScopes    = "attn,mlp,moe_router"
	mostMicrobatches = 1024
)

func newBenchOffload() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "offload",
		Short: "Measure a training step with and without offloaded activations",
		Long: `Run a synthetic training step without and with offloading, in turns, and compare time,
memory and results. The step has the modules of a model's layers on one pipeline rank.
Each module saves tensors of the planner's sizes, filled with noise. Its forward pass
lasts its FLOPs over --tflops plus its bytes over --memory-gbps, and its backward pass
twice as long. The backward pass takes checksums of all saved tensors, which must be the
same without and with offloading.

--budget decides what is offloaded; or the flags of Megatron-LM choose it by hand. With
neither, everything is offloaded that does not make the step longer. On the CPU compute
is a wait, and links are modelled (--link-gbps).

step_ratio is the step time with offloading over that without, and peak_ratio the same
for the memory of saved tensors. saved_bytes is what offloading saved, expected_bytes
what the plan expected. link_utilisation is the time of the same copies alone, in the
same order, over the time of the step: near 1 if copies are the limit. hidden_fraction is
the part of that time that does not lengthen the step. predicted_ms is the step time of
the plan, offload_step_ms the measured one. Times are first quartiles.

The JSON has these figures, with sizes in bytes and times in milliseconds: peak_bytes and
step_ms without offloading, offload_peak_bytes and offload_step_ms with it, host_bytes,
copy_ms (the copies alone) and "equal"; the rates of the links in bytes a second with a
latency in nanoseconds; what the host issued in a step ("issued"); the table by group
("groups"), where units are modules of layers; and the step ("step"), which
pytorch/bench/torch_offload.py runs in PyTorch. budget_bytes is the --budget, or without
one the smallest budget whose plan is hardly longer than keeping everything.`,
		Example: `  stowage bench offload
  stowage bench offload --budget 8MiB --graph full
  stowage bench offload --report offload.html
  stowage bench offload --offload-modules expert_fc1,moe_act --recompute-modules core_attn
  stowage bench offload --pp 4 --vpp 2 --rank 1 --layers 16 --microbatches 8
  stowage bench offload --device cuda --model deepseek-v3 --layers 6 --intensity 1.1 --json`,
		Args: func(cmd *cobra.Command, args []string) error {
			if f := cmd.Flags(); len(args) > 0 && (f.Changed("offload-modules") || f.Changed("recompute-modules")) {
				return usagef("unexpected argument %q; modules are separated by commas here, such as --offload-modules core_attn,moe_act", args[0])
			}
			return noArgs(cmd, args)
		},
	}
	f := addOffloadFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := f.options()
		if err != nil {
			return err
		}
		return f.bench(o)
	}
	return cmd
}

// offloadFlags are the flags as they are typed.
type offloadFlags struct {
	cmd    *cobra.Command
	dev    *deviceChoice
	o      bench.OffloadOptions
	model  string
	graph  string
	scopes string
	budget string
	least  string
	delta  string
	links  string
	trace  string
	page   func() *bench.Page
	asJSON *bool
}

// offloadSections are the flags by what they are for.
var offloadSections = []flagSection{
	{"The step", []string{"model", "layers", "seq", "mbs", "microbatches", "pp", "vpp", "rank", "tflops", "memory-gbps", "intensity"}},
	{"What leaves, under a budget", []string{"budget", "no-recompute"}},
	{"What leaves, by hand", []string{
		"offload-modules", "recompute-modules", "activation-offload-fraction", "fraction-of-groups", "min-offloaded-tensor-size",
		"delta-offload-bytes-across-pp-ranks", "margin", "fine-grained-offloading-max-inflight-offloads", "delay-offload-until-cuda-graph",
	}},
	{"Captured graphs", []string{"graph", "cuda-graph-scope", "stash"}},
}

func addOffloadFlags(cmd *cobra.Command) *offloadFlags {
	x := &offloadFlags{cmd: cmd, dev: deviceFlag(cmd)}
	f, st, h := cmd.Flags(), &x.o.Step, &x.o.ByHand
	*h = policy.Defaults()
	f.StringVar(&x.model, "model", offloadModel, "`name` of a built-in model, or a Hugging Face config.json")
	f.IntVar(&st.Layers, "layers", 0, fmt.Sprintf("`layers` of the model, from its first, over all pipeline ranks (default %d a chunk, on a GPU %d)", cpuLayers, gpuLayers))
	f.IntVar(&st.Seq, "seq", 0, fmt.Sprintf("`tokens` of a sequence (default %d, on a GPU %d)", cpuSeq, gpuSeq))
	f.IntVar(&st.Micro, "mbs", 1, "`sequences` of a microbatch")
	f.IntVar(&st.Microbatches, "microbatches", 2, "`microbatches` of a step")
	f.IntVar(&st.PP, "pp", 1, "pipeline `ranks`, of which one runs")
	f.IntVar(&st.VPP, "vpp", 1, "model `chunks` a pipeline rank (interleaved)")
	f.IntVar(&st.Rank, "rank", 0, "pipeline `rank` to run")
	f.Float64Var(&st.TFLOPS, "tflops", 0, fmt.Sprintf("compute `speed` in 10^12 operations a second (default %g, on a GPU %d)", cpuTFLOPS, gpuTFLOPS))
	f.Float64Var(&st.MemoryGBps, "memory-gbps", 0, fmt.Sprintf("memory `speed` in 10^9 bytes a second (default %d, on a GPU %d)", cpuMemory, gpuMemory))
	f.Float64Var(&x.o.Intensity, "intensity", 0, "compute time over the time to offload all that is saved, in place of --tflops and --memory-gbps: above 1 all copies can hide (a `factor`)")
	f.StringVar(&x.budget, "budget", "", "device memory for saved tensors: a `size` such as 8MiB")
	f.BoolVar(&x.o.NoRecompute, "no-recompute", false, "meet the budget by offloading alone")
	f.Var(listValue{&h.OffloadModules}, "offload-modules", "`modules` to offload, separated by commas")
	f.Var(listValue{&h.RecomputeModules}, "recompute-modules", "`modules` to recompute, separated by commas")
	f.Float64Var(&h.OffloadFraction, "activation-offload-fraction", h.OffloadFraction, "`share` of the modules' bytes to offload, from 0 to 1")
	f.BoolVar(&h.FractionOfGroups, "fraction-of-groups", false, "count the share in groups, as Megatron-LM does, not in bytes")
	f.StringVar(&x.least, "min-offloaded-tensor-size", "", "keep smaller tensors: a `size` such as 2MiB, or a number of elements of two bytes, as in Megatron-LM")
	f.StringVar(&x.delta, "delta-offload-bytes-across-pp-ranks", "", "`bytes` that a pipeline rank offloads less than the one before it")
	f.IntVar(&h.Margin, "margin", h.Margin, "last `groups` of each module to keep")
	f.IntVar(&h.MaxInflight, "fine-grained-offloading-max-inflight-offloads", 0, "`copies` to the host that may be in flight before compute waits (default no limit)")
	f.BoolVar(&h.Delay, "delay-offload-until-cuda-graph", false, "begin copies outside of captured scopes after the replay of the scope before them")
	f.StringVar(&x.graph, "graph", "none", "what to capture: none, `scopes` or full, the whole step")
	f.StringVar(&x.scopes, "cuda-graph-scope", "", "`scopes` to capture: attn, mlp, moe_router, moe or full_iteration (default with --graph scopes "+defaultScopes+")")
	f.BoolVar(&st.Stash, "stash", false, "also stash the rows of experts, which are counted on the device")
	f.StringVar(&x.links, "link-gbps", cpuLink, "`speed` of the CPU's modelled links in 10^9 bytes a second, or two: out,in")
	f.IntVar(&x.o.Rounds, "steps", 7, "measured `steps` with and without")
	f.StringVar(&x.trace, "trace", "", "write a trace to a `file` that \"stowage report\" reads")
	x.page = reportFlag(cmd)
	x.asJSON = jsonFlag(cmd)
	cmd.InitDefaultHelpFlag()
	cmd.SetUsageTemplate(strings.Replace(usageTemplate, flagsTemplate, flagSections(f, offloadSections, "Other"), 1))
	return x
}

// flagSection is a group of flags in a help text.
type flagSection struct {
	title string
	names []string
}

// flagSections returns the flags as a help text shows them. The last section has the rest.
func flagSections(f *pflag.FlagSet, list []flagSection, last string) string {
	var text strings.Builder
	seen := map[string]bool{}
	add := func(s flagSection) {
		part := pflag.NewFlagSet(s.title, pflag.ContinueOnError)
		part.SortFlags = false
		for _, name := range s.names {
			part.AddFlag(f.Lookup(name))
			seen[name] = true
		}
		fmt.Fprintf(&text, "%s:\n%s\n", s.title, part.FlagUsages())
	}
	for _, s := range list {
		add(s)
	}
	rest := flagSection{title: last}
	f.VisitAll(func(x *pflag.Flag) {
		if !seen[x.Name] {
			rest.names = append(rest.names, x.Name)
		}
	})
	add(rest)
	return strings.TrimSpace(text.String())
}
