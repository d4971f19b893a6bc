// This file tests what is read of files of models, and what is said of them.

package run

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// Keys that change results and that the trainer does not follow are named, unless their
// value changes nothing.
func TestKeysThatAreNotUsed(t *testing.T) {
	ones := []any{int64(1), int64(1)}
	for _, x := range []struct {
		key    string
		used   []any // values that change nothing
		unused any
	}{
		{"partial_rotary_factor", []any{nil, int64(1), 1.0}, 0.5},
		{"attn_logit_softcapping", []any{nil}, 50.0},
		{"final_logit_softcapping", []any{nil}, 30.0},
		{"query_pre_attn_scalar", []any{nil}, int64(256)},
		{"attention_multiplier", []any{nil}, 0.0078125},
		{"embedding_multiplier", []any{nil, int64(1)}, 12.0},
		{"residual_multiplier", []any{nil, int64(1)}, 0.22},
		{"logits_scaling", []any{nil, int64(1)}, 8.0},
		{"logit_scale", []any{nil, int64(1)}, 0.0625},
		{"no_rope_layers", []any{nil, []any{}, ones}, []any{int64(1), int64(0)}},
	} {
		for _, v := range x.used {
			if got := (&ModelSpec{Keys: map[string]any{x.key: v}}).unused(); len(got) > 0 {
				t.Errorf("%s %v: %q is said not to be used", x.key, v, got)
			}
		}
		if got := (&ModelSpec{Keys: map[string]any{x.key: x.unused}}).unused(); !slices.Equal(got, []string{x.key}) {
			t.Errorf("%s %v: %q is said not to be used", x.key, x.unused, got)
		}
	}
	newer := map[string]any{"rope_parameters": map[string]any{"rope_type": "default", "partial_rotary_factor": 0.25}}
	if got := (&ModelSpec{Keys: newer}).unused(); !slices.Equal(got, []string{"rope_parameters"}) {
		t.Errorf("%v: %q is said not to be used", newer, got)
	}
}

// Scaled rotary positions are said not to be used, however a file writes them.
func TestRotaryScalingIsNotUsed(t *testing.T) {
	for _, v := range []any{map[string]any{"type": "linear"}, "linear", 2.0} { // the last two are in no file that is right
		s := ModelSpec{Keys: map[string]any{"rope_scaling": v}}
		if got := s.unused(); !slices.Equal(got, []string{"rope_scaling"}) {
			t.Errorf("%v: %q is said not to be used", v, got)
		}
	}
}

// A file without keys is refused in a sentence.
func TestModelFilesThatSayNothing(t *testing.T) {
	for _, text := range []string{"", " \n", "null", "{}"} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		spec := ModelSpec{Name: file}
		if _, _, err := spec.resolve(); err == nil || !strings.Contains(err.Error(), "says nothing") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// An object of JSON that is damaged is refused with the line and in plain words.
func TestModelFilesThatAreDamaged(t *testing.T) {
	for text, want := range map[string]string{
		"{\n\"hidden_size\": 8,\n\"x\": [1, 2}\n": "is damaged in line 3: it is not JSON from character 31 on",
		"{\n\"hidden_size\": 8":                   "is damaged in line 2: it ends too early",
		"{} {}":                                   "is damaged in line 1: it is not JSON from character 4 on",
		strings.Repeat(`{"a":`, 20_000) + strings.Repeat("}", 20_000): "is damaged in line 1: it is nested too deeply",
		"hidden_size: [1, 2\n":     "holds no JSON with keys and values; give the config.json of a model",
		"[1, 2]":                   "holds no JSON with keys and values; give the config.json of a model",
		strings.Repeat("[", 5_000): "holds no JSON with keys and values; give the config.json of a model",
		`"hidden_size"`:            "holds no JSON with keys and values; give the config.json of a model",
		"# nothing\n":              "holds no JSON with keys and values; give the config.json of a model",
		"{\"hidden_size\": 8,}":    "is damaged in line 1: it is not JSON from character 19 on",
		"{'hidden_size': 8}":       "is damaged in line 1: it is not JSON from character 2 on",
		"<html>\n404</html>\n":     "holds no JSON with keys and values; give the config.json of a model",
		"version https://git-lfs.github.com/spec/v1\noid sha256:a": "is a pointer of Git LFS in the place of a file; get the file with git lfs pull",
	} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		spec := ModelSpec{Name: file}
		if _, _, err := spec.resolve(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%.60q: %.300v, want %q", text, err, want)
		} else if strings.Contains(err.Error(), "YAML") {
			t.Errorf("%.60q: the file is JSON, and the error speaks of YAML: %v", text, err)
		}
	}
	file := filepath.Join(t.TempDir(), "model.yaml")
	if err := os.WriteFile(file, []byte("hidden_size: 8\nx: [1, 2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	spec := ModelSpec{Name: file}
	if _, _, err := spec.resolve(); err == nil || !strings.Contains(err.Error(), "is not YAML with keys and values in line 2; look for a tab, or for a bracket or quote without its other half") {
		t.Errorf("the error of a file of YAML is %v", err)
	}
}

// What a file asks for and the model leaves out is said before training.
func TestModelNotes(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	text := `{"model_type":"other","hidden_size":16,"intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":1,"vocab_size":256,"rms_norm_eps":1e-5,"_name_or_path":"a\n b"}`
	if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	o := DefaultOptions()
	o.Model = ModelSpec{Name: file}
	o.Steps = 1
	var said strings.Builder
	j, err := NewJob(o, Machine{}, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	if want := "is not known; the file is read as that of a Llama-like model"; !strings.Contains(said.String(), want) {
		t.Errorf("it says %q, want %q", said.String(), want)
	}
	if j.config.Model.Name != "a b" {
		t.Errorf("the name of the model is %q", j.config.Model.Name)
	}
}
