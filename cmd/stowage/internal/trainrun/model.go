// This file owns models: by the name of a preset, from a config.json of Hugging Face,
// or from the same keys in YAML.

package trainrun

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/train/layer"
)

// ModelSpec is a preset's name or a file's, or the keys of a config.json.
type ModelSpec struct {
	Name string
	Keys map[string]any
}

// nameKey is where a config.json keeps the model's name.
const nameKey = "_name_or_path"

// UnmarshalYAML takes a word or an object.
func (s *ModelSpec) UnmarshalYAML(text []byte) error {
	var name string
	if yaml.Unmarshal(text, &name) == nil {
		*s = ModelSpec{Name: name}
		return nil
	}
	keys := map[string]any{}
	if err := yaml.Unmarshal(text, &keys); err != nil {
		return errors.New("model must be a preset's name, a file's, or the keys of a config.json")
	}
	*s = ModelSpec{Keys: whole(keys).(map[string]any)}
	return nil
}

// MarshalYAML is the opposite.
func (s ModelSpec) MarshalYAML() (any, error) {
	if s.Keys != nil {
		return s.Keys, nil
	}
	return s.Name, nil
}

// isFile tells a file from a preset.
func (s *ModelSpec) isFile() bool {
	ext := strings.ToLower(filepath.Ext(s.Name))
	return ext == ".json" || ext == ".yaml" || ext == ".yml" || strings.ContainsRune(s.Name, os.PathSeparator)
}

// resolve makes the model, and what its file says of how layers are computed. The keys
// of a file are taken into the options, so that a run needs the file no more.
func (s *ModelSpec) resolve() (*model.Model, layer.Settings, error) {
	set := layer.DefaultSettings()
	if s.Keys == nil && !s.isFile() {
		m, err := model.Preset(s.Name)
		switch {
		case err == nil:
			return m, set, nil
		case s.Name == "" || !exists(s.Name):
			return nil, set, fmt.Errorf("--model: %s", strings.TrimPrefix(err.Error(), "model: "))
		} // a file or folder of that name
	}
	from := "the model in the configuration"
	if s.Keys == nil {
		from = "--model " + s.Name
		if err := s.load(); err != nil {
			return nil, set, err
		}
	}
	text, err := json.Marshal(s.Keys)
	if err != nil {
		return nil, set, fmt.Errorf("%s: %w", from, err)
	}
	m, err := model.ParseHF(text)
	if err != nil {
		return nil, set, fmt.Errorf("%s: %s", from, strings.TrimPrefix(err.Error(), "model: "))
	}
	return m, set, s.settings(&set)
}

// load reads the keys of a file, or of the config.json in a folder.
func (s *ModelSpec) load() error {
	file := s.Name
	if info, err := os.Stat(file); err == nil && info.IsDir() {
		file = filepath.Join(file, "config.json")
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("--model %s cannot be read: %w", file, pathless(err))
	}
	keys := map[string]any{}
	// Python writes NaN into such files, which is no JSON, but YAML.
	if json.Unmarshal(text, &keys) != nil {
		if err := yaml.Unmarshal(text, &keys); err != nil {
			return fmt.Errorf("--model %s is neither the config.json of a model nor the same in YAML", s.Name)
		}
	}
	if len(keys) == 0 { // an empty file, or null
		return fmt.Errorf("--model %s says nothing; give the config.json of a model, or the same keys in YAML", s.Name)
	}
	keys = whole(keys).(map[string]any)
	if name, _ := keys[nameKey].(string); name == "" {
		keys[nameKey] = strings.TrimSuffix(filepath.Base(s.Name), filepath.Ext(s.Name))
	}
	s.Keys = keys
	return nil
}

// whole makes integers of numbers that have no fraction, which JSON and YAML read in
// ways of their own.
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
		if v == math.Trunc(v) && math.Abs(v) < 1<<53 {
			return int64(v)
		}
	}
	return v
}

// settings are the keys that change no shape.
func (s *ModelSpec) settings(set *layer.Settings) (err error) {
	number := func(to func(float64), names ...string) {
		for _, name := range names {
			v, ok := s.Keys[name]
			if !ok || v == nil {
				continue
			}
			x, bad := strconv.ParseFloat(fmt.Sprint(v), 64) // YAML takes 1e-06 for a word
			if bad != nil {
				err = errors.Join(err, fmt.Errorf("%s of the model is %v; it must be a number", name, v))
			}
			to(x)
			return
		}
	}
	number(func(v float64) { set.Epsilon = float32(v) }, "rms_norm_eps", "layer_norm_epsilon", "norm_eps")
	if keys, ok := s.Keys["rope_parameters"].(map[string]any); ok && s.Keys["rope_theta"] == nil && keys["rope_theta"] != nil {
		s.Keys["rope_theta"] = keys["rope_theta"] // where newer files have it
	}
	number(func(v float64) { set.Theta = v }, "rope_theta")
	number(func(v float64) { set.Routing.Factor = float32(v) }, "routed_scaling_factor")
	number(func(v float64) { set.Routing.Balance = float32(v) }, "router_aux_loss_coef", "aux_loss_alpha")
	if v, ok := s.Keys["norm_topk_prob"].(bool); ok {
		set.Routing.Normalise = v
	}
	for _, name := range []string{"hidden_act", "hidden_activation"} {
		if v, ok := s.Keys[name].(string); ok && v != "silu" && v != "swish" {
			err = errors.Join(err, fmt.Errorf("%s of the model is %.40q, and the trainer has silu alone; choose another model, or plan it with `stowage plan`", name, v))
		}
	}
	return err
}

// unused are the keys that would change the numbers, and that the trainer has nothing for.
func (s *ModelSpec) unused() (names []string) {
	for _, name := range []string{"rope_scaling", "rope_parameters"} {
		keys, _ := s.Keys[name].(map[string]any)
		for _, kind := range []string{"rope_type", "type"} {
			if v, ok := keys[kind].(string); ok && v != "default" {
				names = append(names, name)
				break
			}
		}
	}
	for _, name := range []string{"attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"} {
		if v, ok := s.Keys[name]; ok && v != nil && fmt.Sprint(v) != "0" {
			names = append(names, name)
		}
	}
	return names
}

// pathless is an error of the file system without the name, which the sentence has
// already.
func pathless(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	return err
}
