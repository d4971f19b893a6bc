// This file owns what cases state together: facts that one case leaves to another of the
// same source, and the kind of a case that is not modelled.

package planvalidate

import (
	"reflect"
	"slices"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/model"
)

// source says where a case comes from.
type source struct {
	Repo  string `json:"repo"`
	Path  string `json:"path"`
	Paper string `json:"paper"`
	URL   string `json:"url"`
	// Changed has the commit that changed the measured values last, and its day.
	Changed [2]string `json:"values_last_changed"`
}

// unknown is the kind of a case that states too little to tell.
const unknown = "unknown"

// lacksLayout reports whether a case states neither how it is divided nor its size.
func (c record) lacksLayout() bool {
	return c.Layout == nil && c.Inferred == nil && c.GPUs == 0
}

// lacksBatch reports whether a case does not state its microbatch.
func (c record) lacksBatch() bool { return c.Batch == nil || c.Batch.Seq == 0 }

// completed adds the layout and batch that a published case lacks, from the first case of
// the same source and model that states them. Tables of one text are about one run unless
// they say otherwise.
func completed(c record, cases []record) record {
	if c.Model == nil || c.Source == (source{}) {
		return c
	}
	for _, o := range cases {
		if o.Source != c.Source || o.Model == nil || !reflect.DeepEqual(o.Model, c.Model) {
			continue
		}
		if c.lacksLayout() && !o.lacksLayout() {
			c.Layout, c.Inferred, c.GPUs = o.Layout, o.Inferred, o.GPUs
			if c.GPU == "" {
				c.GPU = o.GPU
			}
		}
		if c.lacksBatch() && !o.lacksBatch() {
			c.Batch = o.Batch
		}
	}
	return c
}

// statedKind returns the kind of a case without a setup, from what it states.
func statedKind(c record) string {
	s := &plan.Setup{Model: &model.Model{}}
	switch {
	case c.Model != nil:
		m, err := c.Model.model()
		switch {
		case err == nil:
			s.Model = m
		case c.Model.Experts > 0:
			s.Model.Layers = []model.Layer{{MoE: &model.MoE{}}}
		case c.Model.FFN == 0:
			return unknown
		}
		s.Offload.Modules = words(c.Offload)
		if c.FSDP != "" {
			s.Layout.FSDP.Shard = plan.ShardParameters
		}
	case len(c.Args) > 0:
		has := func(names ...string) bool {
			return slices.ContainsFunc(names, func(n string) bool { v, ok := c.Args[n]; return ok && v != false })
		}
		var l model.Layer
		if has("hybrid-layer-pattern", "hybrid-override-pattern", "is-hybrid-model") {
			l.Mamba = &model.Mamba{}
		}
		if has("num-experts") {
			l.MoE = &model.MoE{}
		}
		s.Model.Layers = []model.Layer{l}
		if has("fine-grained-activation-offloading") {
			s.Offload.Modules = []string{"stated"}
		}
		if has("use-megatron-fsdp", "use-custom-fsdp", "use-torch-fsdp2") {
			s.Layout.FSDP.Shard = plan.ShardParameters
		}
	default:
		return unknown
	}
	return kindOf(c, s)
}
