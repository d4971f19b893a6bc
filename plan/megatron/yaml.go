// This file owns arguments in YAML: the files of Megatron-LM's functional tests, and flat
// lists of keys.

package megatron

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/goccy/go-yaml"

	"github.com/stowage-dev/stowage/internal/input"
)

// testModes are the programs behind the modes of functional tests.
var testModes = map[string]string{"inference": "inference", "rl": "train_rl", "pretraining": "pretrain"}

// parseYAML reads arguments from YAML, as a map for [FromArgs]. It reads them under
// MODEL_ARGS if there is such a key, and else at the top. The last of equal keys counts, as
// for Megatron-LM. A map in place of a value is an error. Variables in values are those of
// env.
func parseYAML(data []byte, env map[string]string) (map[string]any, error) {
	var top map[string]any
	err := input.UnmarshalYAML(data, &top, yaml.AllowDuplicateMapKey())
	var invalid *input.YAMLError
	if errors.As(err, &invalid) { // its words are those of the grammar
		return nil, fmt.Errorf("the YAML cannot be read: line %d is not YAML with keys and values, such as num-layers: 32; look for a tab, or for a bracket or quote without its other half", max(invalid.Line, 1))
	}
	if err != nil {
		return nil, fmt.Errorf("the YAML cannot be read: %w", err)
	}
	args, where := top, "the file"
	if inner, ok := top["MODEL_ARGS"]; ok {
		if inner == nil {
			return nil, refused(noModelKind, "there is no model in this file: MODEL_ARGS is empty; lines such as --num-layers: 32 are expected")
		}
		if args, ok = inner.(map[string]any); !ok {
			return nil, fmt.Errorf("MODEL_ARGS must hold flags and their values, one a line")
		}
		where = "MODEL_ARGS"
		if mode, ok := top["MODE"].(string); ok {
			args[programKey] = testModes[mode]
		}
	}
	if len(args) == 0 {
		return nil, refused(noModelKind, "there is no model in this file: %s has no arguments; lines such as num-layers: 32 are expected", where)
	}
	seen := environ{given: env, read: map[string]bool{}}
	for _, key := range slices.Sorted(maps.Keys(args)) {
		v := args[key]
		if _, nested := v.(map[string]any); nested {
			return nil, fmt.Errorf("%s: %q holds keys of its own; flags must stand side by side, as num-layers: 32", where, key)
		}
		if text, ok := v.(string); ok && len(env) > 0 && isVariable(text) {
			args[key] = os.Expand(text, func(name string) string {
				value, given := env[name]
				seen.look(name, value, given)
				if given {
					return value
				}
				return "${" + name + "}"
			})
		}
	}
	seen.write(args)
	unabbreviated(args)
	return args, nil
}

// unabbreviated replaces flags that are abbreviated, unless they are also there in full.
func unabbreviated(args map[string]any) {
	a, there := abbreviations{}, map[string]bool{}
	for key := range args {
		there[flagName(key)] = true
	}
	for _, key := range slices.Sorted(maps.Keys(args)) {
		name := flagName(key)
		if whole := a.whole(name); whole != name && !there[whole] {
			args[whole], there[whole] = args[key], true
			delete(args, key)
		}
	}
	if notes := a.notes(args); len(notes) > 0 {
		args[notesKey] = notes
	}
}
