// This file owns the flags of Megatron-LM that are not read: those that do not affect
// memory, and those whose effect is not predicted.

package megatron

import (
	_ "embed"
	"strings"
)

// ignored.txt has the names of flags that do not change what a training step
// holds in memory by more than its error band, with # before comments.
//
//go:embed ignored.txt
var ignoredNames string

func ignoredFlags() map[string]bool {
	out := map[string]bool{}
	for line := range strings.Lines(ignoredNames) {
		line, _, _ = strings.Cut(line, "#")
		for name := range strings.FieldsSeq(line) {
			out[name] = true
		}
	}
	return out
}

// unmodelledFlags returns the flags that change memory in a way that the forecast does not
// follow. The text says how.
func unmodelledFlags() map[string]string {
	return map[string]string{
		"fp32-residual-connection":                        "residuals take twice the bytes that are counted",
		"distribute-saved-activations":                    "what full recomputation keeps is smaller by the tensor-parallel size",
		"enable-mhc-connections":                          "residual streams are counted once",
		"mhc-num-residual-streams":                        "residual streams are counted once",
		"heterogeneous-layers-config-path":                "all layers are counted as equal",
		"heterogeneous-layers-config-encoded-json":        "all layers are counted as equal",
		"tensor-parallel-num-weight-shards":               "weights are counted as divided over tensor-parallel ranks only",
		"expert-tensor-parallel-num-weight-shards":        "weights are counted as divided over tensor-parallel ranks only",
		"perform-rl-step":                                 "only the training step is predicted",
		"hierarchical-context-parallel-sizes":             "the sequence is counted as divided evenly",
		"hybrid-context-parallel":                         "the sequence is counted as divided evenly",
		"logits-load-dir":                                 "the teacher's logits come on top",
		"logits-save-dir":                                 "the saved logits come on top",
		"freeze-all-layers":                               "gradients and optimiser state are counted as for training all",
		"te-precision-config-file":                        "one precision is assumed for all modules",
		"kitchen-config-file":                             "one precision is assumed for all modules",
		"kitchen-recipe-number":                           "one precision is assumed for all modules",
		"mlp-chunks-for-training":                         "the feed-forward part is counted as computed at once",
		"use-grouped-gemm-for-dense-mlp":                  "workspaces of dense layers are counted as plain",
		"megatron-fsdp-version":                           "pools of version 1 are counted",
		"ddp-reduce-scatter-with-fp32-accumulation":       "its scratch buffers come on top",
		"gtp-remat-reduce-scatter-with-fp32-accumulation": "its scratch buffers come on top",
		"moe-input-jitter-eps":                            "the jittered copy of the rows comes on top",
		"mtp-hsm":                                         "mixed hidden states come on top",
		"fp16-lm-cross-entropy":                           "the loss is counted in fp32",
		"output-logit-dtype":                              "logits are counted in the format of the model",
		"mamba-training-ssm-states-dtype":                 "states of the scan are counted in the format of the model",
		"disable-mamba-mem-eff-path":                      "Mamba layers are counted with the path that saves memory",
		"delay-wgrad-compute":                             "inputs of delayed products are counted as freed at once",
		"overlap-dispatch-backward-with-experts-wgrad":    "inputs of delayed products are counted as freed at once",
		"ep-overlap-early-attn-memory-release":            "attention's tensors are counted as held to the end of a layer",
		"moe-apply-probs-on-input":                        "probabilities are counted as applied between the products",
		"moe-dispatch-fwd-dtype":                          "dispatched rows are counted in bf16",
		"moe-combine-bwd-dtype":                           "combined rows are counted in bf16",
		"keep-fp8-transpose-cache":                        "transposed copies are counted as made when needed",
		"reuse-grad-buf-for-mxfp8-param-ag":               "parameters are counted with the buffers of the default",
		"suggested-communication-unit-size":               "units of the default size are counted",
		"megatron-fsdp-enable-fine-grained-param-gather":  "whole units are counted as gathered",
		"fsdp-db-use-persist-buf-on-alloc-fail":           "no fallback buffers are counted",
		"fused-residual-rmsnorm":                          "norms are counted as separate",
		"moe-router-force-biased":                         "rows are counted as the routing of the forecast says",
		"decoder-num-layers":                              "only decoder models are predicted; --num-layers counts",
		"decoder-seq-length":                              "only decoder models are predicted; --seq-length counts",
		"skip-train":                                      "a training step is predicted all the same",
		"batch-size":                                      "it was removed from Megatron-LM; use --micro-batch-size",
		"model-parallel-size":                             "it was removed from Megatron-LM; use --tensor-model-parallel-size",
		"checkpoint-activations":                          "it was removed from Megatron-LM; use --recompute-granularity",
		"yaml-cfg":                                        "give that file itself",
	}
}
