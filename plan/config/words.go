// This file owns the short names that users may write instead of Megatron-LM's flags, and
// settings that Megatron-LM has no flag for.

package config

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/input"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// Word is a short name for a setting.
type Word struct{ Short, Long, Help string }

// Words lists the short names. A name without a long one stands for several flags of
// Megatron-LM, or for something that it has no flag for.
var Words = []Word{
	{"tp", "tensor-model-parallel-size", "tensor parallel"},
	{"pp", "pipeline-model-parallel-size", "pipeline parallel"},
	{"vpp", "num-virtual-stages-per-pipeline-rank", "chunks of a pipeline rank"},
	{"cp", "context-parallel-size", "context parallel"},
	{"ep", "expert-model-parallel-size", "expert parallel"},
	{"etp", "expert-tensor-parallel-size", "tensor parallel inside experts"},
	{"sp", "sequence-parallel", "sequence parallel (no value, or false)"},
	{"layout", "pipeline-model-parallel-layout", "pipeline layout string, such as Et*3|(tt|)*29m|L"},
	{"mbs", "micro-batch-size", "sequences of a microbatch"},
	{"gbs", "global-batch-size", "sequences of a step"},
	{"seq", "seq-length", "tokens of a sequence"},
	{"fraction", "activation-offload-fraction", "part of the groups that are offloaded"},
	{"precision", "", "bf16, fp16, fp32, fp8, blockwise, mxfp8 or nvfp4"},
	{"recompute", "", "modules to recompute, full, or none"},
	{"offload", "", "modules to offload to host memory, or none"},
	{"stash", "", "stash expert rows; the rows that a rank can receive over balanced rows, such as 1.5"},
	{"graph", "", "scopes to capture, full_iteration, or none"},
	{"fsdp", "", "sharding: params, grads, optim or none"},
	{"pool", "", "pool of gathered parameters: fixed, max, arena or recorded"},
	{"prefetch", "", "FSDP units gathered ahead"},
	{"loss", "", "cross entropy: native, native-fused or te"},
	{"dispatcher", "", "allgather, alltoall, deepep or hybridep"},
	{"routing", "", "natural, balanced, or rows of the fullest expert rank over the mean, such as 1.3"},
	{"counts", "", "file of routing counts"},
	{"trace", "", "the old name of counts"},
	{"expandable", "", "growing segments of the allocator (expandable_segments:True), which leave no holes"},
	{"offload-bytes", "", "part of the bytes that are offloaded, or one for each pipeline rank"},
}

// extras are the settings without a flag.
type extras struct {
	pool     string
	prefetch int
	routing  plan.Routing
	expand   *bool     // nil if it is not set
	byBytes  []float64 // one, or one for each pipeline rank
}

// translate replaces short words by flags.
func translate(given map[string][]string) (map[string][]string, extras, error) {
	t := translator{out: map[string][]string{}, by: map[string]string{}}
	for _, name := range slices.Sorted(maps.Keys(given)) {
		long := ""
		for _, w := range Words {
			if w.Short == name {
				long = w.Long
			}
		}
		switch {
		case long != "":
			t.set(name, long, given[name]...)
		case t.several(name, given[name]):
		default:
			t.set(name, name, given[name]...)
		}
	}
	t.implied()
	return t.out, t.extras, t.err
}

type translator struct {
	out    map[string][]string
	by     map[string]string // the word that set a flag first
	extras extras
	err    error
}

func (t *translator) set(from, flag string, words ...string) {
	if old, again := t.out[flag]; again && !slices.Equal(old, words) && t.err == nil {
		t.err = &memory.SettingError{Setting: from, Problem: "contradicts " + t.by[flag], Remedy: "keep one of them"}
	}
	if t.by[flag] == "" {
		t.by[flag] = from
	}
	t.out[flag] = append([]string{}, words...)
}

// fail notes the first error.
func (t *translator) fail(name, given, problem string) {
	if t.err == nil {
		t.err = &memory.SettingError{Setting: name, Asked: given, Problem: problem}
	}
}

// several handles words that stand for several flags or for none.
func (t *translator) several(name string, words []string) bool {
	one := strings.Join(words, " ")
	switch name {
	case "precision":
		t.precision(one)
	case "recompute":
		t.recompute(words)
	case "offload":
		t.offload(words)
	case "stash":
		if room, ok := input.Number(one); ok && room == 0 {
			t.fail(name, one, "leaves no room for rows; give 1 or more, such as 1.5")
		}
		t.set(name, "moe-paged-stash")
		t.set(name, "moe-expert-rank-capacity-factor", words...)
		t.set(name, "moe-token-dispatcher-type", "flex")
		t.set(name, "moe-flex-dispatcher-backend", "hybridep")
		t.set(name, "use-transformer-engine-op-fuser")
	case "graph":
		t.graph(words)
	case "fsdp":
		t.fsdp(one)
	case "loss":
		t.loss(one)
	case "dispatcher":
		t.dispatcher(one)
	case "pool":
		if one == "trace" { // the old name
			one = "recorded"
		}
		t.extras.pool = t.choice(name, one, "fixed", "max", "arena", "recorded")
	case "prefetch":
		if n := t.number(name, one, 1, 64); n == math.Trunc(n) {
			t.extras.prefetch = int(n)
		} else {
			t.fail(name, one, "is wrong; expected a whole number from 1 to 64")
		}
	case "routing":
		r := &t.extras.routing
		switch one {
		case "natural":
			r.Natural = true
		case "balanced":
			r.Imbalance = 1
		default:
			r.Imbalance = t.number(name, one, 1, 1e6)
		}
	case "counts", "trace":
		t.extras.routing.CountsFile = one
	case "expandable":
		on := t.choice(name, one, "true", "false", "") != "false"
		t.extras.expand = &on
	case "offload-bytes":
		for _, word := range commas(words) {
			t.extras.byBytes = append(t.extras.byBytes, t.number(name, word, 0, 1))
		}
	default:
		return false
	}
	return true
}

func (t *translator) choice(name, given string, among ...string) string {
	if !slices.Contains(among, given) {
		t.fail(name, given, "is unknown; choose from "+strings.TrimSuffix(strings.Join(among, ", "), ", "))
	}
	return given
}

func (t *translator) number(name, given string, least, most float64) float64 {
	f, ok := input.Number(given)
	if !ok || !(f >= least && f <= most) {
		t.fail(name, given, fmt.Sprintf("is wrong; expected a number from %g to %g", least, most))
		return 0
	}
	return f
}

func (t *translator) precision(p string) {
	if t.choice("precision", p, "bf16", "fp16", "fp32", "fp8", "blockwise", "mxfp8", "nvfp4"); t.err != nil {
		return
	}
	// The file's settings of other formats no longer apply.
	if p != "nvfp4" {
		t.set("precision", "fp4-format", "none")
		t.set("precision", "fp4-param-gather", "false")
	}
	if slices.Contains([]string{"bf16", "fp16", "fp32", "nvfp4"}, p) {
		t.set("precision", "fp8-format", "none")
		t.set("precision", "fp8-param-gather", "false")
	}
	switch p {
	case "fp32":
		t.set("precision", "bf16", "false")
	case "fp16":
		t.set("precision", "fp16")
	default:
		t.set("precision", "bf16")
	}
	switch p {
	case "fp8":
		t.set("precision", "fp8-format", "e4m3")
		t.set("precision", "fp8-recipe", "tensorwise")
	case "blockwise", "mxfp8":
		t.set("precision", "fp8-format", "e4m3")
		t.set("precision", "fp8-recipe", p)
	case "nvfp4":
		t.set("precision", "fp4-format", "e2m1")
	}
}

// modules splits a list at commas. Words such as none choose for all modules and stand alone.
func (t *translator) modules(name string, words []string, all ...string) []string {
	words = commas(words)
	for _, w := range all {
		if len(words) > 1 && slices.Contains(words, w) {
			t.fail(name, strings.Join(words, " "), fmt.Sprintf("cannot be: %s stands alone; leave out the others, or %s", w, w))
		}
	}
	return words
}

func (t *translator) recompute(words []string) {
	switch words = t.modules("recompute", words, "none", "full"); {
	case len(words) == 1 && words[0] == "none":
		t.set("recompute", "recompute-granularity", "none")
	case len(words) == 1 && words[0] == "full":
		t.set("recompute", "recompute-granularity", "full")
		t.set("recompute", "recompute-method", "uniform")
		t.set("recompute", "recompute-num-layers", "1")
	default:
		t.set("recompute", "recompute-modules", words...)
	}
}

func (t *translator) offload(words []string) {
	if words = t.modules("offload", words, "none"); len(words) == 1 && words[0] == "none" {
		t.set("offload", "fine-grained-activation-offloading", "false")
		t.set("offload", "offload-modules")
		return
	}
	t.set("offload", "offload-modules", words...)
}

func (t *translator) graph(words []string) {
	switch words = t.modules("graph", words, "none"); {
	case len(words) == 1 && (words[0] == "none" || words[0] == "full_iteration"):
		t.set("graph", "cuda-graph-impl", words[0])
	default:
		t.set("graph", "cuda-graph-modules", words...)
	}
}

func (t *translator) fsdp(level string) {
	switch t.choice("fsdp", level, "params", "grads", "optim", "none", "") {
	case "none":
		t.set("fsdp", "use-megatron-fsdp", "false")
		return
	case "", "params":
		level = "optim_grads_params"
	case "grads":
		level = "optim_grads"
	}
	t.set("fsdp", "use-megatron-fsdp")
	t.set("fsdp", "data-parallel-sharding-strategy", level)
}

func (t *translator) loss(kind string) {
	switch t.choice("loss", kind, "native", "native-fused", "te") {
	case "native":
		t.set("loss", "cross-entropy-loss-fusion", "false")
	case "native-fused", "te":
		t.set("loss", "cross-entropy-loss-fusion")
		t.set("loss", "cross-entropy-fusion-impl", strings.TrimSuffix(kind, "-fused"))
	}
}

func (t *translator) dispatcher(kind string) {
	switch t.choice("dispatcher", kind, "allgather", "alltoall", "deepep", "hybridep") {
	case "deepep", "hybridep":
		t.set("dispatcher", "moe-token-dispatcher-type", "flex")
		t.set("dispatcher", "moe-flex-dispatcher-backend", kind)
	default:
		t.set("dispatcher", "moe-token-dispatcher-type", kind)
	}
}

// commas splits lists that are written with commas.
func commas(words []string) []string {
	return strings.FieldsFunc(strings.Join(words, ","), func(c rune) bool { return c == ',' || c == ' ' })
}

// implied adds the flags that others need to have an effect.
func (t *translator) implied() {
	imply := func(flag, needs string, words ...string) {
		if _, given := t.out[flag]; !given {
			return
		}
		if _, given := t.out[needs]; !given {
			t.out[needs] = words
		}
	}
	imply("recompute-modules", "recompute-granularity", "selective")
	imply("offload-modules", "fine-grained-activation-offloading")
	imply("cuda-graph-modules", "cuda-graph-impl", "transformer_engine")
	imply("moe-flex-dispatcher-backend", "moe-token-dispatcher-type", "flex")
	imply("optimizer-offload-fraction", "optimizer-cpu-offload")
	imply("optimizer-cpu-offload", "use-precision-aware-optimizer")
	for _, flag := range []string{"exp-avg-dtype", "exp-avg-sq-dtype", "main-grads-dtype", "main-params-dtype"} {
		imply(flag, "use-precision-aware-optimizer")
	}
}

// apply sets what has no flag.
func (x extras) apply(s *plan.Setup) error {
	f := &s.Layout.FSDP
	if x.pool != "" || x.prefetch > 1 {
		if f.Shard != plan.ShardParameters {
			name := "prefetch"
			if x.pool != "" {
				name = "pool"
			}
			return &memory.SettingError{Setting: name, Problem: "is about gathered parameters", Remedy: "set fsdp to params"}
		}
		f.Pool, f.DoubleBuffer, f.Prefetch = x.pool, true, x.prefetch
	}
	if len(x.byBytes) > 0 {
		if len(s.Offload.Modules) == 0 {
			return &memory.SettingError{Setting: "offload-bytes", Problem: "needs modules to offload", Remedy: "set offload, such as to moe_act"}
		}
		if s.Offload.Fraction != 0 {
			return &memory.SettingError{Setting: "offload-bytes", Problem: "excludes fraction", Remedy: "keep one of them"}
		}
		s.Offload.ByBytes = true
		if s.Offload.Fraction = x.byBytes[0]; len(x.byBytes) > 1 {
			s.Offload.Fraction, s.Offload.Fractions = 0, x.byBytes
		}
	}
	if x.expand != nil {
		s.ExpandableSegments = *x.expand
	}
	s.Routing = x.routing
	return nil
}
