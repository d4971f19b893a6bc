// This file owns the flags of `stowage train`.

package main

import (
	"strconv"
	"strings"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stowage-dev/stowage/train"
	"github.com/stowage-dev/stowage/train/run"
)

// trainSections groups the flags by what they are for.
var trainSections = []flagSection{
	{"The run", []string{"policy", "model", "data", "steps", "seed", "hold-out", "eval-every", "dry-run", "out", "save-every", "keep", "resume", "config", "trace", "profile", "serve", "plain"}},
	{"Ranks and batches", []string{"pp", "vpp", "ep", "dp", "micro", "seq", "microbatches", "dispatch", "capacity-factor", "device"}},
	{"Memory", []string{
		"budget", "offload-modules", "offload-fraction", "recompute-modules", "stash-modules", "graph", "pool", "prefetch", "grad-comm-dtype", "bf16",
	}},
	{"Learning", []string{"lr", "min-lr", "warm-up", "decay", "beta1", "beta2", "weight-decay", "clip", "aux-loss", "bias-rate"}},
}

func (f *trainFlags) add(cmd *cobra.Command) {
	fs := cmd.Flags()
	addTrainOptions(fs, &f.options)
	fs.StringVar(&f.out, "out", "", "`folder` for the run's configuration, metrics, summary and checkpoints")
	fs.BoolVar(&f.resume, "resume", false, "continue the run in --out")
	fs.BoolVar(&f.dryRun, "dry-run", false, "show the memory that the run would take, by rank and owner, and train nothing")
	fs.StringVar(&f.config, "config", "", "read options from a `file` of YAML; flags override it")
	fs.BoolVar(&f.profile, "profile", false, "time each launch of the last steps, and print what each kernel takes (default 12 steps)")
	fs.StringVar(&f.serve, "serve", "", "serve a live page and /metrics at an `address` such as :8080, which is this machine only")
	fs.BoolVar(&f.plain, "plain", false, "show progress as plain lines, on a terminal too")
	f.asJSON = jsonFlag(cmd)
	cmd.InitDefaultHelpFlag()
	cmd.SetUsageTemplate(strings.Replace(usageTemplate, flagsTemplate, flagSections(fs, trainSections, "Other"), 1))
}

// addTrainOptions declares the flags that are options of a run.
func addTrainOptions(f *pflag.FlagSet, o *run.Options) {
	f.SortFlags = false
	f.StringVar(&o.Policy, "policy", o.Policy, "memory `policy`: "+strings.Join(train.Policies, ", ")+" (default all: compare them)")
	f.Var(modelValue{&o.Model}, "model", "`name` of a preset, a Hugging Face config.json, or its keys in YAML")
	f.StringVar(&o.Data, "data", o.Data, "`file` or folder of text (default a built-in book)")
	f.IntVar(&o.Steps, "steps", o.Steps, "`steps` in all (default "+strconv.Itoa(runSteps)+", and for each policy of a comparison "+strconv.Itoa(compareSteps)+")")
	f.Uint64Var(&o.Seed, "seed", o.Seed, "`number` that decides the first parameters and the order of the text")
	f.Float64Var(&o.HoldOut, "hold-out", o.HoldOut, "`share` of the text to evaluate on and not to train on, from 0 to below 1; it is the end")
	f.IntVar(&o.EvalEvery, "eval-every", o.EvalEvery, "`steps` from one evaluation with --hold-out to the next, 0 for one at the end")
	f.IntVar(&o.SaveEvery, "save-every", o.SaveEvery, "`steps` from one checkpoint to the next, 0 for one at the end")
	f.IntVar(&o.Keep, "keep", o.Keep, "`checkpoints` to keep")
	f.BoolVar(&o.Trace, "trace", o.Trace, "write traces to the folder; --trace=false leaves them out")

	f.IntVar(&o.PP, "pp", o.PP, "pipeline `stages` (default 2)")
	f.IntVar(&o.VPP, "vpp", o.VPP, "model `chunks` of a stage (default 1)")
	f.IntVar(&o.EP, "ep", o.EP, "`ranks` that divide the experts (default 2, or 1 without experts)")
	f.IntVar(&o.DP, "dp", o.DP, "data-parallel `ranks`, which include those of --ep (default 2)")
	f.IntVar(&o.Micro, "micro", o.Micro, "`sequences` of a microbatch")
	f.IntVar(&o.Seq, "seq", o.Seq, "`tokens` of a sequence")
	f.IntVar(&o.Microbatches, "microbatches", o.Microbatches, "`microbatches` of a step on a replica")
	f.StringVar(&o.Dispatch, "dispatch", o.Dispatch, "`way` to exchange rows between expert ranks: alltoall or ring")
	f.Float64Var(&o.Capacity, "capacity-factor", o.Capacity, "most rows of an expert over its balanced share; tokens beyond it are dropped (default no limit)")
	f.StringVar(&o.Device, "device", o.Device, "`device` to use: cpu, cuda, or cuda:1 for the second GPU")

	f.StringVar(&o.Budget, "budget", o.Budget, "device memory that a rank may hold at its peak, parameters included: a `size` such as 60MiB")
	f.Var(listValue{&o.Offload}, "offload-modules", "`modules` to offload to host memory, such as core_attn attn_proj fused_group_mlp")
	f.Float64Var(&o.Fraction, "offload-fraction", o.Fraction, "`share` of --offload-modules to offload, from 0 to 1; rows of experts (fused_group_mlp) are offloaded as a whole")
	f.Var(listValue{&o.Recompute}, "recompute-modules", "`modules` to recompute, such as layernorm core_attn")
	f.Var(listValue{&o.Stash}, "stash-modules", "`modules` whose rows to stash in pages, such as moe_act")
	f.Var(listValue{&o.Graph}, "graph", "`scopes` to capture as graphs: attn mlp moe_router moe, or full_iteration, the step of all ranks")
	f.StringVar(&o.Pool, "pool", o.Pool, "shard parameters (ZeRO-3), gathered into a `pool`: dynamic, rotary, fixed, max, arena or recorded; \"\" for whole ones, also on --resume")
	f.IntVar(&o.Prefetch, "prefetch", o.Prefetch, "FSDP `units` to gather ahead with --pool")
	f.StringVar(&o.GradComm, "grad-comm-dtype", o.GradComm, "`type` in which --pool reduces gradients: fp32 or bf16")
	f.BoolVar(&o.BF16, "bf16", o.BF16, "keep activations, and the parameters that passes read, in bf16")

	f.Float64Var(&o.LR, "lr", o.LR, "learning `rate` of AdamW")
	f.Float64Var(&o.MinLR, "min-lr", o.MinLR, "learning `rate` at the end of --decay")
	f.IntVar(&o.WarmUp, "warm-up", o.WarmUp, "`steps` during which the rate rises")
	f.IntVar(&o.Decay, "decay", o.Decay, "`steps` after which a cosine has lowered the rate to --min-lr (default never)")
	f.Float64Var(&o.Beta1, "beta1", o.Beta1, "`decay` of the first moment")
	f.Float64Var(&o.Beta2, "beta2", o.Beta2, "`decay` of the second moment")
	f.Float64Var(&o.WeightDecay, "weight-decay", o.WeightDecay, "`rate` at which weights shrink towards zero")
	f.Float64Var(&o.Clip, "clip", o.Clip, "largest `norm` of all gradients together, 0 for no limit")
	f.Var(rateValue{&o.AuxLoss}, "aux-loss", "`factor` of the loss that balances experts (default 0.01, or 0 if a bias balances them)")
	f.Float64Var(&o.BiasRate, "bias-rate", o.BiasRate, "`rate` at which a bias balances experts, if the model has one")
}

// listType is the type of list flags for the flag parser.
const listType = "words"

// listValue is a list of words that are separated by commas or spaces. The last flag counts.
type listValue struct{ to *[]string }

func (v listValue) Type() string { return listType }

func (v listValue) String() string {
	if v.to == nil {
		return ""
	}
	return strings.Join(*v.to, ",")
}

func (v listValue) Set(s string) error {
	*v.to = strings.FieldsFunc(s, func(c rune) bool { return c == ',' || unicode.IsSpace(c) })
	return nil
}

// modelValue is the name of a model.
type modelValue struct{ to *run.ModelSpec }

func (v modelValue) Type() string { return "model" }

func (v modelValue) String() string {
	if v.to == nil {
		return ""
	}
	return v.to.Name
}

func (v modelValue) Set(s string) error {
	*v.to = run.ModelSpec{Name: s}
	return nil
}

// rateValue is a number that can be missing.
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
