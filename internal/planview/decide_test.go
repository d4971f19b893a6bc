// This file owns the tests of what a report says about groups.

package planview

import (
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/hardware"
	"github.com/stowage-dev/stowage/plan/model"
)

// experts is a setup of one mixture-of-experts layer.
func experts(t *testing.T) *plan.Setup {
	t.Helper()
	gpu, err := hardware.ByName("h100")
	if err != nil {
		t.Fatal(err)
	}
	return &plan.Setup{
		Model: &model.Model{Name: "toy", Hidden: 1024, Vocab: 1000, Layers: []model.Layer{{
			Attention: &model.Attention{Heads: 8, KVHeads: 8, HeadDim: 128}, MoE: &model.MoE{Experts: 8, TopK: 2, Width: 1024, Gated: true},
		}}},
		Hardware: gpu, Layout: plan.Layout{World: 1}, Batch: plan.Batch{Micro: 1, Global: 1, Seq: 4096},
		Kernels: plan.Kernels{GroupedGEMM: true, OpFuser: true},
	}
}

// A module that covers others offloads their groups, and the report says so.
func TestDecisionsOfCoveringModule(t *testing.T) {
	s := experts(t)
	s.Offload.Modules = []string{"fused_group_mlp"}
	notes, err := WithoutEffect(s)
	if err != nil || len(notes) > 0 {
		t.Errorf("fused_group_mlp has an effect, yet the notes are %v, %v", notes, err)
	}
	list, err := decisions(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		want := "keep"
		if d.Group == "expert_fc1" || d.Group == "moe_act" {
			want = "offload"
		}
		if d.Choice != want || want == "offload" && !strings.Contains(d.Reason, "fused_group_mlp") {
			t.Errorf("%s: %s (%s), want %s", d.Group, d.Choice, d.Reason, want)
		}
	}
}

// The stash takes the experts' rows and the input of their second product.
func TestDecisionsOfStash(t *testing.T) {
	s := experts(t)
	s.Stash.Modules = []string{"expert_fc1", "moe_act"}
	list, err := decisions(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range list {
		rows := d.Group == "expert_fc1" || d.Group == "moe_act" || d.Group == "experts"
		if rows != (d.Choice == "stash") {
			t.Errorf("%s: %s", d.Group, d.Choice)
		}
	}
}
