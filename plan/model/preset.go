// This file owns the models that are built in. Each is a config.json that keeps
// only the keys with dimensions; its key "source" names the Hugging Face
// repository that they are from. Those whose names begin with "tiny" are our own,
// for a machine with two cores.

package model

import (
	"embed"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/spell"
)

//go:embed presets/*.json
var presets embed.FS

// Presets returns the names of the built-in models, in order.
func Presets() []string {
	files, err := presets.ReadDir("presets")
	if err != nil {
		panic("model: the embedded presets cannot be read: " + err.Error())
	}
	names := make([]string, len(files))
	for i, f := range files {
		names[i] = strings.TrimSuffix(f.Name(), ".json")
	}
	slices.Sort(names) // "v2" before "v2-lite", which the files are not
	return names
}

// Preset returns a built-in model. Case does not matter. It returns an error that names
// a preset with a similar name, if there is no such model.
func Preset(name string) (*Model, error) {
	known := Presets()
	for _, k := range known {
		if !strings.EqualFold(k, name) {
			continue
		}
		data, err := presets.ReadFile("presets/" + k + ".json")
		if err != nil {
			panic("model: the embedded preset cannot be read: " + err.Error())
		}
		m, err := ParseHF(data)
		if err != nil {
			panic("model: preset " + k + " is unsound: " + err.Error())
		}
		m.Name = k
		return m, nil
	}
	meant := ""
	if near := spell.Nearest(name, known); near != "" {
		meant = "did you mean " + near + "? "
	}
	return nil, fmt.Errorf("no preset is named %q; %schoose from %s", name, meant, strings.Join(known, ", "))
}
