// This file owns what flags of Megatron-LM cannot express: parts of a setup that are lost,
// and what must be in the environment.

package megatron

import (
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// Unsaid lists what no flag of Megatron-LM can ask for, a sentence for each.
func Unsaid(s *plan.Setup) (out []string) {
	m, p := s.Model, parts(s.Model)
	for _, c := range []struct {
		lost bool
		text string
	}{
		{m.PostNorms, "Megatron-LM has no flag for norms behind attention and feed-forward parts"},
		{p.Attention != nil && p.Attention.OutBias && !m.Bias, "Megatron-LM has no flag for a bias on the output projection alone"},
		{p.Dense != nil && p.Dense.Bias && !m.Bias, "Megatron-LM has no flag for biases of feed-forward parts alone"},
		{p.Mamba != nil && p.Mamba.Version != 2, "Megatron-LM has no Mamba-1 layers"},
		{isHybrid(m) && p.Attention != nil && p.MLA != nil, "Megatron-LM does not mix attention and MLA in one model"},
		{slices.ContainsFunc(m.Layers, model.Layer.Parallel), "Megatron-LM has no flag for attention and Mamba side by side in one layer"},
		{p.Lightning != nil, "Megatron-LM has no lightning attention"},
		{p.Attention != nil && p.Attention.QKNormWhole, "Megatron-LM's --qk-layernorm normalises head by head, not all heads at once"},
		{p.Attention != nil && p.Attention.Chunk > 0, "Megatron-LM has no flag for attention in chunks"},
		{m.OutputBias, "Megatron-LM has no flag for a bias of the output layer"},
		{p.Mamba != nil && p.Mamba.Ungated, "Megatron-LM has no flag for Mamba without a norm behind the scan"},
		{s.Precision.ActivationInputFP8, "storing the activation's input in fp8 is set in the model's config, not by a flag"},
		{s.Precision.Attention, "attention in fp8 is set in the model's config, not by a flag"},
		{s.Kernels.Loss == "te", "Megatron-LM refuses TransformerEngine's cross entropy since August 2026; with the native one the loss takes more memory"},
		{len(s.Offload.Fractions) > 0, "Megatron-LM has one --activation-offload-fraction for every rank; the flags have the nearest that fits, with --delta-offload-bytes-across-pp-ranks"},
		{len(s.Offload.Fractions) == 0 && s.Offload.ByBytes && s.Offload.Fraction > 0 && s.Offload.Fraction < 1, "--activation-offload-fraction counts groups, not bytes; the flags have the least that fits"},
		// "trace" is the old name of the pool "recorded"; both select it.
		{s.Layout.FSDP.Pool == "arena" || s.Layout.FSDP.Pool == "recorded" || s.Layout.FSDP.Pool == "trace", "the pool " + s.Layout.FSDP.Pool + " is Stowage's own; the flags ask for the max-pool"},
		{s.Layout.FSDP.Prefetch > 1, "Megatron-FSDP chooses by itself how far it gathers ahead"},
		{s.Stash.PageBytes != 0, "Megatron-LM's pages hold rows, not bytes (--moe-paged-stash-page-size)"},
		{len(s.Stash.Modules) > 0 && !slices.Equal(s.Stash.Modules, memory.MegatronModules(memory.Stash)), "--moe-paged-stash takes " + strings.Join(memory.MegatronModules(memory.Stash), " and ") + ", all or nothing"},
	} {
		if c.lost {
			out = append(out, c.text)
		}
	}
	return out
}

// Environment returns the environment variables, as NAME=value, that Megatron-LM needs
// to start with the flags of a setup.
func Environment(s *plan.Setup) (out []string) {
	l := s.Layout
	divided, blackwell := l.TP > 1 || l.CP > 1, s.Hardware != nil && s.Hardware.Generation >= 10
	if divided && !blackwell && l.FSDP.Shard == plan.NoShard && !l.OverlapEP {
		out = append(out, "CUDA_DEVICE_MAX_CONNECTIONS=1")
	}
	if s.ExpandableSegments {
		out = append(out, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
	}
	if len(s.Offload.Modules) > 0 {
		// TransformerEngine's newer offloading would move weights as well.
		out = append(out, "NVTE_CPU_OFFLOAD_V1=1")
	}
	return out
}
