// This file owns the flags of `stowage train` for a setup, and what they cannot say.

package config

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// TrainFlags returns the flags that ask stowage train for a setup. [TrainUnsaid] lists
// what they cannot ask for.
func TrainFlags(s *plan.Setup) []string {
	l, out := s.Layout, []string{}
	set := func(name string, values ...string) { out = append(append(out, "--"+name), values...) }
	count := func(name string, n int) { set(name, strconv.Itoa(n)) }
	if isPreset(s) {
		set("model", s.Model.Name)
	}
	pp, vpp := trainStages(s)
	count("pp", pp)
	if vpp > 1 {
		count("vpp", vpp)
	}
	count("ep", l.EP)
	count("dp", l.DP())
	count("micro", s.Batch.Micro)
	count("seq", s.Batch.Seq)
	count("microbatches", s.Batch.Global/(s.Batch.Micro*l.DP()))
	if s.Precision.Params != plan.FP32 {
		set("bf16")
	}
	scopes := trainScopes(s)
	if len(s.Stash.Modules) > 0 || len(scopes) > 0 {
		set("policy", "stash")
	} else {
		set("policy", "none") // exact sizes, as the planner has them
	}
	if len(s.Recompute.Modules) > 0 {
		set("recompute-modules", strings.Join(s.Recompute.Modules, ","))
	}
	if o := s.Offload; len(o.Modules) > 0 {
		set("offload-modules", strings.Join(o.Modules, ","))
		share := o.Fraction
		if len(o.Fractions) > 0 {
			share = slices.Max(o.Fractions) // one for all ranks: what the fullest needs
		}
		if share > 0 && share < 1 {
			set("offload-fraction", strconv.FormatFloat(share, 'g', -1, 64))
		}
	}
	if len(scopes) > 0 {
		set("graph", strings.Join(scopes, ","))
	}
	if l.FSDP.Shard == plan.ShardParameters {
		pool := l.FSDP.Pool
		if pool == "" {
			pool = "dynamic"
		}
		set("pool", pool)
	}
	if s.Budget > 0 {
		set("budget", s.Budget.Exact())
	}
	return out
}

func isPreset(s *plan.Setup) bool {
	_, err := model.Preset(s.Model.Name)
	return err == nil
}

// trainStages returns the degrees of a pipeline that the trainer accepts: all stages have
// the same number of layers. If the setup's have not, it takes fewer.
func trainStages(s *plan.Setup) (pp, vpp int) {
	layers, pp, vpp := len(s.Model.Layers), s.Layout.PP, s.Layout.VPP
	if layers%(pp*vpp) == 0 {
		return pp, vpp
	}
	for layers%pp != 0 {
		pp--
	}
	return pp, 1
}

// trainScopes are the captured scopes that the trainer has under the policies of the flags.
// It captures moe under the policy static alone.
func trainScopes(s *plan.Setup) (out []string) {
	for _, name := range s.Graph.Scopes {
		if slices.Contains([]string{"attn", "mlp", "moe_router", "full_iteration"}, name) {
			out = append(out, name)
		}
	}
	return out
}

// TrainUnsaid lists what stowage train cannot be asked for, a sentence for each.
func TrainUnsaid(s *plan.Setup) []string {
	l, o, out := s.Layout, s.Offload, []string{}
	pp, vpp := trainStages(s)
	for _, c := range []struct {
		lost bool
		text string
	}{
		{l.TP > 1 || l.CP > 1 || l.ETP > 1, "stowage train has no tensor and no context parallelism; the flags leave them out"},
		{!isPreset(s), "stowage train takes a preset or a Hugging Face config.json; add --model with one that describes " + cmp.Or(s.Model.Name, "the model")},
		{pp != l.PP || vpp != l.VPP, fmt.Sprintf("stowage train gives every stage as many layers as the next, and %d stages do not divide %d layers; the flags have --pp %d", l.PP*l.VPP, len(s.Model.Layers), pp)},
		{s.Precision.Params == plan.FP16 || s.Precision.Compute > plan.FP16, "stowage train computes in bf16 or fp32; the flags ask for bf16"},
		{l.FSDP.Shard == plan.ShardOptimizer || l.FSDP.Shard == plan.ShardGradients, "stowage train shards parameters or nothing; with the flags every replica has the whole optimiser"},
		{s.Recompute.Full, "stowage train recomputes modules, not whole layers; the flags recompute nothing; a budget alone lets it choose"},
		{len(o.Fractions) > 0, "stowage train offloads one fraction on every rank; the flags have the largest"},
		{o.Layers > 0, "stowage train offloads modules, not whole layers; the flags offload none of those"},
		{o.Delta > 0 || o.MaxInflight > 0, "stowage train moves the same share on every rank and bounds copies by itself"},
		{len(trainScopes(s)) < len(s.Graph.Scopes), "stowage train captures attn, mlp and moe_router, or full_iteration; the flags leave the others out"},
	} {
		if c.lost {
			out = append(out, c.text)
		}
	}
	return out
}
