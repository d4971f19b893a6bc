// Package maxtext writes a setup as settings for MaxText: the keys of its YAML that
// decide about memory.
package maxtext

// This file owns all of it: shapes, mesh, batch, and whether each named tensor of a layer
// is kept, offloaded or recomputed.

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// Config returns YAML that asks MaxText for a setup, on top of its base.yml. Comments in
// it list what MaxText has no key for.
func Config(s *plan.Setup) string {
	w := &writer{}
	w.note("stowage plan: keys on top of MaxText's base.yml")
	w.model(s)
	w.mesh(s)
	w.batch(s)
	w.numbers(s)
	w.remat(s)
	return w.out.String()
}

type writer struct{ out strings.Builder }

func (w *writer) set(key string, value any) { fmt.Fprintf(&w.out, "%s: %v\n", key, value) }

func (w *writer) note(text string) { fmt.Fprintf(&w.out, "# %s\n", text) }

func (w *writer) noteIf(on bool, text string) {
	if on {
		w.note(text)
	}
}

// kinds returns one part of each kind, and how many layers come before the first with
// experts.
func kinds(m *model.Model) (p model.Layer, dense int) {
	experts := false
	for _, l := range m.Layers {
		if l.MoE != nil {
			experts, p.MoE = true, l.MoE
		} else if !experts {
			dense++
		}
		if l.Attention != nil {
			p.Attention = l.Attention
		}
		if l.MLA != nil {
			p.MLA = l.MLA
		}
		if l.Dense != nil {
			p.Dense = l.Dense
		}
		if l.Mamba != nil {
			p.Mamba = l.Mamba
		}
		if l.DeltaNet != nil {
			p.DeltaNet = l.DeltaNet
		}
		if l.Lightning != nil {
			p.Lightning = l.Lightning
		}
	}
	return p, dense
}

func (w *writer) model(s *plan.Setup) {
	m := s.Model
	p, dense := kinds(m)
	w.set("override_model_config", true)
	w.set("base_num_decoder_layers", len(m.Layers))
	w.set("base_emb_dim", m.Hidden)
	w.set("vocab_size", m.Vocab)
	w.set("logits_via_embedding", m.Tied)
	switch {
	case p.MLA != nil:
		a := p.MLA
		w.set("attention_type", "mla")
		w.set("base_num_query_heads", a.Heads)
		w.set("base_num_kv_heads", a.Heads)
		w.set("q_lora_rank", a.QRank)
		w.set("kv_lora_rank", a.KVRank)
		w.set("qk_nope_head_dim", a.Nope)
		w.set("qk_rope_head_dim", a.Rope)
		w.set("v_head_dim", a.V)
	case p.Attention != nil:
		a := p.Attention
		w.set("base_num_query_heads", a.Heads)
		w.set("base_num_kv_heads", a.KVHeads)
		w.set("head_dim", a.HeadDim)
	}
	gated := (p.Dense != nil && p.Dense.Gated) || (p.MoE != nil && p.MoE.Gated)
	if !gated {
		w.set("mlp_activations", `["gelu"]`)
	}
	if p.Dense != nil {
		w.set("base_mlp_dim", p.Dense.Width)
	}
	if x := p.MoE; x != nil {
		if p.Dense == nil {
			w.set("base_mlp_dim", x.Width) // base.yml requires both to be equal if no layer is dense
		}
		w.set("num_experts", x.Experts)
		w.set("num_experts_per_tok", x.TopK)
		w.set("base_moe_mlp_dim", x.Width)
		w.set("first_num_dense_layers", dense)
		if x.SharedWidth > 0 {
			w.set("shared_experts", x.SharedWidth/x.Width)
			w.noteIf(x.SharedWidth%x.Width != 0, fmt.Sprintf("shared_experts counts experts of equal width; %d is not a multiple of %d", x.SharedWidth, x.Width))
		}
	}
	if m.MTP != nil {
		w.set("mtp_num_layers", m.MTP.Depth)
	}
	w.noteIf(p.Mamba != nil, "MaxText has no Mamba layers; these keys leave them out")
	w.noteIf(p.Lightning != nil, "MaxText has no lightning attention; these keys leave it out")
}

// mesh divides the devices. An expert-parallel rank also holds a share of the
// batch, so the axes multiply to the number of devices.
func (w *writer) mesh(s *plan.Setup) {
	l := s.Layout
	w.set("ici_tensor_parallelism", l.TP)
	w.set("ici_context_parallelism", l.CP)
	w.set("ici_expert_parallelism", l.EP)
	w.set("ici_pipeline_parallelism", l.PP)
	replicas, whole := l.DP()/l.EP, l.DP()%l.EP == 0
	w.noteIf(!whole, fmt.Sprintf("expert parallelism of %d does not divide the %d data-parallel ranks: MaxText cannot lay them out", l.EP, l.DP()))
	slices := 1
	if h := s.Hardware; h != nil && h.FastGroup > 0 && l.World > h.FastGroup && replicas%(l.World/h.FastGroup) == 0 {
		slices = l.World / h.FastGroup
	}
	w.set("dcn_data_parallelism", slices)
	fsdp, data := 1, max(replicas, 1)/slices
	if l.FSDP.Shard == plan.ShardParameters {
		fsdp, data = data, 1
	}
	w.set("ici_fsdp_parallelism", fsdp)
	w.set("ici_data_parallelism", data)
	if l.PP > 1 {
		layers := len(s.Model.Layers)
		w.noteIf(layers%(l.PP*l.VPP) != 0, fmt.Sprintf("%d layers do not divide over %d stages: MaxText wants equal ones", layers, l.PP*l.VPP))
		w.set("num_layers_per_pipeline_stage", max(layers/(l.PP*l.VPP), 1))
		w.set("num_pipeline_repeats", l.VPP)
	}
}

func (w *writer) batch(s *plan.Setup) {
	b, l := s.Batch, s.Layout
	w.set("max_target_length", b.Seq)
	steps := b.Global / (b.Micro * l.DP())
	if l.PP > 1 {
		// The pipeline divides the batch into microbatches itself.
		w.set("per_device_batch_size", decimal(float64(b.Global)/float64(l.World)))
		w.set("num_pipeline_microbatches", steps)
		return
	}
	w.set("per_device_batch_size", decimal(float64(b.Micro*l.DP())/float64(l.World)))
	w.set("gradient_accumulation_steps", steps)
}

func decimal(f float64) string {
	text := strconv.FormatFloat(f, 'f', -1, 64)
	if !strings.Contains(text, ".") {
		text += ".0"
	}
	return text
}

func (w *writer) numbers(s *plan.Setup) {
	names := map[plan.Format]string{plan.BF16: "bfloat16", plan.FP16: "float16", plan.FP32: "float32"}
	w.set("dtype", names[s.Precision.Params])
	w.set("weight_dtype", "float32")
	onTPU := s.Hardware != nil && strings.HasPrefix(s.Hardware.Name, "tpu")
	if s.Hardware != nil {
		w.set("hardware", map[bool]string{true: "tpu", false: "gpu"}[onTPU])
	}
	switch s.Precision.Compute {
	case plan.FP8:
		w.set("quantization", `"fp8"`)
	case plan.MXFP8:
		w.set("quantization", `"te_mxfp8"`)
	case plan.NVFP4:
		w.set("quantization", `"te_nvfp4"`)
	}
	o := s.Optimizer
	kind := "adamw"
	if o.Kind == "sgd" || o.Kind == "muon" {
		kind = o.Kind
	}
	w.set("opt_type", strconv.Quote(kind))
	if o.PrecisionAware && o.Moment1 == plan.BF16 {
		w.set("mu_dtype", "bfloat16")
	}
	if o.OffloadFraction > 0 {
		w.set("optimizer_memory_host_offload", true)
		w.noteIf(o.OffloadFraction < 1, fmt.Sprintf("MaxText moves the whole optimiser state, not %g of it", o.OffloadFraction))
	}
	if s.Kernels.CapacityFactor > 0 {
		w.set("capacity_factor", s.Kernels.CapacityFactor)
	}
}

// tensor is one of MaxText's names, with the modules of Megatron-LM that recompute or
// offload it.
type tensor struct {
	name      string
	recompute []string // modules whose recompute drops it
	offload   []string // modules whose offload moves it
}

// tensors returns the tensors of the model's layers.
func tensors(p model.Layer) (out []tensor) {
	if p.Attention != nil {
		for _, name := range []string{"query_proj", "key_proj", "value_proj"} {
			out = append(out, tensor{name, nil, []string{"core_attn"}})
		}
	}
	if p.MLA != nil {
		out = append(out,
			tensor{"query_wa_proj", nil, []string{"qkv_linear"}},
			tensor{"kv_wa_proj", nil, []string{"qkv_linear"}},
			tensor{"mla_q", []string{"mla_up_proj"}, []string{"core_attn"}},
			tensor{"mla_kv", []string{"mla_up_proj"}, []string{"core_attn"}})
	}
	if p.Attention != nil || p.MLA != nil {
		out = append(out,
			tensor{"context", []string{"core_attn"}, []string{"attn_proj"}},
			tensor{"attention_out", []string{"core_attn"}, []string{"attn_proj"}},
			// The residual before the second norm follows from it and the layer's input.
			tensor{"out_proj", nil, []string{"mlp_norm"}})
	}
	if p.Dense != nil {
		names := []string{"mlpwi"}
		if p.Dense.Gated {
			names = []string{"mlpwi_0", "mlpwi_1"}
		}
		for _, name := range names {
			out = append(out, tensor{name, []string{"mlp"}, nil})
		}
	}
	if p.MoE != nil {
		out = append(out,
			tensor{"moe_mlpwi_0", []string{"moe"}, []string{"moe_act"}},
			tensor{"moe_mlpwi_1", []string{"moe"}, []string{"moe_act"}},
			// Weights are applied behind the second product, so the backward pass needs it.
			tensor{"moe_mlpwo", []string{"moe"}, []string{"fused_group_mlp"}})
	}
	return out
}

func (w *writer) remat(s *plan.Setup) {
	p, _ := kinds(s.Model)
	away := slices.Contains(s.Offload.Modules, "attn_norm")
	if s.Recompute.Full && !away {
		w.set("remat_policy", "full")
		return
	}
	w.set("remat_policy", "custom")
	w.set("decoder_layer_input", where(false, away))
	for _, t := range tensors(p) {
		has := func(given, names []string) bool {
			return slices.ContainsFunc(names, func(n string) bool { return memory.Including(given, n) != "" })
		}
		w.set(t.name, where(s.Recompute.Full || has(s.Recompute.Modules, t.recompute), has(s.Offload.Modules, t.offload)))
	}
	w.noteIf(len(s.Stash.Modules) > 0, "the paged stash is not among MaxText's keys; the tensors it would take stay on the device here")
	f := s.Offload.Fraction
	some := len(s.Offload.Fractions) > 0
	w.noteIf(some, "MaxText moves a tensor in every layer and on every rank, not a share by rank")
	w.noteIf(!some && len(s.Offload.Modules) > 0 && f > 0 && f < 1, fmt.Sprintf("MaxText moves a tensor in every layer, not in %g of them", f))
}

// where returns the value for a tensor. A recomputed tensor is not offloaded.
func where(recomputed, moved bool) string {
	switch {
	case recomputed:
		return "remat"
	case moved:
		return "offload"
	}
	return "device"
}
