package config

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// words writes settings as a command line has them: "pp 8 offload moe_act".
func words(text string) map[string][]string {
	out, name := map[string][]string{}, ""
	for w := range strings.FieldsSeq(text) {
		if flag, ok := strings.CutPrefix(w, "--"); ok {
			name = flag
			out[name] = []string{}
			continue
		}
		out[name] = append(out[name], w)
	}
	return out
}

// SPEC S6.1
func TestPreset(t *testing.T) {
	s, notes, err := Resolve(Input{
		Model: "DeepSeek-V3", Hardware: "GB200", GPUs: 256,
		Settings: words("--pp 8 --ep 32 --layout Et*3|(tt|)*29m|L --gbs 2048 --precision mxfp8 --offload moe_act --recompute mla_up_proj,mlp --routing 1.2"),
		Budget:   100 << 30,
	})
	if err != nil {
		t.Fatal(err)
	}
	l := s.Layout
	if l.World != 256 || l.PP != 8 || l.VPP != 4 || l.EP != 32 || l.ETP != 1 || l.DP() != 32 || len(l.Stages) != 32 || !l.Stages[30].MTP {
		t.Errorf("layout is %+v", l)
	}
	if s.Batch != (plan.Batch{Micro: 1, Global: 2048, Seq: 4096}) || s.Precision.Compute != plan.MXFP8 || s.Budget != 100<<30 || s.Routing.Imbalance != 1.2 {
		t.Errorf("setup is %+v", s)
	}
	if !slices.Equal(s.Offload.Modules, []string{"moe_act"}) || !slices.Equal(s.Recompute.Modules, []string{"mla_up_proj", "mlp"}) {
		t.Errorf("policy is %v and %v", s.Offload, s.Recompute)
	}
	if s.Hardware.Name != "gb200" || !s.Optimizer.Distributed || s.Kernels.Dropout != 0 {
		t.Errorf("setup is %+v", s)
	}
	if len(notes) != 1 || !strings.Contains(notes[0], "--use-distributed-optimizer") || strings.Contains(notes[0], "--global-batch-size") {
		t.Errorf("notes are %q", notes)
	}
}

// What a model's file asks for and the description leaves out is a note, and a further head
// that it does not name can be added.
func TestModelNotes(t *testing.T) {
	_, notes, err := Resolve(Input{Model: "../model/testdata/minimax-m2.json", Settings: words("--ep 8")})
	if err != nil || len(notes) == 0 || !strings.Contains(notes[0], "num_mtp_modules") {
		t.Errorf("notes are %q, %v", notes, err)
	}
	s, _, err := Resolve(Input{Model: "qwen3-next-80b-a3b", Settings: words("--ep 8 --mtp-num-layers 1")})
	if err != nil || s.Model.Parameters() != 81324862720 {
		t.Errorf("Qwen3-Next with its MTP head: %v", err)
	}
}

// A launch file of DeepSpeed sets the sharding and the batch of a model. Settings override
// it.
func TestLaunch(t *testing.T) {
	zero3, titan := "../internal/launch/testdata/deepspeed-zero3.json", "../internal/launch/testdata/torchtitan-llama3-8b.toml"
	file, _, err := Resolve(Input{Model: titan})
	if err != nil || file.Layout.World != 64 || file.Model.Name != "llama3 8B" || file.Batch != (plan.Batch{Micro: 1, Global: 32, Seq: 8192}) || file.Layout.FSDP.Outer != 2 {
		t.Errorf("the file of torchtitan is read as %+v, %v", file, err)
	}
	const laid = "the file lays out 64 GPUs, and 128 are planned, with 64 data-parallel replicas"
	for gpus, want := range map[int]bool{0: false, 64: false, 128: true} {
		if s, notes, err := Resolve(Input{Model: titan, GPUs: gpus}); err != nil || slices.Contains(notes, laid) != want {
			t.Errorf("with %d GPUs: %+v, %q, %v", gpus, s, notes, err)
		}
	}
	s, notes, err := Resolve(Input{Model: "llama-3-8b", Launch: zero3, GPUs: 8, Settings: words("--tp 2")})
	if err != nil {
		t.Fatal(err)
	}
	if s.Layout.FSDP.Shard != plan.ShardParameters || s.Layout.TP != 2 || s.Batch != (plan.Batch{Micro: 2, Global: 32, Seq: 4096}) || !s.Recompute.Full || s.Optimizer.OffloadFraction != 0.5 {
		t.Errorf("setup is %+v", s)
	}
	if all := strings.Join(notes, " "); !strings.Contains(all, "novel_option") || strings.Contains(all, "--bf16") || strings.Contains(all, "--global-batch-size") {
		t.Errorf("notes are %q", notes)
	}
	nemo := "../internal/launch/testdata/nemo-gpt.yaml"
	if s, notes, err := Resolve(Input{Model: nemo}); err != nil || s.Layout.World != 32 || s.Model.Name != "nemo-gpt" || s.Layout.VPP != 2 || !strings.Contains(strings.Join(notes, " "), "novel_key") {
		t.Errorf("the file of NeMo is read as %+v, %q, %v", s, notes, err)
	}
	if s, _, err = Resolve(Input{Model: "llama-3-8b", Launch: zero3, GPUs: 8, Settings: words("--recompute none --gbs 64")}); err != nil || s.Recompute.Full || s.Batch.Global != 64 {
		t.Errorf("settings do not override the file: %v", err)
	}
	write := func(name, text string) string {
		name = filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return name
	}
	for _, c := range []struct {
		in    Input
		words []string
	}{
		{Input{Model: zero3}, []string{"Model", "DeepSpeed", "names no model"}},
		{Input{Model: write("unset.yaml", "trainer:\n  devices: 8\nmodel:\n  hidden_size: 64\n  num_layers: ${oc.env:LAYERS}\n")}, []string{"model.num_layers ${oc.env:LAYERS}", "the variable is not set in the text"}},
		{Input{Model: "llama-3-8b", Launch: write("wide.json", "{\x00\"\x00")}, []string{"Launch", "UTF-8"}},
		{Input{Model: "llama-3-8b", Launch: nemo}, []string{"Launch", "model of its own"}},
		{Input{Model: "llama-3-8b", Launch: titan}, []string{"Launch", "model of its own"}},
		{Input{Model: "llama-3-8b", Launch: "config_test.go"}, []string{"Launch", "no launch file"}},
		{Input{Model: "llama-3-8b", Launch: "missing.json"}, []string{"Launch", "missing.json"}},
	} {
		_, _, err := Resolve(c.in)
		for _, w := range c.words {
			if err == nil || !strings.Contains(err.Error(), w) {
				t.Errorf("%+v: %v does not name %s", c.in, err, w)
			}
		}
	}
}

// Every preset makes a job without any further word.
func TestAllPresets(t *testing.T) {
	for _, name := range model.Presets() {
		s, notes, err := Resolve(Input{Model: name, Hardware: "h100"})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if s.Layout.World != 1 || s.Batch.Global != 2 || len(notes) < 2 {
			t.Errorf("%s: %+v, notes %q", name, s.Layout, notes)
		}
	}
}

func write(t *testing.T, name, text string) string {
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

const script = `torchrun --nproc-per-node 8 --nnodes 2 pretrain_gpt.py \
  --num-layers 8 --hidden-size 64 --num-attention-heads 8 --vocab-size 1000 --max-position-embeddings 64 \
  --seq-length 64 --micro-batch-size 1 --global-batch-size 64 --bf16 --pipeline-model-parallel-size 2 \
  --num-layers-per-virtual-pipeline-stage 2 --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \
  --fp8-format hybrid --lr 1e-4
`

const huggingFace = `{"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":4,"num_attention_heads":4,
"num_key_value_heads":2,"vocab_size":1000,"max_position_embeddings":128,"tie_word_embeddings":false}`

func TestFiles(t *testing.T) {
	path := write(t, "job.sh", script)
	s, _, err := Resolve(Input{Model: path})
	if err != nil {
		t.Fatal(err)
	}
	if s.Layout.World != 16 || s.Layout.VPP != 2 || !s.Recompute.Full || s.Model.Name != "job" || s.Kernels.Dropout != 0.1 || s.Precision.Compute != plan.FP8 {
		t.Errorf("script: %+v", s)
	}
	for text, want := range map[string]bool{
		"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True\n": true, "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False\n": false, "": false,
	} {
		grows := write(t, "grows.sh", text+script)
		for given, want := range map[string]bool{"": want, "--expandable": true, "--expandable false": false} {
			if s, _, err := Resolve(Input{Model: grows, Settings: words(given)}); err != nil || s.ExpandableSegments != want {
				t.Errorf("%q, then %q: %v, %v", text, given, s, err)
			}
		}
	}
	s, _, err = Resolve(Input{Model: path, GPUs: 4, Settings: words("--vpp 4 --recompute layernorm --precision bf16 --mbs 2")})
	if err != nil {
		t.Fatal(err)
	}
	if s.Layout.World != 4 || s.Layout.VPP != 4 || s.Recompute.Full || !slices.Equal(s.Recompute.Modules, []string{"layernorm"}) || s.Batch.Micro != 2 || s.Precision.Compute != plan.BF16 {
		t.Errorf("script with settings on top: %+v", s)
	}
	path = write(t, "config.json", huggingFace)
	for _, p := range []string{path, filepath.Dir(path)} {
		s, _, err = Resolve(Input{Model: p, GPUs: 4, Settings: words("--tp 2 --seq 64")})
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Model.Layers) != 4 || s.Layout.DP() != 2 || !s.Layout.SequenceParallel || s.Batch.Seq != 64 {
			t.Errorf("config.json: %+v", s)
		}
	}
	path = write(t, "args.json", `{"--num-layers":2,"hidden_size":64,"num-attention-heads":4,"seq-length":8,"max-position-embeddings":8,"micro-batch-size":1}`)
	if s, _, err = Resolve(Input{Model: path, GPUs: 1, Vocab: 100}); err != nil || s.Model.Vocab != 100 {
		t.Errorf("args.json: %+v, %v", s, err)
	}
	path = write(t, "model_config.yaml", "MODEL_ARGS:\n  --num-layers: 2\n  --hidden-size: 64\n  --num-attention-heads: 4\n  --seq-length: 8\n  --max-position-embeddings: 8\n  --micro-batch-size: 1\n  --vocab-size: 50\n")
	if s, _, err = Resolve(Input{Model: path, GPUs: 1}); err != nil || len(s.Model.Layers) != 2 {
		t.Errorf("YAML: %+v, %v", s, err)
	}
	gpu := write(t, "mine.json", `{"name":"mine","memory_bytes":48000000000,"flops":{"bf16":1e14},"hbm":1e12,"host_out":2e10,"host_in":2e10}`)
	if s, _, err = Resolve(Input{Model: path, GPUs: 1, Hardware: gpu}); err != nil || s.Hardware.Name != "mine" {
		t.Errorf("own hardware: %+v, %v", s, err)
	}
}

func TestSettings(t *testing.T) {
	for _, c := range []struct {
		settings string
		ok       func(*plan.Setup) bool
	}{
		{"--fsdp params --pool arena --prefetch 2", func(s *plan.Setup) bool {
			return s.Layout.FSDP == plan.FSDP{Shard: plan.ShardParameters, DoubleBuffer: true, Pool: "arena", Prefetch: 2, EarlyGather: true}
		}},
		{"--fsdp grads", func(s *plan.Setup) bool { return s.Layout.FSDP.Shard == plan.ShardGradients }},
		{"--fsdp none", func(s *plan.Setup) bool { return s.Layout.FSDP.Shard == plan.NoShard && s.Optimizer.Distributed }},
		{"--use-distributed-optimizer false", func(s *plan.Setup) bool { return !s.Optimizer.Distributed }},
		{"--stash 1.5", func(s *plan.Setup) bool {
			return len(s.Stash.Modules) > 0 && s.Stash.RankCapacity == 1.5 && s.Kernels.Dispatcher == "hybridep" && s.Kernels.OpFuser
		}},
		{"--dispatcher deepep", func(s *plan.Setup) bool { return s.Kernels.Dispatcher == "deepep" }},
		{"--graph attn,moe_router", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"attn", "moe_router"}) }},
		{"--graph full_iteration", func(s *plan.Setup) bool { return slices.Equal(s.Graph.Scopes, []string{"full_iteration"}) }},
		{"--recompute full", func(s *plan.Setup) bool { return s.Recompute.Full && s.Recompute.Layers == 1 }},
		{"--recompute none --offload none --graph none", func(s *plan.Setup) bool { return !s.Recompute.Full && len(s.Offload.Modules) == 0 }},
		{"--offload moe_act expert_fc1 --fraction 0.5", func(s *plan.Setup) bool { return len(s.Offload.Modules) == 2 && s.Offload.Fraction == 0.5 }},
		{"--offload moe_act --offload-bytes 0.5", func(s *plan.Setup) bool { return s.Offload.ByBytes && s.Offload.Fraction == 0.5 }},
		{"--loss te", func(s *plan.Setup) bool { return s.Kernels.Loss == "te" }},
		{"--loss native", func(s *plan.Setup) bool { return s.Kernels.Loss == "" }},
		{"--precision fp32", func(s *plan.Setup) bool { return s.Precision.Params == plan.FP32 }},
		{"--precision fp16", func(s *plan.Setup) bool { return s.Precision.Params == plan.FP16 }},
		{"--precision blockwise", func(s *plan.Setup) bool { return s.Precision.Compute == plan.FP8 && s.Precision.Blockwise }},
		{"--precision nvfp4", func(s *plan.Setup) bool { return s.Precision.Compute == plan.NVFP4 }},
		{"--exp-avg-dtype bf16", func(s *plan.Setup) bool { return s.Optimizer.PrecisionAware && s.Optimizer.Moment1 == plan.BF16 }},
		{"--optimizer-offload-fraction 0.5", func(s *plan.Setup) bool { return s.Optimizer.OffloadFraction == 0.5 }},
		{"--num-layers 4", func(s *plan.Setup) bool { return len(s.Model.Layers) == 4 }},
		{"--offload moe_act --offload-bytes 0.5,0.25 --pp 2", func(s *plan.Setup) bool {
			return s.Offload.ByBytes && slices.Equal(s.Offload.Fractions, []float64{0.5, 0.25})
		}},
		{"--routing natural", func(s *plan.Setup) bool { return s.Routing == plan.Routing{Natural: true} }},
		{"--tp 1", func(s *plan.Setup) bool { return s.Routing.Natural }},
		{"--moe-router-force-load-balancing", func(s *plan.Setup) bool { return s.Routing == plan.Routing{} }},
		{"--routing 1.3", func(s *plan.Setup) bool { return s.Routing == plan.Routing{Imbalance: 1.3} }},
		{"--expandable", func(s *plan.Setup) bool { return s.ExpandableSegments }},
		{"--routing balanced --trace rows.txt", func(s *plan.Setup) bool { return s.Routing.CountsFile == "rows.txt" && s.Routing.Imbalance == 1 }},
		{"--tp 2 --sp false", func(s *plan.Setup) bool { return s.Layout.TP == 2 && !s.Layout.SequenceParallel }},
	} {
		s, _, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words(c.settings)})
		if err != nil {
			t.Errorf("%s: %v", c.settings, err)
		} else if !c.ok(s) {
			t.Errorf("%s: %+v", c.settings, s)
		}
	}
}

// Bad input gets one sentence that names the setting and what would do.
func TestRefused(t *testing.T) {
	for _, c := range []struct {
		in   Input
		want string
	}{
		{Input{}, "Model is missing; name a preset (deepseek-v2"},
		{Input{Model: "mixtal-8x7b"}, "there is no such file, and no preset is named \"mixtal-8x7b\"; did you mean mixtral-8x7b?"},
		{Input{Model: "no/such/config.json"}, "Model no/such/config.json: the file cannot be read: no such file"},
		{Input{Model: write(t, "a.json", "{")}, "is not valid JSON"},
		{Input{Model: write(t, "b.json", "{}")}, "b.json: "},
		{Input{Model: write(t, "c.sh", "echo")}, "no flags are in the text"},
		{Input{Model: "mixtral-8x7b", Hardware: "h101"}, "Hardware h101: no built-in hardware is named \"h101\"; choose from a100"},
		{Input{Model: "mixtral-8x7b", Hardware: "none.json"}, "Hardware none.json: the file cannot be read"},
		{Input{Model: "mixtral-8x7b", GPUs: -1}, "GPUs is negative"},
		{Input{Model: "mixtral-8x7b", Budget: -1}, "Budget is negative"},
		{Input{Model: "mixtral-8x7b", Vocab: 5}, "Vocab 5 is for files that leave the vocabulary to a tokenizer, but mixtral-8x7b has 32000; remove it"},
		{Input{Model: write(t, "picture.json", "a\x00b")}, "picture.json: expected text in UTF-8, got binary data"},
		{Input{Model: "mixtral-8x7b", Hardware: write(t, "gpu.json", `{"name": "mine"}`)}, "gpu.json: "},
		{Input{Model: "mixtral-8x7b", Launch: "no/such/file.json"}, "Launch no/such/file.json: the file cannot be read"},
		{Input{Model: "mixtral-8x7b", Launch: write(t, "launch.json", "a\x00b")}, "launch.json: expected text in UTF-8"},
		{Input{Model: "mixtral-8x7b", Launch: write(t, "wrong.json", `{"zero_optimization": {"stage": 7}}`)}, "wrong.json: "},
		{Input{Model: "mixtral-8x7b", Launch: write(t, "own.sh", script)}, "own.sh is no launch file that can be read beside a model"},
		{Input{Model: write(t, "cut.toml", "[model\n")}, "cut.toml has no two tables of torchtitan, such as [model] and [training]; give its file"},
		{Input{Model: write(t, "other.TOML", "a = 1\n")}, "other.TOML has no two tables of torchtitan"},
		{Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words("--ep 3")}, "8 GPUs do not divide by"},
		{Input{Model: "mixtral-8x7b", GPUs: 9, Settings: words("--ep 3")}, "--num-experts 8 does not divide by --expert-model-parallel-size 3; the nearest that does is 2"},
		{Input{Model: "mixtral-8x7b", GPUs: 6, Settings: words("--tp 6")}, "--num-attention-heads 32 does not divide by --tensor-model-parallel-size 6; the nearest that does is 4"},
		{Input{Model: "deepseek-v3", GPUs: 64, Settings: words("--pp 64")}, "--pipeline-model-parallel-size 64 does not divide 61 layers; use 61, or keep it with --pipeline-model-parallel-layout \"E|(t|)*61|mL\""},
		{Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words("--gbs 10")}, "--global-batch-size 10 does not divide by --micro-batch-size 1 x 8 data-parallel replicas; the nearest that does is 8"},
		{Input{Model: "mixtral-8x7b", Settings: words("--tp 2 --tensor-model-parallel-size 4")}, "tp contradicts tensor-model-parallel-size"},
		{Input{Model: "mixtral-8x7b", Settings: words("--fsdp none --use-megatron-fsdp")}, "use-megatron-fsdp contradicts fsdp; keep one of them"},
		{Input{Model: "mixtral-8x7b", Settings: words("--precision fp7")}, "precision fp7 is unknown; choose from bf16"},
		{Input{Model: "mixtral-8x7b", Settings: words("--offload moe_atc")}, "did you mean moe_act?"},
		{Input{Model: "mixtral-8x7b", Settings: words("--offload none,core_attn")}, "none stands alone; leave out the others, or none"},
		{Input{Model: "mixtral-8x7b", Settings: words("--recompute mlp none")}, "none stands alone"},
		{Input{Model: "mixtral-8x7b", Settings: words("--recompute full mlp")}, "full stands alone"},
		{Input{Model: "mixtral-8x7b", Settings: words("--graph attn none")}, "none stands alone"},
		{Input{Model: "mixtral-8x7b", Settings: words("--pool max")}, "pool is about gathered parameters; set fsdp to params"},
		{Input{Model: "mixtral-8x7b", Settings: words("--routing 0.5")}, "routing 0.5 is wrong; expected a number from 1"},
		{Input{Model: "mixtral-8x7b", Settings: words("--offload-bytes 0.5")}, "offload-bytes needs modules to offload"},
		{Input{Model: "mixtral-8x7b", Settings: words("--hidden-size 64")}, "--hidden-size describes a model, but mixtral-8x7b is given already"},
		{Input{Model: "mixtral-8x7b", Settings: words("--pipeline-paralel 2 --mbs -1")}, "--micro-batch-size -1"},
		{Input{Model: "mixtral-8x7b", Settings: words("--seq 0")}, "--seq-length 0"},
	} {
		_, _, err := Resolve(c.in)
		switch {
		case err == nil:
			t.Errorf("%+v was accepted, want %q", c.in, c.want)
		case !strings.Contains(err.Error(), c.want):
			t.Errorf("%+v: %v\nwant %q", c.in, err, c.want)
		case strings.Contains(err.Error(), "\n"):
			t.Errorf("%+v: more than a sentence: %v", c.in, err)
		}
	}
}

func TestTrainFlags(t *testing.T) {
	s, _, err := Resolve(Input{
		Model: "mixtral-8x7b", GPUs: 16, Budget: 1 << 30,
		Settings: words("--pp 2 --vpp 2 --ep 4 --gbs 64 --mbs 2 --offload moe_act,core_attn --fraction 0.5 --recompute layernorm --graph attn"),
	})
	if err != nil {
		t.Fatal(err)
	}
	want := "--model mixtral-8x7b --pp 2 --vpp 2 --ep 4 --dp 8 --micro 2 --seq 4096 --microbatches 4 --bf16 --policy stash --recompute-modules layernorm --offload-modules moe_act,core_attn --offload-fraction 0.5 --graph attn --budget 1GiB"
	if got := strings.Join(TrainFlags(s), " "); got != want {
		t.Errorf("flags are %s\nwant %s", got, want)
	}
}

// Whatever words are given, a job or a sentence comes out.
func FuzzSettings(f *testing.F) {
	for _, s := range []string{"--pp 2 --vpp 2", "--stash 1.5 --graph attn", "--precision mxfp8 --recompute full", "--layout Et|L", "--fsdp --pool max", "--offload none"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		defer inputtest.Bound(t, len(text))()
		s, _, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words(text)})
		if err != nil {
			return
		}
		TrainFlags(s)
		TrainUnsaid(s)
	})
}

// What a file says beside its arguments is no flag.
func TestArgsAreFlags(t *testing.T) {
	var args map[string]any
	_, _, err := Resolve(Input{Model: write(t, "job.sh", "source other.sh\n"+script+" $MORE"), Args: func(a map[string]any) { args = a }})
	if err != nil {
		t.Fatal(err)
	}
	for name := range args {
		if strings.HasPrefix(name, "$") {
			t.Errorf("%s is no flag", name)
		}
	}
	if args["hidden-size"] == nil {
		t.Errorf("arguments are %v", args)
	}
}

// Microbatches that a launch file accumulates make the batch, unless a setting gives it.
// Variables have no effect on models that have none, and each is named.
func TestBatchOfALaunchFile(t *testing.T) {
	file := write(t, "accumulates.json", `{"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 5, "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}`)
	for words, want := range map[string]int{"": 2 * 8 * 5, "--gbs 32": 32} {
		in := Input{Model: "mixtral-8x7b", GPUs: 8, Launch: file, Env: map[string]string{"B": "1", "A": "2"}, Settings: map[string][]string{}}
		if name, value, set := strings.Cut(strings.TrimPrefix(words, "--"), " "); set {
			in.Settings[name] = []string{value}
		}
		s, notes, err := Resolve(in)
		if err != nil || s.Batch.Global != want || s.Batch.Micro != 2 {
			t.Errorf("%q: %+v, %v", words, s, err)
			continue
		}
		if len(notes) < 2 || !strings.HasPrefix(notes[0], "the variable A changes nothing") || !strings.HasPrefix(notes[1], "the variable B changes nothing") {
			t.Errorf("%q", notes)
		}
	}
}

// Each setting that stowage train lacks is told of by a sentence of its own, and no other is.
func TestTrainUnsaid(t *testing.T) {
	for _, x := range []struct {
		words string // of the sentence, or none
		with  func(s *plan.Setup)
	}{
		{"", func(*plan.Setup) {}},
		{"no tensor and no context parallelism", func(s *plan.Setup) { s.Layout.TP = 2 }},
		{"no tensor and no context parallelism", func(s *plan.Setup) { s.Layout.CP = 2 }},
		{"no tensor and no context parallelism", func(s *plan.Setup) { s.Layout.ETP = 2 }},
		{"one that describes mine", func(s *plan.Setup) { s.Model = &model.Model{Name: "mine", Layers: s.Model.Layers} }},
		{"one that describes the model", func(s *plan.Setup) { s.Model = &model.Model{Layers: s.Model.Layers} }},
		{"12 stages do not divide 32 layers; the flags have --pp 2", func(s *plan.Setup) { s.Layout.PP, s.Layout.VPP = 3, 4 }},
		{"10 stages do not divide 32 layers; the flags have --pp 2", func(s *plan.Setup) { s.Layout.PP, s.Layout.VPP = 2, 5 }},
		{"", func(s *plan.Setup) { s.Layout.PP, s.Layout.VPP = 4, 4 }},
		{"computes in bf16 or fp32", func(s *plan.Setup) { s.Precision.Params = plan.FP16 }},
		{"computes in bf16 or fp32", func(s *plan.Setup) { s.Precision.Compute = plan.FP16 + 1 }},
		{"shards parameters or nothing", func(s *plan.Setup) { s.Layout.FSDP.Shard = plan.ShardOptimizer }},
		{"shards parameters or nothing", func(s *plan.Setup) { s.Layout.FSDP.Shard = plan.ShardGradients }},
		{"", func(s *plan.Setup) { s.Layout.FSDP.Shard = plan.ShardParameters }},
		{"modules, not whole layers; the flags recompute nothing", func(s *plan.Setup) { s.Recompute.Full = true }},
		{"one fraction on every rank", func(s *plan.Setup) { s.Offload.Fractions = []float64{0.5} }},
		{"modules, not whole layers; the flags offload none", func(s *plan.Setup) { s.Offload.Layers = 1 }},
		{"bounds copies by itself", func(s *plan.Setup) { s.Offload.Delta = 1 }},
		{"bounds copies by itself", func(s *plan.Setup) { s.Offload.MaxInflight = 1 }},
		{"captures attn, mlp and moe_router, or full_iteration", func(s *plan.Setup) { s.Graph.Scopes = []string{"attn", "moe"} }},
		{"", func(s *plan.Setup) { s.Graph.Scopes = []string{"attn", "mlp", "moe_router"} }},
	} {
		s, _, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words("--ep 8")})
		if err != nil {
			t.Fatal(err)
		}
		x.with(s)
		got := TrainUnsaid(s)
		if want := min(len(x.words), 1); len(got) != want || want > 0 && !strings.Contains(got[0], x.words) {
			t.Errorf("%q, want %q", got, x.words)
		}
	}
}

// Flags say what is not usual, and no more.
func TestTrainFlagsOneByOne(t *testing.T) {
	for words, with := range map[string]func(s *plan.Setup){
		"":                                       func(*plan.Setup) {},
		" --pp 2 --vpp 2 ":                       func(s *plan.Setup) { s.Layout.PP, s.Layout.VPP = 2, 2 },
		" --policy stash":                        func(s *plan.Setup) { s.Stash.Modules = []string{"moe_act"} },
		" --policy stash --graph mlp,moe_router": func(s *plan.Setup) { s.Graph.Scopes = []string{"mlp", "moe", "moe_router"} },
		" --pool dynamic":                        func(s *plan.Setup) { s.Layout.FSDP.Shard = plan.ShardParameters },
		" --pool arena":                          func(s *plan.Setup) { s.Layout.FSDP.Shard, s.Layout.FSDP.Pool = plan.ShardParameters, "arena" },
		" --offload-modules a,b --offload-fraction 0.75": func(s *plan.Setup) {
			s.Offload.Modules, s.Offload.Fraction, s.Offload.Fractions = []string{"a", "b"}, 0.25, []float64{0.5, 0.75, 0}
		},
		" --offload-modules a":               func(s *plan.Setup) { s.Offload.Modules, s.Offload.Fraction = []string{"a"}, 1 },
		" --recompute-modules layernorm,mlp": func(s *plan.Setup) { s.Recompute.Modules = []string{"layernorm", "mlp"} },
		" --budget 3GiB":                     func(s *plan.Setup) { s.Budget = 3 << 30 },
	} {
		s, _, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 8, Settings: map[string][]string{"ep": {"8"}}})
		if err != nil {
			t.Fatal(err)
		}
		plain := strings.Join(TrainFlags(s), " ")
		with(s)
		got := " " + strings.Join(TrainFlags(s), " ") + " "
		if !strings.Contains(got, words) {
			t.Errorf("%q, want %q", got, words)
		}
		for _, flag := range strings.Split(plain, " --") {
			name, _, _ := strings.Cut(strings.TrimPrefix(flag, "--"), " ")
			if strings.Count(got, " --"+name+" ") != 1 {
				t.Errorf("%q says --%s %d times", got, name, strings.Count(got, " --"+name+" "))
			}
		}
		if n, m := strings.Count(got, " --"), strings.Count(" "+plain, " --"); words == "" && n != m {
			t.Errorf("%q has %d flags, want %d", got, n, m)
		}
	}
}

// What a setting or a script asks for and the plan lacks is noted.
func TestNotesOfWhatHasNoEffect(t *testing.T) {
	script := write(t, "run.sh", "source cluster.sh\npython pretrain_gpt.py --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 8 --max-position-embeddings 8 --vocab-size 128 --micro-batch-size 1 --global-batch-size 8 --bf16\n")
	const sp, source = "--sequence-parallel changes nothing", "the script reads cluster.sh, which was not found: what it sets takes no part"
	for _, x := range []struct {
		in   Input
		want string // beginning of a note, or none of both
	}{
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--sp")}, sp},
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--sp --tp 1")}, sp},
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--sp --tp 2")}, ""},
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--tp 1")}, ""},
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--graph moe")}, "the scope moe captures nothing, because llama-3-8b has no experts"},
		{Input{Model: "llama-3-8b", GPUs: 8, Settings: words("--graph attn,mamba,mlp")}, "the scope mamba captures nothing, because llama-3-8b has no Mamba layers"},
		{Input{Model: "mixtral-8x7b", GPUs: 8, Settings: words("--graph attn,mlp,moe_router")}, "the scope mlp captures nothing, because mixtral-8x7b has no dense layers"},
		{Input{Model: script, GPUs: 8}, source},
	} {
		_, notes, err := Resolve(x.in)
		if err != nil {
			t.Fatal(err)
		}
		var idle []string
		for _, n := range notes {
			if strings.Contains(n, "changes nothing") || strings.Contains(n, "captures nothing") || strings.Contains(n, "takes no part") {
				idle = append(idle, n)
			}
		}
		if got := strings.Join(idle, "; "); !strings.HasPrefix(got, x.want) || (got == "") != (x.want == "") || len(idle) > 1 {
			t.Errorf("%+v: the notes are %q, want %q", x.in.Settings, idle, x.want)
		}
	}
}

func TestNoRoom(t *testing.T) {
	for _, zero := range []string{"0", "0.0", "-0"} {
		_, _, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 16, Settings: words("--stash " + zero)})
		if err == nil || !strings.Contains(err.Error(), "leaves no room for rows; give 1 or more") {
			t.Errorf("%s: %v", zero, err)
		}
	}
}

// A stash with less room than the assumed routing needs overflows, and the plan says so.
func TestRoomNote(t *testing.T) {
	for settings, want := range map[string]string{
		"--ep 8 --stash 1.01":                 "--stash 1.01 leaves room for fewer rows than the fullest expert rank gets, 1.1 x the mean by the assumed routing, so steps overflow; give --stash 1.1 or more",
		"--ep 8 --stash 1.5 --routing 2.25":   "give --stash 2.25 or more",
		"--ep 8 --stash 1.1":                  "",
		"--ep 8 --stash 1 --routing balanced": "",
		"--ep 1 --stash 1":                    "",
		"--ep 8 --stash 1.5 --routing 1.5":    "",
		"--ep 8 --stash 0.5":                  "leaves room for fewer rows than balanced routing sends",
		"--ep 8 --dispatcher hybridep --moe-expert-rank-capacity-factor 1.05": "give --moe-expert-rank-capacity-factor 1.1 or more",
	} {
		_, notes, err := Resolve(Input{Model: "mixtral-8x7b", GPUs: 16, Settings: words(settings)})
		var room []string
		for _, n := range notes {
			if strings.Contains(n, "leaves room") {
				room = append(room, n)
			}
		}
		if got := strings.Join(room, "; "); err != nil || len(room) > 1 || !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("%s: %q, %v, want %q", settings, got, err, want)
		}
	}
}
