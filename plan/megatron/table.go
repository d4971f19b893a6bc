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
		"distribute-saved-activations":                    "what full recomputation keeps is smaller by the tensor-parallel size",
		"hierarchical-context-parallel-sizes":             "the sequence is counted as divided evenly",
		"hybrid-context-parallel":                         "the sequence is counted as divided evenly",
		"te-precision-config-file":                        "one precision is assumed for all modules",
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
		"export-moe-apply-probs-on-input":                 "probabilities are counted as applied between the products",
		"export-force-local-attention":                    "attention is counted as that of --attention-backend",
		"moe-dispatch-fwd-dtype":                          "dispatched rows are counted in bf16",
		"moe-combine-bwd-dtype":                           "combined rows are counted in bf16",
		"keep-fp8-transpose-cache":                        "transposed copies are counted as made when needed",
		"reuse-grad-buf-for-mxfp8-param-ag":               "parameters are counted with the buffers of the default",
		"suggested-communication-unit-size":               "units of the default size are counted",
		"megatron-fsdp-enable-fine-grained-param-gather":  "whole units are counted as gathered",
		"fsdp-db-use-persist-buf-on-alloc-fail":           "no fallback buffers are counted",
		"fused-residual-rmsnorm":                          "norms are counted as separate",
		"moe-router-force-biased":                         "rows are counted as the routing of the forecast says",
		"batch-size":                                      "it was removed from Megatron-LM; use --micro-batch-size",
		"model-parallel-size":                             "it was removed from Megatron-LM; use --tensor-model-parallel-size",
		"deepspeed":                                       "DeepSpeed's own configuration can shard and offload states, and is not read",
		"deepspeed-config":                                "the file can shard and offload states, and is not read",
		"yaml-cfg":                                        "give that file itself",
	}
}

// refusedOptions are flags that change memory by more than the error band in a way that
// the forecast does not follow. The text says how. A job that has one is refused.
var refusedOptions = map[string]string{
	"enable-hyper-connections":                            "keeps several residual streams beside each other",
	"enable-mhc-connections":                              "keeps several residual streams beside each other",
	"mhc-num-residual-streams":                            "keeps several residual streams beside each other",
	"fp32-residual-connection":                            "keeps residuals in twice the bytes",
	"flextron":                                            "trains several sizes of a model inside each other",
	"linear-attention-type":                               "names the first version of linear attention, which saved more than that of today",
	"heterogeneous-layers-config-path":                    "gives every layer sizes of its own",
	"heterogeneous-layers-config-encoded-json":            "gives every layer sizes of its own",
	"tensor-parallel-num-weight-shards":                   "divides weights once more",
	"expert-tensor-parallel-num-weight-shards":            "divides weights once more",
	"logits-save-dir":                                     "keeps logits",
	"kitchen-config-file":                                 "sets the precision of single modules",
	"kitchen-recipe-number":                               "sets the precision of single modules",
	"mlp-chunks-for-training":                             "divides the feed-forward part",
	"skip-train":                                          "trains nothing",
	"fp8-dot-product-attention":                           "saves queries, keys and values in fp8",
	"fp8-multi-head-attention":                            "saves queries, keys and values in fp8",
	"use-kitchen-attention":                               "saves what kitchen's attention needs",
	"no-fp8-wgrad":                                        "keeps the inputs of products in bf16",
	"disable-fp8-wgrad":                                   "keeps the inputs of products in bf16",
	"fp8-quantizer-factory":                               "names a format of its own",
	"fp4-quantizer-factory":                               "names a format of its own",
	"ddp-param-name-patterns-for-fp32-local-accumulation": "keeps a second buffer of gradients",
}

// heavyWords stand in the names of flags that change what a job holds.
var heavyWords = []string{
	"offload", "recompute", "checkpoint-act", "freeze", "frozen", "lora", "adapter", "peft", "teacher", "student", "draft-model", "eagle", "medusa",
	"vision", "audio", "image", "video", "speech", "encoder", "retriev", "reward", "critic", "ref-model", "reference-model",
	"shard", "zero-stage", "fsdp", "fp8", "fp4", "quant", "residual", "num-layers", "hidden-size",
}
