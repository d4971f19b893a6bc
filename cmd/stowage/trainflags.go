// This file owns the flags of `stowage train`.

package main

import (
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/cmd/stowage/internal/trainrun"
	"github.com/stowage-dev/stowage/train"
)

// trainSections are the flags by what they are for.
var trainSections = []flagSection{
	{"The run", []string{"policy", "model", "data", "steps", "seed", "hold-out", "eval-every", "dry-run", "out", "save-every", "keep", "resume", "config", "trace", "serve", "plain"}},
	{"Ranks and batches", []string{"pp", "vpp", "ep", "dp", "micro", "seq", "microbatches", "dispatch", "capacity-factor", "device"}},
	{"Memory", []string{
		"budget", "offload-modules", "offload-fraction", "recompute-modules", "graph", "pool", "prefetch", "grad-comm-dtype", "bf16",
	}},
	{"Learning", []string{"lr", "min-lr", "warm-up", "decay", "beta1", "beta2", "weight-decay", "clip", "aux-loss", "bias-rate"}},
}

func (f *trainFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	addTrainOptions(fs, &f.options)
	fs.StringVar(&f.out, "out", "", "`folder` for the run's configuration, metrics, summary and checkpoints")
	fs.BoolVar(&f.resume, "resume", false, "go on with the run in --out")
	fs.BoolVar(&f.dryRun, "dry-run", false, "say what memory the run would take, by rank and owner, and train nothing")
	fs.StringVar(&f.config, "config", "", "read options from a `file` of YAML; flags win over it")
	fs.BoolVar(&f.trace, "trace", true, "trace what ranks do where a folder is written; --trace=false leaves the trace out")
	fs.StringVar(&f.serve, "serve", "", "serve a live page and /metrics at a `port` of this machine such as :8080, or a host and a port")
	fs.BoolVar(&f.plain, "plain", false, "show progress as plain lines, on a terminal too")
	f.asJSON = jsonFlag(cmd)
	cmd.InitDefaultHelpFlag()
	cmd.SetUsageTemplate(strings.Replace(usageTemplate, flagsTemplate, flagSections(fs, trainSections, "Other"), 1))
}

// addTrainOptions declares the flags that are options of a run.
func addTrainOptions(f *pflag.FlagSet, o *trainrun.Options) {
	f.SortFlags = false
	f.StringVar(&o.Policy, "policy", o.Policy, "memory `policy`: "+strings.Join(train.Policies, ", ")+" (default all: each of them, compared)")
	f.Var(modelValue{&o.Model}, "model", "`name` of a preset, a Hugging Face config.json, or its keys in YAML")
	f.StringVar(&o.Data, "data", o.Data, "`file` or folder of text (default a book that is built in)")
	f.IntVar(&o.Steps, "steps", o.Steps, "`steps` in all (default "+strconv.Itoa(trainrun.RunSteps)+", and of each policy in a comparison "+strconv.Itoa(trainrun.CompareSteps)+")")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`number` that parameters and the order of the text follow from")
	f.Float64Var(&o.HoldOut, "hold-out", o.HoldOut, "`share` of the text, its end, to evaluate on instead of training, from 0 to below 1")
	f.IntVar(&o.EvalEvery, "eval-every", o.EvalEvery, "`steps` from one evaluation with --hold-out to the next, 0 for one at the end")
	f.IntVar(&o.SaveEvery, "save-every", o.SaveEvery, "`steps` from one checkpoint to the next, 0 for one at the end")
	f.IntVar(&o.Keep, "keep", o.Keep, "`checkpoints` that are kept")

	f.IntVar(&o.PP, "pp", o.PP, "pipeline `stages` (default 2)")
	f.IntVar(&o.VPP, "vpp", o.VPP, "`chunks` of the model on a stage (default 1)")
	f.IntVar(&o.EP, "ep", o.EP, "`ranks` that experts are divided over (default 2, without experts 1)")
	f.IntVar(&o.DP, "dp", o.DP, "data-parallel `ranks`, those of --ep among them (default 2)")
	f.IntVar(&o.Micro, "micro", o.Micro, "`sequences` of a microbatch")
	f.IntVar(&o.Seq, "seq", o.Seq, "`tokens` of a sequence")
	f.IntVar(&o.Microbatches, "microbatches", o.Microbatches, "`microbatches` of a step on each replica")
	f.StringVar(&o.Dispatch, "dispatch", o.Dispatch, "`way` of tokens to experts: alltoall or ring")
	f.Float64Var(&o.Capacity, "capacity-factor", o.Capacity, "rows of an expert over its share; beyond it tokens are dropped (default no limit)")
	f.StringVar(&o.Device, "device", o.Device, "`device` to use: cpu, cuda, or cuda:1 for the second GPU")

	f.StringVar(&o.Budget, "budget", o.Budget, "`size` that a rank may take on its device, such as 60MiB, parameters and all")
	f.Var(listValue{&o.Offload}, "offload-modules", "`modules` that go to host memory, such as core_attn attn_proj fused_group_mlp")
	f.Float64Var(&o.Fraction, "offload-fraction", o.Fraction, "`share` of what --offload-modules names that goes, from 0 to 1")
	f.Var(listValue{&o.Recompute}, "recompute-modules", "`modules` that are computed again, such as layernorm core_attn")
	f.Var(listValue{&o.Graph}, "graph", "`scopes` that are captured: attn mlp moe_router, or full_iteration on one rank")
	f.StringVar(&o.Pool, "pool", o.Pool, "shard parameters (ZeRO-3), gathered into a `pool`: dynamic, rotary, fixed, max, arena or trace")
	f.IntVar(&o.Prefetch, "prefetch", o.Prefetch, "`units` gathered ahead with --pool")
	f.StringVar(&o.GradComm, "grad-comm-dtype", o.GradComm, "`type` that gradients are reduced in with --pool: fp32 or bf16")
	f.BoolVar(&o.BF16, "bf16", o.BF16, "keep activations and the parameters that passes read in bf16")

	f.Float64Var(&o.LR, "lr", o.LR, "learning `rate` of AdamW")
	f.Float64Var(&o.MinLR, "min-lr", o.MinLR, "`rate` that --decay ends with")
	f.IntVar(&o.WarmUp, "warm-up", o.WarmUp, "`steps` in which the rate rises")
	f.IntVar(&o.Decay, "decay", o.Decay, "`steps` after which a cosine has brought the rate to --min-lr (default never)")
	f.Float64Var(&o.Beta1, "beta1", o.Beta1, "`decay` of the first moment")
	f.Float64Var(&o.Beta2, "beta2", o.Beta2, "`decay` of the second moment")
	f.Float64Var(&o.WeightDecay, "weight-decay", o.WeightDecay, "`rate` at which weights are drawn towards zero")
	f.Float64Var(&o.Clip, "clip", o.Clip, "largest `norm` of all gradients together, 0 for none")
	f.Var(rateValue{&o.AuxLoss}, "aux-loss", "`factor` of the loss that balances experts (default 0.01, and 0 where a bias does it)")
	f.Float64Var(&o.BiasRate, "bias-rate", o.BiasRate, "`rate` at which a bias balances experts, if the model has one")
}

// listType is what the flag parser calls lists.
const listType = "words"

// listValue is a list with commas between its words; the last one given counts.
type listValue struct{ to *[]string }

func (v listValue) Type() string { return listType }

func (v listValue) String() string {
	if v.to == nil {
		return ""
	}
	return strings.Join(*v.to, ",")
}

func (v listValue) Set(s string) error {
	*v.to = []string{}
	for word := range strings.SplitSeq(s, ",") {
		if word = strings.TrimSpace(word); word != "" {
			*v.to = append(*v.to, word)
		}
	}
	return nil
}

// modelValue is a model by its name.
type modelValue struct{ to *trainrun.ModelSpec }

func (v modelValue) Type() string { return "model" }

func (v modelValue) String() string {
	if v.to == nil {
		return ""
	}
	return v.to.Name
}

func (v modelValue) Set(s string) error {
	*v.to = trainrun.ModelSpec{Name: s}
	return nil
}

// rateValue is a number that may be missing.
type rateValue struct{ to **float64 }

func (v rateValue) Type() string { return "float64" }

func (v rateValue) String() string {
	if v.to == nil || *v.to == nil {
		return ""
	}
	return strconv.FormatFloat(**v.to, 'g', -1, 64)
}

func (v rateValue) Set(s string) error {
	x, err := strconv.ParseFloat(s, 64)
	*v.to = &x
	return err
}
