// This file owns the tests of what a search says about its choices.

package search

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// Impossible combinations are never chosen, and their reasons say why.
func TestConflictsAreExplained(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*plan.Setup)
		module string
		action memory.Choice
		says   string
	}{
		"overlap":  {func(s *plan.Setup) { s.Layout.OverlapEP = true }, "moe", memory.Recompute, "drop the overlap"},
		"shared":   {func(s *plan.Setup) { s.Kernels.SharedExpertOverlap = true }, "shared_experts", memory.Recompute, "overlap"},
		"grouped":  {func(s *plan.Setup) { s.Kernels.GroupedGEMM = false }, "moe_act", memory.Recompute, "moe-grouped-gemm"},
		"captured": {func(s *plan.Setup) { s.Graph.Scopes = []string{"attn"} }, "attn_norm", memory.Offload, "captured"},
		"fused":    {func(s *plan.Setup) { s.Kernels.OpFuser = true }, "expert_fc1", memory.Offload, "fused_group_mlp"},
		"layers":   {func(s *plan.Setup) { s.Offload.Layers = 2 }, "core_attn", memory.Offload, "whole layers"},
	} {
		s := small(t)
		c.change(s)
		if name == "layers" {
			if why := noOffload(s, c.module); !strings.Contains(why, c.says) {
				t.Errorf("%s: %q", name, why)
			}
			continue
		}
		r, err := Policy(s, Options{Budget: peakOf(t, s) * 7 / 10})
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		i := slices.IndexFunc(r.Modules, func(v ModuleDecision) bool { return v.Module == c.module && v.Choice == c.action })
		if i < 0 {
			t.Errorf("%s: nothing is said about %s of %s", name, c.action, c.module)
			continue
		}
		if v := r.Modules[i]; v.Possible || v.Chosen || !strings.Contains(v.Reason, c.says) || !strings.Contains(v.Reason, "impossible") {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

// With fused experts a search offloads the module that covers them, with as many bytes as
// the covered modules have.
func TestFusedExpertsAreOffloaded(t *testing.T) {
	var bytes memory.Bytes
	for _, fused := range []bool{false, true} {
		s := small(t)
		s.Kernels.OpFuser = fused
		p, err := newProblem(s, Options{Budget: 1})
		if err != nil {
			t.Fatal(err)
		}
		if slices.Contains(p.off, "fused_group_mlp") != fused || slices.Contains(p.off, "moe_act") == fused {
			t.Fatalf("fused is %v, and %v can be offloaded", fused, p.off)
		}
		var n memory.Bytes
		for _, k := range p.left(0) {
			for _, b := range k.moved {
				n += b
			}
		}
		if fused && n != bytes || n == 0 {
			t.Errorf("fused experts can move %d bytes, the others %d", n, bytes)
		}
		bytes = n
	}
}

// attn_proj is offloaded only together with core_attn.
func TestProjectionNeedsAttention(t *testing.T) {
	p, err := newProblem(small(t), Options{Budget: 1})
	if err != nil {
		t.Fatal(err)
	}
	for _, set := range p.allowed(p.off, memory.Offload) {
		if n := names(p.off, set); has(n, "attn_proj") && !has(n, "core_attn") {
			t.Errorf("%v is allowed", n)
		}
	}
}

// reasonsFor lists what a search decided about a module, a line for each choice.
func reasonsFor(r *Result, module string) string {
	var lines []string
	for _, v := range r.Modules {
		if v.Module == module {
			lines = append(lines, fmt.Sprintf("%s %s: %s", v.Module, v.Choice, v.Reason))
		}
	}
	return strings.Join(lines, "\n")
}

// On an H200 the queries, keys and values of a layer take 9.7 ms over the link.
func TestReasons(t *testing.T) {
	s := deepseek(t, "h200", 16, 1, 16)
	r, err := Policy(s, Options{Budget: peakOf(t, s) * 9 / 10})
	if err != nil {
		t.Fatal(err)
	}
	text := reasonsFor(r, "core_attn")
	t.Log(text)
	for _, want := range []string{"core_attn offload: 512 MiB a layer, window ", " ms, copy ", "core_attn recompute: frees "} {
		if !strings.Contains(text, want) {
			t.Errorf("%q is not in %q", want, text)
		}
	}
	for _, v := range r.Modules {
		if v.Reason == "" || v.Chosen && !v.Possible {
			t.Errorf("%+v", v)
		}
	}
}

// With a slow link the reason says that the copy does not hide.
func TestDoesNotHide(t *testing.T) {
	s := deepseek(t, "h100", 8, 4, 32)
	g := *s.Hardware
	g.HostOut, g.HostIn, g.HostBoth = 2e9, 2e9, 4e9
	s.Hardware = &g
	r, err := Policy(s, Options{Budget: peakOf(t, s) * 9 / 10})
	if err != nil {
		t.Fatal(err)
	}
	if text := reasonsFor(r, "core_attn"); !strings.Contains(text, "does not hide") {
		t.Errorf("%q", text)
	}
}

func TestDescribe(t *testing.T) {
	full := plan.Recompute{Full: true, Method: "uniform", Layers: 1}
	for want, x := range map[string]struct {
		r       plan.Recompute
		offload []string
	}{
		"everything kept": {}, "recomputation of whole layers": {r: full}, "recomputation of the first 3 layers of each stage": {r: plan.Recompute{Full: true, Method: "block", Layers: 3}},
		"recomputation of a, b and offloading of c, d": {plan.Recompute{Modules: []string{"a", "b"}}, []string{"c", "d"}}, "offloading of c": {offload: []string{"c"}},
	} {
		if got := describe(x.r, x.offload); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
