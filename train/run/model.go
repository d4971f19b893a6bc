// This file owns models: by the name of a preset, from a config.json of Hugging Face,
// or from the same keys in YAML.

package run

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// ModelSpec chooses a model: by the name of a preset or a file, or by the keys of a
// config.json of Hugging Face.
type ModelSpec struct {
	Name string
	Keys map[string]any
}

// nameKey is where a config.json keeps the model's name.
const nameKey = "_name_or_path"

// UnmarshalYAML reads a name or an object of keys.
func (s *ModelSpec) UnmarshalYAML(text []byte) error {
	var name string
	if input.UnmarshalYAML(text, &name) == nil {
		*s = ModelSpec{Name: name}
		return nil
	}
	keys := map[string]any{}
	if err := input.UnmarshalYAML(text, &keys); err != nil {
		return errors.New("expected the name of a preset, the name of a file, or the keys of a config.json for model")
	}
	*s = ModelSpec{Keys: whole(keys).(map[string]any)}
	return nil
}

// MarshalYAML writes what UnmarshalYAML reads.
func (s ModelSpec) MarshalYAML() (any, error) {
	if s.Keys != nil {
		return s.Keys, nil
	}
	return s.Name, nil
}

// isFile reports whether the name is that of a file rather than a preset.
func (s *ModelSpec) isFile() bool {
	ext := strings.ToLower(filepath.Ext(s.Name))
	return ext == ".json" || ext == ".yaml" || ext == ".yml" || strings.ContainsRune(s.Name, os.PathSeparator)
}

// resolve returns the model, and what its file says about how layers are computed. It
// copies the keys of a file into s, so that a resumed run does not need the file.
func (s *ModelSpec) resolve() (*model.Model, layer.Settings, error) {
	set := layer.DefaultSettings()
	if s.Keys == nil && !s.isFile() {
		m, err := model.Preset(s.Name)
		switch {
		case err == nil:
			return m, set, nil
		case s.Name == "" || !exists(s.Name):
			return nil, set, blame("Model", err)
		} // a file or folder of that name
	}
	file := ""
	if s.Keys == nil {
		file = s.Name
		if err := s.load(); err != nil {
			return nil, set, err
		}
	}
	text, err := json.Marshal(s.Keys)
	if err != nil {
		return nil, set, &memory.SettingError{Setting: "Model", Asked: file, Err: err}
	}
	m, err := model.ParseHF(text)
	if err != nil {
		return nil, set, &memory.SettingError{Setting: "Model", Asked: file, Err: err}
	}
	if err := s.readSettings(&set); err != nil {
		return nil, set, &memory.SettingError{Setting: "Model", Asked: file, Err: err}
	}
	return m, set, nil
}

// jsonLine returns the line of an object of JSON in which it is wrong. It returns 0 for any
// other text.
func jsonLine(text []byte, err error) int {
	var syntax *json.SyntaxError
	if !errors.As(err, &syntax) || !bytes.HasPrefix(bytes.TrimSpace(text), []byte("{")) {
		return 0
	}
	return 1 + bytes.Count(text[:min(int(syntax.Offset), len(text))], []byte("\n"))
}

// tooLarge reports whether an object of JSON cannot be read for a number beyond a float64.
func tooLarge(err error) bool {
	var typed *json.UnmarshalTypeError
	return errors.As(err, &typed) && strings.HasPrefix(typed.Value, "number ")
}

// twice returns an error if an object of JSON gives a key of a model different values. The
// reader takes the last one without a word.
func twice(text []byte) error {
	for _, table := range []string{"", "text_config"} {
		if err := input.Contradiction(input.JSONKeys(input.JSON(text), table)); err != nil {
			return err
		}
	}
	return nil
}

// load reads the keys of a file, or of the config.json in a folder.
func (s *ModelSpec) load() error {
	file := s.Name
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		file = filepath.Join(file, "config.json")
	}
	text, err := input.ReadFile(file, input.Settings)
	if err != nil {
		return blame("Model", fmt.Errorf("cannot read %s: %w%s", file, input.Cause(err), input.Hub(file, err)))
	}
	if bytes.IndexByte(text, 0) >= 0 { // UTF-16, a compressed file
		return &InputError{&memory.SettingError{Setting: "Model", Asked: s.Name, Err: errors.New("expected text in UTF-8, got binary data")}}
	}
	keys := map[string]any{}
	if len(bytes.TrimSpace(text)) == 0 {
		text = []byte("{}")
	}
	if wrong := json.Unmarshal(input.JSON(text), &keys); wrong != nil {
		if tooLarge(wrong) {
			if _, named := model.ParseHF(text); named != nil {
				wrong = named // it names the key, if it is one of a model
			}
			return &InputError{&memory.SettingError{Setting: "Model", Asked: s.Name, Err: input.Plain(wrong)}}
		}
		err := wrong
		var syntax *json.SyntaxError
		if !strings.HasSuffix(strings.ToLower(file), ".json") || !errors.As(wrong, &syntax) {
			err = input.UnmarshalYAML(text, &keys)
		}
		var invalid *input.YAMLError
		switch {
		case err != nil && jsonLine(text, wrong) == 0 && strings.HasSuffix(file, ".json"):
			return refuse("Model", s.Name, "holds no JSON with keys and values", "give the config.json of a model")
		case errors.As(err, &invalid) && invalid.Twice:
			return refuse("Model", s.Name, fmt.Sprintf("gives a key of line %d twice", invalid.Line), "leave one of them out")
		case err != nil && jsonLine(text, wrong) > 0:
			return refuse("Model", s.Name, fmt.Sprintf("is damaged in line %d: %v", jsonLine(text, wrong), input.Plain(wrong)), "correct it, or get it anew")
		case err != nil && !errors.As(err, &invalid):
			return &InputError{&memory.SettingError{Setting: "Model", Asked: s.Name, Err: err}}
		case err != nil && (strings.HasSuffix(file, ".yaml") || strings.HasSuffix(file, ".yml")) && invalid.Line > 0:
			return refuse("Model", s.Name, fmt.Sprintf("is not YAML with keys and values in line %d", invalid.Line), "look for a tab, or for a bracket or quote without its other half")
		case err != nil:
			return refuse("Model", s.Name, "is neither JSON nor YAML", "give the config.json of a model, or the same keys in YAML")
		}
	} else if err := twice(text); err != nil {
		return &InputError{&memory.SettingError{Setting: "Model", Asked: s.Name, Err: err}}
	}
	if len(keys) == 0 { // an empty file, or null
		return refuse("Model", s.Name, "says nothing", "give the config.json of a model, or the same keys in YAML")
	}
	for _, names := range []string{"id2label", "label2id"} {
		delete(keys, names) // names of classes, up to megabytes, which no decoder has
	}
	keys = whole(keys).(map[string]any)
	if name := keys[nameKey]; name == nil || name == "" {
		keys[nameKey] = strings.TrimSuffix(filepath.Base(s.Name), filepath.Ext(s.Name))
	}
	s.Keys = keys
	return nil
}

// whole turns numbers without a fraction into integers, which JSON and YAML read
// differently, and numbers without an end into the words that [input.JSON] makes of them.
func whole(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for k := range v {
			v[k] = whole(v[k])
		}
	case []any:
		for i := range v {
			v[i] = whole(v[i])
		}
	case int:
		return int64(v)
	case uint64:
		return int64(min(v, math.MaxInt64))
	case float64:
		switch {
		case math.IsNaN(v):
			return "NaN"
		case math.IsInf(v, 1):
			return "Infinity"
		case math.IsInf(v, -1):
			return "-Infinity"
		}
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return int64(v)
		}
	}
	return v
}

// readSettings reads the keys that change no shape. It returns the first error.
func (s *ModelSpec) readSettings(set *layer.Settings) (err error) {
	// number reads the first key that is there. Its value fits a float32, and is above 0 or,
	// if zero says so, 0.
	number := func(zero bool, to func(float64), names ...string) {
		for _, name := range names {
			v, ok := s.Keys[name]
			if !ok || v == nil {
				continue
			}
			x, bad := strconv.ParseFloat(fmt.Sprint(v), 64) // YAML takes 1e-06 for a word
			want := "a number above 0 and up to 3e38"
			if zero {
				want = "a number from 0 to 3e38"
			}
			if bad != nil || !(x >= 0 && x <= math.MaxFloat32) || float32(x) == 0 && !zero {
				err = cmp.Or(err, fmt.Errorf("%s is %s; it must be %s", name, inJSON(v), want))
			}
			to(x)
			return
		}
	}
	number(false, func(v float64) { set.Epsilon = float32(v) }, "rms_norm_eps", "layer_norm_epsilon", "norm_eps")
	if keys, ok := s.Keys["rope_parameters"].(map[string]any); ok && s.Keys["rope_theta"] == nil && keys["rope_theta"] != nil {
		s.Keys["rope_theta"] = keys["rope_theta"] // where newer files have it
	}
	number(false, func(v float64) { set.Theta = v }, "rope_theta")
	number(false, func(v float64) { set.Routing.Factor = float32(v) }, "routed_scaling_factor")
	number(true, func(v float64) { set.Routing.Balance = float32(v) }, "router_aux_loss_coef", "aux_loss_alpha")
	if v := s.Keys["norm_topk_prob"]; v != nil {
		var is bool
		if set.Routing.Normalise, is = v.(bool); !is {
			err = cmp.Or(err, fmt.Errorf("norm_topk_prob is %s; it must be true or false", inJSON(v)))
		}
	}
	for _, x := range []struct{ name, known, other string }{
		{"hidden_act", "silu", "swish"}, {"hidden_activation", "silu", "swish"}, {"scoring_func", "softmax", "sigmoid"},
	} {
		if v, ok := s.Keys[x.name]; ok && v != nil && v != x.known && v != x.other {
			err = cmp.Or(err, fmt.Errorf("%s is %s, and the trainer knows only %s and %s; choose another model", x.name, inJSON(v), x.known, x.other))
		}
	}
	return err
}

// inJSON returns a value as its file has it, shortened.
func inJSON(v any) string {
	text, err := json.Marshal(v)
	if err != nil { // infinite or not a number
		text = fmt.Append(nil, v)
	}
	if _, number := v.(float64); number {
		text = bytes.Replace(text, []byte("e+"), []byte("e"), 1)
	}
	return fmt.Sprintf("%.40s", text)
}

// unused returns the keys that would change the results and that the trainer ignores.
func (s *ModelSpec) unused() (names []string) {
	for _, name := range []string{"rope_scaling", "rope_parameters"} {
		keys, ok := s.Keys[name].(map[string]any)
		if v := s.Keys[name]; v != nil && !ok {
			names = append(names, name) // no file has it like that
		}
		scaled := func(kind string) bool { v, ok := keys[kind].(string); return ok && v != "default" }
		if scaled("rope_type") || scaled("type") || !neutral(keys["partial_rotary_factor"], 1) {
			names = append(names, name)
		}
	}
	if v, ok := s.Keys["n_group"]; ok && v != nil && fmt.Sprint(v) != "1" && fmt.Sprint(v) != "0" {
		names = append(names, "n_group") // experts are chosen among all, not among the best groups
	}
	for _, x := range []struct {
		neutral int64 // the value that changes nothing
		names   []string
	}{
		{0, []string{"attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"}},
		{0, []string{"attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"}},
		{1, []string{"partial_rotary_factor", "embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"}},
		{1, []string{"no_rope_layers"}}, // zeros are layers without positions
	} {
		for _, name := range x.names {
			if !neutral(s.Keys[name], x.neutral) {
				names = append(names, name)
			}
		}
	}
	return names
}

// neutral reports whether a value is missing or the one that changes nothing. So is a list
// of such values.
func neutral(v any, value int64) bool {
	if list, ok := v.([]any); ok {
		return !slices.ContainsFunc(list, func(v any) bool { return !neutral(v, value) })
	}
	return v == nil || fmt.Sprint(v) == fmt.Sprint(value)
}
