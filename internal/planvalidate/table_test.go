// This file owns tables: the setups that are made of stated facts, the figures of measurements, and
// a report in all its forms. Write them anew with -update if a change is meant.

package planvalidate

import (
	"encoding/json"
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/plantest"
	"github.com/stowage-dev/stowage/plan"
)

// facts are changes of a case, one in a line: keys in place of those of the base.
const facts = `
"gpu": ""|"gpu": "B300"|"gpu": "abacus"|"n_gpus": 0|"n_gpus": 96|"n_gpus": 0, "parallelism": {"TP": 4, "PP": 4, "DP": 3}|"n_gpus": 0, "parallelism": {"TP": 4, "PP": 4, "n_gpus": 48}|"n_gpus": 0, "parallelism": {"DP": 3}
"n_gpus": 0, "parallelism": {"TP": 8}|"n_gpus": 0, "parallelism": {"TP": 8, "PP": 2}, "batch": {"MBS": 1, "GBS": 3, "seq": 4096}|"n_gpus": 0, "parallelism": {"TP": 8, "PP": 2}, "batch": {"MBS": 1, "GBS": 32, "seq": 65536}, "gpu": "B300"
"n_gpus": 0, "parallelism": {"TP": 2}, "batch": {"MBS": 1, "GBS": 6, "seq": 4096}|"n_gpus": 0, "parallelism": null|"parallelism": null|"parallelism": null, "parallelism_inferred": {"TP": 2, "CP": 2, "ETP": 2, "SP": true, "cp_comm": "a2a"}|"parallelism": {"TP": 4, "SP": false}|"parallelism": {"TP": 1, "SP": true}|"parallelism": {"EP": 4}
"batch": null|"batch": {"seq": 512}|"batch": {"MBS": 3, "GBS": 24, "seq": 128}|"precision": "MXFP8"|"precision": "FP8-CS"|"precision": "nvfp4"|"precision": "bf16"|"settings": "HybridEP, EP overlap"|"settings": "CUDA graphs for attention"|"settings": "CUDA graphs for attention and Mamba"
"settings": "Mamba"|"settings": "capacity factor 1.5 with padding"|"settings": "capacity factor 2 with padding"|"settings": "capacity factor 2"|"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge"}|"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge"}, "precision": "fp8"|"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge"}, "precision": "mxfp8"|"source": {"repo": "NVIDIA-NeMo/Megatron-Bridge"}, "model": {"name": "DeepSeek-V3"}
"optimizer_offload_fraction": 0.5|"fsdp": "params"|"fsdp": "optimizer"|"offload": "core_attn moe_act"|"offload": ["core_attn", 5]|"offload": 7|"recompute": "mlp layernorm"|"recompute": ["full"]|"recompute": "uniform"|"recompute": ["uniform", "mlp"]
"model": null|"model": {"name": "Llama-3-8B, DualPipe"}|"model": {"name": "Mixtral-8x7B"}|"model": {"name": "Mixtral 8x7B"}, "n_gpus": 24|"model": {"name": "Mixtral-8x7B"}, "n_gpus": 64, "parallelism": {"PP": 2, "ETP": 2}|"model": {"name": "Nemotron-3-Nano"}|"model": {"name": "Nemot"}|"model": {"name": "Nemotron-3.5-Lightning, 2 MTP"}
"model": {"name": "DeepSeek-V3 cut to 4 layers, 2 experts"}|"model": {"name": "DeepSeek-V3 with 61 layers"}|"model": {"name": "DeepSeek-V3 with 99 layers"}|"model": {"name": "DeepSeek-V3 685B"}|"model": {"name": "DeepSeek-V3 671B"}|"model": {"name": "DeepSeek-V3, 2 MTP"}|"model": {"name": "DeepSeek-V3 685B, 1 MTP"}|"model": {"name": "Qwen3-30B-A3B, 1 MTP"}|"model": {"name": "Qwen3-30B-A3B, 3 MTP"}
"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 4, "vocab": 1000, "ffn": 200}|"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 4, "vocab": 1000, "ffn": 200, "swiglu": true, "untied": true, "kv_heads": 2, "head_dim": 32}|"model": {"name": "own", "hidden": 0, "layers": 3, "heads": 4, "vocab": 1000}
"model": {"name": "own", "hidden": 96, "layers": 0, "heads": 4, "vocab": 1000}|"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 0, "vocab": 1000}|"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 4, "vocab": 0}|"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 4, "vocab": 1000, "ffn": 200, "experts": 8, "topk": 2, "moe_ffn": 64, "shared_ffn": 32, "dense_layers": 1, "swiglu": true}
"model": {"name": "own", "hidden": 96, "layers": 3, "heads": 4, "vocab": 1000, "ffn": 200, "mla": {"q_lora": 1, "kv_lora": 2, "qk": 3, "rope": 4, "v": 5}}`

const arguments = `
|"tokenizer-type": "Own"|"tokenizer-type": "Own", "vocab-size": 77|"tokenizer-type": "Own", "padded-vocab-size": 128|"tokenizer-type": "GPT2BPETokenizer"|"tokenizer-type": "TikTokenizer"|"tokenizer-type": "Llama2Tokenizer"|"tokenizer-type": "GPTSentencePieceTokenizer"|"moe-router-force-load-balancing": true
"tokenizer-type": "Own", "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336, "group-query-attention": true, "num-query-groups": 8, "swiglu": true|"tokenizer-type": "Own", "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14335, "swiglu": true|"tokenizer-type": "Own", "num-layers": 31, "hidden-size": 4096, "ffn-hidden-size": 14336|"tokenizer-type": "Own", "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336, "num-experts": 8, "moe-ffn-hidden-size": 14336
"tokenizer-type": "Own", "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336, "num-experts": 8|"tokenizer-type": "Own", "num-layers": 32, "hidden-size": 4096, "ffn-hidden-size": 14336, "num-experts": 8, "moe-ffn-hidden-size": 14335|"perform-rl-step": true|"perform-rl-step": false|"flextron": true|"flextron": false|"linear-attention-type": "x"|"export-kd-teacher-load": "x"|"pipeline-model-parallel-size": 2, "pipeline-model-parallel-layout": "Et\\*4,t\\*4L"|"no-such-thing": "x"|"hidden-size": 63`

// changes returns the changes of a list.
func changes(list string) []string {
	return strings.FieldsFunc(list, func(c rune) bool { return c == '\n' || c == '|' })
}

// read reads a case with some keys replaced.
func read(t *testing.T, base, change string) record {
	keys := map[string]any{}
	var c record
	for _, text := range []string{base, "{" + change + "}"} {
		if err := json.Unmarshal([]byte(text), &keys); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
	}
	text, err := json.Marshal(keys)
	if err == nil {
		err = json.Unmarshal(text, &c)
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestTableOfSetups(t *testing.T) {
	var b strings.Builder
	table := func(name, base string, list []string, build func(c record) (*plan.Setup, error)) {
		s, err := build(read(t, base, ""))
		if err != nil {
			t.Fatal(err)
		}
		was := plantest.Fields(s)
		fmt.Fprintf(&b, "%s %s\n %s\n", name, base, plantest.Changes(nil, was))
		for _, change := range list {
			s, err := build(read(t, base, change))
			if err != nil {
				fmt.Fprintf(&b, "  %s: %v\n", change, err)
				continue
			}
			is := plantest.Fields(s)
			if is["Hardware.name"] != was["Hardware.name"] { // its figures are not of interest
				for name := range was {
					if strings.HasPrefix(name, "Hardware.") && name != "Hardware.name" {
						is[name] = was[name]
					}
				}
			}
			fmt.Fprintf(&b, "  %s:%s\n", change, plantest.Changes(was, is))
		}
	}
	table("facts", "{"+llama+"}", changes(facts), fromFacts)
	const base = `"num-layers": 8, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 64, "max-position-embeddings": 64, "micro-batch-size": 1, "global-batch-size": 8, "bf16": true`
	args := []string{`"args": {}`, `"gpu": "abacus"`, `"n_gpus": 0`, `"source": {"values_last_changed": ["c", "2026-01-13"]}`, `"source": {"values_last_changed": ["c", "2026-01-14"]}`}
	for _, change := range changes(arguments) {
		args = append(args, `"args": {`+base+", "+strings.Replace(change, "4,t", `4\\|t`, 1)+"}")
	}
	table("arguments", `{"id": "a", "gpu": "H100", "n_gpus": 8, "args": {`+base+`}}`, args, fromArgs)
	golden.Check(t, "setups.txt", b.String())
}

// rows of throughput are read as setups, names and figures.
func TestTableOfThroughput(t *testing.T) {
	var b strings.Builder
	base := map[string]any{
		"release": "26.06 NeMo", "model": "Mixtral-8x7B", "System": "DGX-H100", "#-GPUs": "64", "Precision": "FP8", "GBS": "256", "MBS": 2.0,
		"Sequence Length": "4096", "TP": "2", "PP": "4", "CP": "n/a", "VP": "8", "EP": " 4 ", tokensKey: "1048", tflopsKey: "2646",
	}
	for _, c := range []struct{ key, value string }{
		{"TP", "2"}, {"TP", "1"}, {"TP", "0"}, {"TP", "-1"}, {"TP", "x"}, {"FSDP", "1"}, {"FSDP", "2"}, {"FSDP", "x"}, {"FSDP", "0"}, {"MBS", "1"}, {"EP", ""}, {"CP", "3"}, {"Precision", ""}, {"Precision", "bf16"}, {"Precision", "MXFP8"}, {"Precision", "NVFP4"}, {"Precision", "FP2"},
		{"model", "Nemotron-3-Nano"}, {"model", "Llama-3-8B"}, {"model", "none"}, {"System", "DGX-B200"}, {"System", "none"}, {"release", "mine"}, {tokensKey, ""}, {tokensKey, "-1"}, {tokensKey, "NaN"}, {tokensKey, "Inf"}, {tokensKey, "12[^slow]"}, {tokensKey, "n/a"},
	} {
		s := speed{}
		for k, v := range base {
			s[k] = v
		}
		s[c.key] = c.value
		fmt.Fprintf(&b, "%s %q: %s, release %s\n", c.key, c.value, s.id(), s.release())
		tokens, err := s.figure(tokensKey)
		fmt.Fprintf(&b, "  %g tokens, %v\n", tokens, err)
		setup, layout, err := s.setup()
		if err != nil {
			fmt.Fprintf(&b, "  %v\n", err)
			continue
		}
		fmt.Fprintf(&b, "  %s, %s, %s %+v %+v %+v %+v %+v\n", timeKind(setup), layout, setup.Model.Name, setup.Layout, setup.Batch, setup.Precision, setup.Optimizer, setup.Kernels)
	}
	golden.Check(t, "throughput.txt", b.String())
}

// A report with values that all differ, and an empty one, as text, as a page and as JSON.
func TestTableOfReports(t *testing.T) {
	r := &Report{
		Cases: 9, Modelled: 8, Counts: []Count{{"moe small", 4, 1}, {"dense", 3, 0}},
		Rows: []Row{
			{"first", "dense", Peak, "", 1, 5 << 30, 4 << 30, true}, {"second", "dense", Peak, "before offloading", 2, 3 << 30, 4 << 30, false}, {"third, which has a name that is far too long for its column", "moe small", Static, "", 3, 7 << 30, 8 << 30, true},
			{"fourth", "moe small", Fits, "", 4, 0, 0, true}, {"fifth", "dense", Fits, "", 5, 1, 0, false}, {"sixth", "dense", Peak, "", 6, 6 << 30, 4 << 30, true}, {"seventh", "dense", Peak, "", 7, 2 << 30, 4 << 30, true}, {"eighth", "dense", Reserved, "", 7, 9 << 30, 4 << 30, false},
		},
		Skipped:     []Skip{{"ninth", "hybrid", "it has no args"}, {"tenth", "offload", strings.Repeat("a long reason ", 12)}},
		Throughput:  []TimeRow{{"run one", "moe", 110, 100, 0.1}, {"run two", "moe", 60, 80, -0.25}, {"run three", "dense", 300, 320, -0.0625}, {"run four", "moe", 125, 100, 0.25}},
		TimeSkipped: []Skip{{"run five", "fsdp", "it is not stated"}},
	}
	r.summarise()
	r.summariseTime()
	if math.Abs(r.MeanAbsError-(0.25+0.25+0.5+0.5)/4) > 1e-12 || r.Worst != 0.5 || math.Abs(r.TimeMeanAbsError-(0.1+0.25+0.0625+0.25)/4) > 1e-12 || r.TimeWorst != -0.25 {
		t.Errorf("%+v", r)
	}
	var b strings.Builder
	timesOnly, memoryOnly := *r, *r
	timesOnly.Cases, memoryOnly.Throughput, memoryOnly.TimeSkipped = 0, nil, nil
	empty := &Report{}
	empty.summarise()
	empty.summariseTime()
	for _, r := range []*Report{r, &timesOnly, &memoryOnly, empty} {
		fmt.Fprintln(&b, "TEXT")
		r.WriteText(&b)
		text, err := json.MarshalIndent(r.JSON(), "", " ")
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&b, "PAGE\n%sJSON\n%s\n", r.Markdown(), text)
	}
	golden.Check(t, "reports.txt", b.String())
}
