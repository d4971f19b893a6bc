// This file tests files of arguments in JSON and YAML: their spellings, and flags with two values.

package config

import (
	"strings"
	"testing"
)

const (
	jsonArgs = `"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 8, "max_position_embeddings": 8, "micro_batch_size": 1, "vocab_size": 50`
	yamlArgs = "num_layers: 2\nhidden_size: 64\nnum_attention_heads: 4\nseq_length: 8\nmax_position_embeddings: 8\nmicro_batch_size: 1\nvocab_size: 50\n"
)

// JSON with arguments of Megatron-LM is no config.json, whatever their spelling.
func TestJSONArguments(t *testing.T) {
	inner := `{"MODE": "pretraining", "MODEL_ARGS": {` + strings.NewReplacer(`"num`, `"--num`, `_`, `-`).Replace(jsonArgs) + `}}`
	for _, text := range []string{
		"{" + jsonArgs + "}", inner, `{"MODEL_ARGS": {` + jsonArgs + `}}`, "{" + strings.Replace(jsonArgs, "2", `"${LAYERS}"`, 1) + "}",
		`{"architectures": null, ` + jsonArgs + "}", "{\"bf16\": true,\n\"bf16\": true,\n" + jsonArgs + "}",
	} {
		for _, arguments := range []bool{false, true} {
			s, _, err := Resolve(Input{Model: write(t, "job.json", text), Arguments: arguments, Env: map[string]string{"LAYERS": "2"}})
			if err != nil || len(s.Model.Layers) != 2 || s.Model.Hidden != 64 || s.Model.Name != "job" {
				t.Errorf("%s: %v", text, err)
			}
		}
	}
	for text, says := range map[string]string{
		`{"hidden_size": 64}`:           "--num-layers",
		`{"MODEL_ARGS": {}}`:            "MODEL_ARGS has no arguments",
		`{"MODEL_ARGS": []}`:            "MODEL_ARGS must hold flags",
		`{"num_layers": {"a": 1}}`:      `"num_layers" holds keys of its own`,
		`{}`:                            "the file has no arguments",
		`{"model_type": "no-such"}`:     `model_type "no-such"`,
		`{"num_layers": "${N}", "a":1}`: "the variable is not set",
	} {
		_, _, err := Resolve(Input{Model: write(t, "job.json", text), Arguments: true})
		if err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
}

// A file that gives a flag two values is refused in all its forms. Equal values, and flags that
// change no memory, contradict nothing: Megatron-LM's own tests have them.
func TestContradictions(t *testing.T) {
	for _, c := range []struct{ name, text, says string }{
		{"a.yaml", yamlArgs + "num_layers: 4\n", "lines 1 and 8 give num_layers different values"},
		{"a.yaml", yamlArgs + "num-layers: 4\n", "lines 1 and 8 give one flag different values, as num_layers and as num-layers"},
		{"a.yaml", "MODEL_ARGS:\n  " + strings.ReplaceAll(yamlArgs, "\n", "\n  ") + "--hidden_size: 32\n", "lines 3 and 9 give one flag"},
		{"a.yaml", "MODEL_ARGS:\n  a: 1\nMODEL_ARGS:\n  " + strings.ReplaceAll(yamlArgs, "\n", "\n  "), "lines 1 and 3 give MODEL_ARGS"},
		{"a.json", "{" + jsonArgs + `, "num_layers": 4}`, "line 1 gives num_layers different values"},
		{"a.json", "{\"num-layers\": 4,\n" + jsonArgs + "}", "lines 1 and 2 give one flag different values, as num-layers and as num_layers"},
		{"a.json", "{\"MODEL_ARGS\":\n{" + jsonArgs + ",\n\"--num-layers\": 4}}", "lines 2 and 3 give one flag"},
		{"a.yaml", yamlArgs + "\"--\": 2\n", `line 8: the key "--" is no flag`},
		{"a.json", "{" + jsonArgs + ", \"$notes\": 2}", `line 1: the key "$notes" is no flag`},
		{"a.yaml", yamlArgs + "<<: {num_layers: 4}\n", "line 8: << stands below other keys"},
		{"a.yaml", "<<: {num_layers: 4}\n" + yamlArgs, ""},
		{"a.json", strings.Replace(huggingFace, "{", "{\"hidden_size\": 1,\n", 1), "give hidden_size different values"},
		{"a.yaml", yamlArgs + "num_layers: 2\n", ""},
		{"a.yaml", yamlArgs + "num-layers: 2\n", ""},
		{"a.yaml", yamlArgs + "init-method-std: 0.1\ninit-method-std: 0.2\nlr: 1\n--lr: 2\n", ""},
		{"a.json", "{" + jsonArgs + `, "num-layers": 2, "lr": 1, "lr": 2}`, ""},
	} {
		s, _, err := Resolve(Input{Model: write(t, c.name, c.text)})
		switch {
		case c.says == "" && (err != nil || len(s.Model.Layers) != 2):
			t.Errorf("%s: %v", c.text, err)
		case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s: %v, want %q", c.text, err, c.says)
		}
	}
}
