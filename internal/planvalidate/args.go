// This file owns cases that have Megatron-LM's arguments.

package planvalidate

import (
	"fmt"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/model"
)

// vocabularies of tokenizers whose file the arguments do not name: what the file
// format of the cases says about unknown ones ("GPT-2 BPE 50257 for the small
// cases, 256000 for GPTSentencePieceTokenizer"), and the size of the
// vocabulary that TikTokenizer files have by default.
var vocabularies = map[string]int{"": 50257, "GPT2BPETokenizer": 50257, "GPTSentencePieceTokenizer": 256000, "TikTokenizer": 131072, "Llama2Tokenizer": 32000}

// unmodelled are flags that change memory in ways that the planner does not count.
var unmodelled = map[string]string{
	"enable-hyper-connections": "keeps several residual streams beside each other",
	"flextron":                 "trains several sizes of a model inside each other",
	"linear-attention-type":    "names the first version of linear attention, which saved more than that of today",
}

// offloadRewritten is when Megatron-LM's tests began to run with the offloading of today.
const offloadRewritten = "2026-01-14"

func fromArgs(c record) (*plan.Setup, error) {
	if len(c.Args) == 0 {
		return nil, fmt.Errorf("it has no args")
	}
	if v, ok := c.Args["perform-rl-step"]; ok && v == true {
		return nil, fmt.Errorf("reinforcement learning holds inference engines and reference models besides training")
	}
	for flag, why := range unmodelled {
		if v, ok := c.Args[flag]; ok && v != false {
			return nil, fmt.Errorf("--%s %s, which is not modelled", flag, why)
		}
	}
	for name := range c.Args {
		if strings.HasPrefix(name, "export-kd-teacher") {
			return nil, fmt.Errorf("distillation holds a teacher model besides")
		}
	}
	if c.GPUs == 0 {
		return nil, fmt.Errorf("the number of GPUs, over which the optimiser is sharded, is not stated")
	}
	gpu, err := hardware.ByName(c.GPU)
	if err != nil {
		return nil, err
	}
	tokenizer, _ := c.Args["tokenizer-type"].(string)
	vocab, ok := vocabularies[tokenizer]
	if tokenizer != "" && !strings.HasPrefix(tokenizer, "GPT2") {
		if n := likePreset(c.Args); n > 0 {
			vocab, ok = n, true
		}
	}
	if !ok && c.Args["vocab-size"] == nil && c.Args["padded-vocab-size"] == nil {
		return nil, fmt.Errorf("the vocabulary of %s is not stated", tokenizer)
	}
	args := map[string]any{}
	for k, v := range c.Args {
		if s, ok := v.(string); ok {
			v = strings.ReplaceAll(s, `\`, "") // shell quoting in layout strings
		}
		args[k] = v
	}
	s, _, err := megatron.FromArgs(args, megatron.Options{GPUs: c.GPUs, Hardware: gpu, Vocab: vocab, Name: c.ID})
	if err != nil {
		return nil, err
	}
	if args["moe-router-force-load-balancing"] != true {
		s.Routing.Imbalance = plan.NaturalImbalance(s.Model, s.Layout)
	}
	if day := c.Source.Changed[1]; day != "" {
		s.Offload.Older = day < offloadRewritten
	}
	s.LastReplica = true // the last rank of a job writes its measurements
	return s, nil
}

// likePreset returns the vocabulary of the preset whose layers have the dimensions of the
// arguments, or zero.
func likePreset(args map[string]any) int {
	number := func(name string) int { n, _ := args[name].(float64); return int(n) }
	for _, name := range model.Presets() {
		m, err := model.Preset(name)
		if err != nil || m.Hidden != number("hidden-size") || len(m.Layers) != number("num-layers") {
			continue
		}
		l := m.Layers[len(m.Layers)-1]
		width, experts := 0, 0
		switch {
		case l.MoE != nil:
			width, experts = l.MoE.Width, l.MoE.Experts
		case l.Dense != nil:
			width = l.Dense.Width
		}
		if w := number("moe-ffn-hidden-size"); w != width && (w != 0 || number("ffn-hidden-size") != width) || experts != number("num-experts") {
			continue
		}
		return m.Vocab
	}
	return 0
}
