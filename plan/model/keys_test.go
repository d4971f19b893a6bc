// This file owns the table of what each key of a config.json does: in a file of each family the key
// is left out, gets other values, or is added. Write it anew with -update if a change is meant.

package model_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/plan/model"
)

// digest returns a model in a few letters, with its notes. It is was if the model is the base.
func digest(t *testing.T, m *model.Model, base []byte, was string) string {
	text := encode(t, m)
	if bytes.Equal(text, base) {
		return was
	}
	for _, i := range []int{0, len(m.Layers) / 2, len(m.Layers) - 1} {
		text = fmt.Append(text, m.LayerParams(m.Layers[i]))
	}
	if m.MTP != nil {
		text = fmt.Append(text, m.MTPParams(0))
	}
	sum := sha256.Sum256(fmt.Append(text, m.EmbeddingParams(), m.FinalNormParams(), m.OutputParams(), m.ActiveParameters()))
	return fmt.Sprintf("%x %d parameters%s", sum[:4], m.Parameters(), strings.Join(append([]string{""}, m.Notes...), "; "))
}

func encode(t *testing.T, m *model.Model) []byte {
	text, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Append(text, m.Notes)
}

func TestTableOfKeys(t *testing.T) {
	var b strings.Builder
	keys := map[string]bool{}
	for _, file := range []string{"hf.go", "family.go", "hybrid.go", "mixture.go"} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"([a-z0-9]+_[a-z0-9_]+)"`).FindAllStringSubmatch(string(text), -1) {
			keys[m[1]] = true
		}
	}
	families := map[string]bool{}
	for _, folder := range []string{"presets", "testdata"} {
		files, err := os.ReadDir(folder)
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			name, isJSON := strings.CutSuffix(f.Name(), ".json")
			if !isJSON {
				continue
			}
			o := readFrom(t, folder, name)
			family := fmt.Sprint(o["model_type"])
			if families[family] {
				continue
			}
			families[family] = true
			base := encode(t, o.must(t))
			was := digest(t, o.must(t), nil, "")
			fmt.Fprintf(&b, "%s, %s: %s\n", family, name, was)
			all := maps.Clone(keys)
			for key := range o {
				all[key] = true
			}
			for _, key := range slices.Sorted(maps.Keys(all)) {
				values := []any{nil, 0, 3, "relu2"}
				switch v := o[key].(type) {
				case nil: // not in the file
					values = []any{true}
				case bool:
					values = []any{nil, !v, 0}
				case []any:
					values = []any{nil, v[:len(v)/2], true}
				}
				effects := map[string][]string{}
				for _, v := range values {
					m, err := o.with(key, v).parse(t)
					effect := ""
					if err != nil {
						effect = err.Error()
					} else if is := digest(t, m, base, was); is != was {
						effect = is
					}
					effects[effect] = append(effects[effect], fmt.Sprint(v))
				}
				for _, effect := range slices.Sorted(maps.Keys(effects)) {
					if effect != "" {
						fmt.Fprintf(&b, "  %s %s: %.120s\n", key, strings.Join(effects[effect], "|"), effect)
					}
				}
			}
		}
	}
	golden.Check(t, "keys.txt", b.String())
}
