// Package plantest draws setups for tests: many unlike ones, always the same. Only tests
// import it.
package plantest

import (
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// values has what each field of a setup is drawn from. Half of the fields keep their zero
// value, except for those of the layout and the batch.
var values = map[string]any{
	"Layout.TP": []int{1, 2, 2, 4, 8}, "Layout.PP": []int{1, 2, 3, 4}, "Layout.VPP": []int{1, 1, 2}, "Layout.CP": []int{1, 1, 2, 4}, "Layout.EP": []int{1, 2, 4, 8, 16, 32},
	"Layout.ETP": []int{0, 1, 1, 2}, "Layout.GroupSize": []int{0, 0, 6}, "Layout.VocabMultiple": []int{0, 64, 1000},
	"Layout.FSDP.Shard": []plan.ShardLevel{plan.NoShard, plan.NoShard, plan.ShardOptimizer, plan.ShardGradients, plan.ShardParameters, plan.ShardParameters},
	"Layout.FSDP.Outer": []int{0, 2}, "Layout.FSDP.Prefetch": []int{1, 2},
	"Layout.FSDP.Pool":     []string{"", "fixed", "max", "arena", "recorded"},
	"Batch.Micro":          []int{1, 2, 3},
	"Batch.Seq":            []int{512, 4096, 5120},
	"Precision.Params":     []plan.Format{plan.BF16, plan.BF16, plan.FP16, plan.FP32},
	"Precision.Compute":    []plan.Format{plan.BF16, plan.FP8, plan.MXFP8, plan.NVFP4},
	"Precision.PlainFirst": []int{1, 2}, "Precision.PlainLast": []int{1, 3},
	"Precision.MainGrads": []plan.Format{plan.BF16, plan.FP32, plan.FP16},
	"Optimizer.Kind":      []string{"adam", "sgd", "muon", "dist_muon"}, "Optimizer.Instances": []int{1, 2},
	"Optimizer.MainParams": []plan.Format{plan.FP32, plan.FP16}, "Optimizer.MainGrads": []plan.Format{plan.FP32, plan.BF16},
	"Optimizer.Moment1": []plan.Format{plan.FP32, plan.FP8, plan.BF16}, "Optimizer.Moment2": []plan.Format{plan.FP32, plan.FP16},
	"Optimizer.OffloadFraction": []float64{0.25, 1},
	"Kernels.Attention":         []string{"flash", "fused", "unfused"}, "Kernels.Dropout": []float64{0.1}, "Kernels.AttentionDropout": []float64{0.1},
	"Kernels.Loss": []string{"native", "native-fused", "te"}, "Kernels.Dispatcher": []string{"allgather", "alltoall", "deepep", "hybridep"},
	"Kernels.CapacityFactor": []float64{1, 1.5}, "Kernels.WgradDeferral": []int{1, 3}, "Kernels.CPComm": []string{"p2p", "a2a"},
	"Recompute.Method": []string{"uniform", "block"}, "Recompute.Layers": []int{1, 2},
	"Recompute.Modules":   [][]string{{"layernorm"}, {"mlp"}, {"moe_act", "core_attn"}, {"moe"}, {"mla_up_proj", "shared_experts"}},
	"Offload.Modules":     [][]string{{"core_attn"}, {"attn_norm", "qkv_linear"}, {"expert_fc1", "moe_act"}, {"attn_proj", "mlp_norm"}},
	"Offload.Fraction":    []float64{0.4, 1},
	"Offload.MinElements": []int64{1, 1 << 24}, "Offload.Delta": []int64{100 << 20}, "Offload.MaxInflight": []int{2}, "Offload.Layers": []int{0, 1},
	"Stash.Modules": [][]string{{"expert_fc1"}, {"expert_fc1", "moe_act"}}, "Stash.RankCapacity": []float64{1.5}, "Stash.Factor": []float64{1.2},
	"Stash.HostFactor": []float64{0.5}, "Stash.PageBytes": []int64{1 << 20},
	"Graph.Scopes": [][]string{{"attn"}, {"attn", "moe_router"}, {"moe"}, {"mlp"}, {"full_iteration"}}, "Graph.Warmup": []int{-1, 1, 3},
	"Routing.Imbalance": []float64{1, 1.3},
	"Budget":            []int64{20 << 30, 100 << 30}, "HostMemory": []int64{300 << 30}, "Layout.NodeGPUs": []int{0, 0, 4, 16},
}

// left has the fields that are not drawn as the others are.
var left = []string{"Offload.Fractions", "Model", "Hardware", "Layout.World", "Layout.Stages", "Batch.Global", "Routing.CountsFile"}

// models are small enough to be quick, and unlike: dense layers, experts of several kinds,
// grouped and latent attention, state-space layers and heads for later tokens.
var models = []string{"llama-3-70b", "mixtral-8x7b", "deepseek-v3", "qwen3-30b-a3b", "nemotron-h-8b", "gpt-oss-20b", "jamba-1.5-large", "tiny-deepseek", "qwen3-next-80b-a3b"}

// Draw returns setup i, and the fields that it sets in words. The setup may be one that
// [plan.Setup.Normalise] refuses.
func Draw(i int) (*plan.Setup, string) {
	d := &drawer{number: uint64(i)}
	s := &plan.Setup{}
	name := pick(d, "Model", models)
	m, err := model.Preset(name)
	if err != nil {
		panic(err)
	}
	n := min(len(m.Layers), pick(d, "Layers", []int{4, 7, 8, 12}))
	m.Layers = m.Layers[:n]
	s.Model = m
	d.model(m)
	d.said = append(d.said, fmt.Sprintf("%s:%d", name, n))
	d.fill("", reflect.ValueOf(s).Elem())
	if o := &s.Offload; len(o.Modules) > 0 && pick(d, "Offload.Fractions", []bool{false, false, true}) {
		o.Fraction, o.Fractions = 0, nil
		for rank := range s.Layout.PP {
			o.Fractions = append(o.Fractions, []float64{0.5, 0, 1, 0.25}[(i+rank)%4])
		}
		d.said = append(d.said, fmt.Sprintf("Offload.Fractions=%v", o.Fractions))
	}
	if gpu := pick(d, "Hardware", []string{"", "a100", "h100", "b200"}); gpu != "" {
		if s.Hardware, err = hardware.ByName(gpu); err != nil {
			panic(err)
		}
		d.said = append(d.said, gpu)
	}
	l := &s.Layout
	l.World = l.PP * max(l.TP*l.CP, max(l.ETP, 1)*l.EP) * pick(d, "Layout.World", []int{1, 2, 3, 8})
	s.Batch.Global = s.Batch.Micro * max(l.World/(l.TP*l.PP*l.CP), 1) * pick(d, "Batch.Global", []int{2, 4, 6, 12})
	d.said = append(d.said, fmt.Sprintf("World=%d Global=%d", l.World, s.Batch.Global))
	return s, strings.Join(d.said, " ")
}

// model changes what models of one kind differ in: tied embeddings, heads for later tokens,
// grouped attention and shared experts.
func (d *drawer) model(m *model.Model) {
	if pick(d, "Tied", []bool{false, false, true}) {
		m.Tied = true
		d.said = append(d.said, "tied")
	}
	if depth := pick(d, "MTP", []int{0, 0, 1, 2}); m.MTP == nil && depth > 0 {
		m.MTP = &model.MTP{Depth: depth, Layers: m.Layers[len(m.Layers)-1:]}
	}
	if m.MTP != nil {
		m.MTP.Repeated = pick(d, "Repeated", []bool{false, true})
		d.said = append(d.said, fmt.Sprintf("mtp %d repeated %t", m.MTP.Depth, m.MTP.Repeated))
	}
	if pick(d, "KVHeads", []int{0, 0, 1}) == 1 {
		for i, l := range m.Layers {
			if l.Attention != nil {
				a := *l.Attention
				a.KVHeads = max(1, a.KVHeads/4)
				m.Layers[i].Attention = &a
			}
		}
		d.said = append(d.said, "fewer kv heads")
	}
}

type drawer struct {
	number uint64
	said   []string
}

// of returns the random numbers of a field. They do not depend on other fields, so that a
// new one changes no other.
func (d *drawer) of(field string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(field))
	return rand.New(rand.NewPCG(d.number, h.Sum64()))
}

func pick[T any](d *drawer, field string, of []T) T { return of[d.of(field).IntN(len(of))] }

// fill draws the fields of a structure. It panics for a field that has no values, so that
// a new one gets some.
func (d *drawer) fill(path string, v reflect.Value) {
	for i := range v.NumField() {
		name := strings.TrimPrefix(path+"."+v.Type().Field(i).Name, ".")
		f := v.Field(i)
		always := strings.HasPrefix(name, "Batch.") || strings.HasPrefix(name, "Layout.") && !strings.HasPrefix(name, "Layout.FSDP.")
		of, known := values[name]
		rng := d.of(name)
		switch {
		case slices.Contains(left, name):
		case f.Kind() == reflect.Struct:
			if name == "Layout" || name == "Batch" || rng.IntN(3) > 0 {
				d.fill(name, f)
			}
		case f.Kind() == reflect.Bool:
			if rng.IntN(4) == 0 {
				f.SetBool(true)
				d.said = append(d.said, name)
			}
		case !known:
			panic("the field " + name + " of a setup is new: give it values in internal/plantest")
		default:
			list := reflect.ValueOf(of)
			x := list.Index(rng.IntN(list.Len()))
			if always || rng.IntN(2) == 0 {
				f.Set(x.Convert(f.Type()))
				if !x.IsZero() {
					d.said = append(d.said, fmt.Sprintf("%s=%v", name, x))
				}
			}
		}
	}
}
