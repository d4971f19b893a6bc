// This file owns published figures: a model by name or by its dimensions, a layout, and a
// few words about settings.

package planvalidate

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

type modelFacts struct {
	Name        string `json:"name"`
	Layers      int    `json:"layers"`
	Hidden      int    `json:"hidden"`
	FFN         int    `json:"ffn"`
	Heads       int    `json:"heads"`
	KVHeads     int    `json:"kv_heads"`
	HeadDim     int    `json:"head_dim"`
	Vocab       int    `json:"vocab"`
	SwiGLU      bool   `json:"swiglu"`
	Untied      bool   `json:"untied"`
	Experts     int    `json:"experts"`
	TopK        int    `json:"topk"`
	MoEFFN      int    `json:"moe_ffn"`
	SharedFFN   int    `json:"shared_ffn"`
	DenseLayers int    `json:"dense_layers"`
	MLA         *struct {
		Q    int `json:"q_lora"`
		KV   int `json:"kv_lora"`
		Nope int `json:"qk"`
		Rope int `json:"rope"`
		V    int `json:"v"`
	} `json:"mla"`
}

type layoutFacts struct {
	TP     int    `json:"TP"`
	PP     int    `json:"PP"`
	CP     int    `json:"CP"`
	EP     int    `json:"EP"`
	ETP    int    `json:"ETP"`
	VPP    int    `json:"VPP"`
	DP     int    `json:"DP"`
	SP     *bool  `json:"SP"`
	CPComm string `json:"cp_comm"`
	GPUs   int    `json:"n_gpus"`
}

type batchFacts struct {
	Micro  int `json:"MBS"`
	Global int `json:"GBS"`
	Seq    int `json:"seq"`
}

// fromFacts makes a setup of a published figure. What is not said is taken to be
// what large jobs use: a distributed optimiser, gradients in fp32, fused
// accumulation, no dropout, all-to-all with fused permutation, the sequence
// divided where tensors are, TransformerEngine's loss.
func fromFacts(c record) (*plan.Setup, error) {
	l := c.Layout
	if l == nil {
		l = c.Inferred
	}
	switch {
	case c.Model == nil:
		return nil, fmt.Errorf("it names no model")
	case l == nil && c.GPUs == 0:
		return nil, fmt.Errorf("neither its layout nor its size is stated")
	case strings.Contains(c.Model.Name, "DualPipe"):
		return nil, fmt.Errorf("DualPipe keeps two directions of microbatches in flight, which is not modelled")
	}
	if l == nil {
		l = &layoutFacts{} // data parallel, with the experts divided over all
	}
	m, err := c.Model.model()
	if err != nil {
		return nil, err
	}
	s := &plan.Setup{Model: m}
	if c.GPU != "" {
		if s.Hardware, err = hardware.ByName(c.GPU); err != nil {
			return nil, err
		}
	}
	s.Layout = plan.Layout{
		TP: max(l.TP, 1), PP: max(l.PP, 1), VPP: max(l.VPP, 1), CP: max(l.CP, 1), EP: max(l.EP, 1), ETP: max(l.ETP, 1),
		World: max(c.GPUs, l.GPUs), SequenceParallel: l.TP > 1,
	}
	if l.EP == 0 && s.Layout.World > 0 {
		s.Layout.EP = shareExperts(m, s.Layout)
	}
	if s.Layout.World == 0 && l.DP > 0 {
		s.Layout.World = l.DP * s.Layout.TP * s.Layout.PP * s.Layout.CP
	}
	if l.SP != nil {
		s.Layout.SequenceParallel = *l.SP && l.TP > 1
	}
	// Static memory does not depend on the batch; see measured.
	s.Batch = plan.Batch{Micro: 1, Seq: 4096}
	if c.Batch != nil {
		s.Batch = plan.Batch{Micro: max(c.Batch.Micro, 1), Global: c.Batch.Global, Seq: c.Batch.Seq}
	}
	if err := settings(s, c, l); err != nil {
		return nil, err
	}
	if s.Layout.World == 0 {
		return smallest(s)
	}
	return s, nil
}

// shareExperts returns the expert parallelism of a job that does not state it: all ranks of
// a stage divide the experts, as far as they divide evenly.
func shareExperts(m *model.Model, l plan.Layout) int {
	for _, x := range m.Layers {
		if x.MoE == nil {
			continue
		}
		n := l.World / (l.PP * l.ETP)
		for n > 1 && x.MoE.Experts%n != 0 {
			n--
		}
		return max(n, 1)
	}
	return 1
}

// smallest gives a setup of unstated size the fewest GPUs that its layout allows and that
// hold it without offloading. It ran, so it fitted.
func smallest(s *plan.Setup) (*plan.Setup, error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
	}
	least := n.Layout.World
	for _, factor := range []int{1, 2, 4, 8, 16} {
		s.Layout.World = factor * least
		if g := s.Batch.Global; g > 0 && g%(s.Batch.Micro*s.Layout.DP()) != 0 {
			break
		}
		bare := *s
		bare.Offload = plan.Offload{}
		p, err := plan.Predict(&bare)
		if err != nil {
			return nil, err
		}
		if s.Hardware == nil || p.Peak.Expected < s.Hardware.Memory {
			return s, nil
		}
	}
	s.Layout.World = least
	return s, nil
}

// settings reads the stated precision, kernels and policies.
func settings(s *plan.Setup, c record, l *layoutFacts) error {
	text := strings.ToLower(c.Settings)
	says := func(words string) bool { return strings.Contains(text, words) }
	k := &s.Kernels
	*k = plan.Kernels{GradFusion: true, Loss: "te", GroupedGEMM: true, PermuteFusion: true, RouterFP32: true, Dispatcher: "alltoall", NoAttentionMask: true, CPComm: l.CPComm}
	s.Optimizer.Distributed = true
	if says("hybridep") {
		k.Dispatcher = "hybridep"
	}
	if m := regexp.MustCompile(`capacity factor (\d+(\.\d+)?) with padding`).FindStringSubmatch(text); m != nil {
		k.CapacityFactor, _ = strconv.ParseFloat(m[1], 64)
		k.PadToCapacity = true
	}
	if says("ep overlap") {
		s.Layout.OverlapEP = true
	}
	if says("cuda graphs for attention") {
		s.Graph.Scopes = append(s.Graph.Scopes, "attn")
	}
	if says("mamba") && says("cuda graphs") {
		s.Graph.Scopes = append(s.Graph.Scopes, "mamba")
	}
	switch p := strings.ToLower(c.Precision); {
	case strings.Contains(p, "mxfp8"):
		s.Precision.Compute, s.Precision.ParamGather = plan.MXFP8, true
	case strings.Contains(p, "fp8"):
		s.Precision.Compute = plan.FP8
	case strings.Contains(p, "nvfp4"):
		s.Precision.Compute = plan.NVFP4
	}
	if strings.Contains(c.Source.Repo, "Megatron-Bridge") {
		bridge(s)
	}
	if c.Optimizer != nil {
		s.Optimizer.OffloadFraction = *c.Optimizer
	}
	if strings.Contains(c.FSDP, "params") {
		s.Layout.FSDP.Shard = plan.ShardParameters
	}
	// Published savings are those of the pull request that added offloading (1913), from
	// before it was merged.
	s.Offload = plan.Offload{Modules: words(c.Offload), Older: true}
	for _, w := range words(c.Recompute) {
		if strings.Contains(w, "full") || strings.Contains(w, "uniform") {
			s.Recompute.Full = true
		} else {
			s.Recompute.Modules = append(s.Recompute.Modules, w)
		}
	}
	return nil
}

// bridge sets what Megatron-Bridge's recipes for performance set unless told
// otherwise: gradients are reduced in bf16, fp8 parameters are stored as such
// (perf_recipes/_common.py); the recipes for latent attention (deepseek_v3.py,
// moonlight_16b.py) keep moments in bf16 besides.
func bridge(s *plan.Setup) {
	s.Precision.GradsInBF16 = true
	// Its recipes take TransformerEngine's loss, which since 2.18, the version it
	// pins, keeps a gradient in fp32 beside logits in bf16: what "native" keeps.
	s.Kernels.Loss = "native"
	s.Kernels.WeightedSquaredReLU = true // recipes/nemotronh and perf_recipes/nemotronh
	s.Precision.ParamGather = s.Precision.Compute == plan.FP8 || s.Precision.Compute == plan.MXFP8
	if slices.ContainsFunc(s.Model.Layers, func(l model.Layer) bool { return l.MLA != nil }) {
		s.Optimizer.PrecisionAware = true
		s.Optimizer.MainParams, s.Optimizer.Moment1, s.Optimizer.Moment2 = plan.FP32, plan.BF16, plan.BF16
	}
}

// words returns a list of words that is given as a list or as text.
func words(v any) []string {
	switch v := v.(type) {
	case []any:
		var out []string
		for _, x := range v {
			if w, ok := x.(string); ok {
				out = append(out, w)
			}
		}
		return out
	case string:
		return strings.Fields(v)
	}
	return nil
}
