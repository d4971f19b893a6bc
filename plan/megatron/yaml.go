// This file owns arguments in YAML and JSON: the files of Megatron-LM's functional tests, and
// flat lists of keys.

package megatron

import (
	"encoding/json"
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

// parseYAML reads arguments from YAML, as a map for [FromArgs].
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
	return keyed(top, func(under string) []input.Key { return input.YAMLKeys(data, under) }, env)
}

// parseJSON reads arguments from JSON, as a map for [FromArgs].
func parseJSON(data []byte, env map[string]string) (map[string]any, error) {
	data = input.JSON(data)
	var top map[string]any
	if err := json.Unmarshal(data, &top); err != nil {
		return nil, fmt.Errorf("the JSON cannot be read: %w", input.Plain(err))
	}
	return keyed(top, func(under string) []input.Key { return input.JSONKeys(data, under) }, env)
}

// keyed returns the arguments under MODEL_ARGS if there is such a key, and else those at the
// top. A map in place of a value is an error. Variables in values are those of env.
func keyed(top map[string]any, keys func(under string) []input.Key, env map[string]string) (map[string]any, error) {
	args, where, under := top, "the file", ""
	if inner, ok := top[modelArgs]; ok {
		if inner == nil {
			return nil, refused(noModelKind, "there is no model in this file: MODEL_ARGS is empty; lines such as --num-layers: 32 are expected")
		}
		if args, ok = inner.(map[string]any); !ok {
			return nil, fmt.Errorf("MODEL_ARGS must hold flags and their values, one a line")
		}
		tables := slices.DeleteFunc(keys(""), func(k input.Key) bool { return k.Name != modelArgs })
		if err := contradiction(tables); err != nil {
			return nil, err
		}
		where, under = modelArgs, modelArgs
	}
	if len(args) == 0 {
		return nil, refused(noModelKind, "there is no model in this file: %s has no arguments; lines such as num-layers: 32 are expected", where)
	}
	said := keys(under)
	if err := contradiction(said); err != nil {
		return nil, err
	}
	oneSpelling(args, said)
	if mode, ok := top["MODE"].(string); ok && under != "" {
		args[programKey] = testModes[mode]
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

// modelArgs holds the arguments in the files of Megatron-LM's functional tests.
const modelArgs = "MODEL_ARGS"

// contradiction returns an error if a key is no flag, or if keys give a flag two values, under
// one spelling or two.
// Megatron-LM's own tests repeat keys with equal values, and flags that change no memory with
// others; there the last one counts, as for Megatron-LM.
func contradiction(keys []input.Key) error {
	ignored, first := ignoredFlags(), map[string]input.Key{}
	for _, k := range keys {
		name := flagName(k.Name)
		before, twice := first[name]
		switch {
		case name == "" || name[0] == '$':
			return fmt.Errorf("line %d: the key %q is no flag; expected one such as num-layers", k.Line, k.Name)
		case k.Name == "<<" && k != keys[0]: // the parser would let it replace what stands above
			return fmt.Errorf("line %d: << stands below other keys; write it above all that may replace what it holds", k.Line)
		case !twice:
			first[name] = k
		case before.Value == k.Value || ignored[name]:
		case before.Name == k.Name:
			return fmt.Errorf("%s %s different values; leave one of them out", giving(before, k), k.Name)
		default:
			return fmt.Errorf("%s one flag different values, as %s and as %s; leave one of them out", giving(before, k), before.Name, k.Name)
		}
	}
	return nil
}

// giving names the lines of two keys as the beginning of a sentence.
func giving(a, b input.Key) string {
	if a.Line == b.Line {
		return fmt.Sprintf("line %d gives", a.Line)
	}
	return fmt.Sprintf("lines %d and %d give", a.Line, b.Line)
}

// oneSpelling removes all spellings of a flag but the last one.
func oneSpelling(args map[string]any, keys []input.Key) {
	last := map[string]string{}
	for _, k := range keys {
		name := flagName(k.Name)
		if before, twice := last[name]; twice && before != k.Name {
			delete(args, before)
		}
		last[name] = k.Name
	}
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
