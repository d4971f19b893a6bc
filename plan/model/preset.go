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
// the nearest preset if there is no such model.
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
	return nil, fmt.Errorf("no preset is named %q; the nearest is %s, and there are %s",
		name, nearest(name, known), strings.Join(known, ", "))
}

// nearest is the name with the fewest letters to change, add or take away. A
// common beginning halves the cost, so that "llama" finds a Llama.
func nearest(name string, known []string) string {
	name = strings.ToLower(name)
	best, least := "", 0
	for _, k := range known {
		cost := 2 * spell.Distance(name, k)
		if strings.HasPrefix(k, name) || strings.HasPrefix(name, k) {
			cost /= 2
		}
		if best == "" || cost < least {
			best, least = k, cost
		}
	}
	return best
}
