// This file owns memory policies: what a run does with what it saves.

package train

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/kernels"
	"github.com/stowage-dev/stowage/model"
	"github.com/stowage-dev/stowage/policy"
	"github.com/stowage-dev/stowage/schedule"
	"github.com/stowage-dev/stowage/stash"
	"github.com/stowage-dev/stowage/train/layer"
)

// Memory is what is done about memory.
type Memory struct {
	// Rows is how the rows of experts get memory.
	Rows layer.Rows
	// Offload and Recompute name modules. Rows of experts that are offloaded are stashed
	// in host memory.
	Offload   []string
	Recompute []string
	// Fraction is how much of what Offload names leaves, from 0 to 1.
	Fraction float64
	// Budget is what a rank's device may hold, parameters and all; zero is no budget.
	Budget device.Bytes
	Scopes capture.Set
	// Sets is the number of shared buffers for rows, and Room their size over what
	// balanced routing needs; zero stands for 2 (under a budget 1) of twice as
	// much. A step that needs more is rerun with more.
	Sets int
	Room float64
	// Links are the rates between device and host; zero has them measured.
	Links policy.Links
}

// Policies are the names of policies that need nothing else to be said.
var Policies = []string{"none", "static", "stash", "offload", "offload+recompute", "budget", "graphs"}

// Named is the memory policy of a name, under a budget if one is given; "budget" needs
// one.
func Named(name string, budget device.Bytes) (Memory, error) {
	m := Memory{Rows: layer.Stashed, Fraction: 1}
	switch name {
	case "none":
		m.Rows = layer.Exact
	case "static":
		m.Rows = layer.Padded
	case "stash":
	case "offload":
		m.Offload = []string{"core_attn", "attn_proj", layer.RowsGroup}
	case "offload+recompute":
		m.Offload, m.Recompute = []string{"core_attn", "attn_proj", layer.RowsGroup}, []string{"layernorm"}
	case "budget":
		if budget <= 0 {
			return m, errors.New("train: the policy budget needs one; give --budget")
		}
		m.Budget = budget
	case "graphs":
		m.Scopes = capture.Of(capture.Attn, capture.MLP, capture.MoERouter)
	default:
		near := slices.MinFunc(Policies, func(a, b string) int { return spell.Distance(name, a) - spell.Distance(name, b) })
		return m, fmt.Errorf("train: no policy is named %q; the nearest is %s, and there are %s", name, near, strings.Join(Policies, ", "))
	}
	if budget > 0 && m.Budget == 0 {
		m.Budget = budget
	}
	return m, nil
}

// again are the groups that the field's names for recomputing stand for: what a module
// makes is saved by the one that reads it.
var again = map[string][]string{
	"layernorm":   {"qkv_linear", "router"},
	"core_attn":   {"attn_proj"},
	"mla_up_proj": {"core_attn"},
	"moe_act":     {}, // always: its backward pass makes it on the way
	"moe":         {"router", "moe_act"},
}

// recomputed are the groups that are recomputed.
func (m *Memory) recomputed() (names []string) {
	for _, n := range m.Recompute {
		groups, ok := again[n]
		if !ok {
			groups = []string{n}
		}
		for _, g := range groups {
			if !slices.Contains(names, g) && !(m.Rows == layer.Stashed && g == "moe_act") {
				names = append(names, g)
			}
		}
	}
	return names
}

// offloaded are the groups that leave by the runtime; rows that are stashed leave by pages.
func (m *Memory) offloaded() (names []string) {
	for _, n := range m.Offload {
		if !(m.Rows == layer.Stashed && rowsModule(n)) {
			names = append(names, n)
		}
	}
	return names
}

func rowsModule(name string) bool {
	return name == layer.RowsGroup || name == "expert_fc1" || name == "moe_act"
}

// hostRows tells whether stashed rows are kept in host memory.
func (m *Memory) hostRows() bool {
	return m.Rows == layer.Stashed && slices.ContainsFunc(m.Offload, rowsModule)
}

func (m *Memory) sets() int {
	if m.Sets == 0 && m.Budget > 0 {
		return 1 // what is short is memory
	}
	return cmp.Or(m.Sets, 2)
}

// setRows is the size of a shared buffer.
func (m *Memory) setRows(balanced, worst int) int {
	return min(worst, max(1, int(cmp.Or(m.Room, 2)*float64(balanced))))
}

func (m *Memory) check(c *Config) error {
	switch {
	case m.Budget < 0:
		return fmt.Errorf("train: a budget of %d bytes is negative; give what a device may hold", int64(m.Budget))
	case !(m.Fraction >= 0 && m.Fraction <= 1):
		return fmt.Errorf("train: an offload fraction of %g lies outside of 0 to 1", m.Fraction)
	case m.Sets < 0 || !(m.Room >= 0 && m.Room <= 1e6):
		return fmt.Errorf("train: %d sets of %g times the balanced rows; neither may be negative, nor the latter above a million", m.Sets, m.Room)
	case m.Scopes != 0 && m.Rows == layer.Exact:
		return errors.New("train: graphs cannot be captured where the host waits for row counts; use the policy stash or static with --graph")
	case m.Scopes.Has(capture.FullIteration) && c.Layout.Ranks() > 1:
		return errors.New("train: full_iteration captures one rank's step, and several ranks wait for each other on the host; use --graph attn moe_router, or one rank")
	case m.Scopes != 0 && c.Sharding != nil && c.Sharding.Pool == bucket.Dynamic:
		return errors.New("train: graphs cannot be captured over parameters that are gathered into other memory each time; use --pool arena, max or another but dynamic with --graph")
	case m.Scopes.Has(capture.MoE):
		return errors.New("train: the scope moe holds the exchange of rows between ranks, which is not captured; use --graph attn mlp moe_router")
	}
	if h := m.byHand(); h != nil {
		return h.Check(slices.Sorted(maps.Keys(places))...)
	}
	return nil
}

// byHand are the runtime's settings, or nil where nothing is chosen by hand.
func (m *Memory) byHand() *policy.ByHand {
	off, re := m.offloaded(), m.recomputed()
	if len(off)+len(re) == 0 {
		return nil
	}
	h := policy.Defaults()
	h.OffloadModules, h.RecomputeModules, h.OffloadFraction = off, re, m.Fraction
	return &h
}

// places say where groups of our own lie.
var places = map[string]capture.Scope{"qk_norm": capture.Attn}

// openRuntime opens the rank's runtime and makes its workspaces. What the device holds
// by now is for good; a budget has the rest.
func (r *rank) openRuntime() error {
	m := &r.cfg.Memory
	c := stowage.Config{
		Device: r.dev, Compute: r.s, ByHand: m.byHand(), Scopes: m.Scopes, Places: places, Links: m.Links,
		Rank: r.index, Stage: r.pp, Reduce: r.t.meet.reduce, Log: r.cfg.Log,
	}
	if r.cfg.Trace != nil {
		c.Trace = r.cfg.Trace(r.index)
	}
	if m.Budget > 0 {
		held := r.dev.Memory().Kind[device.Accel].Current
		if c.Budget = m.Budget - held; c.Budget <= 0 {
			return fmt.Errorf("train: parameters and their optimiser take %v of a budget of %v; raise --budget, or shard them with --pool", held, m.Budget)
		}
	}
	mixtures := r.mixtures()
	if m.Rows == layer.Stashed && r.cfg.hasExperts() { // ranks without experts too: all agree whether a step is rerun
		c.Stash = r.stash(mixtures, c.Budget)
		if n := r.books(c.Stash, mixtures); c.Budget > 0 {
			if c.Budget -= n; c.Budget <= 0 {
				return fmt.Errorf("train: the page tables of expert rows take %v beyond a budget of %v; raise --budget", n, m.Budget)
			}
		}
	}
	var err error
	if r.rt, err = stowage.Open(c); err != nil {
		return err
	}
	if c.Stash == nil {
		return nil
	}
	return layer.Guard(func() {
		for _, x := range mixtures {
			r.space(x.Width)
		}
	})
}

// mixtures are the mixtures of experts of this rank's layers.
func (r *rank) mixtures() (out []*model.MoE) {
	for v := range r.cfg.Layout.VPP {
		for _, l := range r.layers(v) {
			if l.MoE != nil {
				out = append(out, l.MoE)
			}
		}
	}
	return out
}

// layers are those of one of the rank's chunks, those of further heads included.
func (r *rank) layers(chunk int) []model.Layer {
	m := r.cfg.Model
	stages := r.cfg.Layout.PP * r.cfg.Layout.VPP
	each, at := len(m.Layers)/stages, chunk*r.cfg.Layout.PP+r.pp
	out := slices.Clone(m.Layers[at*each : (at+1)*each])
	if m.MTP != nil && at == stages-1 {
		for range m.MTP.Depth {
			out = append(out, m.MTP.Layers...)
		}
	}
	return out
}

// setRows are the rows of a shared buffer for experts of a width, and the most that one of
// its layers can get: mixtures of one width may differ in all else.
func (r *rank) setRows(width int) (rows, worst int) {
	for _, x := range r.mixtures() {
		if x.Width == width {
			b, w := r.env.RowBounds(x)
			rows, worst = max(rows, r.cfg.Memory.setRows(b, w)), max(worst, w)
		}
	}
	return rows, worst
}

// stash sizes the store for rows: it begins with what balanced routing needs, and grows
// with what is seen.
func (r *rank) stash(mixtures []*model.MoE, budget device.Bytes) *stash.ManagerConfig {
	page := 16 * device.KiB
	var balanced, worst, spaces schedule.Pages
	widths := map[int]bool{}
	for _, x := range mixtures {
		b, w := r.env.RowBounds(x)
		per := func(rows int) schedule.Pages {
			var sizes []int64
			for _, t := range layer.RowTensors(r.cfg.Model.Hidden, x.Width, r.cfg.Number, 1) {
				sizes = append(sizes, int64(t.Row)*int64(rows))
			}
			return schedule.PagesOf(int64(page), sizes...)
		}
		balanced += per(b)
		worst += per(w)
		if !widths[x.Width] {
			widths[x.Width] = true
			spaces += schedule.Pages(r.cfg.Memory.sets())*per(w) + schedule.Pages(r.env.Passing(x)/page)
		}
	}
	live := schedule.Pages(r.inFlight())
	c := &stash.ManagerConfig{}
	c.Store.Page = page
	if r.cfg.forecast {
		c.Store.Assume = r.assumed
	}
	// A tenth more than that on the device, and a net for an eighth in host memory:
	// routing is never balanced, and a spill costs less than a rerun.
	room, net := max(1, balanced*live*11/10), max(1, balanced*live/8)
	c.Store.Pages = [stash.Tiers]schedule.Pages{room, net}
	most := max(worst*live, room+net)
	c.Store.Max = [stash.Tiers]schedule.Pages{most, most}
	switch {
	case r.cfg.Memory.hostRows():
		c.Store.Pages, c.Store.Max[stash.Device] = [stash.Tiers]schedule.Pages{1, room + net}, 1
	case budget > 0:
		// Sets may come to need the worst case, and passes need memory that nobody saves.
		// Half of what is left is for rows; what finds no page there goes to the host.
		c.Store.Max[stash.Device] = min(room, max(1, (schedule.Pages(budget/page)-spaces)/2))
		c.Store.Pages = [stash.Tiers]schedule.Pages{c.Store.Max[stash.Device], room + net - c.Store.Max[stash.Device]}
	}
	return c
}

// books is the device memory in which the store keeps its books: control, two rings of
// at most twice the pages rounded up, and a table of pages for every group of rows.
func (r *rank) books(c *stash.ManagerConfig, mixtures []*model.MoE) device.Bytes {
	n := kernels.StashControlBytes
	for _, most := range c.Store.Max {
		n += 8*device.Bytes(most) + device.Align
	}
	for _, x := range mixtures {
		_, worst := r.setRows(x.Width)
		var sizes []int64
		for _, t := range layer.RowTensors(r.cfg.Model.Hidden, x.Width, r.cfg.Number, 1) {
			sizes = append(sizes, int64(t.Row)*int64(worst))
		}
		record := kernels.StashRecordSize(len(sizes), uint64(schedule.PagesOf(int64(c.Store.Page), sizes...)))
		n += device.Bytes(r.cfg.Batch.Microbatches) * (record + device.Align + 8)
	}
	return n
}

// inFlight is the most microbatches of a chunk that are between their forward and their
// backward pass, over all chunks divided by their number, rounded up.
func (r *rank) inFlight() int {
	now, most := 0, 0
	for _, a := range r.program {
		if a.verb != compute {
			continue
		}
		if a.pass.Backward {
			now--
		} else {
			now++
		}
		most = max(most, now)
	}
	chunks := r.cfg.Layout.VPP
	return (most + chunks - 1) / chunks
}
