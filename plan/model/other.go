// This file owns what a config.json says of itself that makes it another model than the keys
// of its sizes do: recurrent families, architectures, and weights that are stored quantised.

package model

import (
	"encoding/json"
	"maps"
	"slices"
	"strings"
)

// recurrent are well-known families with layers that have a recurrence, a convolution or
// linear attention in place of attention, and that are not modelled. Their files often have
// every key of a Llama-like model.
var recurrent = []string{
	"abc", "bamba", "comba", "delta_net", "falcon_mamba", "forgetting_transformer", "gated_deltanet", "gated_deltaproduct", "gla", "griffin", "gsa",
	"hgrn", "hgrn2", "hyena", "kda", "kimi_linear", "lfm2", "lfm2_moe", "lightnet", "linear_attn", "log_linear_mamba2", "mamba", "mamba2", "mesa_net",
	"mom", "path_attn", "plamo2", "recurrent_gemma", "retnet", "rodimus", "rwkv", "rwkv5", "rwkv6", "rwkv6qwen2", "rwkv7", "samba", "stripedhyena",
	"ttt", "xlstm", "zamba", "zamba2",
}

// hybrids returns the families whose recurrent layers are modelled.
func hybrids() string {
	return "falcon_h1, granitemoehybrid, jamba, minimax, nemotron_h, qwen3_next"
}

// encoderClasses and recurrentClasses are the beginnings of the classes of such models.
var (
	encoderClasses = []string{
		"Albert", "Bart", "Bert", "BlenderbotFor", "Camembert", "CLIP", "Deberta", "DistilBert", "Electra", "LED", "Longformer", "LongT5", "M2M100", "MBart",
		"MT5", "Marian", "ModernBertFor", "Pegasus", "Roberta", "SwitchTransformers", "T5", "UMT5", "Whisper", "XLMRoberta",
	}
	recurrentClasses = []string{"Bamba", "FalconMamba", "KimiLinear", "Lfm2", "Mamba", "RecurrentGemma", "RetNet", "Rwkv", "RWKV", "xLSTM", "XLSTM", "Zamba"}
)

// headless are the ends of classes whose head is no output layer over the vocabulary.
var headless = []string{"ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice", "RewardModel"}

// mustBeModel reports a file that describes adapters of another model.
func (c *config) mustBeModel() {
	if c.on("peft_type") {
		c.fail("peft_type says that the file describes adapters, and not the model that they are for; give the config.json of that model")
	}
}

// mustAttend reports a family that is known to have layers without attention.
func (c *config) mustAttend(kind string) {
	if slices.Contains(recurrent, strings.ReplaceAll(strings.ToLower(kind), "-", "_")) {
		c.fail("model_type %.40q has recurrent layers or linear attention, which are modelled for %s alone; give the config.json of one of these, or of a model with attention in every layer", kind, hybrids())
	}
}

// readArchitectures compares the classes that a file names with its model_type.
func (c *config) readArchitectures(kind string) {
	begins := func(class string, names []string) bool {
		return slices.ContainsFunc(names, func(n string) bool { return strings.HasPrefix(class, n) })
	}
	for _, class := range list[string](c, "architectures") {
		ends := func(end string) bool { return strings.HasSuffix(class, end) }
		switch other := familyOf(class); {
		case begins(class, encoderClasses):
			c.fail("architectures names %.60q, which has an encoder, and only decoders are modelled; give the config.json of a decoder", class)
		case begins(class, recurrentClasses):
			c.fail("architectures names %.60q, which has recurrent layers or linear attention; these are modelled for %s alone", class, hybrids())
		case ends("ForConditionalGeneration"):
			c.note("architectures names %.60q, which can have an encoder, or a vision or audio tower beside the decoder; the decoder alone is planned", class)
		case slices.ContainsFunc(headless, ends):
			c.note("architectures names %.60q, whose head is small; the output layer over the vocabulary is planned in its place", class)
		case other != "" && kind != "" && other != kind && kind != "kimi_k2": // which has DeepSeek-V3's class
			c.note("architectures names %.60q and model_type is %.40q; the file is read as %[2]s", class, kind)
		}
	}
}

// familyOf returns the known family of a class, such as qwen3_moe of Qwen3MoeForCausalLM, or
// nothing.
func familyOf(class string) string {
	name, ok := strings.CutSuffix(class, "ForCausalLM")
	if !ok {
		return ""
	}
	for _, kind := range slices.Sorted(maps.Keys(families)) {
		if strings.EqualFold(strings.ReplaceAll(kind, "_", ""), strings.ReplaceAll(name, "_", "")) {
			return kind
		}
	}
	return ""
}

// readQuantised notes that the format in which weights are stored is not that of training.
func (c *config) readQuantised() {
	raw, ok := c.get("quantization_config")
	if !ok {
		return
	}
	var q struct {
		Method string `json:"quant_method"`
	}
	_ = json.Unmarshal(raw, &q) // of another form: the note has no method
	if q.Method != "" {
		q.Method = " (" + shorten(json.RawMessage(q.Method)) + ")"
	}
	c.note("quantization_config%s takes no part: all weights are trained, in the formats of the plan", q.Method)
}
