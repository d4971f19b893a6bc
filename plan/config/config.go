// Package config makes setups from what people write. [Resolve] takes a model (a preset,
// a Hugging Face config.json or Megatron-LM arguments), hardware by name or file, and
// settings under their Megatron-LM names or the short ones of [Words]. [TrainFlags]
// writes a setup as flags of stowage train.
package config

// This file owns the resolution.

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/internal/launch"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/model"
)

// Input is what Resolve makes a setup of.
type Input struct {
	// Model is the name of a preset, or the path of a config.json, of a folder with
	// one, of a file of Megatron-LM arguments (shell, YAML or JSON), or of a launch file
	// that describes a model.
	Model string
	// Launch is the path of a launch file of another system, whose settings apply to
	// Model. It may be empty.
	Launch string
	// Data is the contents of the file that Launch names, or else Model, if it was read
	// already, as from standard input.
	Data []byte
	// Arguments says that Model is a file of Megatron-LM arguments. JSON may be that or a
	// config.json, and its keys do not always tell.
	Arguments bool
	// Hardware is a built-in name or the path of a JSON file. It may be empty.
	Hardware string
	GPUs     int
	// Settings maps flags of Megatron-LM, without dashes, or the short names of
	// [Words] to their values. Settings override those of a file.
	Settings map[string][]string
	// Vocab is the size of the vocabulary if a file of arguments leaves it to a
	// tokenizer.
	Vocab int
	// Env has variables that a file of arguments takes from its environment.
	Env map[string]string
	// Budget is the device memory that a rank may hold at its peak, in bytes. Zero
	// stands for what the hardware leaves.
	Budget memory.Bytes
	// Args, if it is not nil, is told the arguments of Megatron-LM that the setup is made
	// of. The settings are among them.
	Args func(map[string]any)
}

// Resolve returns the setup, and notes about what it assumed or left out, a sentence
// each. It returns a *memory.SettingError that names the field of Input or the setting,
// or an error in the words of Megatron-LM's flags.
func Resolve(in Input) (*plan.Setup, []string, error) {
	if in.GPUs < 0 || in.Budget < 0 {
		name := "GPUs"
		if in.Budget < 0 {
			name = "Budget"
		}
		return nil, nil, &memory.SettingError{Setting: name, Problem: "is negative", Remedy: "give a positive number"}
	}
	options := megatron.Options{GPUs: in.GPUs, Vocab: in.Vocab}
	if in.Hardware != "" {
		gpu, err := loadHardware(in.Hardware)
		if err != nil {
			return nil, nil, err
		}
		options.Hardware = gpu
	}
	m, base, file, err := in.loadModel()
	if err != nil {
		return nil, nil, err
	}
	if in.Launch != "" {
		if file, err = in.loadLaunch(m != nil && file == nil); err != nil {
			return nil, nil, err
		}
	}
	settings, extras, err := translate(in.Settings)
	if err != nil {
		return nil, nil, err
	}
	notes, said := []string{}, map[string]any{}
	if m != nil || file != nil {
		for _, name := range slices.Sorted(maps.Keys(in.Env)) {
			if file == nil || !file.Reads[name] {
				notes = append(notes, fmt.Sprintf("the variable %s changes nothing: the file does not read it", name))
			}
		}
	}
	if m != nil {
		if in.Vocab > 0 {
			return nil, nil, &memory.SettingError{
				Setting: "Vocab", Asked: fmt.Sprint(in.Vocab), Problem: fmt.Sprintf("is for files that leave the vocabulary to a tokenizer, but %s has %d", m.Name, m.Vocab),
				Remedy: "remove it, or set vocab-size",
			}
		}
		options.Model = m
		base = usual(m)
		if file != nil {
			if options.GPUs == 0 {
				options.GPUs = file.GPUs
			}
			notes = append(notes, file.Notes...)
			for name, v := range file.Args {
				delete(base, name)
				said[name] = v
			}
		}
	} else {
		options.Name = strings.TrimSuffix(filepath.Base(in.Model), filepath.Ext(in.Model))
		if file != nil {
			notes = append(notes, file.Notes...)
			if options.GPUs == 0 {
				options.GPUs = file.GPUs
			}
		}
	}
	expandable := base[growing] == true
	delete(base, growing)
	maps.Copy(said, base)
	args := merge(said, settings)
	if in.Args != nil {
		flags := maps.Clone(args)
		maps.DeleteFunc(flags, func(name string, _ any) bool { return strings.HasPrefix(name, "$") }) // no flags
		in.Args(flags)
	}
	s, warnings, err := megatron.FromArgs(args, options)
	if err != nil {
		return nil, nil, in.inFile(err, file, settings)
	}
	s.ExpandableSegments = expandable
	if file != nil && file.GPUs > 0 && options.GPUs != file.GPUs {
		notes = append(notes, fmt.Sprintf("the file lays out %d GPUs, and %d are planned, with %d data-parallel replicas", file.GPUs, options.GPUs, s.Layout.DP()))
	}
	if m != nil {
		notes = append(notes, m.Notes...)
		if file != nil && file.Accumulation > 0 && args["global-batch-size"] == nil {
			s.Batch.Global = s.Batch.Micro * s.Layout.DP() * file.Accumulation
			args["global-batch-size"] = s.Batch.Global
		}
		notes = append(notes, assumed(base, settings, args["global-batch-size"] != nil, s)...)
	}
	for _, w := range warnings {
		notes = append(notes, w.String())
	}
	if words, given := settings["sequence-parallel"]; given && s.Layout.TP == 1 && !slices.Contains(words, "false") {
		notes = append(notes, "--sequence-parallel changes nothing with one tensor-parallel rank")
	}
	notes = append(notes, idleScopes(s)...)
	if note := formatNote(s); note != "" {
		notes = append(notes, note)
	}
	s.Budget = in.Budget
	if err := extras.apply(s); err != nil {
		return nil, nil, err
	}
	if s.Routing == (plan.Routing{}) {
		// Without a setting, routing is like that of runs that do not force it.
		s.Routing.Natural = !on(args["moe-router-force-load-balancing"])
	}
	if err := s.Check(); err != nil {
		return nil, nil, err
	}
	if note := roomNote(s, in.Settings["stash"] != nil); note != "" {
		notes = append(notes, note)
	}
	return s, notes, nil
}

// roomNote says if the fullest expert rank has room for fewer rows than it gets by the assumed
// routing. Room for fewer than balanced routing sends has a warning already.
func roomNote(s *plan.Setup, short bool) string {
	room, most := s.Stash.RankCapacity, s.Routing.Imbalance
	if s.Routing.Natural {
		most = plan.NaturalImbalance(s.Model, s.Layout)
	}
	if room < 1 || room >= most || s.Kernels.CapacityFactor > 0 {
		return ""
	}
	flag := "--moe-expert-rank-capacity-factor"
	if short {
		flag = "--stash"
	}
	return fmt.Sprintf("%s %g leaves room for fewer rows than the fullest expert rank gets, %.3g x the mean by the assumed routing, so steps overflow; give %[1]s %[4]g or more, or say with --routing how even it is",
		flag, room, most, math.Ceil(100*most-1e-6)/100)
}

// inFile returns an error about a setting that a launch file has in words of that file, unless
// a given setting overrides it.
func (in *Input) inFile(err error, file *launch.File, settings map[string][]string) error {
	if file == nil {
		return err
	}
	said := file.InFile(err)
	var refused *megatron.Refused
	if errors.As(said, &refused) {
		return said
	}
	if flag, _, _ := strings.Cut(strings.TrimPrefix(err.Error(), "--"), " "); said == err || settings[flag] != nil {
		return err
	}
	if in.Launch != "" {
		return &memory.SettingError{Setting: "Launch", Asked: in.Launch, Err: said}
	}
	return &memory.SettingError{Setting: "Model", Asked: in.Model, Err: said}
}

// formatNote says if the hardware has no rate for the format that products are computed in.
func formatNote(s *plan.Setup) string {
	name, narrow := map[plan.Format]string{plan.FP8: "fp8", plan.MXFP8: "mxfp8", plan.NVFP4: "nvfp4"}[s.Precision.Compute]
	if s.Hardware == nil || !narrow || s.Hardware.Flops[name] > 0 {
		return ""
	}
	return fmt.Sprintf("%s has no rate for %s, so that of the next wider format is taken; see whether it can compute in %[2]s at all", s.Hardware.Name, name)
}

// idleScopes returns a note for each scope of graphs that no layer of the model has.
func idleScopes(s *plan.Setup) (notes []string) {
	const experts = "has no experts"
	has := func(is func(model.Layer) bool) bool { return slices.ContainsFunc(s.Model.Layers, is) }
	for _, x := range []struct {
		scope, lacks string
		has          bool
	}{
		{"attn", "has no attention", has(func(l model.Layer) bool { return l.Attention != nil || l.MLA != nil })},
		{"mamba", "has no Mamba layers", has(func(l model.Layer) bool { return l.Mamba != nil })},
		{"mlp", "has no dense layers", has(func(l model.Layer) bool { return l.Dense != nil })},
		{"moe", experts, has(func(l model.Layer) bool { return l.MoE != nil })},
		{"moe_router", experts, has(func(l model.Layer) bool { return l.MoE != nil })},
		{"moe_preprocess", experts, has(func(l model.Layer) bool { return l.MoE != nil })},
	} {
		if slices.Contains(s.Graph.Scopes, x.scope) && !x.has {
			notes = append(notes, fmt.Sprintf("the scope %s captures nothing, because %s %s", x.scope, s.Model.Name, x.lacks))
		}
	}
	return notes
}

// on reports whether a flag without a value is set, as files and command lines
// write it.
func on(v any) bool {
	if words, ok := v.([]string); ok {
		return len(words) == 0 || words[0] != "false"
	}
	return v != nil && v != false && v != "false"
}

func loadHardware(name string) (*hardware.GPU, error) {
	if !strings.HasSuffix(strings.ToLower(name), ".json") {
		gpu, err := hardware.ByName(name)
		if err != nil {
			return nil, &memory.SettingError{Setting: "Hardware", Asked: name, Err: err}
		}
		return gpu, nil
	}
	data, err := readFile("Hardware", name)
	if err != nil {
		return nil, err
	}
	gpu, err := hardware.Parse(data)
	if err != nil {
		return nil, &memory.SettingError{Setting: "Hardware", Asked: name, Err: err}
	}
	return gpu, nil
}

// readFile reads the file that a setting names.
func readFile(setting, name string) ([]byte, error) {
	data, err := input.ReadFile(name, input.Settings)
	if err != nil {
		return nil, &memory.SettingError{Setting: setting, Asked: name, Err: fmt.Errorf("the file cannot be read: %w", input.Cause(err))}
	}
	return data, nil
}

// loadLaunch reads a launch file for a model that is named beside it.
func (in *Input) loadLaunch(model bool) (*launch.File, error) {
	name, data := in.Launch, in.Data
	if data == nil {
		var err error
		if data, err = readFile("Launch", name); err != nil {
			return nil, err
		}
	}
	if err := checkText("Launch", name, data); err != nil {
		return nil, err
	}
	file, err := launch.Parse(data, in.Env)
	switch {
	case err != nil:
		return nil, asked("Launch", name, err)
	case file == nil:
		return nil, &memory.SettingError{Setting: "Launch", Asked: name, Problem: "is no launch file that can be read beside a model", Remedy: "give DeepSpeed's JSON, or a file that describes its own model alone"}
	case !model:
		return nil, &memory.SettingError{Setting: "Launch", Asked: name, Problem: fmt.Sprintf("cannot be read beside %s, which has settings of its own", in.Model), Remedy: "leave one of them out"}
	case file.Model != nil || file.Described():
		return nil, &memory.SettingError{Setting: "Launch", Asked: name, Problem: "describes a model of its own", Remedy: "leave the other model out"}
	}
	return file, nil
}

// asked wraps an error about a file. An error about what is not modelled stays as it is.
func asked(setting, name string, err error) error {
	var refused *megatron.Refused
	if errors.As(err, &refused) {
		return err
	}
	return &memory.SettingError{Setting: setting, Asked: name, Err: err}
}

// loadModel returns a model, or the arguments of a file. A launch file comes with its model.
func (in *Input) loadModel() (*model.Model, map[string]any, *launch.File, error) {
	name := in.Model
	if in.Data != nil && in.Launch == "" {
		if yamlLine.Match(in.Data) {
			name += ".yaml"
		}
		return in.parseFile(name, in.Data)
	}
	if name == "" {
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Problem: "is missing", Remedy: "name a preset (" + strings.Join(model.Presets(), ", ") + "), a config.json or a file of Megatron-LM arguments"}
	}
	m, unknown := model.Preset(name)
	if unknown == nil {
		return m, nil, nil, nil
	}
	info, err := os.Stat(name)
	switch {
	case err != nil && (strings.ContainsRune(name, filepath.Separator) || filepath.Ext(name) != "" && !errors.Is(err, fs.ErrNotExist)):
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: fmt.Errorf("the file cannot be read: %w%s", input.Cause(err), input.Hub(name, err))}
	case err != nil:
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: fmt.Errorf("there is no such file, and %w", unknown)}
	case info.IsDir():
		name = filepath.Join(name, "config.json")
	}
	data, err := readFile("Model", name)
	if err != nil {
		return nil, nil, nil, err
	}
	return in.parseFile(name, data)
}

// checkText returns an error if a file is no text. No text has a zero byte, and almost every
// picture, archive and program has one, as have texts in UTF-16.
func checkText(setting, name string, data []byte) error {
	if bytes.IndexByte(data, 0) >= 0 {
		return &memory.SettingError{Setting: setting, Asked: name, Err: errors.New("expected text in UTF-8, got binary data")}
	}
	return nil
}

// parseFile returns what a file says.
func (in *Input) parseFile(name string, data []byte) (*model.Model, map[string]any, *launch.File, error) {
	if err := checkText("Model", name, data); err != nil {
		return nil, nil, nil, err
	}
	switch file, err := launch.Parse(data, in.Env); {
	case err != nil:
		return nil, nil, nil, asked("Model", name, err)
	case file != nil && file.Described():
		return nil, file.Args, file, nil
	case file != nil && file.Model == nil && file.Unset != "":
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Problem: "names no model: " + file.Unset + ", which another file or the environment sets", Remedy: "write the number in its place"}
	case file != nil && file.Model == nil:
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Problem: "is a configuration of " + file.System + ", which names no model", Remedy: "name a preset or a config.json beside it"}
	case file != nil:
		if file.Model.Name == "" {
			file.Model.Name = strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
		}
		return file.Model, nil, file, nil
	case strings.EqualFold(filepath.Ext(name), ".toml"):
		return nil, nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Problem: "has no two tables of torchtitan, such as [model] and [training]", Remedy: "give its file, or one of another system"}
	}
	m, args, err := in.parseModel(name, data)
	return m, args, nil, err
}

// yamlLine finds a key at the beginning of a line, which a command line does not have.
var yamlLine = regexp.MustCompile(`(?m)^\s*(--)?[A-Za-z_][\w-]*:(\s|$)`)

// growing marks the arguments of a file whose environment makes the allocator's segments
// grow, in a script or in the YAML of a test.
const growing = "expandable-segments"

var growingWord = regexp.MustCompile(`ALLOC_CONF['"]?\s*[=:].*expandable_segments:\s*[Tt]rue`)

// describesModel reports whether JSON has a key that every config.json of Hugging Face has.
func describesModel(keys map[string]json.RawMessage) bool {
	for _, key := range []string{"model_type", "architectures", "num_hidden_layers", "n_layer", "n_layers", "text_config"} {
		if v := keys[key]; v != nil && string(v) != "null" {
			return true
		}
	}
	return false
}

// areArguments reports whether JSON has arguments of Megatron-LM, with a key that no config.json
// has. Some old ones of Hugging Face have num_layers, too.
func areArguments(keys map[string]json.RawMessage) bool {
	for key := range keys {
		if key == "MODEL_ARGS" || strings.Contains(key, "-") {
			return true
		}
	}
	for _, key := range []string{"num_layers", "micro_batch_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"} {
		if keys[key] != nil {
			return !describesModel(keys)
		}
	}
	return false
}

// parseModel distinguishes a config.json from arguments by its contents.
func (in *Input) parseModel(name string, data []byte) (*model.Model, map[string]any, error) {
	if !strings.HasPrefix(strings.TrimSpace(string(data)), "{") {
		if strings.EqualFold(filepath.Ext(name), ".json") {
			return nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: errors.New("expected a JSON object: a config.json of Hugging Face or arguments of Megatron-LM")}
		}
		args, err := megatron.Parse(name, data, megatron.ParseOptions{Env: in.Env, Open: func(other string) ([]byte, error) {
			return input.ReadFile(filepath.Join(filepath.Dir(name), other), input.Settings)
		}})
		if err != nil {
			return nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: err}
		}
		if growingWord.Match(data) {
			args[growing] = true
		}
		return nil, args, nil
	}
	data = input.JSON(data)
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(data, &keys); err != nil {
		return nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: fmt.Errorf("the file is not valid JSON: %w", input.Plain(err))}
	}
	if in.Arguments && !describesModel(keys) || areArguments(keys) {
		args, err := megatron.Parse("arguments.json", data, megatron.ParseOptions{Env: in.Env})
		if err != nil {
			return nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: err}
		}
		return nil, args, nil
	}
	m, err := model.ParseHF(data)
	if err != nil {
		return nil, nil, &memory.SettingError{Setting: "Model", Asked: name, Err: err}
	}
	if m.Name == "" {
		m.Name = strings.TrimSuffix(filepath.Base(name), filepath.Ext(name))
	}
	return m, nil, nil
}

// usual returns the settings that large jobs use today and that are not Megatron-LM's
// defaults. They apply to models that come without arguments.
func usual(m *model.Model) map[string]any {
	args := map[string]any{
		"bf16": true, "use-distributed-optimizer": true, "sequence-parallel": true,
		"hidden-dropout": 0, "attention-dropout": 0,
		"micro-batch-size": 1, "seq-length": min(4096, max(m.MaxPositions, 1)),
		"cross-entropy-loss-fusion": true, "no-create-attention-mask-in-dataloader": true,
		"overlap-grad-reduce": true, "overlap-param-gather": true,
	}
	if slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil }) {
		maps.Copy(args, map[string]any{
			"expert-tensor-parallel-size": 1, "moe-grouped-gemm": true, "moe-permute-fusion": true,
			"moe-router-dtype": "fp32", "moe-token-dispatcher-type": "alltoall",
		})
	}
	return args
}

// excludes lists which settings of the base a setting removes.
var excludes = map[string][]string{
	"bf16":                                  {"fp16"},
	"fp16":                                  {"bf16"},
	"recompute-granularity":                 {"recompute-modules", "recompute-method", "recompute-num-layers", "recompute-activations"},
	"pipeline-model-parallel-layout":        splits,
	"num-virtual-stages-per-pipeline-rank":  splits,
	"num-layers-per-virtual-pipeline-stage": splits,
	"pipeline-model-parallel-size":          splits,
	"cuda-graph-impl":                       {"cuda-graph-modules", "cuda-graph-scope", "enable-cuda-graph", "external-cuda-graph"},
}

var splits = []string{
	"pipeline-model-parallel-layout", "num-virtual-stages-per-pipeline-rank", "num-layers-per-virtual-pipeline-stage",
	"virtual-pipeline-model-parallel-size", "decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers",
	"account-for-embedding-in-pipeline-split", "account-for-loss-in-pipeline-split",
}

// merge replaces settings of a base by the given ones.
func merge(base map[string]any, settings map[string][]string) map[string]any {
	out := map[string]any{}
	for key, v := range base {
		out[strings.ReplaceAll(strings.TrimLeft(key, "-"), "_", "-")] = v
	}
	for name := range settings {
		for _, gone := range excludes[name] {
			delete(out, gone)
		}
	}
	for name, words := range settings {
		out[name] = words
	}
	return out
}

// assumed sets what a model without arguments leaves open, and returns notes about it.
func assumed(base map[string]any, settings map[string][]string, batched bool, s *plan.Setup) (notes []string) {
	words := []string{}
	for _, name := range slices.Sorted(maps.Keys(base)) {
		if _, given := settings[name]; given || name == "sequence-parallel" && s.Layout.TP == 1 {
			continue
		}
		words = append(words, "--"+name)
		if v := base[name]; v != true {
			words = append(words, fmt.Sprint(v))
		}
	}
	if !batched {
		// Twice as many microbatches as stages fill the pipeline.
		l := s.Layout
		s.Batch.Global = s.Batch.Micro * l.DP() * l.PP * max(l.VPP, 2)
		words = append(words, "--global-batch-size", fmt.Sprint(s.Batch.Global))
	}
	return append(notes, "assumed where nothing else was said: "+strings.Join(words, " "))
}
