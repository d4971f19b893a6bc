// This file owns the way from a command line to a job: its model, hardware, budget and
// routing, and the errors about them.

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/config"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/megatron"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/plan/routing"
)

// jobFlags are the flags that describe a job, beside its settings.
type jobFlags struct {
	model, config, megatron string
	launch                  string
	gpu, doctor             string
	gpus, vocab             int
	budget, routing         string
	host                    string // memory of a node
	nodeGPUs                int
	env                     []string // NAME=VALUE
	anyLayout               bool     // whether layouts are searched

	stdin func() io.Reader // what --megatron - and --launch - read

	// modelFlag is the flag that named the model, for errors about it.
	modelFlag string
	counted   int     // expert ranks of the routing counts that --routing names
	skew      float64 // that --routing names, or 0
	input     config.Input
	args      map[string]any // the arguments of Megatron-LM that the job was made of
}

// given returns the arguments that describe the job, to say what must change in them: those
// of a file without the settings of the command line, or all if a model has none. It returns
// nil if neither is known.
func (j *jobFlags) given(s *plan.Setup) *planview.Given {
	if _, err := model.Preset(j.model); j.launch == "" && (j.config != "" || j.model != "" && err == nil) {
		return &planview.Given{Args: j.args, Setup: s}
	}
	if j.megatron == "" || j.launch != "" {
		return nil
	}
	g := &planview.Given{File: j.megatron, Args: j.args, Setup: s}
	if g.File == "-" {
		g.File = "standard input"
	}
	in := j.input
	in.Settings, in.Args = nil, func(args map[string]any) { g.Args = args }
	if own, _, err := config.Resolve(in); err == nil {
		g.Setup = own
	} else {
		g.Args = j.args // the file needs settings, so they count as its own
	}
	return g
}

// asGiven returns the setup with the layout that is given. If layouts are searched, that one
// need not divide the batch over the GPUs, and then it has one replica.
func (j *jobFlags) asGiven(s *plan.Setup) *plan.Setup {
	if _, err := s.Normalise(); err == nil || !j.anyLayout {
		return s
	}
	one := *s
	one.Layout.World = 0
	return &one
}

// files returns the files that the flags may name.
func (j *jobFlags) files() []flagFile {
	return []flagFile{{"model", j.model}, {"config", j.config}, {"megatron", j.megatron}, {"launch", j.launch}, {"gpu", j.gpu}, {"doctor", j.doctor}}
}

// setup returns the job, and notes about what was assumed. All its errors are errors of
// usage.
func (j *jobFlags) setup(w planWords) (*plan.Setup, []string, error) {
	if len(w.rest) > 0 {
		if near := spell.Nearest(w.rest[0], []string{"explain", "ring", "scan", "validate"}); near != "" {
			return nil, nil, usagef("unexpected argument %q (did you mean %q?)", w.rest[0], near)
		}
		return nil, nil, usagef("unexpected argument %q", w.rest[0])
	}
	var found *examined
	err := plainNumbers(w.settings)
	if err != nil {
		return nil, nil, err
	}
	if j.doctor != "" {
		if found, err = j.readDoctor(); err != nil {
			return nil, nil, err
		}
	}
	in := config.Input{Hardware: j.gpu, GPUs: j.gpus, Vocab: j.vocab, Settings: w.settings}
	if found != nil && j.gpu == "" {
		in.Hardware = found.gpu
	}
	if in.Model, err = j.source(); err != nil {
		return nil, nil, err
	}
	in.Arguments = j.megatron != ""
	if j.modelFlag != "--launch" {
		in.Launch = j.launch
	}
	if in.Env, err = j.environment(); err != nil {
		return nil, nil, err
	}
	if j.megatron == "-" || j.launch == "-" {
		if in.Launch == "" {
			in.Model = "stdin"
		}
		if in.Data, err = j.readStdin(j.stdinFlag()); err != nil {
			return nil, nil, err
		}
	}
	if j.budget != "" {
		n, err := memory.ParseBytes(j.budget)
		if err != nil {
			return nil, nil, usagef("--budget: %w", err)
		}
		in.Budget = n
	}
	if err := j.route(in.Settings); err != nil {
		return nil, nil, err
	}
	in.Args = func(args map[string]any) { j.args = args }
	j.input = in
	s, notes, err := config.Resolve(in)
	if err != nil && j.anyLayout && j.gpus > 0 {
		// Perhaps only the layout that is given does not divide the batch over the GPUs.
		on := in
		on.GPUs = 0
		if fewer, more, none := config.Resolve(on); none == nil {
			s, err = fewer, nil
			s.Layout.World = j.gpus
			notes = slices.DeleteFunc(more, func(n string) bool { return strings.Contains(n, "the number of GPUs is not in the arguments") })
		}
	}
	if refused := j.refusal(err); refused != nil {
		return nil, nil, refused
	}
	if err != nil {
		return nil, nil, j.asTyped(j.planError(err), w.settings)
	}
	if found != nil {
		if err := found.apply(s, j.doctor); err != nil {
			return nil, nil, err
		}
		if _, err := hardware.ByName(found.gpu); err != nil {
			notes = append(notes, fmt.Sprintf("--doctor %s: the figures of %s stand for those of %s, except for the free memory", j.doctor, s.Hardware.Name, found.gpu))
		}
	}
	if h := s.Hardware; h != nil && h.Free > 0 && in.Budget > h.Free {
		return nil, nil, usagef("--budget %s is more than the %s that --doctor found free; give at most that, or leave --budget out for the %s that it leaves to a job",
			j.budget, planview.Size(h.Free), planview.Size(h.Usable))
	}
	if h := s.Hardware; h != nil && in.Budget > h.Memory {
		return nil, nil, usagef("--budget %s is more than %s has; give at most %s, or leave --budget out for the %s that it leaves to a job",
			j.budget, h.Name, planview.Size(h.Memory), planview.Size(h.Usable))
	}
	if err := j.setNode(s); err != nil {
		return nil, nil, err
	}
	if err := j.checkIdle(s, w.settings); err != nil {
		return nil, nil, err
	}
	n, err := s.Normalise()
	if err == nil && (n.Layout.EP > 1 || !j.anyLayout) {
		switch most := plan.MostImbalance(n.Model, n.Layout); {
		case j.skew > 1 && n.Layout.EP == 1:
			return nil, nil, usagef("--routing skewed:%s is impossible: with --ep 1 every rank has all experts; give --ep, or leave it out", figures(j.skew, -1))
		case j.skew > most:
			return nil, nil, usagef("--routing skewed:%s is impossible: with --ep %d a rank gets at most %g x the mean; give at most that", figures(j.skew, -1), n.Layout.EP, most)
		}
	}
	if err == nil && !j.anyLayout {
		if most := plan.MostImbalance(n.Model, n.Layout); n.Stash.RankCapacity > most {
			notes = append(notes, fmt.Sprintf("--moe-expert-rank-capacity-factor %s leaves room for more rows than a rank can get, which is %g x the balanced ones; give at most that", figures(n.Stash.RankCapacity, -1), most))
		}
	}
	if err == nil && j.counted > 0 && n.Layout.EP*n.Layout.ETP != j.counted {
		notes = append(notes, fmt.Sprintf("the routing counts have %d expert ranks, the job %d; their imbalance of %.3g is used unchanged", j.counted, n.Layout.EP*n.Layout.ETP, n.Routing.Imbalance))
	}
	return s, notes, nil
}

// setNode sets how many GPUs share a node, and its memory.
func (j *jobFlags) setNode(s *plan.Setup) error {
	s.Layout.NodeGPUs = j.nodeGPUs
	if j.host == "" {
		return nil
	}
	n, err := memory.ParseBytes(j.host)
	switch {
	case err != nil:
		return usagef("--host-memory: %w", err)
	case n < 1:
		return usagef("--host-memory %s is no memory; give a size such as 900GiB, or leave the flag out", j.host)
	case j.nodeGPUs == 0 && (s.Hardware == nil || s.Hardware.NodeGPUs == 0):
		return usagef("--host-memory needs the number of GPUs that share it; add --gpus-per-node, or --gpu")
	}
	s.HostMemory = n
	return nil
}

// hostFrom says where the host memory of a node comes from.
func (j *jobFlags) hostFrom(s *plan.Setup) string {
	switch {
	case s.HostMemory > 0:
		return "--host-memory"
	case s.Hardware != nil && s.Hardware.Free > 0:
		return "what is left of the " + planview.Size(s.Hardware.NodeMemory) + " that doctor found available"
	case s.Hardware != nil && s.Hardware.NodeMemory > 0:
		return "what a usual node of " + s.Hardware.Name + " leaves of " + planview.Size(s.Hardware.NodeMemory)
	}
	return ""
}

// environment returns the variables of --env.
func (j *jobFlags) environment() (map[string]string, error) {
	env := map[string]string{}
	for _, pair := range j.env {
		name, value, ok := strings.Cut(pair, "=")
		if _, twice := env[name]; twice {
			return nil, usagef("--env %s: %s is given twice; leave one of them out", pair, name)
		}
		if !ok || name == "" || strings.IndexAny(name, "0123456789") == 0 || strings.Trim(name, "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_") != "" {
			return nil, usagef("--env %s: expected a variable of the file with its value, such as NODES=4", pair)
		}
		env[name] = value
	}
	if len(env) > 0 && j.megatron+j.launch == "" && !strings.Contains(j.model, ".") {
		return nil, usagef("--env changes nothing without a file of arguments; give --megatron FILE, or leave it out")
	}
	return env, nil
}

// readStdin reads the file that a flag takes from standard input.
func (j *jobFlags) readStdin(flag string) ([]byte, error) {
	data, err := io.ReadAll(io.LimitReader(j.stdin(), input.Settings+1))
	switch {
	case err != nil:
		return nil, usagef("%s -: standard input cannot be read: %w", flag, input.Cause(err))
	case len(data) > input.Settings:
		return nil, usagef("%s -: standard input is larger than %s, the most that is read of such a file", flag, memory.Bytes(input.Settings).Short())
	}
	return data, nil
}

// stdinFlag returns the flag that reads standard input, or nothing.
func (j *jobFlags) stdinFlag() string {
	switch "-" {
	case j.megatron:
		return "--megatron"
	case j.launch:
		return "--launch"
	case j.doctor:
		return "--doctor"
	}
	return ""
}

// refusal returns the error about a job that the planner does not model, or nil. The
// command line is right and there is no answer, so it is no error of usage, except for a
// file that holds no job.
func (j *jobFlags) refusal(err error) error {
	var refused *megatron.Refused
	if !errors.As(err, &refused) {
		return nil
	}
	flag, where := j.modelFlag, cmp.Or(j.launch, j.megatron, j.config, j.model)
	if j.launch != "" {
		flag = "--launch"
	}
	if refused.NoJob {
		remedy := ""
		if n := len(refused.Variables); n > 0 {
			remedy = "; give "
			for i, v := range refused.Variables {
				remedy += []string{"", " and "}[min(i, 1)] + "--env " + v + "=VALUE"
			}
			if n > 3 {
				remedy = fmt.Sprintf("; give --env NAME=VALUE for each of %s", strings.Join(refused.Variables, ", "))
			}
		}
		return usagef("%s %s: %s%s", flag, where, refused.Text, remedy)
	}
	return fmt.Errorf("%s %s: cannot say: %s", flag, where, refused.Text)
}

// asTyped names settings in an error by their short names, except those that the command
// line or a file has under the long one.
func (j *jobFlags) asTyped(err error, settings map[string][]string) error {
	text, end := err.Error(), `([^-\w]|$)` // not in a longer name
	if strings.Contains(text, "did you mean") {
		end = "( )" // a flag that was meant is not changed, only one with its value
	}
	renamed := func(text, long, short string) string {
		return regexp.MustCompile("--"+long+end).ReplaceAllString(text, "--"+short+"${1}")
	}
	for _, w := range config.Words {
		_, short := settings[w.Short]
		_, long := settings[w.Long]
		if w.Long != "" && !long && (short || j.megatron == "") {
			text = renamed(text, w.Long, w.Short)
		}
	}
	for short, flags := range longNames {
		for _, long := range flags {
			if settings[short] != nil && settings[long] == nil {
				text = renamed(text, long, short)
			}
		}
	}
	return &usageError{text: text, cause: err}
}

// longNames are the flags that settings without one of their own become.
var longNames = map[string][]string{
	"stash": {"moe-expert-rank-capacity-factor", "moe-paged-stash"}, "offload": {"offload-modules"}, "recompute": {"recompute-modules"},
	"graph": {"cuda-graph-modules", "cuda-graph-impl"},
}

// offloads reports whether the command line names modules to offload.
func (j *jobFlags) offloads(settings map[string][]string) bool {
	words := slices.Concat(settings["offload"], settings["offload-modules"])
	return len(words) > 0 && !slices.Contains(words, "none")
}

// checkIdle returns an error if a setting of the command line changes nothing.
func (j *jobFlags) checkIdle(s *plan.Setup, settings map[string][]string) error {
	for _, name := range []string{"fraction", "activation-offload-fraction"} {
		if _, typed := settings[name]; typed && len(s.Offload.Modules) == 0 {
			if j.offloads(settings) {
				return usagef("--%s 0 offloads nothing of what --offload names; give a share above 0, or leave both out", name)
			}
			return usagef("--%s changes nothing without --offload, such as --offload moe_act; add that, or leave --%[1]s out", name)
		}
	}
	if slices.ContainsFunc(s.Model.Layers, func(l model.Layer) bool { return l.MoE != nil }) {
		return nil
	}
	for _, name := range []string{"dispatcher", "etp", "expert-tensor-parallel-size"} {
		if value, typed := settings[name]; typed && !slices.Equal(value, []string{"1"}) {
			return usagef("--%s changes nothing, because %s has no experts; leave it out", name, s.Model.Name)
		}
	}
	if j.routing != "" {
		return usagef("--routing changes nothing, because %s has no experts; leave it out", s.Model.Name)
	}
	return nil
}

// source returns what one of the three flags for a model names.
func (j *jobFlags) source() (name string, err error) {
	var found, flags []string
	for _, f := range []struct{ flag, value string }{{"--model", j.model}, {"--config", j.config}, {"--megatron", j.megatron}} {
		if f.value != "" {
			found, flags = append(found, f.value), append(flags, f.flag)
		}
	}
	switch {
	case len(found) > 0 && j.megatron != "" && j.launch != "":
		return "", usagef("--megatron and --launch both name a launch file; keep one")
	case len(found) == 0 && j.launch != "":
		found, flags = append(found, j.launch), append(flags, "--launch")
	case len(found) == 0:
		return "", usagef("no model is given; add --model NAME, --config config.json, --megatron FILE or --launch FILE, such as --model deepseek-v3")
	case len(found) > 1:
		return "", usagef("%s and %s both name a model; keep one", flags[0], flags[1])
	}
	if j.modelFlag == "" {
		j.modelFlag = flags[0]
	}
	if flags[0] == "--model" || found[0] == "-" && flags[0] != "--config" {
		return found[0], nil
	}
	// The flag means a file, even if a preset has the same name.
	info, err := os.Stat(found[0])
	if err == nil && info.IsDir() && flags[0] == "--config" {
		found[0] = filepath.Join(found[0], "config.json")
		info, err = os.Stat(found[0])
	}
	switch {
	case err != nil:
		return "", usagef("%s %s: the file cannot be read: %w", j.modelFlag, found[0], input.Cause(err))
	case info.IsDir():
		return "", usagef("%s %s is a folder; give a file in it", j.modelFlag, found[0])
	}
	if !strings.ContainsRune(found[0], os.PathSeparator) {
		found[0] = "." + string(os.PathSeparator) + found[0]
	}
	return found[0], nil
}

// counts are the settings that count something.
var counts = []string{"tp", "pp", "vpp", "cp", "ep", "etp", "mbs", "gbs", "seq", "prefetch"}

// plainNumbers returns an error if a setting that counts something is not written in decimal digits, as all numbers on a
// command line are. Files may have 1_000 or 4e3, as Python writes them.
func plainNumbers(settings map[string][]string) error {
	for _, w := range config.Words {
		for _, name := range []string{w.Short, w.Long} {
			if !slices.Contains(counts, w.Short) || name == "" || len(settings[name]) != 1 {
				continue
			}
			if value := settings[name][0]; !input.IsWhole(value) && !strings.EqualFold(value, "none") && value != "" {
				return usagef("--%s expects a whole number such as 8, got %q", name, value)
			}
		}
	}
	return nil
}

// route translates --routing into settings.
func (j *jobFlags) route(settings map[string][]string) error {
	kind, value, _ := strings.Cut(j.routing, ":")
	for _, word := range []string{"counts", "trace"} {
		if file, ok := settings[word]; ok {
			kind, value = "counts", strings.Join(file, " ")
			delete(settings, word)
		}
	}
	if _, err := strconv.ParseFloat(kind, 64); err == nil {
		kind, value = "skewed", kind
	}
	switch kind {
	case "":
		return nil
	case "natural", "balanced":
		settings["routing"] = []string{kind}
		return nil
	case "skewed":
		x, ok := input.Number(value)
		if !ok || !(x >= 1 && x <= 1e6) {
			return usagef("--routing %s: expected the rows of the fullest expert rank over the mean, from 1 to 1e6, such as skewed:1.3", j.routing)
		}
		j.skew = x
		settings["routing"] = []string{value}
		return nil
	case "counts", "trace": // trace is the old word
		if value == "" {
			return usagef("--routing %s: names no file; write counts:FILE, the file of routing counts", kind)
		}
		counts, err := readCounts(value)
		if err != nil {
			return usagef("--routing %s:%s: %w", kind, value, err)
		}
		j.counted = counts.Ranks
		settings["routing"], settings["counts"] = []string{strconv.FormatFloat(counts.Imbalance(), 'g', -1, 64)}, []string{value}
		return nil
	}
	return usagef("--routing %s is unknown; write natural, balanced, skewed:1.3 or counts:FILE", j.routing)
}

// mostCounts is the most bytes of a file of routing counts: ten million lines.
const mostCounts = 1 << 29

// readCounts reads a file of routing counts.
func readCounts(name string) (*routing.Counts, error) {
	in, err := input.Open(name, mostCounts)
	if err != nil {
		return nil, fmt.Errorf("the file cannot be read: %w", input.Cause(err))
	}
	defer in.Close()
	counts, err := routing.Read(in)
	return counts, input.Plain(err)
}

// planFlag names the flags for what the planner calls by the names of its fields.
var planFlag = map[string]string{"Model": "--model", "Launch": "--launch", "Hardware": "--gpu", "GPUs": "--gpus", "Vocab": "--vocab", "Budget": "--budget"}

// planError makes an error of usage out of what the planner refuses. Settings get the
// names of their flags.
func planError(err error) error { return (&jobFlags{}).planError(err) }

func (j *jobFlags) planError(err error) error {
	var wrong *memory.SettingError
	if !errors.As(err, &wrong) {
		return usagef("%w", input.Plain(err))
	}
	name, ok := planFlag[wrong.Setting]
	switch {
	case !ok:
		name = "--" + wrong.Setting
	case wrong.Setting == "Model" && j.modelFlag != "":
		name = j.modelFlag
	}
	plain := *wrong
	if flag := j.stdinFlag(); flag == name && strings.TrimSuffix(wrong.Asked, ".yaml") == "stdin" {
		plain.Asked = "-"
	}
	if wrong.Err == nil {
		return usagef("%s", plain.Named(name))
	}
	plain.Err = input.Plain(wrong.Err)
	return &usageError{text: plain.Named(name), cause: wrong.Err}
}
