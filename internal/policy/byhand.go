// This file owns the choices that a user makes, with the names of Megatron-LM.

package policy

import (
	"fmt"
	"slices"

	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// ByHand holds the choices that a user makes. The comments name the flags of Megatron-LM.
type ByHand struct {
	OffloadModules   []string `json:"offload_modules,omitempty"`   // --offload-modules
	RecomputeModules []string `json:"recompute_modules,omitempty"` // --recompute-modules
	// StashModules is Stowage's own setting: Megatron-LM stashes the rows of all
	// experts (--moe-paged-stash) or none.
	StashModules []string `json:"stash_modules,omitempty"`
	// OffloadFraction (--activation-offload-fraction) is the share of the named modules'
	// saved tensors in a chunk that is offloaded, from 0 to 1. The last units stay. It is a
	// share of bytes or, if FractionOfGroups is set, of groups, as in older versions of
	// Megatron-LM.
	OffloadFraction  float64 `json:"activation_offload_fraction"`
	FractionOfGroups bool    `json:"fraction_of_groups,omitempty"`
	// MinBytes is the smallest size of a storage that is offloaded. In Megatron-LM,
	// --min-offloaded-tensor-size counts elements: its default of 1,048,576 is 2,097,152
	// bytes in bfloat16.
	MinBytes memory.Bytes `json:"min_offloaded_bytes,omitempty"`
	// DeltaBytes (--delta-offload-bytes-across-pp-ranks) makes pipeline rank r keep the
	// first r x DeltaBytes of the saved tensors that are on the device at once.
	DeltaBytes memory.Bytes `json:"delta_offload_bytes_across_pp_ranks,omitempty"`
	// Margin is the number of last units of each name in a chunk that stay.
	Margin int `json:"margin"`
	// MaxInflight (--fine-grained-offloading-max-inflight-offloads) is the number of
	// offloads that may be in flight before compute waits. Zero sets no limit.
	MaxInflight int `json:"max_inflight_offloads,omitempty"`
	// Delay (--delay-offload-until-cuda-graph) delays copies outside of a captured graph
	// until after its replay.
	Delay bool `json:"delay_offload_until_cuda_graph,omitempty"`
}

// Defaults returns settings that offload all of what is named, except for the last unit
// of each name, whose backward pass comes next. Megatron-LM has other defaults for
// MinBytes, which is zero here, and for what the fraction counts, which is bytes here.
func Defaults() ByHand { return ByHand{OffloadFraction: 1, Margin: 1} }

// Check returns an error if no step can follow the settings. modules are the names that
// the step has besides those in memory.Modules.
func (h ByHand) Check(modules ...string) error {
	named := map[memory.Choice][]string{memory.Offload: h.OffloadModules, memory.Recompute: h.RecomputeModules, memory.Stash: h.StashModules}
	if err := memory.CheckModules(named, modules...); err != nil {
		return err
	}
	if !(h.OffloadFraction >= 0 && h.OffloadFraction <= 1) {
		return &memory.SettingError{Setting: "OffloadFraction", Asked: fmt.Sprint(h.OffloadFraction), Problem: "is outside of 0 to 1", Remedy: "give 1 to offload all that the modules name, or 0 for nothing"}
	}
	for _, x := range []struct {
		setting string
		n       int64
	}{
		{"MinBytes", int64(h.MinBytes)}, {"DeltaBytes", int64(h.DeltaBytes)}, {"Margin", int64(h.Margin)}, {"MaxInflight", int64(h.MaxInflight)},
	} {
		if x.n < 0 {
			return &memory.SettingError{Setting: x.setting, Asked: fmt.Sprint(x.n), Problem: "is negative", Remedy: "give 0 to do without it"}
		}
	}
	return nil
}

// Notes returns a note for each setting that has no effect in a recorded step, such as a
// known module that this rank has no group of.
func (h ByHand) Notes(p *Profile) (notes []string) {
	units, _ := p.units()
	for _, x := range []struct {
		setting string
		names   []string
	}{
		{"OffloadModules", h.OffloadModules}, {"RecomputeModules", h.RecomputeModules}, {"StashModules", h.StashModules},
	} {
		for _, n := range x.names {
			if !slices.ContainsFunc(units, func(u memory.Unit) bool { return p.named(u, n) }) {
				notes = append(notes, fmt.Sprintf("%s: no group in this step is named %s; remove it or rename the groups", x.setting, n))
			}
		}
	}
	if len(h.OffloadModules) > 0 && h.OffloadFraction == 0 {
		notes = append(notes, "OffloadFraction is 0, so nothing is offloaded; set it to 1 to offload all that the modules name")
	}
	for _, n := range h.StashModules {
		saved := slices.ContainsFunc(units, func(u memory.Unit) bool { return u.Name == n })
		if saved && !slices.ContainsFunc(units, func(u memory.Unit) bool { return p.Units[u].Rows && p.named(u, n) }) {
			notes = append(notes, fmt.Sprintf("StashModules: %s saves no rows that the stash holds, so it is kept; compute it in a workspace", n))
		}
	}
	return notes
}

// named reports whether a module's name selects a unit: it is the unit's own name, or that
// of a module whose rows the unit includes.
func (p *Profile) named(u memory.Unit, module string) bool {
	return u.Name == module || p.Units[u].Rows && RowsNamed(u.Name, module)
}

// RowsNamed reports whether naming a module names the rows of a workspace: it has the
// module's name, or its rows include the module's.
func RowsNamed(workspace, module string) bool {
	m, _ := memory.LookupModule(workspace)
	return workspace == module || slices.Contains(m.Covers, module)
}

// RowChoice returns the choice for rows of a workspace: offload puts them in host
// pages, stash in device pages. It is stash if nothing names them.
func (h ByHand) RowChoice(workspace string) memory.Choice {
	if slices.ContainsFunc(h.OffloadModules, func(m string) bool { return RowsNamed(workspace, m) }) {
		return memory.Offload
	}
	return memory.Stash
}

// Config returns cfg with MinBytes and MaxInflight.
func (h ByHand) Config(cfg residency.Config) residency.Config {
	cfg.Least, cfg.Cap = h.MinBytes, h.MaxInflight
	return cfg
}

// candidate is a unit that the modules to offload name.
type candidate struct {
	memory.Unit
	bytes memory.Bytes // the bytes of its largest group
	live  memory.Bytes // the most bytes that are saved and not released at once
}

// Policy returns the choices for a recorded step on a pipeline rank. It considers the
// named units with storages of at least MinBytes. Of these, the last Margin of each name
// in a chunk stay. Then the first rank x DeltaBytes stay. Of the rest in each chunk, the
// last units with 1 - OffloadFraction of the bytes stay. All others are offloaded.
func (h ByHand) Policy(p *Profile, rank int) (memory.Policy, error) {
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
		return nil, fmt.Errorf("policy: expected a pipeline rank of zero or more, got %d; give the rank of this process", rank)
	}
	pol := memory.Policy{}
	var chunks [][]candidate
	for _, c := range all {
		facts := p.Units[c.Unit]
		switch {
		case facts.Rows:
			if pol[c.Unit] = h.RowChoice(c.Name); !facts.can(pol[c.Unit]) {
				pol[c.Unit] = memory.Stash // there are no host pages
			}
		case slices.Contains(h.RecomputeModules, c.Name) && facts.can(memory.Recompute):
			pol[c.Unit] = memory.Recompute
		case slices.Contains(h.OffloadModules, c.Name) && facts.can(memory.Offload) && c.bytes > 0:
			for len(chunks) <= c.Chunk {
				chunks = append(chunks, nil)
			}
			chunks[c.Chunk] = append(chunks[c.Chunk], c)
		}
	}
	keep := memory.Bytes(rank) * h.DeltaBytes
	for _, units := range chunks {
		units = h.margin(units)
		for len(units) > 0 && units[0].live <= keep {
			keep -= units[0].live
			units = units[1:]
		}
		for _, c := range h.fraction(units) {
			pol[c.Unit] = memory.Offload
		}
	}
	return pol, nil
}

// candidates returns the units of a step in the order of saving, with the bytes that may be
// offloaded.
func (p *Profile) candidates(least memory.Bytes) []candidate {
	s := p.step(nil)
	list := make([]candidate, len(s.units))
	live := make([]memory.Bytes, len(s.units))
	of := map[memory.GroupID]int{}
	for i, u := range s.units {
		list[i].Unit = u
	}
	for i, g := range s.groups {
		of[g.GroupID] = i
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

// movable returns the bytes of a group's storages that may be offloaded and that no group
// saved before.
func (s *step) movable(i int, least memory.Bytes) (n memory.Bytes) {
	for _, it := range s.groups[i].storages {
		if !it.Stay && s.saver[it.ID] == i && s.sizes[it.ID] >= least {
			n += s.sizes[it.ID]
		}
	}
	return n
}

// margin returns a chunk's units without the last Margin of each name.
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

// fraction returns units without the last ones that OffloadFraction keeps.
func (h ByHand) fraction(units []candidate) []candidate {
	var all memory.Bytes
	for _, c := range units {
		all += c.bytes
	}
	groups, bytes := int(float64(len(units))*(1-h.OffloadFraction)), memory.Bytes(float64(all)*(1-h.OffloadFraction))
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
