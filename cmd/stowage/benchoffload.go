// This file owns `stowage bench offload`: its flags, and what they mean together.

package main

import (
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/bench"
	"github.com/stowage-dev/stowage/policy"
)

// What flags are where they are not given, on the CPU and on a GPU: the same
// model, with so many tokens and at such a speed that a step takes half a second,
// and that of what it saves about half could leave and come back unnoticed.
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
		Long: `Run a synthetic training step without and with offloading, in turns, and compare
time, memory and results. The step has the modules of a model's layers on one
pipeline rank: each saves tensors of the planner's sizes, filled with noise, and
lasts its FLOPs over --tflops and its tensors over --memory-gbps, and twice as long
in backward, where checksums of everything that comes back are taken. They must be
the same with and without.

What leaves is decided under a memory --budget, or by hand with the flags that
Megatron-LM has; with neither, everything leaves that can do so without making
the step longer. On the CPU compute sleeps and links are modelled (--link-gbps).

step_ratio is the time with over the time without, peak_ratio the same of memory
for saved tensors; saved_bytes what offloading saves of it and expected_bytes
what the plan said it would. link_utilisation is the time that the same copies
take by themselves, in the same order and run, over the time of the step: near 1
where copies are the limit. hidden_fraction is how much of that time does not
show. predicted_ms is the step's time as the plan has it, offload_step_ms as it
was measured. Times are first quartiles.

The JSON has these under the same names, with sizes in bytes and times in
milliseconds; peak_bytes and step_ms without and offload_peak_bytes and
offload_step_ms with offloading, host_bytes, copy_ms (the copies by themselves) and
"equal"; the rates of the links in bytes a second with a latency in nanoseconds;
what the host issued in a step ("issued"); the table by group ("groups"), where
units are modules of layers; and the step ("step"), for bench/torch_offload.py to
do the same in PyTorch. budget_bytes is the --budget, or without one the smallest
whose plan, made from one recorded step, is hardly longer than keeping everything.`,
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
	page   *benchPage
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
	f.IntVar(&st.PP, "pp", 1, "pipeline `ranks`, of which one is run")
	f.IntVar(&st.VPP, "vpp", 1, "model `chunks` a pipeline rank (interleaved)")
	f.IntVar(&st.Rank, "rank", 0, "pipeline `rank` that is run")
	f.Float64Var(&st.TFLOPS, "tflops", 0, fmt.Sprintf("`speed` of compute in 10^12 operations a second (default %g, on a GPU %d)", cpuTFLOPS, gpuTFLOPS))
	f.Float64Var(&st.MemoryGBps, "memory-gbps", 0, fmt.Sprintf("`speed` of memory in 10^9 bytes a second (default %d, on a GPU %d)", cpuMemory, gpuMemory))
	f.Float64Var(&x.o.Intensity, "intensity", 0, "compute lasts so many `times` as long as the copies out of all that is saved, instead of --tflops and --memory-gbps: above 1 all of it hides")
	f.StringVar(&x.budget, "budget", "", "`bytes` of device memory for saved tensors, such as 8MiB")
	f.BoolVar(&x.o.NoRecompute, "no-recompute", false, "meet the budget by moving alone")
	f.StringSliceVar(&h.OffloadModules, "offload-modules", nil, "`modules` whose tensors leave, separated by commas")
	f.StringSliceVar(&h.RecomputeModules, "recompute-modules", nil, "`modules` that are computed again instead of saved")
	f.Float64Var(&h.OffloadFraction, "activation-offload-fraction", h.OffloadFraction, "`share` of the bytes of the modules that leaves, from 0 to 1")
	f.BoolVar(&h.FractionOfGroups, "fraction-of-groups", false, "the share is one of groups, as in Megatron-LM, not of bytes")
	f.StringVar(&x.least, "min-offloaded-tensor-size", "", "smaller tensors stay: a size such as 2MiB, or a `number` of elements of two bytes, as in Megatron-LM")
	f.StringVar(&x.delta, "delta-offload-bytes-across-pp-ranks", "", "`bytes` that a pipeline rank keeps more than the one before it")
	f.IntVar(&h.Margin, "margin", h.Margin, "last `groups` of each module that stay")
	f.IntVar(&h.MaxInflight, "fine-grained-offloading-max-inflight-offloads", 0, "`copies` out that may be under way before compute waits (default no limit)")
	f.BoolVar(&h.Delay, "delay-offload-until-cuda-graph", false, "copies outside of captured scopes begin after the replay of the scope before them")
	f.StringVar(&x.graph, "graph", "none", "what is captured: none, `scopes` or full, the whole step")
	f.StringVar(&x.scopes, "cuda-graph-scope", "", "captured `scopes`: attn, mlp, moe_router, moe or full_iteration (default with --graph scopes "+defaultScopes+")")
	f.BoolVar(&st.Stash, "stash", false, "stash the rows of experts, counted on the device, in the same step")
	f.StringVar(&x.links, "link-gbps", cpuLink, "`speed` of the CPU's modelled links in 10^9 bytes a second, or two: out,in")
	f.IntVar(&x.o.Rounds, "steps", 7, "measured `steps` with and without")
	f.StringVar(&x.trace, "trace", "", "write what the runtime did to a `file` that \"stowage report\" reads")
	x.page = reportFlag(cmd)
	x.asJSON = jsonFlag(cmd)
	cmd.InitDefaultHelpFlag()
	cmd.SetUsageTemplate(strings.Replace(usageTemplate, flagsTemplate, flagSections(f, offloadSections, "Other"), 1))
	return x
}

// flagSection is flags that belong together.
type flagSection struct {
	title string
	names []string
}

// flagSections are flags as the help shows them; the last section has the rest.
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
