// This file owns the table of what options become: the settings of a trainer, warnings and the file
// of options, or an error. Write it anew with -update if a change is meant.

package run

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/train"
)

// optionFiles are options, one file in a line. A bar stands for the end of a line.
const optionFiles = `
steps: 0
steps: 16777216
steps: 16777217
seed: 7
data: text.txt
data: none.txt
data: short.txt
hold_out: 0.25
hold_out: 0.25|eval_every: 3
eval_every: 3
hold_out: 1
hold_out: -0.1
hold_out: .nan
hold_out: 0.9999|data: text.txt
hold_out: 0.0001|data: text.txt
hold_out: 0.000001|data: text.txt
pp: 1
pp: 3
pp: -1
vpp: 2
ep: 4
dp: 4
dp: 3
ep: 3|dp: 3
pp: 16|dp: 8
micro: 3
micro: 0
seq: 64
seq: 0
microbatches: 5
microbatches: 0
dispatch: ring
dispatch: ring|ep: 1
dispatch: post
dispatch: ring|model: tiny-dense
capacity_factor: 1.5
capacity_factor: 1.5|model: tiny-dense
capacity_factor: -1
capacity_factor: 1048577
device: cuda
policy: none
policy: stash
policy: budget
policy: budget|budget: 1GiB
policy: budget|budget: many
policy: stash|budget: 1GiB
policy: graphs
policy: static
policy: some
policy: stash|offload_modules: [core_attn]
policy: stash|offload_modules: [core_attn]|offload_fraction: 0.5
policy: stash|offload_fraction: 0.5
policy: stash|offload_fraction: 1.5
policy: stash|offload_modules: [nothing]
policy: stash|recompute_modules: [mlp, layernorm]
policy: stash|recompute_modules: [core]
policy: stash|stash_modules: [moe_act]
policy: stash|stash_modules: []
policy: stash|offload_modules: [moe_act]|recompute_modules: [moe_act]
policy: stash|graph: [attn, moe_router]
policy: stash|graph: [attn, mlp]
policy: stash|graph: [some]
policy: stash|graph: [moe_router]|model: tiny-dense
pool: recorded
pool: arena|prefetch: 2|grad_comm_dtype: bf16
pool: large
prefetch: 0
grad_comm_dtype: fp8
bf16: true
bf16: 3
lr: 0.5
lr: 0
lr: 1e-60
lr: 4e38
min_lr: 0.25
min_lr: -1
warm_up: 9
warm_up: -1
decay: 11
decay: -1
beta1: 0.5
beta1: 1
beta2: 0.75
beta2: -0.5
weight_decay: 0.3
weight_decay: -0.3
clip: 2.5
clip: -2.5
aux_loss: 0.5
aux_loss: 0
aux_loss: -1
aux_loss: 0.5|model: tiny-dense
bias_rate: 0.5
bias_rate: 0.5|model: tiny-deepseek
bias_rate: -0.5
model: tiny-deepseek
model: tiny-deepseek|aux_loss: 0.5
model: tiny-hybrid
model: tiny
model: ""
model: hf.json
model: folder
model: folder/
model: hf.yaml
model: none.json
model: org/model
model: empty.json
model: null.yaml
model: twice.yaml
model: broken.yaml
model: binary.json
model: wrong.json
model: scaled.json
model: odd.json
model: {model_type: llama}
model: [a, b]
model: {rms_norm_eps: .inf, model_type: llama}
trace: false
save_every: 0
save_every: -1
keep: 0
keep: 3
stepps: 3
steps: three
steps: 3.5
steps: [3]
steps: 1e30
steps: -9223372036854775809
graph: attn
trace: maybe
1: 2
true: 3
`

func TestTableOfOptions(t *testing.T) {
	var b strings.Builder
	t.Run("jobs", func(t *testing.T) {
		dir := t.TempDir()
		hf := `{"model_type":"llama","hidden_size":64,"intermediate_size":128,"num_hidden_layers":4,"num_attention_heads":4,"num_key_value_heads":2,"vocab_size":256,"max_position_embeddings":128,"tie_word_embeddings":false,"rms_norm_eps":1e-4,"hidden_act":"silu"}`
		files := map[string]string{
			"text.txt": strings.Repeat("a line of text\n", 4000), "short.txt": "short", "hf.json": hf, "folder/config.json": hf,
			"hf.yaml":    strings.NewReplacer(`{"`, "", `"`, "", ",", "\n", ":", ": ", "}", "\n").Replace(hf),
			"empty.json": "", "null.yaml": "null\n", "twice.yaml": "a: 1\na: 2\n", "broken.yaml": "a: [1\n", "binary.json": "\x00\x01",
			"wrong.json":  strings.Replace(hf, "1e-4", "-1", 1),
			"scaled.json": strings.Replace(hf, `"hidden_act":"silu"`, `"attention_dropout":0.1,"n_group":4,"rope_scaling":{"type":"yarn"},"rope_parameters":{"rope_theta":7,"rope_type":"default"},"norm_topk_prob":true,"routed_scaling_factor":2.5`, 1),
			"odd.json":    strings.Replace(hf, `"hidden_act":"silu"`, `"rope_theta":0,"norm_topk_prob":3,"scoring_func":"max"`, 1),
		}
		for name, text := range files {
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		t.Chdir(dir)
		base := outcome(t, "steps: 50")
		show := func(name string, is map[string]string) {
			fmt.Fprintf(&b, "%s\n", name)
			for _, field := range slices.Sorted(maps.Keys(is)) {
				if is[field] != base[field] || name == "the base" {
					fmt.Fprintf(&b, "  %s: %s\n", field, is[field])
				}
			}
		}
		show("the base", base)
		for _, text := range strings.Split(strings.TrimSpace(optionFiles), "\n") {
			if !strings.HasPrefix(text, "steps") {
				text += "|steps: 50"
			}
			show(strings.TrimSuffix(text, "|steps: 50"), outcome(t, strings.ReplaceAll(text, "|", "\n")))
		}
	})
	golden.Check(t, "options.txt", b.String())
}

// outcome returns what a file of options becomes, by name.
func outcome(t *testing.T, text string) map[string]string {
	out := map[string]string{}
	var warned strings.Builder
	log := slog.New(slog.NewTextHandler(&warned, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}}))
	o := DefaultOptions()
	if err := os.WriteFile("options.yaml", []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := o.ReadFile("options.yaml"); err != nil {
		return map[string]string{"not read": err.Error()}
	}
	j, err := NewJob(o, Machine{}, log)
	if err != nil {
		return map[string]string{"error": fmt.Sprintf("%T %v", err, err)}
	}
	here, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	c := j.config
	for name, v := range map[string]any{
		"model": fmt.Sprint(c.Model.Name, " ", len(c.Model.Layers)), "settings": c.Settings, "number": c.Number, "layout": c.Layout, "batch": c.Batch, "optim": c.Optim, "memory": c.Memory,
		"dispatch": c.Dispatch, "seed": c.Seed, "text": fmt.Sprint(c.Text.Name(), " ", c.Text.Len()), "evaluated": j.batches, "words": j.layout(), "budget": j.share,
	} {
		out[name] = strings.ReplaceAll(fmt.Sprintf("%+v", v), here, "")
	}
	if c.Sharding != nil {
		out["sharding"] = fmt.Sprintf("%+v", *c.Sharding)
	}
	if c.HeldOut != nil {
		out["held out"] = fmt.Sprint(c.HeldOut.Len())
	}
	if warned.Len() > 0 {
		out["warnings"] = warned.String()
	}
	file, err := j.Options.encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range regexp.MustCompile(`(?m)^(\w+):(.*)$`).FindAllStringSubmatch(string(file), -1) {
		out["file "+line[1]] = strings.TrimSpace(strings.ReplaceAll(line[2], here, ""))
	}
	j.Options.ChoosePolicy()
	out["policy"] = j.Options.Policy
	return out
}

// What is printed of a run and of forecasts, with values that all differ.
func TestTableOfTexts(t *testing.T) {
	var b strings.Builder
	eval := 5.25
	for _, s := range []Summary{
		{Model: "m", Policy: "stash", Steps: 3, Loss: 4.5, Speed: 1234.4, Device: 5 << 20, Host: 6 << 30, Digest: "ab12"},
		{Model: "m", Policy: "none", Steps: 1, Loss: 4.5, Speed: 12, Device: 7, Host: 0, Digest: "ab12", Eval: &eval, folder: "a/folder", report: "a/report.html"},
		{Steps: 1, idle: true}, {Steps: 5, idle: true, report: "b/report.html"},
	} {
		s.WriteText(&b)
		fmt.Fprintln(&b)
	}
	o := DefaultOptions()
	o.Steps = 3
	j, err := NewJob(o, Machine{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	f := &Forecasts{job: j}
	for i, name := range train.Policies {
		f.Rows = append(f.Rows, ForecastRow{Policy: name, Device: int64(90-7*i) << 20, Host: int64(i) << 19})
	}
	f.WriteText(&b)
	golden.Check(t, "texts.txt", b.String())
}
