// This file tests variables of the environment in YAML of NeMo.

package config

import (
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan/megatron"
)

const nemoJob = `trainer:
  devices: ${oc.env:GPUS,4}
model:
  num_layers: ${oc.env:LAYERS,${oc.env:DEPTH,'2'}}
  hidden_size: 64
  num_attention_heads: 4
  max_position_embeddings: 8
  encoder_seq_length: ${oc.decode:${oc.env:SEQ,8}}
  micro_batch_size: 1
  global_batch_size: 8
  tensor_model_parallel_size: ${oc.env:TP}
  add_bias_linear: ${oc.env:BIAS,false}
  num_query_groups: ${oc.env:GROUPS,null}
  tokenizer:
    vocab_size: 50
    tokenizer_model: ${oc.env:TOKENS}
exp_manager:
  dir: ${oc.env:OUT}/runs
`

// YAML of NeMo takes variables that are given, or else their defaults. One that has neither is
// asked for if its value matters and no setting replaces it.
func TestNeMoVariables(t *testing.T) {
	job := write(t, "job.yaml", nemoJob)
	for _, c := range []struct {
		env, settings string
		says          string // the error, or nothing
		missing       string // variables
		layers, world int
	}{
		{"", "", "model.tensor_model_parallel_size ${oc.env:TP}: the variable is not set in the text", "TP", 0, 0},
		{"TP=2", "", "", "", 2, 4},
		{"", "--tp 2", "", "", 2, 4},
		{"TP=2 LAYERS=3 GPUS=8", "", "", "", 3, 8},
		{"TP=2 DEPTH=4", "", "", "", 4, 4},
		{"TP=2 GROUPS=2 SEQ=4 BIAS=true", "", "", "", 2, 4},
		{"TP=two", "", "the variable TP is wrong: model.tensor_model_parallel_size two: a whole number is expected", "", 0, 0},
		{"TP=2 GPUS=x", "", `the variable GPUS is wrong: trainer.devices is "x"; it must be a whole number`, "", 0, 0},
		{"TP=2 BIAS=7", "", "the variable BIAS is wrong: model.add_bias_linear is 7; it must be true or false", "", 0, 0},
		{"TP=2 LAYERS=${oc.env:LAYERS}", "", "${oc.env:LAYERS}", "LAYERS", 0, 0},
	} {
		env := map[string]string{}
		for _, pair := range strings.Fields(c.env) {
			name, value, _ := strings.Cut(pair, "=")
			env[name] = value
		}
		given := maps.Clone(env)
		s, notes, err := Resolve(Input{Model: job, Env: env, Settings: words(c.settings)})
		var refused *megatron.Refused
		switch {
		case c.says == "" && (err != nil || len(s.Model.Layers) != c.layers || s.Layout.World != c.world || s.Layout.TP != 2):
			t.Errorf("%s %s: %v", c.env, c.settings, err)
		case c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)):
			t.Errorf("%s %s: %v, want %q", c.env, c.settings, err, c.says)
		case c.missing != "" && (!errors.As(err, &refused) || !refused.NoJob || !slices.Equal(refused.Variables, []string{c.missing})):
			t.Errorf("%s: %#v does not ask for %s", c.env, err, c.missing)
		case slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "changes nothing") }):
			t.Errorf("%s: %q", c.env, notes)
		case !maps.Equal(env, given):
			t.Errorf("%s: the variables changed", c.env)
		}
	}
	_, notes, err := Resolve(Input{Model: job, Env: map[string]string{"TP": "1", "UNREAD": "2"}})
	if err != nil || !slices.ContainsFunc(notes, func(n string) bool { return strings.HasPrefix(n, "the variable UNREAD changes nothing") }) {
		t.Errorf("%v, %q", err, notes)
	}
	open := write(t, "open.yaml", strings.Replace(nemoJob, "GPUS,4", "GPUS", 1))
	s, notes, err := Resolve(Input{Model: open, Env: map[string]string{"TP": "2"}})
	if err != nil || s.Layout.World != 2 || !slices.ContainsFunc(notes, func(n string) bool { return strings.Contains(n, "give --env GPUS=VALUE") }) {
		t.Errorf("%v, %q", err, notes)
	}
}

// The vocabulary of a tokenizer that the file does not name is asked for once, and by what helps.
func TestTokenizerVariables(t *testing.T) {
	for _, c := range []struct{ tokenizer, vocab, says, missing string }{
		{"${oc.env:TOKENS}", "50", "", ""},
		{"${data.tokens}", "50", "", ""},
		{"${oc.env:TOKENS}", "", "(--vocab-size) is not in the arguments", "TOKENS"},
		{"${data.tokens}", "", "give it as --vocab-size", ""},
	} {
		text := strings.NewReplacer("${oc.env:TOKENS}", c.tokenizer, "    vocab_size: 50\n", "", "${oc.env:TP}", "1").Replace(nemoJob)
		if c.vocab != "" {
			text = strings.Replace(text, "  tokenizer:\n", "  vocab_size: 50\n  tokenizer:\n", 1)
		}
		_, _, err := Resolve(Input{Model: write(t, "job.yaml", text)})
		var refused *megatron.Refused
		asks := errors.As(err, &refused) && slices.Equal(refused.Variables, []string{c.missing})
		if c.says == "" && err != nil || c.says != "" && (err == nil || !strings.Contains(err.Error(), c.says)) || asks != (c.missing != "") {
			t.Errorf("%s, %s: %v, want %q and variables %q", c.tokenizer, c.vocab, err, c.says, c.missing)
		}
	}
}
