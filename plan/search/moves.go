// This file owns what prevents a module from being recomputed or offloaded.

package search

import (
	"fmt"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// move is a choice for one module.
type move struct {
	module string
	action memory.Choice
	// never says why the choice is impossible in this setup. It is empty if it is possible.
	never string
}

// noRecompute says why a module cannot be recomputed in a setup. It is empty if it can.
func noRecompute(s *plan.Setup, module string) string {
	switch {
	case module == "moe" && s.Layout.OverlapEP:
		return "expert communication is overlapped with another microbatch, and a layer of experts cannot be recomputed beside it; drop the overlap"
	case module == "shared_experts" && s.Kernels.SharedExpertOverlap:
		return "shared experts overlap with communication; drop that overlap"
	case module == "moe_act" && !s.Kernels.GroupedGEMM:
		return "it needs grouped products of experts (--moe-grouped-gemm)"
	case module == "moe" && len(s.Graph.Scopes) > 0 && (has(s.Graph.Scopes, "moe_router") || has(s.Graph.Scopes, "moe_preprocess")):
		return "a part of the layer is captured in a graph (moe_router), and what is recomputed must lie wholly inside or outside of it; capture moe or nothing of it"
	}
	return ""
}

// noOffload says why a module cannot be offloaded in a setup. It is empty if it can.
func noOffload(s *plan.Setup, module string) string {
	captured := len(s.Graph.Scopes) > 0
	m, _ := memory.LookupModule(module)
	fused, isPart := coveredBy(module)
	switch {
	case s.Offload.Layers > 0:
		return "whole layers are offloaded already (--cpu-offloading-num-layers); drop that"
	case (module == "attn_norm" || module == "mlp_norm") && captured:
		return fmt.Sprintf("its tensors cross the border of captured graphs (%v); capture nothing, or keep it", s.Graph.Scopes)
	case has(s.Graph.Scopes, "moe"):
		return "layers of experts are captured whole (moe), and Megatron-LM offloads nothing beside that; capture moe_router instead"
	case s.Graph.Local && !m.Rows:
		return "under --cuda-graph-impl local only tensors of experts are offloaded; use transformer_engine"
	case m.Rows && isPart && s.Kernels.OpFuser:
		return "the experts are one fused operation; offload " + fused + " instead"
	case m.Rows && len(s.Stash.Modules) > 0:
		return "the experts' tensors go through the stash; size its host tier instead"
	}
	return ""
}

// clash says why two choices exclude each other. It is empty if they do not.
func clash(a, b move) string {
	ma, _ := memory.LookupModule(a.module)
	mb, _ := memory.LookupModule(b.module)
	if a.action == memory.Recompute && b.action == memory.Offload && a.module == "moe" && mb.Rows {
		return "the whole layer of experts is recomputed, so nothing is left to offload"
	}
	if a.action == memory.Offload && b.action == memory.Offload {
		if has(ma.Covers, b.module) {
			return a.module + " offloads the same tensors"
		}
		if has(mb.Covers, a.module) {
			return b.module + " offloads the same tensors"
		}
	}
	if a.action == memory.Recompute && b.action == memory.Recompute && a.module == "moe" && (b.module == "moe_act" || b.module == "shared_experts") {
		return "the whole layer of experts is recomputed already"
	}
	return ""
}

// coveredBy returns the module whose tensors include those of a module, and whether
// there is one.
func coveredBy(module string) (string, bool) {
	for _, m := range memory.Modules() {
		if has(m.Covers, module) {
			return m.Name, true
		}
	}
	return "", false
}
