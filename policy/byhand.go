// This file owns the choices that a user makes, with the names that the field uses.

package policy

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/residency"
	"github.com/stowage-dev/stowage/schedule"
)

// ByHand is the field's settings; the comments name its flags.
type ByHand struct {
	OffloadModules   []string `json:"offload_modules,omitempty"`   // --offload-modules
	RecomputeModules []string `json:"recompute_modules,omitempty"` // --recompute-modules
	StashModules     []string `json:"stash_modules,omitempty"`     // --stash-modules
	// OffloadFraction (--activation-offload-fraction) is how much of what the
	// modules name in a chunk leaves, from 0 to 1; the last units stay. It counts
	// bytes, or with FractionOfGroups the groups, which is the flag's old meaning.
	OffloadFraction  float64 `json:"activation_offload_fraction"`
	FractionOfGroups bool    `json:"fraction_of_groups,omitempty"`
	// MinBytes is what a storage must have to leave. The field's
	// --min-offloaded-tensor-size counts elements: its 1,048,576 are 2,097,152
	// bytes of bfloat16.
	MinBytes int64 `json:"min_offloaded_bytes,omitempty"`
	// DeltaBytes (--delta-offload-bytes-across-pp-ranks): pipeline rank r keeps
	// the first r x DeltaBytes of what is on the device at once.
	DeltaBytes int64 `json:"delta_offload_bytes_across_pp_ranks,omitempty"`
	// Margin is how many of the last units of each name in a chunk stay.
	Margin int `json:"margin"`
	// MaxInflight (--fine-grained-offloading-max-inflight-offloads) is how many
	// copies out may be under way before compute waits; zero is no limit.
	MaxInflight int `json:"max_inflight_offloads,omitempty"`
	// Delay (--delay-offload-until-cuda-graph) lets copies that fall outside of a
	// captured graph begin behind its replay.
	Delay bool `json:"delay_offload_until_cuda_graph,omitempty"`
}

// Defaults are the settings that the field begins with: all of what is named
// leaves, except for the last unit of each name, whose backward pass comes next.
func Defaults() ByHand { return ByHand{OffloadFraction: 1, Margin: 1} }

var (
	offloadModules = []string{"attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm", "expert_fc1", "moe_act", "fused_group_mlp", "gdp_qkv", "mla_up_proj", "mlp", "router", "shared_experts", "mamba_in", "mamba_scan"}
	// Of these, qkv_linear, attn_proj and router are groups that the field recomputes
	// under the name of what makes them: layernorm and core_attn.
	recomputeModules = []string{"core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts", "gdn_norm_out", "gdp_in_proj", "gdp_qkv", "mhc", "qkv_linear", "attn_proj", "router", "mamba_in", "mamba_scan"}
	stashModules     = []string{"expert_fc1", "moe_act"}
)

// Check refuses settings that no step can follow. Modules are the names that the
// step has besides the field's.
func (h ByHand) Check(modules ...string) error {
	for _, x := range []struct {
		what        string
		names, list []string
	}{
		{"offload", h.OffloadModules, offloadModules},
		{"recompute", h.RecomputeModules, recomputeModules},
		{"stash", h.StashModules, stashModules},
	} {
		if err := known(x.what, x.names, x.list, modules); err != nil {
			return err
		}
	}
	if !(h.OffloadFraction >= 0 && h.OffloadFraction <= 1) {
		return fmt.Errorf("policy: activation-offload-fraction %g is outside of 0 to 1; give 1 to offload all that the modules name, 0 for nothing", h.OffloadFraction)
	}
	for _, x := range []struct {
		flag string
		n    int64
	}{
		{"min-offloaded-tensor-size", h.MinBytes}, {"delta-offload-bytes-across-pp-ranks", h.DeltaBytes},
		{"margin", int64(h.Margin)}, {"fine-grained-offloading-max-inflight-offloads", int64(h.MaxInflight)},
	} {
		if x.n < 0 {
			return fmt.Errorf("policy: %s %d is below zero; give 0 to do without it", x.flag, x.n)
		}
	}
	return h.conflicts()
}

// conflicts refuses names that exclude each other.
func (h ByHand) conflicts() error {
	off := func(name string) bool { return slices.Contains(h.OffloadModules, name) }
	for _, name := range h.OffloadModules {
		if slices.Contains(h.RecomputeModules, name) {
			return fmt.Errorf("policy: module %s is both in offload-modules and in recompute-modules; remove it from one of them", name)
		}
	}
	for _, name := range h.StashModules {
		if off(name) || slices.Contains(h.RecomputeModules, name) {
			return fmt.Errorf("policy: module %s is stashed and in offload-modules or recompute-modules too; remove it from all but one", name)
		}
	}
	if off("attn_proj") && !off("core_attn") {
		return fmt.Errorf("policy: offload module attn_proj needs core_attn beside it; add core_attn to offload-modules")
	}
	if off("fused_group_mlp") {
		for _, name := range []string{"expert_fc1", "moe_act"} {
			if off(name) {
				return fmt.Errorf("policy: offload module fused_group_mlp is the whole of the experts, and excludes %s; remove one of them from offload-modules", name)
			}
		}
	}
	return nil
}

// known refuses names that are neither the field's nor the step's.
func known(what string, names, field, step []string) error {
	list := slices.Clone(field)
	for _, n := range step {
		if !slices.Contains(list, n) {
			list = append(list, n)
		}
	}
	for _, n := range names {
		if slices.Contains(list, n) {
			continue
		}
		near := slices.MinFunc(list, func(a, b string) int { return spell.Distance(n, a) - spell.Distance(n, b) })
		if spell.Distance(n, near) <= max(1, len(n)/3) {
			return fmt.Errorf("policy: unknown %s module %q (did you mean %s?); there are %v", what, n, near, list)
		}
		return fmt.Errorf("policy: unknown %s module %q; there are %v", what, n, list)
	}
	return nil
}

// Notes are the settings that find nothing to do in a recorded step: a name may be
// the field's, and be none of this rank's groups.
func (h ByHand) Notes(p *Profile) (notes []string) {
	units, _ := p.units()
	for _, x := range []struct {
		flag  string
		names []string
	}{
		{"offload-modules", h.OffloadModules}, {"recompute-modules", h.RecomputeModules}, {"stash-modules", h.StashModules},
	} {
		for _, n := range x.names {
			if !slices.ContainsFunc(units, func(u Unit) bool { return u.Name == n }) {
				notes = append(notes, fmt.Sprintf("%s names %s, which no group of this step is called; remove it, or call the groups so", x.flag, n))
			}
		}
	}
	if len(h.OffloadModules) > 0 && h.OffloadFraction == 0 {
		notes = append(notes, "the fraction to offload is 0, so nothing leaves; begin with Defaults, where it is 1")
	}
	return notes
}

// Config is a machine's limits with the settings that are the machine's.
func (h ByHand) Config(cfg residency.Config) residency.Config {
	cfg.Least, cfg.Cap = h.MinBytes, h.MaxInflight
	return cfg
}

// candidate is a unit that the modules to offload name.
type candidate struct {
	Unit
	bytes int64 // of its largest group
	live  int64 // that are saved and not released at once, at most
}

// Policy is the choices for a recorded step on a pipeline rank: of the units that
// are named and hold storages of at least MinBytes, the last Margin of each name
// in a chunk stay; then the first rank x DeltaBytes; then of what is left in each
// chunk the last ones, as many as hold 1 - OffloadFraction of it.
func (h ByHand) Policy(p *Profile, rank int) (Policy, error) {
	all := p.candidates(h.MinBytes)
	var modules []string
	for _, c := range all {
		if !slices.Contains(modules, c.Name) {
			modules = append(modules, c.Name)
		}
	}
	if err := h.Check(modules...); err != nil {
		return nil, err
	}
	if rank < 0 {
		return nil, fmt.Errorf("policy: pipeline rank %d is below zero; give the rank of this process", rank)
	}
	pol := Policy{}
	var chunks [][]candidate
	for _, c := range all {
		facts := p.Units[c.Unit]
		switch {
		case slices.Contains(h.RecomputeModules, c.Name) && facts.can(Recompute):
			pol[c.Unit] = Recompute
		case slices.Contains(h.StashModules, c.Name) && facts.can(Stash):
			pol[c.Unit] = Stash
		case slices.Contains(h.OffloadModules, c.Name) && facts.can(Offload) && c.bytes > 0:
			for len(chunks) <= c.Chunk {
				chunks = append(chunks, nil)
			}
			chunks[c.Chunk] = append(chunks[c.Chunk], c)
		}
	}
	keep := int64(rank) * h.DeltaBytes
	for _, units := range chunks {
		units = h.margin(units)
		for len(units) > 0 && units[0].live <= keep {
			keep -= units[0].live
			units = units[1:]
		}
		for _, c := range h.fraction(units) {
			pol[c.Unit] = Offload
		}
	}
	return pol, nil
}

// candidates are the units of a step in the order of saving, with what of them may
// leave.
func (p *Profile) candidates(least int64) []candidate {
	s := p.step(nil)
	list := make([]candidate, len(s.units))
	live := make([]int64, len(s.units))
	of := map[schedule.Group]int{}
	for i, u := range s.units {
		list[i].Unit = u
	}
	for i, g := range s.groups {
		of[g.Group] = i
	}
	for i := range s.when {
		e := s.schedule.At(i)
		g := of[e.Group]
		n, u := s.movable(g, least), s.groups[g].unit
		if e.Load {
			live[u] -= n
			continue
		}
		live[u] += n
		list[u].bytes, list[u].live = max(list[u].bytes, n), max(list[u].live, live[u])
	}
	return list
}

// movable is the bytes of a group's storages that may leave and that no group
// saved before.
func (s *step) movable(i int, least int64) (n int64) {
	for _, it := range s.groups[i].storages {
		if !it.Stay && s.saver[it.ID] == i && s.sizes[it.ID] >= least {
			n += s.sizes[it.ID]
		}
	}
	return n
}

// margin takes the last units of each name off a chunk's list.
func (h ByHand) margin(units []candidate) []candidate {
	left := map[string]int{}
	var out []candidate
	for _, c := range slices.Backward(units) {
		if left[c.Name]++; left[c.Name] > h.Margin {
			out = append(out, c)
		}
	}
	slices.Reverse(out)
	return out
}

// fraction takes as many units off the end as the fraction says.
func (h ByHand) fraction(units []candidate) []candidate {
	var all int64
	for _, c := range units {
		all += c.bytes
	}
	groups, bytes := int(float64(len(units))*(1-h.OffloadFraction)), int64(float64(all)*(1-h.OffloadFraction))
	for len(units) > 0 {
		last := units[len(units)-1]
		if h.FractionOfGroups && groups == 0 || !h.FractionOfGroups && bytes < last.bytes {
			break
		}
		groups, bytes = groups-1, bytes-last.bytes
		units = units[:len(units)-1]
	}
	return units
}
