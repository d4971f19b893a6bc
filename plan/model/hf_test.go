// This file owns the tests of reading a config.json.

package model_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/stowage-dev/stowage/internal/input/inputtest"
	"github.com/stowage-dev/stowage/plan/model"
)

// object is a config.json that a test changes.
type object map[string]any

func read(t testing.TB, name string) object { t.Helper(); return readFrom(t, "presets", name) }

func readFrom(t testing.TB, folder, name string) object {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(folder, name+".json"))
	if err != nil {
		t.Fatal(err)
	}
	var o object
	if err := json.Unmarshal(data, &o); err != nil {
		t.Fatal(err)
	}
	return o
}

// with returns a copy in which keys have other values. Nil removes a key.
func (o object) with(pairs ...any) object {
	c := object{}
	for k, v := range o {
		c[k] = v
	}
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] == nil {
			delete(c, pairs[i].(string))
		} else {
			c[pairs[i].(string)] = pairs[i+1]
		}
	}
	return c
}

func (o object) parse(t testing.TB) (*model.Model, error) {
	t.Helper()
	data, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	return model.ParseHF(data)
}

func (o object) must(t testing.TB) *model.Model {
	t.Helper()
	m, err := o.parse(t)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// names fails unless the error is one sentence with all the words.
func names(t *testing.T, what string, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Errorf("%s is accepted", what)
		return
	}
	for _, w := range words {
		if !strings.Contains(err.Error(), w) {
			t.Errorf("%s: %v does not name %s", what, err, w)
		}
	}
	if strings.ContainsAny(err.Error(), "\n\r") {
		t.Errorf("%s: %q is not one sentence", what, err)
	}
}

// Every key of every preset counts: a value that makes no sense is refused, and the error
// names the key.
func TestEveryKeyIsNamed(t *testing.T) {
	files := map[string]object{}
	for _, name := range model.Presets() {
		files[name] = read(t, name)
	}
	for _, c := range fromData {
		files[c.name] = readData(t, c.name)
	}
	for name, o := range files {
		for key, v := range o {
			var wrong []any
			switch v.(type) {
			case float64:
				wrong = []any{-1, 1.5, 1e30, "many", true, []int{1}, object{"a": 1}}
			case bool:
				wrong = []any{"yes", 1}
			case string:
				wrong = []any{7, []string{"x"}}
			case []any:
				wrong = []any{7, "x", object{}}
			}
			if key == "source" || v == nil {
				continue
			}
			for _, w := range wrong {
				_, err := o.with(key, w).parse(t)
				names(t, fmt.Sprintf("%s with %s %v", name, key, w), err, key)
			}
		}
	}
}

func TestMissingKeys(t *testing.T) {
	for _, c := range []struct{ preset, keys string }{
		{"llama-3-8b", "hidden_size vocab_size num_hidden_layers num_attention_heads intermediate_size"},
		{"mixtral-8x7b", "num_local_experts num_experts_per_tok intermediate_size"},
		{"deepseek-v3", "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim moe_intermediate_size num_experts_per_tok"},
		{"qwen3-next-80b-a3b", "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim linear_conv_kernel_dim"},
		{"gpt-oss-20b", "num_local_experts sliding_window"},
		{"jamba-1.5-large", "mamba_d_state mamba_d_conv num_experts_per_tok"},
		{"nemotron-h-8b", "hybrid_override_pattern mamba_num_heads mamba_head_dim n_groups ssm_state_size conv_kernel intermediate_size"},
		{"nemotron-3-nano-30b-a3b", "n_routed_experts moe_shared_expert_intermediate_size"},
	} {
		o := read(t, c.preset)
		for _, key := range strings.Fields(c.keys) {
			_, err := o.with(key, nil).parse(t)
			names(t, c.preset+" without "+key, err, key, "missing")
		}
	}
}

func TestKeysThatDoNotFit(t *testing.T) {
	for _, c := range []struct {
		preset string
		change []any
		words  []string
	}{
		{"llama-3-8b", []any{"num_attention_heads", 24}, []string{"num_attention_heads", "hidden_size", "4096"}},
		{"llama-3-8b", []any{"num_key_value_heads", 5}, []string{"num_key_value_heads", "num_attention_heads"}},
		{"llama-3-8b", []any{"num_key_value_heads", 0}, []string{"num_key_value_heads"}},
		{"llama-3-8b", []any{"num_hidden_layers", 5000}, []string{"num_hidden_layers"}},
		{"llama-3-8b", []any{"layer_types", []string{"full_attention"}}, []string{"layer_types", "num_hidden_layers"}},
		{"llama-3-8b", []any{"layer_types", []string{"chunked_attention"}}, []string{"layer_types[0]", "chunked_attention"}},
		{"mixtral-8x7b", []any{"num_experts_per_tok", 9}, []string{"num_experts_per_tok", "num_local_experts"}},
		{"deepseek-v3", []any{"attention_bias", true}, []string{"attention_bias"}},
		{"deepseek-v3", []any{"n_shared_experts", 1 << 19}, []string{"n_shared_experts"}},
		{"deepseek-v3", []any{"num_nextn_predict_layers", 65}, []string{"num_nextn_predict_layers"}},
		{"deepseek-v3", []any{"moe_layer_freq", 0}, []string{"moe_layer_freq"}},
		{"deepseek-v3", []any{"n_group", 3}, []string{"n_group is 3", "n_routed_experts, which is 256"}},
		{"deepseek-v3", []any{"n_group", 0}, []string{"n_group is 0"}},
		{"deepseek-v3", []any{"n_group", 8, "topk_group", 9}, []string{"topk_group is 9", "n_group, which is 8"}},
		{"deepseek-v3", []any{"n_group", 64, "topk_group", 1}, []string{"num_experts_per_tok is 8", "the experts of topk_group groups, which is 4"}},
		{"deepseek-v3", []any{"scoring_func", "softplus"}, []string{"scoring_func is \"softplus\"", "softmax or sigmoid"}},
		{"deepseek-v3", []any{"topk_method", "best"}, []string{"topk_method is \"best\"", "noaux_tc"}},
		{"deepseek-v3", []any{"num_local_experts", 64}, []string{"n_routed_experts is 256 and num_local_experts is 64", "leave one of them out"}},
		{"mixtral-8x7b", []any{"num_experts", 16}, []string{"num_local_experts is 8 and num_experts is 16"}},
		{"nemotron-3-nano-30b-a3b", []any{"n_group", 1, "topk_group", 2}, []string{"topk_group is 2", "n_group, which is 1"}},
		{"jamba-1.5-large", []any{"attn_layer_offset", 8}, []string{"attn_layer_offset", "attn_layer_period"}},
		{"jamba-1.5-large", []any{"mamba_conv_bias", false}, []string{"mamba_conv_bias"}},
		{"jamba-1.5-large", []any{"mamba_expand", 1 << 10}, []string{"mamba_expand"}},
		{"jamba-1.5-large", []any{"mamba_dt_rank", "none"}, []string{"mamba_dt_rank"}},
		{"nemotron-h-8b", []any{"num_hidden_layers", 51}, []string{"hybrid_override_pattern", "num_hidden_layers"}},
		{"nemotron-h-8b", []any{"hybrid_override_pattern", "M-X"}, []string{"hybrid_override_pattern", "'X' at 2"}},
		{"nemotron-h-8b", []any{"n_groups", 3}, []string{"n_groups", "mamba_num_heads"}},
		{"nemotron-h-8b", []any{"layers_block_type", []string{"rnn"}}, []string{"layers_block_type[0]", "rnn"}},
		{"qwen3-next-80b-a3b", []any{"linear_num_key_heads", 3}, []string{"linear_num_key_heads", "linear_num_value_heads"}},
		{"gpt-oss-20b", []any{"attention_bias", false}, []string{"attention_bias"}},
		{"llama-3-8b", []any{"hidden_size", 1 << 20, "vocab_size", 1 << 24, "intermediate_size", 1 << 20, "num_hidden_layers", 4096}, []string{"parameters"}},
	} {
		_, err := read(t, c.preset).with(c.change...).parse(t)
		names(t, fmt.Sprint(c.preset, " with ", c.change), err, c.words...)
	}
}

// A key of GPT-2 in a file of another family changes nothing, and GPT-2 has two names for some sizes.
func TestKeysOfGPT2(t *testing.T) {
	if m := read(t, "llama-3-8b").with("n_embd", 3).must(t); m.Hidden != 4096 {
		t.Errorf("hidden size %d with a key of GPT-2, want 4096", m.Hidden)
	}
	const gpt2 = `{"model_type":"gpt2","n_embd":768,"n_layer":12,"n_head":12,"vocab_size":50257,"n_positions":1024%s}`
	for more, wrong := range map[string]string{
		"": "", `,"hidden_size":768`: "", `,"num_hidden_layers":null`: "",
		`,"hidden_size":1024`:       "n_embd is 768 and hidden_size is 1024",
		`,"num_hidden_layers":24`:   "n_layer is 12 and num_hidden_layers is 24",
		`,"num_attention_heads":16`: "n_head is 12 and num_attention_heads is 16",
	} {
		_, err := model.ParseHF(fmt.Appendf(nil, gpt2, more))
		if (err == nil) != (wrong == "") || err != nil && !strings.Contains(err.Error(), wrong) {
			t.Errorf("%s: error %v, want %q", more, err, wrong)
		}
	}
}

// A router that takes the best of all experts does not read its groups.
func TestGreedyRoutersHaveNoGroups(t *testing.T) {
	read(t, "deepseek-v3").with("topk_method", "greedy", "n_group", 3, "topk_group", 9).must(t)
}

// A model of an unknown kind is read as a Llama if no key contradicts that.
func TestUnknownFamilies(t *testing.T) {
	base := read(t, "llama-3-8b")
	strange := base.with("model_type", "novel", "rms_norm_eps", 1e-5, "num_experts", 0, "encoder_no_repeat_ngram_size", 0)
	if got, want := strange.must(t).Parameters(), base.must(t).Parameters(); got != want {
		t.Errorf("an unknown Llama has %d parameters, want %d", got, want)
	}
	for _, c := range []struct {
		change []any
		words  []string
	}{
		{[]any{"rms_norm_eps", nil}, []string{"novel", "rms_norm_eps"}},
		{[]any{"n_routed_experts", 8}, []string{"novel", "n_routed_experts", "deepseek_v3"}},
		{[]any{"kv_lora_rank", 512}, []string{"kv_lora_rank"}},
		{[]any{"mamba_d_state", 16}, []string{"mamba_d_state"}},
		{[]any{"hidden_act", "relu2"}, []string{"hidden_act"}},
		{[]any{"intermediate_size", nil}, []string{"intermediate_size"}},
	} {
		_, err := strange.with(c.change...).parse(t)
		names(t, fmt.Sprint("a strange model with ", c.change), err, c.words...)
	}
}

func TestNotAnObject(t *testing.T) {
	for _, text := range []string{"", "null", "[]", "7", `{"hidden_size":`, "{}", `{"model_type":7}`, `{"text_config":[]}`, `{"text_config":null}`} {
		_, err := model.ParseHF([]byte(text))
		names(t, text, err)
		if err != nil && strings.Contains(err.Error(), "json: ") {
			t.Errorf("%s: the error is in words of the program: %v", text, err)
		}
	}
}

// Python writes numbers that JSON does not have.
func TestInfinity(t *testing.T) {
	text, err := os.ReadFile("presets/nemotron-h-8b.json")
	if err != nil {
		t.Fatal(err)
	}
	odd := strings.Replace(string(text), "{", `{"time_step_limit": [0.0, Infinity, -Infinity, NaN], "note": "to \"Infinity\"",`, 1)
	m, err := model.ParseHF([]byte(odd))
	if err != nil {
		t.Fatal(err)
	}
	if m.Parameters() != preset(t, "nemotron-h-8b").Parameters() {
		t.Error("it has other parameters")
	}
}

// SPEC S6.1: reading any file does not panic, and an accepted model is sound and can be
// added up.
func FuzzParseHF(f *testing.F) {
	for _, name := range model.Presets() {
		data, err := os.ReadFile(filepath.Join("presets", name+".json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	for _, c := range fromData {
		data, err := os.ReadFile(filepath.Join("testdata", c.name+".json"))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Add([]byte(`{"model_type":"gpt2","n_embd":8,"n_head":2,"n_layer":2,"n_positions":16,"vocab_size":10}`))
	f.Add([]byte(`{"text_config":{"model_type":"gemma3_text","hidden_size":8},"x":[NaN,-Infinity]}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		defer inputtest.Bound(t, len(data))()
		if m, err := model.ParseHF(data); err != nil {
			names(t, "it", err)
		} else if err := sound(m); err != nil {
			t.Fatal(err)
		}
	})
}

func sound(m *model.Model) error {
	if err := m.Check(); err != nil {
		return err
	}
	all, active := m.Parameters(), m.ActiveParameters()
	if active <= 0 || all < active || all > 1e15 {
		return fmt.Errorf("%d parameters, %d a token", all, active)
	}
	return nil
}

// The same holds for files that mix the keys of all families, of which far more are
// accepted.
func TestMixedKeys(t *testing.T) {
	files, every, families := map[string]object{}, object{}, object{}
	for _, name := range model.Presets() {
		files[name] = read(t, name)
		maps.Copy(every, files[name])
		families[files[name]["model_type"].(string)] = nil
	}
	for _, c := range fromData {
		o := readData(t, c.name)
		maps.Copy(every, o)
		families[o["model_type"].(string)] = nil
	}
	for _, more := range []string{"llama", "mistral", "gemma", "gemma2", "gemma3_text", "qwen2_moe", "gpt_neox", "novel"} {
		families[more] = nil
	}
	keys, kinds := slices.Sorted(maps.Keys(every)), slices.Sorted(maps.Keys(families))
	values := []any{0, 1, 2, 3, 4, 6, 8, 64, 4096, 1 << 20, 1 << 24, -1, nil, true, false, "M*-E", "auto", []int{0}, []string{"moe"}}
	// Names of one size, which must agree.
	names := [][]string{{"hidden_size", "n_embd"}, {"num_hidden_layers", "n_layer"}, {"num_attention_heads", "n_head"}, {"n_routed_experts", "num_experts", "num_local_experts"}}
	accepted := 0
	rapid.Check(t, func(t *rapid.T) {
		o := files[rapid.SampledFrom(model.Presets()).Draw(t, "file")].with("num_hidden_layers", 8)
		for _, same := range names {
			i := max(slices.IndexFunc(same, func(key string) bool { return o[key] != nil }), 0)
			for _, key := range same {
				o[key] = cmp.Or(o[same[i]], every[same[i]])
			}
		}
		o = o.with("model_type", rapid.SampledFrom(kinds).Draw(t, "family"))
		for key, v := range every {
			if _, ok := o[key]; !ok {
				o[key] = v
			}
		}
		for range rapid.IntRange(0, 3).Draw(t, "changes") {
			o = o.with(rapid.SampledFrom(keys).Draw(t, "key"), rapid.SampledFrom(values).Draw(t, "value"))
		}
		data, err := json.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		m, err := model.ParseHF(data)
		if err != nil {
			return
		}
		accepted++
		if err := sound(m); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("%d accepted", accepted)
	if accepted == 0 && !testing.Short() { // a short run draws too few
		t.Error("none is accepted")
	}
}
