// This file owns a table of everything that Resolve says of many inputs: the setup, the notes, the
// arguments, the flags of the trainer and what they lack, or the error. Write it anew with -update
// if a change is meant.

package config

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
)

// small are settings that change one thing each, for a preset and for a script.
const small = `
--tp 2|--tp 2 --sp false|--pp 2 --vpp 2|--pp 2 --vpp 2 --gbs 48|--cp 2 --tp 2|--ep 4|--ep 4 --etp 2|--layout LAYOUT --pp 2|--mbs 2 --gbs 64|--seq 128
--precision bf16|--precision fp16|--precision fp32|--precision fp8|--precision blockwise|--precision mxfp8|--precision nvfp4|--precision fp7|--bf16 false|--fp16
--recompute full|--recompute none|--recompute mlp,layernorm|--recompute mlp layernorm|--recompute nothing|--offload none|--offload moe_act|--offload core_attn,attn_norm --fraction 0.25
--offload core_attn --offload-bytes 0.5|--offload core_attn --offload-bytes 0.5,0.75 --pp 2|--offload core_attn --offload-bytes 1.5|--offload core_attn --offload-bytes x|--offload-bytes 0.5
--offload core_attn --fraction 0.5 --offload-bytes 0.5|--stash 1.5|--stash 0|--stash|--graph none|--graph full_iteration|--graph attn|--graph attn mlp|--graph attn,moe_router|--graph nothing
--fsdp|--fsdp params|--fsdp grads|--fsdp optim|--fsdp none|--fsdp some|--fsdp --pool fixed|--fsdp --pool max --prefetch 3|--fsdp --pool trace|--fsdp --pool large|--pool arena|--prefetch 2|--prefetch 1
--fsdp --prefetch 64|--fsdp --prefetch 65|--fsdp --prefetch 1.5|--fsdp --prefetch 0|--fsdp --prefetch x|--loss native|--loss native-fused|--loss te|--loss other
--dispatcher allgather --ep 4|--dispatcher alltoall --ep 4|--dispatcher deepep --ep 4|--dispatcher hybridep --ep 4|--dispatcher post|--moe-flex-dispatcher-backend deepep
--routing natural|--routing balanced|--routing 1|--routing 1.25|--routing 1e6|--routing 2e6|--routing 0.5|--routing x|--counts a.txt|--trace b.txt|--counts a.txt --routing 1.5
--moe-router-force-load-balancing|--moe-router-force-load-balancing false|--moe-router-force-load-balancing true|--expandable|--expandable true|--expandable false|--expandable maybe|--tp 2 --tensor-model-parallel-size 4|--tp 2 --tensor-model-parallel-size 2
--optimizer-offload-fraction 0.5|--optimizer-cpu-offload|--exp-avg-dtype bf16|--exp-avg-sq-dtype fp8|--main-grads-dtype bf16|--main-params-dtype fp16|--use-distributed-optimizer false
--recompute-granularity selective|--recompute-modules mlp|--cuda-graph-modules attn|--offload-modules core_attn|--num-layers 4|--hidden-size 96|--global-batch-size 10|--unknown-flag 3|--seq 0|--mbs -1`

func TestTable(t *testing.T) {
	var b strings.Builder
	t.Run("resolve", func(t *testing.T) {
		dir := t.TempDir()
		files := map[string]string{
			"job.sh": script, "job.yaml": "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 8\n  --max-position-embeddings: 8\n  --micro-batch-size: 1\n  --vocab-size: 50\n",
			"grows.sh": "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n" + script, "hf.json": huggingFace, "some/config.json": huggingFace, "named.json": strings.Replace(huggingFace, "{", `{"_name_or_path":"a/b",`, 1),
			"args.json": `{"--num-layers":2,"hidden_size":64,"num-attention-heads":4,"seq-length":8,"max-position-embeddings":8,"micro-batch-size":1}`,
			"env.sh":    strings.Replace(script, "--hidden-size 64", "--hidden-size $WIDTH", 1), "empty.json": "{}", "broken.json": "{", "list.json": "[]", "typed.json": `{"hidden_size":"x"}`, "binary": "a\x00b", "echo.sh": "echo",
			"gpu.json": `{"name":"mine","memory_bytes":48000000000,"flops":{"bf16":1e14},"hbm":1e12,"host_out":2e10,"host_in":2e10}`, "badgpu.JSON": `{"name": "mine"}`,
			"zero1.json": `{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}`, "zero7.json": `{"zero_optimization": {"stage": 7}}`,
			"odd.json": `{"train_micro_batch_size_per_gpu": 2, "train_batch_size": 30, "zero_optimization": {"stage": 2}, "fp16": {"enabled": true}}`,
			"oom.yaml": "trainer:\n  devices: 8\nmodel:\n  hidden_size: 64\n  num_layers: ${oc.env:LAYERS}\n", "some/empty": "", "folder/readme": "",
		}
		for name, text := range files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.CopyFS(filepath.Join(dir, "launch"), os.DirFS("../internal/launch/testdata")); err != nil {
			t.Fatal(err)
		}
		t.Chdir(dir)
		base := Input{Model: "mixtral-8x7b", GPUs: 16}
		first := show(t, &b, "mixtral-8x7b of 16 ranks", base, nil)
		other := Input{Model: "job.sh"}
		second := show(t, &b, "job.sh", other, nil)
		for _, given := range strings.FieldsFunc(small, func(c rune) bool { return c == '\n' || c == '|' }) {
			given = strings.Replace(given, "LAYOUT", "Et*16|t*16L", 1)
			base.Settings, other.Settings = words(given), words(given)
			show(t, &b, given, base, first)
			show(t, &b, "job.sh "+given, other, second)
		}
		of := func(model string, change func(in *Input)) Input {
			in := Input{Model: model, GPUs: 16, Settings: map[string][]string{}}
			if change != nil {
				change(&in)
			}
			return in
		}
		launched := func(file, settings string) func(in *Input) {
			return func(in *Input) { in.Launch, in.Settings = file, words(settings) }
		}
		for i, in := range []Input{
			{}, {Model: "mixtal-8x7b"}, {Model: "no/such/config.json"}, {Model: "org/model"}, {Model: "none.json"}, {Model: "some"}, {Model: "folder"}, {Model: "job.sh/x.sh"}, {Model: strings.Repeat("x", 300) + ".sh"},
			{Model: "job.yaml"}, {Model: "job.yaml", Vocab: 60}, {Model: "grows.sh"}, {Model: "grows.sh", Settings: words("--expandable false")}, {Model: "hf.json"}, {Model: "hf.json", Settings: words("--tp 1 --seq 64")}, {Model: "named.json"}, {Model: "args.json"}, {Model: "args.json", Vocab: 100, GPUs: 2},
			{Model: "env.sh", Env: map[string]string{"WIDTH": "128"}}, {Model: "env.sh"}, {Model: "empty.json"}, {Model: "broken.json"}, {Model: "list.json"}, {Model: "typed.json"}, {Model: "binary"}, {Model: "echo.sh"}, {Model: "oom.yaml"},
			of("mixtral-8x7b", func(in *Input) { in.Hardware = "h100" }), of("mixtral-8x7b", func(in *Input) { in.Hardware = "gpu.json" }), of("mixtral-8x7b", func(in *Input) { in.Hardware = "badgpu.JSON" }), of("mixtral-8x7b", func(in *Input) { in.Hardware = "none.json" }), of("mixtral-8x7b", func(in *Input) { in.Hardware = "h101" }),
			of("mixtral-8x7b", func(in *Input) { in.Hardware, in.Settings = "a100", words("--precision fp8") }), of("mixtral-8x7b", func(in *Input) { in.Hardware, in.Settings = "h100", words("--precision mxfp8") }), of("mixtral-8x7b", func(in *Input) { in.Hardware, in.Settings = "h100", words("--precision nvfp4") }), of("mixtral-8x7b", func(in *Input) { in.Hardware, in.Settings = "b200", words("--precision nvfp4") }),
			of("mixtral-8x7b", func(in *Input) { in.GPUs = -1 }), of("mixtral-8x7b", func(in *Input) { in.Budget = -1 }), of("mixtral-8x7b", func(in *Input) { in.Budget = 5 << 30 }), of("mixtral-8x7b", func(in *Input) { in.Vocab = 5 }), of("mixtral-8x7b", func(in *Input) { in.Env = map[string]string{"B": "1", "A": "2"} }),
			{Model: "-", Data: []byte(script)}, {Model: "-", Data: []byte(files["job.yaml"])}, {Model: "-", Data: []byte(huggingFace)}, {Model: "-", Data: []byte("")}, {Model: "-", Data: []byte("a\x00")},
			of("mixtral-8x7b", launched("zero1.json", "")), of("mixtral-8x7b", launched("zero1.json", "--gbs 64")), of("mixtral-8x7b", launched("zero1.json", "--ep 3")), of("mixtral-8x7b", launched("zero7.json", "")), of("mixtral-8x7b", launched("odd.json", "")), of("mixtral-8x7b", launched("odd.json", "--gbs 31")), of("mixtral-8x7b", launched("none.json", "")), of("mixtral-8x7b", launched("binary", "")), of("mixtral-8x7b", launched("job.sh", "")),
			of("mixtral-8x7b", func(in *Input) { in.Launch, in.Data = "-", []byte(files["zero1.json"]) }), of("", launched("zero1.json", "")), of("job.sh", launched("zero1.json", "")), of("launch/nemo-gpt.yaml", launched("zero1.json", "")), of("hf.json", launched("launch/nemo-gpt.yaml", "")), {Model: "hf.json", Launch: "launch/torchtitan-llama3-8b.toml"},
			{Model: "launch/bridge-override.yaml"}, {Model: "launch/deepspeed-auto.json"}, {Model: "launch/maxtext-command.sh"}, {Model: "launch/maxtext-llama3-8b.yml"}, {Model: "launch/maxtext-sizes.yml"}, {Model: "launch/nemo-gpt.yaml"}, {Model: "launch/torchtitan-deepseek-671b.toml"}, {Model: "launch/torchtitan-llama3-8b.toml"},
			{Model: "launch/nemo-gpt.yaml", GPUs: 48}, {Model: "launch/torchtitan-llama3-8b.toml", GPUs: 12}, {Model: "launch/torchtitan-llama3-8b.toml", Settings: words("--tp 5")}, {Model: "launch/nemo-gpt.yaml", Settings: words("--gbs 7")}, {Model: "launch/torchtitan-llama3-8b.toml", Settings: words("--gbs 256 --mbs 2")}, of("llama-3-8b", launched("launch/deepspeed-zero3.json", "--tp 2")), of("llama-3-8b", launched("launch/deepspeed-auto.json", "")),
		} {
			in.Data = append([]byte(nil), in.Data...)
			if len(in.Data) == 0 {
				in.Data = nil
			}
			show(t, &b, fmt.Sprintf("input %d: %.40s %s", i, in.Model, in.Launch), in, map[string]string{})
		}
	})
	golden.Check(t, "table.txt", b.String())
}

// show writes what Resolve says, of the setup only what differs from another, and returns its
// values by their path.
func show(t *testing.T, b *strings.Builder, title string, in Input, than map[string]string) map[string]string {
	fmt.Fprintf(b, "%s\n", title)
	var args map[string]any
	in.Args = func(a map[string]any) { args = a }
	s, notes, err := Resolve(in)
	if err != nil {
		fmt.Fprintf(b, "  error: %v\n", err)
		return nil
	}
	values := map[string]string{"name": s.Model.Name, "layers": fmt.Sprint(len(s.Model.Layers), s.Model.Hidden, s.Model.Vocab, s.Model.Parameters()), "budget": fmt.Sprint(s.Budget)}
	if s.Hardware != nil {
		values["hardware"] = s.Hardware.Name
	}
	for name, part := range map[string]any{"layout": s.Layout, "batch": s.Batch, "precision": s.Precision, "optimizer": s.Optimizer, "kernels": s.Kernels, "recompute": s.Recompute, "offload": s.Offload, "stash": s.Stash, "graph": s.Graph, "routing": s.Routing, "grows": map[string]bool{"on": s.ExpandableSegments}} {
		text, err := json.Marshal(part)
		var fields map[string]any
		if err == nil {
			err = json.Unmarshal(text, &fields)
		}
		if err != nil {
			t.Fatal(err)
		}
		for field, v := range fields {
			if v := fmt.Sprint(v); v != "0" && v != "false" && v != "<nil>" && v != "" {
				values[name+"."+field] = v
			}
		}
	}
	for name, v := range args {
		values["--"+name] = fmt.Sprint(v)
	}
	for i, note := range notes {
		values[fmt.Sprint("note ", i+1)] = note
	}
	values["train"] = strings.Join(TrainFlags(s), " ")
	values["unsaid"] = strings.Join(TrainUnsaid(s), "; ")
	for _, name := range slices.Sorted(maps.Keys(values)) {
		if than[name] != values[name] {
			fmt.Fprintf(b, "  %s: %s\n", name, values[name])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(than)) {
		if _, there := values[name]; !there {
			fmt.Fprintf(b, "  no %s\n", name)
		}
	}
	return values
}
