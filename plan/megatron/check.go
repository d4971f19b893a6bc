// This file owns contradictions between settings that are valid separately, and sizes that
// do not divide.

package megatron

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

func check(r *reader, s *plan.Setup, _ Options) error {
	if err := checkDivisions(s); err != nil {
		return err
	}
	return checkModules(r, s)
}

func checkDivisions(s *plan.Setup) error {
	l := s.Layout
	for _, layer := range slices.Concat(s.Model.Layers, mtpLayers(s)) {
		type size struct {
			flag   string
			n      int
			degree string
			by     int
		}
		sizes := []size{}
		switch {
		case layer.Attention != nil:
			sizes = append(sizes, size{"num-attention-heads", layer.Attention.Heads, "tensor-model-parallel-size", l.TP})
		case layer.MLA != nil:
			sizes = append(sizes, size{"num-attention-heads", layer.MLA.Heads, "tensor-model-parallel-size", l.TP})
		case layer.Mamba != nil:
			sizes = append(sizes, size{"mamba-num-heads", layer.Mamba.Heads, "tensor-model-parallel-size", l.TP},
				size{"mamba-num-groups", layer.Mamba.Groups, "tensor-model-parallel-size", l.TP})
		}
		if layer.Dense != nil {
			sizes = append(sizes, size{"ffn-hidden-size", layer.Dense.Width, "tensor-model-parallel-size", l.TP})
		}
		if e := layer.MoE; e != nil {
			sizes = append(sizes, size{"num-experts", e.Experts, "expert-model-parallel-size", l.EP},
				size{"moe-ffn-hidden-size", e.Width, "expert-tensor-parallel-size", l.ETP},
				size{"moe-shared-expert-intermediate-size", e.SharedWidth, "tensor-model-parallel-size", l.TP})
		}
		for _, f := range sizes {
			if f.n%f.by != 0 {
				return fmt.Errorf("--%s %d does not divide by --%s %d; the nearest that does is %d", f.flag, f.n, f.degree, f.by, divisor(f.n, f.by))
			}
		}
	}
	return nil
}

func checkModules(r *reader, s *plan.Setup) error {
	recompute := func(m string) bool { return slices.Contains(s.Recompute.Modules, m) }
	offload := func(m string) bool { return slices.Contains(s.Offload.Modules, m) }
	inExperts := slices.DeleteFunc(slices.Clone(s.Offload.Modules), func(m string) bool { return !inExperts(m) })
	wrong := ""
	var module *memory.ModuleError
	if errors.As(memory.CheckOffload(s.Offload.Modules), &module) {
		wrong = fmt.Sprintf("--offload-modules %s %s; %s", module.Module, module.Problem, module.Remedy)
	}
	delayed := s.Precision.Compute == plan.FP8 && r.word("fp8-recipe", "delayed") == "delayed"
	for _, c := range []struct {
		wrong bool
		text  string
	}{
		{recompute("moe_act") && !s.Kernels.GroupedGEMM && hasExperts(s.Model), "--recompute-modules moe_act needs --moe-grouped-gemm"},
		{recompute("mla_up_proj") && !hasMLA(s), "--recompute-modules mla_up_proj needs --multi-latent-attention"},
		{recompute("shared_experts") && s.Kernels.SharedExpertOverlap, "--recompute-modules shared_experts excludes --moe-shared-expert-overlap; drop one"},
		{s.Precision.OutputLayer && s.Model.Tied && s.Layout.PP == 1, "--fp8-output-proj needs --untie-embeddings-and-output-weights"},
		{delayed && (recompute("moe_act") || recompute("layernorm")), "--recompute-modules moe_act and layernorm exclude --fp8-recipe delayed; use tensorwise, blockwise or mxfp8"},
		{recompute("moe") && s.Layout.OverlapEP, "--recompute-modules moe excludes --overlap-moe-expert-parallel-comm; drop one"},
		{s.Recompute.Full && s.Layout.OverlapEP, "--recompute-granularity full excludes --overlap-moe-expert-parallel-comm; recompute modules instead"},
		{recompute("moe") && len(inExperts) > 0, "--recompute-modules moe recomputes what --offload-modules " + strings.Join(inExperts, " ") + " would move; drop one"},
		{wrong != "", wrong},
		{offload("fused_group_mlp") && !s.Kernels.OpFuser, "--offload-modules fused_group_mlp needs --use-transformer-engine-op-fuser"},
		{len(s.Stash.Modules) > 0 && len(inExperts) > 0, "--moe-paged-stash covers --offload-modules " + strings.Join(inExperts, " ") + "; drop those"},
		{len(s.Offload.Modules) > 0 && s.Kernels.Local, "--fine-grained-activation-offloading needs --transformer-impl transformer_engine"},
		{s.Stash.RankCapacity > 0 && s.Kernels.Dispatcher != "hybridep", "--moe-expert-rank-capacity-factor needs --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep"},
		{s.Layout.OverlapEP && !hasExperts(s.Model), "--overlap-moe-expert-parallel-comm needs experts; drop it"},
	} {
		if c.wrong {
			return fmt.Errorf("%s", c.text)
		}
	}
	return nil
}

// inExperts reports whether a module belongs to the experts.
func inExperts(name string) bool {
	m, _ := memory.LookupModule(name)
	return m.Rows
}
