// This file owns the settings that save memory: recompute, offload, the paged stash,
// graphs.

package megatron

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// graphModules are the names that --cuda-graph-modules accepts.
var (
	graphModules = []string{"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full", "full_iteration", "full_iteration_inference"}
)

// These are defaults. defaultElements is the smallest tensor that is offloaded,
// defaultFactor the size of the stash over balanced rows, and defaultWarmup how many steps
// run before graphs are captured.
const (
	defaultElements = 1 << 20
	defaultFactor   = 1.10
	defaultWarmup   = 3
)

func readMemory(r *reader, s *plan.Setup, _ Options) error {
	for _, read := range []func(*reader, *plan.Setup) error{readRecompute, readOffload, readStash, readGraph} {
		if err := read(r, s); err != nil {
			return err
		}
	}
	return nil
}

func readRecompute(r *reader, s *plan.Setup) error {
	granularity := r.word("recompute-granularity", "", "full", "selective")
	if r.flag("recompute-activations") {
		granularity = "selective"
	}
	method := r.word("recompute-method", "", "uniform", "block")
	layers := r.positive("recompute-num-layers", 0)
	// The names that Megatron-LM had until 2022.
	old, count := r.word("activations-checkpoint-method", "", "uniform", "block"), r.positive("activations-checkpoint-num-layers", 1)
	if r.flag("checkpoint-activations") && old == "" {
		old = "uniform"
	}
	if old != "" && granularity == "" {
		granularity, method, layers = "full", old, count
	}
	modules := r.modules("recompute-modules", memory.Recompute)
	if r.flag("moe-layer-recompute") {
		if granularity == "full" {
			return fmt.Errorf("--moe-layer-recompute excludes --recompute-granularity full; keep one")
		}
		granularity = "selective"
		modules = append(slices.DeleteFunc(modules, func(m string) bool { return m == "moe" }), "moe")
	}
	switch granularity {
	case "":
		if len(modules) > 0 || method != "" || layers > 0 {
			r.warn("recompute-granularity", "without it, --recompute-modules, --recompute-method and --recompute-num-layers have no effect")
		}
	case "full":
		if method == "" || layers == 0 {
			return fmt.Errorf("--recompute-granularity full needs --recompute-method uniform or block and --recompute-num-layers")
		}
		s.Recompute = plan.Recompute{Full: true, Method: method, Layers: layers}
	case "selective":
		if method != "" || layers > 0 {
			return fmt.Errorf("--recompute-granularity selective excludes --recompute-method and --recompute-num-layers; drop them, or use full")
		}
		if modules == nil {
			modules = []string{"core_attn"}
		}
		s.Recompute = plan.Recompute{Modules: modules}
	}
	return nil
}

func readOffload(r *reader, s *plan.Setup) error {
	on := r.flag("fine-grained-activation-offloading")
	modules := r.modules("offload-modules", memory.Offload)
	share := r.share("activation-offload-fraction", 1)
	elements := r.count("min-offloaded-tensor-size", defaultElements)
	delta := r.number("delta-offload-bytes-across-pp-ranks", 0)
	inflight := r.count("fine-grained-offloading-max-inflight-offloads", 0)
	layers := r.count("cpu-offloading-num-layers", 0)
	weights := r.flag("cpu-offloading-weights")
	switch {
	case on && layers > 0:
		return fmt.Errorf("--fine-grained-activation-offloading excludes --cpu-offloading-num-layers; keep one")
	case on && len(modules) == 0:
		return fmt.Errorf("--fine-grained-activation-offloading needs --offload-modules; for instance moe_act")
	case !on && len(modules) > 0:
		return fmt.Errorf("--offload-modules needs --fine-grained-activation-offloading")
	case delta < 0 || delta > 1<<50:
		return fmt.Errorf("--delta-offload-bytes-across-pp-ranks %g must not be negative", delta)
	case layers >= len(s.Model.Layers) && layers > 0:
		return fmt.Errorf("--cpu-offloading-num-layers %d must be less than the %d layers of the model", layers, len(s.Model.Layers))
	case layers > 0 && s.Layout.PP > 1:
		return fmt.Errorf("--cpu-offloading-num-layers excludes --pipeline-model-parallel-size %d; use --fine-grained-activation-offloading", s.Layout.PP)
	case layers > 0 && (s.Recompute.Full || len(s.Recompute.Modules) > 0):
		return fmt.Errorf("--cpu-offloading-num-layers excludes recomputation; drop --recompute-granularity")
	}
	if weights {
		r.warn("cpu-offloading-weights", "weights are counted as staying on the device")
	}
	s.Offload.Layers = layers
	if !on {
		return nil
	}
	if share == 0 {
		r.warn("activation-offload-fraction", "a fraction of 0 offloads nothing")
		return nil
	}
	if s.Recompute.Full && s.Recompute.Method == "uniform" {
		r.warn("offload-modules", "all layers are recomputed (--recompute-granularity full), so nothing is left to offload")
	}
	o := &s.Offload
	o.Modules, o.Delta, o.MaxInflight = modules, memory.Bytes(delta), inflight
	// Defaults are stored as zero, so equal jobs have equal setups.
	if share != 1 {
		o.Fraction = share
	}
	if elements != defaultElements {
		o.MinElements = int64(max(elements, 1))
	}
	return nil
}

func readStash(r *reader, s *plan.Setup) error {
	on := r.flag("moe-paged-stash")
	capacity := r.number("moe-expert-rank-capacity-factor", 0)
	factor := r.number("moe-paged-stash-buffer-size-factor-cuda", defaultFactor)
	host := r.number("moe-paged-stash-buffer-size-factor-cpu", 0)
	switch {
	case capacity < 0:
		return fmt.Errorf("--moe-expert-rank-capacity-factor %g must not be negative", capacity)
	case on && capacity == 0:
		return fmt.Errorf("--moe-paged-stash needs --moe-expert-rank-capacity-factor; for instance 1.5")
	case on && !hasExperts(s.Model):
		return fmt.Errorf("--moe-paged-stash needs experts; give --num-experts, or drop it")
	}
	if capacity > 0 && capacity < 1 {
		r.warn("moe-expert-rank-capacity-factor", fmt.Sprintf("%g leaves room for fewer rows than balanced routing sends, so every step overflows; give 1 or more, such as 1.5", capacity))
	}
	s.Stash.RankCapacity = capacity
	if !on {
		return nil
	}
	s.Stash.Modules = memory.MegatronModules(memory.Stash)
	// A negative factor sizes the stash from what a step needed, which is what a setup
	// without a factor means.
	s.Stash.Factor, s.Stash.HostFactor = max(factor, 0), max(host, 0)
	return nil
}

func readGraph(r *reader, s *plan.Setup) error {
	impl := r.word("cuda-graph-impl", "none", "none", "local", "transformer_engine", "full_iteration")
	local, external := r.flag("enable-cuda-graph"), r.flag("external-cuda-graph")
	otherwise := defaultWarmup
	switch {
	case local:
		impl = "local"
	case external: // the old name, under which graphs were captured before the first step
		impl, otherwise = "transformer_engine", 0
	}
	warmup := r.count("cuda-graph-warmup-steps", otherwise)
	modules := r.list("cuda-graph-modules", graphModules...)
	old := r.list("cuda-graph-scope", graphModules...)
	if len(modules) > 0 && len(old) > 0 {
		return fmt.Errorf("--cuda-graph-scope is the old name of --cuda-graph-modules; give one of them")
	}
	modules = append(modules, old...)
	switch {
	case slices.Contains(modules, "full_iteration") && len(modules) > 1:
		return fmt.Errorf("--cuda-graph-modules full_iteration captures everything; drop the other modules")
	case slices.Contains(modules, "full_iteration") && impl != "none":
		impl = "full_iteration"
	case slices.Contains(modules, "full_iteration_inference"):
		return nil
	case impl == "full_iteration" && len(modules) > 0:
		return fmt.Errorf("--cuda-graph-impl full_iteration captures everything; drop --cuda-graph-modules")
	}
	switch impl {
	case "none":
		if len(modules) > 0 {
			r.warn("cuda-graph-modules", "nothing is captured without --cuda-graph-impl")
		}
	case "full_iteration":
		s.Graph.Scopes = []string{"full_iteration"}
	default:
		if len(modules) == 0 || slices.Contains(modules, "full") {
			modules = wholeLayer(s)
		} else if err := keepBorders(r, s, modules, impl == "local"); err != nil {
			return err
		}
		s.Graph.Scopes, s.Graph.Local = modules, impl == "local"
	}
	switch {
	case len(s.Graph.Scopes) == 0 || s.Graph.Local: // Megatron's own graphs are captured after one step
	case warmup == 0:
		s.Graph.Warmup = -1
	case warmup != defaultWarmup:
		s.Graph.Warmup = warmup
	}
	return nil
}

// keepBorders removes from offloading what Megatron-LM does not offload if only parts of a
// layer are captured. The input of a norm on the border of a graph stays on the device, and
// the job runs. What Megatron-LM refuses is an error.
func keepBorders(r *reader, s *plan.Setup, scopes []string, local bool) error {
	has := func(scope string) bool { return slices.Contains(scopes, scope) }
	var left []string
	for _, m := range s.Offload.Modules {
		border := m == "attn_norm" && has("attn")
		for _, l := range s.Model.Layers {
			// The few dense layers of a model with experts count like the others.
			moe := l.MoE != nil && (has("attn") || has("moe_router"))
			border = border || m == "mlp_norm" && (moe || l.Dense != nil && has("attn") != has("mlp"))
		}
		switch {
		case local && !inExperts(m):
			return fmt.Errorf("--offload-modules %s excludes --cuda-graph-impl local; use transformer_engine, or drop it", m)
		case has("moe"):
			return fmt.Errorf("--offload-modules %s excludes --cuda-graph-modules moe; capture moe_router instead, or drop it", m)
		case border:
			left = append(left, m)
		}
	}
	if len(left) == 0 {
		return nil
	}
	r.warn("offload-modules", fmt.Sprintf("Megatron-LM does not move %s where --cuda-graph-modules %s captures up to it, so it is counted on the device",
		strings.Join(left, " and "), strings.Join(scopes, " ")))
	s.Offload.Modules = slices.DeleteFunc(slices.Clone(s.Offload.Modules), func(m string) bool { return slices.Contains(left, m) })
	if len(s.Offload.Modules) == 0 {
		s.Offload = plan.Offload{}
	}
	return nil
}

// wholeLayer returns every scope that some layer of the model has.
func wholeLayer(s *plan.Setup) (scopes []string) {
	has := map[string]bool{}
	for _, l := range s.Model.Layers {
		has["attn"] = has["attn"] || l.Attention != nil || l.MLA != nil
		has["mlp"] = has["mlp"] || l.Dense != nil
		has["moe"] = has["moe"] || l.MoE != nil
		has["mamba"] = has["mamba"] || l.Mamba != nil
	}
	for _, name := range []string{"attn", "mlp", "moe", "mamba"} {
		if has[name] {
			scopes = append(scopes, name)
		}
	}
	return scopes
}
