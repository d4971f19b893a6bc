// This file owns the modules that can be recomputed or offloaded, and what
// excludes what.

package search

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/plan"
)

// move is one module and what may be done with it.
type move struct {
	module string
	action Action
	// never says why it is impossible in this setup, if it is.
	never string
}

var (
	recomputable = []string{"core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "moe", "shared_experts", "gdn_norm_out", "gdp_in_proj", "gdp_qkv"}
	offloadable  = []string{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp", "gdp_qkv"}
)

// noRecompute says why a module cannot be recomputed in a setup at all.
func noRecompute(s *plan.Setup, module string) string {
	switch {
	case module == "moe" && s.Layout.OverlapEP:
		return "expert communication is overlapped with another microbatch, and a layer of experts cannot be computed again beside it; drop the overlap"
	case module == "shared_experts" && s.Kernels.SharedExpertOverlap:
		return "shared experts overlap with communication; drop that overlap"
	case module == "moe_act" && !s.Kernels.GroupedGEMM:
		return "it needs grouped products of experts (--moe-grouped-gemm)"
	case module == "moe" && len(s.Graph.Scopes) > 0 && (has(s.Graph.Scopes, "moe_router") || has(s.Graph.Scopes, "moe_preprocess")):
		return "a part of the layer is captured in a graph (moe_router), and what is computed again must lie wholly inside or outside; capture moe or nothing of it"
	}
	return ""
}

// noOffload says why a module cannot be offloaded in a setup at all.
func noOffload(s *plan.Setup, module string) string {
	captured := len(s.Graph.Scopes) > 0
	switch {
	case s.Offload.Layers > 0:
		return "whole layers are offloaded already (--cpu-offloading-num-layers); drop that"
	case (module == "attn_norm" || module == "mlp_norm") && captured:
		return fmt.Sprintf("its tensors cross the border of captured graphs (%v); capture nothing, or keep it", s.Graph.Scopes)
	case has(s.Graph.Scopes, "moe"):
		return "layers of experts are captured whole (moe), and Megatron-LM moves nothing beside that; capture moe_router instead"
	case s.Graph.Local && module != "expert_fc1" && module != "moe_act" && module != "fused_group_mlp":
		return "under --cuda-graph-impl local only tensors of experts move; use transformer_engine"
	case module == "fused_group_mlp" && !s.Kernels.OpFuser:
		return "it needs the fused grouped experts (--use-transformer-engine-op-fuser)"
	case (module == "expert_fc1" || module == "moe_act") && s.Kernels.OpFuser:
		return "the experts are one fused operation; offload fused_group_mlp instead"
	case (module == "expert_fc1" || module == "moe_act" || module == "fused_group_mlp") && len(s.Stash.Modules) > 0:
		return "the experts' tensors go through the stash; size its host tier instead"
	}
	return ""
}

// clash says why two chosen moves exclude each other, if they do.
func clash(a, b move) string {
	if a.action == Recompute && b.action == Offload {
		if a.module == "moe" && slices.Contains([]string{"expert_fc1", "moe_act", "fused_group_mlp"}, b.module) {
			return "the whole layer of experts is computed again, so there is nothing left to move"
		}
	}
	if a.action == Offload && b.action == Offload && (a.module == "fused_group_mlp") != (b.module == "fused_group_mlp") {
		for _, m := range []string{a.module, b.module} {
			if m == "expert_fc1" || m == "moe_act" {
				return "fused_group_mlp moves the same tensors"
			}
		}
	}
	if a.action == Recompute && b.action == Recompute && a.module == "moe" && (b.module == "moe_act" || b.module == "shared_experts") {
		return "the whole layer of experts is computed again already"
	}
	return ""
}
