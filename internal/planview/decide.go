// This file owns decisions: what happens to each group of saved tensors under the given
// settings or those that a search chose, and the alternatives.

package planview

import (
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/cost"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/plan/search"
)

// groupOf is a group in the kind of layer that saves most of it, or in the most common
// of equal kinds.
type groupOf struct {
	name    string
	layer   model.Layer
	layers  int
	bytes   memory.Bytes
	tensors []plan.SavedTensor
	// offload and recompute list the modules that can offload or recompute a part of it.
	offload, recompute []string
}

// groupsOf lists the groups of a model in the order in which layers save them.
func groupsOf(s *plan.Setup) (out []*groupOf) {
	layers := slices.Concat(s.Model.Layers, mtpLayers(s))
	count, seen := map[model.Kind]int{}, map[model.Kind]bool{}
	for _, l := range layers {
		count[model.KindOf(l)]++
	}
	for _, l := range layers {
		kind := model.KindOf(l)
		if seen[kind] {
			continue
		}
		seen[kind] = true
		here := map[string]*groupOf{}
		for _, t := range plan.Activations(s, l) {
			g := here[t.Group]
			if g == nil {
				g = &groupOf{name: t.Group, layer: l, layers: count[kind]}
				here[t.Group] = g
				if i := slices.IndexFunc(out, func(o *groupOf) bool { return o.name == t.Group }); i < 0 {
					out = append(out, g)
				}
			}
			g.add(t, s.Offload.MinElements)
		}
		for i, o := range out {
			if g := here[o.name]; g != nil && (g.bytes > o.bytes || g.bytes == o.bytes && g.layers > o.layers) {
				out[i] = g
			}
		}
	}
	return out
}

// WithoutEffect returns a remark on each module that a setup offloads or recomputes by
// name and that saves nothing in any layer of the model.
func WithoutEffect(s *plan.Setup) (notes []*memory.ModuleError, err error) {
	n, err := s.Normalise()
	if err != nil {
		return nil, err
	}
	found := map[memory.Choice]map[string]bool{memory.Offload: {}, memory.Recompute: {}}
	for _, l := range slices.Concat(n.Model.Layers, mtpLayers(n)) {
		for _, t := range plan.Activations(n, l) {
			found[memory.Offload][memory.Including(s.Offload.Modules, t.Offload)] = true
			for _, m := range t.Recompute {
				found[memory.Recompute][m] = true
			}
		}
	}
	for _, x := range []struct {
		choice  memory.Choice
		modules []string
	}{{memory.Offload, s.Offload.Modules}, {memory.Recompute, s.Recompute.Modules}} {
		for _, m := range x.modules {
			if !found[x.choice][m] {
				notes = append(notes, &memory.ModuleError{Choice: x.choice, Module: m, Problem: "has no effect, because no layer of this model saves anything under that name", Remedy: "leave it out"})
			}
		}
	}
	return notes, nil
}

// mtpLayers returns the layers of the MTP head, if there is one.
func mtpLayers(s *plan.Setup) []model.Layer {
	if s.Model.MTP == nil {
		return nil
	}
	return s.Model.MTP.Layers
}

func (g *groupOf) add(t plan.SavedTensor, least int64) {
	g.bytes += t.Bytes
	g.tensors = append(g.tensors, t)
	if t.Offload != "" && t.Elements >= least && !slices.Contains(g.offload, t.Offload) {
		g.offload = append(g.offload, t.Offload)
	}
	for _, m := range t.Recompute {
		if !slices.Contains(g.recompute, m) {
			g.recompute = append(g.recompute, m)
		}
	}
}

// decisions returns what happens to every group. With the result of a search it adds the
// search's reasons.
func decisions(s *plan.Setup, res *search.Result) ([]Decision, error) {
	m, err := cost.New(s)
	if err != nil {
		return nil, err
	}
	s = m.Setup()
	out := []Decision{}
	for _, g := range groupsOf(s) {
		d := asGiven(s, m, g)
		if res != nil {
			d.searched(g, res)
		}
		out = append(out, d)
	}
	return out, nil
}

// asGiven returns what the settings do to a group.
func asGiven(s *plan.Setup, m *cost.Model, g *groupOf) Decision {
	var dropped, moved, movable memory.Bytes
	var by, movers []string // what computes again, and what moves
	use := func(list *[]string, module string) {
		if !slices.Contains(*list, module) {
			*list = append(*list, module)
		}
	}
	for _, t := range g.tensors {
		freed := slices.IndexFunc(t.Recompute, func(x string) bool { return slices.Contains(s.Recompute.Modules, x) })
		if t.Offload != "" && t.Elements >= s.Offload.MinElements {
			movable += t.Bytes
		}
		switch {
		case s.Recompute.Full && t.Tensor != g.inputOfLayer(s):
			dropped += t.Bytes
			use(&by, Recomputed(setupReport(s)))
		case freed >= 0:
			dropped += t.Bytes
			use(&by, t.Recompute[freed])
		case memory.Including(s.Offload.Modules, t.Offload) != "" && t.Elements >= s.Offload.MinElements:
			moved += t.Bytes
			use(&movers, memory.Including(s.Offload.Modules, t.Offload))
		}
	}
	if share, _ := mostShare(s); share == 0 { // a fraction of zero on every rank
		moved = 0
	}
	layer := m.Layer(g.layer)
	copies := m.Copies(layer, movable, layersOfStage(s), 0)
	d := Decision{Group: g.name, Choice: "keep", Bytes: g.bytes, Chosen: []Alternative{}, Rejected: []Alternative{}}
	if movable > 0 {
		d.Window, d.Copy = worse(copies)
	}
	switch {
	case dropped > 0 && moved == 0 && dropped < g.bytes/20:
		// Only a small part is: the layer's input, or attention without its inputs.
		d.Reason = fmt.Sprintf("kept; only %s of it is recomputed (%s)", Size(dropped), strings.Join(by, ", "))
	case dropped > 0 && dropped >= moved:
		d.Choice, d.Cost = "recompute", float64(layer.Recompute(plan.Recompute{Full: s.Recompute.Full, Modules: by}))
		d.Reason = fmt.Sprintf("recomputes %s (%s, %s a layer)", MiB(dropped), strings.Join(by, ", "), Seconds(d.Cost))
	case moved > 0:
		d.Choice = "offload"
		d.Reason, d.Cost = offloadReason(s, m, g, moved, strings.Join(movers, ", "))
	case slices.ContainsFunc(g.tensors, func(t plan.SavedTensor) bool { return memory.Including(s.Stash.Modules, t.Stash) != "" }):
		d.Choice, d.Reason = "stash", "its live rows go to pages of the stash"
	default:
		d.Reason = keepReason(g, d.Window, d.Copy)
	}
	return d
}

// offloadReason says how well the copies of a group hide, alone and with those of the
// layer's other groups, and returns the group's part of the delay.
func offloadReason(s *plan.Setup, m *cost.Model, g *groupOf, moved memory.Bytes, by string) (string, float64) {
	late := func(bytes memory.Bytes) float64 {
		layer := m.Layer(g.layer)
		c := m.Copies(layer, bytes, layersOfStage(s), layer.Recompute(s.Recompute))
		return float64(c.LateOut + c.LateBack)
	}
	share, where := mostShare(s)
	all := memory.Bytes(share * float64(max(cost.OffloadedBytes(s, g.layer), moved)))
	moved = memory.Bytes(share * float64(moved))
	text := fmt.Sprintf("offloads %s (%s%s)", MiB(moved), by, where)
	own, together := late(moved), late(all)
	switch {
	case own > 0:
		text += fmt.Sprintf(", %s late a layer", Seconds(own))
	case together > 0:
		text += fmt.Sprintf(", which hides alone; all copies of a layer together are %s late", Seconds(together))
	default:
		text += ", the copy hides"
	}
	return text, together * float64(moved) / float64(max(all, 1))
}

// mostShare returns the largest part that a rank offloads of what it could, and which
// rank it is if ranks differ.
func mostShare(s *plan.Setup) (most float64, where string) {
	for r := range s.Layout.PP {
		if o := s.Offload.Rank(r); len(o.Modules) == 0 {
			continue
		}
		if x := plan.OffloadShare(s, r); x > most {
			if most = x; len(s.Offload.Fractions) > 0 {
				where = fmt.Sprintf(", on rank %d", r)
			}
		}
	}
	return most, where
}

// inputOfLayer returns the tensor that a whole layer is recomputed from.
func (g *groupOf) inputOfLayer(s *plan.Setup) string {
	return plan.Activations(s, g.layer)[0].Tensor
}

func keepReason(g *groupOf, window, copying float64) string {
	switch {
	case len(g.offload) == 0 && len(g.recompute) == 0:
		return "kept; no module offloads or recomputes it"
	case len(g.offload) == 0:
		return "kept; recomputing " + strings.Join(g.recompute, " or ") + " would free it"
	case copying <= window:
		return "kept; its copy would hide"
	}
	return "kept; its copy would not hide"
}

// worse returns the window and the time of the direction that hides worse.
func worse(c cost.Copies) (window, copying float64) {
	if c.Back-c.Backward > c.Out-c.Forward {
		return float64(c.Backward), float64(c.Back)
	}
	return float64(c.Forward), float64(c.Out)
}

// layersOfStage returns the number of layers of the stage with most.
func layersOfStage(s *plan.Setup) (n int) {
	for _, st := range s.Layout.Stages {
		n = max(n, st.Last-st.First)
	}
	return n
}

// searched adds the decisions of a search. Its choices are in the settings already.
func (d *Decision) searched(g *groupOf, res *search.Result) {
	for _, v := range decisionsOn(g, res) {
		if v.Choice == memory.Offload && v.Copy > 0 {
			d.Window, d.Copy = float64(v.Window), float64(v.Copy)
		}
		a := Alternative{Choice: v.Choice.String() + " " + v.Module, Reason: v.Reason}
		if v.Chosen {
			d.Chosen = append(d.Chosen, a)
			continue
		}
		d.Rejected = append(d.Rejected, a)
		if d.Choice == "keep" && len(d.Rejected) == 1 {
			// Figures come before the last colon, and have columns of their own.
			why := a.Reason
			if i := strings.LastIndex(why, ": "); i >= 0 {
				why = why[i+2:]
			}
			d.Reason = "kept; " + a.Choice + ": " + why
			if res.Nothing {
				d.Reason = "kept; the job fits without a policy"
			}
		}
	}
}

// decisionsOn returns the decisions about modules that can offload or recompute a part of
// a group.
func decisionsOn(g *groupOf, res *search.Result) (out []search.ModuleDecision) {
	for _, v := range res.Modules {
		var list []string
		switch v.Choice {
		case memory.Offload:
			if slices.ContainsFunc(g.offload, func(m string) bool { return memory.Including([]string{v.Module}, m) != "" }) {
				list = []string{v.Module}
			}
		case memory.Recompute:
			list = append(slices.Clone(g.recompute), "full") // of whole layers, all but their input
		case memory.Stash:
			if slices.Contains(strings.Split(v.Module, ", "), g.name) {
				list = []string{v.Module}
			}
		}
		if slices.Contains(list, v.Module) {
			out = append(out, v)
		}
	}
	return out
}
