// This file owns the checks of settings: that names exist, that shares and factors are in
// range, and that sizes can be counted.

package plan

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// graphScopes are the parts of a layer that Megatron-LM captures.
var graphScopes = []string{"attn", "mamba", "mlp", "moe_router", "moe_preprocess", "moe", "full_iteration"}

func (s *Setup) checkSettings() error {
	for c, names := range [memory.Choices][]string{memory.Recompute: s.Recompute.Modules, memory.Offload: s.Offload.Modules, memory.Stash: s.Stash.Modules} {
		if err := knownModules(memory.Choice(c), names); err != nil {
			return err
		}
	}
	for _, x := range []struct {
		what        string
		names, list []string
	}{
		{"graph scope", s.Graph.Scopes, graphScopes},
		{"optimizer", []string{s.Optimizer.Kind}, []string{"adam", "sgd", "muon"}},
	} {
		if err := known(x.what, x.names, x.list); err != nil {
			return err
		}
	}
	if name := s.Layout.FSDP.Pool; name != "" {
		if _, err := bucket.ParsePoolKind(name); err != nil {
			return fmt.Errorf("there is no pool %q for sharded parameters; choose from %s", name, poolNames())
		}
	}
	if l := s.Layout; l.VPP > 1 && l.PP == 1 {
		return fmt.Errorf("vpp %d needs more than one pipeline rank; set vpp to 1, or pp to 2", l.VPP)
	}
	if err := memory.CheckOffload(s.Offload.Modules); err != nil {
		return fmt.Errorf("%w", err)
	}
	if r := s.Recompute; r.Full {
		if err := known("recompute method", []string{r.Method}, []string{"uniform", "block"}); err != nil {
			return err
		}
		if r.Layers < 1 {
			return fmt.Errorf("recompute layers are %d; it must be at least 1", r.Layers)
		}
	}
	return s.checkFactors()
}

// checkFactors returns an error if a share is outside of 0 to 1, or a factor is too small
// or not a number.
func (s *Setup) checkFactors() error {
	share := func(name string, f float64) error {
		if !(f >= 0 && f <= 1) {
			near := min(max(f, 0), 1)
			if math.IsNaN(f) {
				near = 1
			}
			return fmt.Errorf("%s %g is outside of 0 to 1; the nearest is %g", name, f, near)
		}
		return nil
	}
	if err := share("offload fraction", s.Offload.Fraction); err != nil {
		return err
	}
	if n := len(s.Offload.Fractions); n > 0 && n != s.Layout.PP {
		return fmt.Errorf("there are %d offload fractions for %d pipeline ranks; give one for each", n, s.Layout.PP)
	}
	for r, f := range s.Offload.Fractions {
		if !(f >= 0 && f <= 1) {
			return fmt.Errorf("offload fraction %g of pipeline rank %d is outside of 0 to 1; the nearest is %g", f, r, min(max(f, 0), 1))
		}
	}
	if err := share("optimizer offload fraction", s.Optimizer.OffloadFraction); err != nil {
		return err
	}
	for _, f := range []struct {
		name     string
		v, least float64
	}{
		{"routing imbalance", s.Routing.Imbalance, 1},
		{"--moe-expert-capacity-factor", s.Kernels.CapacityFactor, 0},
		{"--moe-expert-rank-capacity-factor", s.Stash.RankCapacity, 0}, {"--moe-paged-stash-buffer-size-factor-cuda", s.Stash.Factor, 0}, {"--moe-paged-stash-buffer-size-factor-cpu", s.Stash.HostFactor, 0},
		{"stash page", float64(s.Stash.PageBytes), 0},
		{"offload delta", float64(s.Offload.Delta), 0}, {"--min-offloaded-tensor-size", float64(s.Offload.MinElements), 0},
		{"budget", float64(s.Budget), 0},
	} {
		if !(f.v >= f.least && f.v <= mostBytes) {
			return fmt.Errorf("%s is %g; it must be at least %g and no more than can be counted", f.name, f.v, f.least)
		}
	}
	return nil
}

// mostBytes is the largest sum of bytes: a billion times a gigabyte, an eighth of what 64
// bits can hold.
const mostBytes = 1 << 60

// checkBounds returns an error if the bytes of a batch might not fit in 64 bits. It
// overestimates every walk: it counts every tensor of every layer and microbatch in flight,
// at eight bytes an element.
func (s *Setup) checkBounds() error {
	most, name := 1.0, ""
	for _, f := range []struct {
		name string
		v    float64
	}{{"routing imbalance", s.Routing.Imbalance}, {"--moe-expert-capacity-factor", s.Kernels.CapacityFactor}, {"--moe-expert-rank-capacity-factor", s.Stash.RankCapacity}} {
		if f.v > most {
			most, name = f.v, f.name
		}
	}
	switch {
	case s.boundOf(most) < mostBytes:
		return nil
	case s.boundOf(1) < mostBytes:
		return fmt.Errorf("%s %g makes more bytes of expert rows than can be counted; give a smaller one", name, most)
	}
	one := *s
	one.Batch.Global = s.Batch.Global / s.Microbatches()
	if one.boundOf(1) < mostBytes {
		return fmt.Errorf("--global-batch-size %d makes more microbatches than can be counted; give a smaller one", s.Batch.Global)
	}
	return fmt.Errorf("--micro-batch-size %d x --seq-length %d makes more bytes than can be counted; give fewer tokens", s.Batch.Micro, s.Batch.Seq)
}

// boundOf overestimates the bytes of a batch. Expert ranks get up to uneven times as many
// rows as balanced ones.
func (s *Setup) boundOf(uneven float64) float64 {
	l := s.Layout
	var width float64 // elements a token
	seq := float64(s.Batch.Seq)
	for _, x := range s.Model.Layers {
		width += 32 * float64(s.Model.Hidden)
		if x.Parallel() {
			width += mambaBound(x.Mamba)
		}
		switch {
		case x.Attention != nil:
			width += float64(x.Attention.Heads) * (8*float64(x.Attention.HeadDim) + 4*seq)
		case x.MLA != nil:
			width += float64(x.MLA.Heads) * (8*float64(x.MLA.Nope+x.MLA.Rope+x.MLA.V) + 4*seq)
		case x.Mamba != nil:
			width += mambaBound(x.Mamba)
		case x.DeltaNet != nil:
			width += 16 * float64(x.DeltaNet.ValueHeads*x.DeltaNet.ValueDim+x.DeltaNet.KeyHeads*x.DeltaNet.KeyDim)
		case x.Lightning != nil:
			width += 16 * float64(x.Lightning.Heads*x.Lightning.HeadDim)
		}
		if x.Dense != nil {
			width += 8 * float64(x.Dense.Width)
		}
		if x.MoE != nil {
			rows := float64(x.MoE.TopK) * float64(l.ETP) * uneven
			width += 8*rows*float64(s.Model.Hidden+x.MoE.Width) + 8*float64(x.MoE.SharedWidth) + 8*float64(x.MoE.Experts) + float64(l.EP*l.ETP)*float64(s.Model.Hidden)
		}
	}
	flight := float64(min(s.Microbatches(), l.PP*(l.VPP+2)+l.GroupSize*l.VPP))
	width = width*flight + 64*float64(s.Model.Vocab)*float64(1+s.Microbatches()) + seq
	return 8 * float64(s.Batch.Micro) * seq * width
}

// mambaBound overestimates the elements that a Mamba mixer has for one token.
func mambaBound(a *model.Mamba) float64 {
	return 16*float64(a.Inner) + float64(a.Groups)*(8*float64(a.State)+512) + float64(a.Inner)*float64(a.State)
}

// known returns an error if a name is not in a list.
func known(what string, names, list []string) error {
	for _, n := range names {
		if !slices.Contains(list, n) {
			return fmt.Errorf("unknown %s %q; choose from %s", what, n, strings.Join(list, ", "))
		}
	}
	return nil
}

// knownModules returns an error if Megatron-LM does not accept a module for a choice.
func knownModules(c memory.Choice, names []string) error {
	list := memory.MegatronModules(c)
	for _, n := range names {
		if _, ok := memory.LookupModule(n); ok && !slices.Contains(list, n) {
			return fmt.Errorf("%s is not one of Megatron-LM's %s modules; choose from %s", n, c, strings.Join(list, ", "))
		}
	}
	return known(c.String()+" module", names, list)
}

// poolNames lists the pools.
func poolNames() string {
	var names []string
	for _, k := range bucket.PoolKinds {
		names = append(names, k.String())
	}
	return strings.Join(names, ", ")
}
