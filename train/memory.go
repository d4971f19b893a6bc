// This file owns memory policies: what a run does with its saved tensors.

package train

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/engine"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/policy"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/spell"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// Memory is a memory policy: it says where saved tensors and the rows of experts live.
// NamedMemory returns the common ones.
type Memory struct {
	// Rows selects how the rows of experts get memory.
	Rows layer.Rows
	// Offload, Recompute and Stash name the modules that are offloaded, recomputed or
	// stashed. Offloaded rows of experts go to host pages. Stashed rows go to device
	// pages, and without a budget that is also their default.
	Offload   []string
	Recompute []string
	Stash     []string
	// Fraction is the share of the saved tensors of the modules in Offload that is
	// offloaded, from 0 to 1.
	Fraction float64
	// Budget limits the device memory of each rank, with parameters and everything else.
	// Zero sets no limit.
	Budget memory.Bytes
	// Scopes are the parts of a step that are captured as graphs.
	Scopes memory.Scopes
	// Sets is the number of sets of workspace buffers for the rows of experts. Zero
	// selects 2 sets, or 1 set under a budget. Under a budget the solver adds up to two
	// more if they make the step shorter. Without one, a rank that has all experts has a
	// set for each group that is saved at once, because pages would save nothing.
	Sets int
	// Room is the size of a set divided by the size that balanced routing needs. Zero
	// selects 2. A step that needs more is rerun with larger buffers.
	Room float64
	// DevicePages fixes the number of 16 KiB device pages for rows under a budget.
	// Benchmarks use it. Zero lets the runtime decide, which is better for training.
	DevicePages int
	// Links are the rates between device and host. If they are zero, New measures them
	// where the policy needs them.
	Links memory.Links
}

// Policies lists the names that NamedMemory accepts.
var Policies = []string{"none", "static", "stash", "offload", "offload+recompute", "budget", "graphs"}

// NamedMemory returns the memory policy of a name in Policies, with a budget unless
// budget is zero. It returns a *memory.SettingError if the name is unknown, or if the
// name is "budget" and budget is zero.
func NamedMemory(name string, budget memory.Bytes) (Memory, error) {
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
			return m, refuse("Budget", "", "is missing, and the policy budget needs one", "give a size such as 60MiB")
		}
	case "graphs":
		m.Scopes = memory.ScopesOf(memory.Attn, memory.MLP, memory.MoERouter)
	default:
		remedy := "choose from " + strings.Join(Policies, ", ")
		if near := spell.Nearest(name, Policies); near != "" {
			remedy = fmt.Sprintf("did you mean %s? %s", near, remedy)
		}
		return m, refuse("Policy", name, "is unknown", remedy)
	}
	m.Budget = max(budget, 0)
	return m, nil
}

// recomputed returns the names of the groups that are recomputed.
func (m *Memory) recomputed() (names []string) {
	for _, n := range m.Recompute {
		groups := []string{n}
		if m, _ := memory.LookupModule(n); m.Recomputes != nil {
			groups = m.Recomputes
		}
		for _, g := range groups {
			if !slices.Contains(names, g) && !(m.Rows == layer.Stashed && g == "moe_act") {
				names = append(names, g)
			}
		}
	}
	return names
}

func rowsModule(name string) bool { return slices.Contains(memory.RowModules(), name) }

// hostRows reports whether the stash keeps its rows in host memory.
func (m *Memory) hostRows() bool {
	return m.Rows == layer.Stashed && slices.ContainsFunc(m.Offload, rowsModule)
}

// sets returns the number of sets for experts of a width.
func (r *rank) sets(width int) int {
	m := &r.cfg.Memory
	switch {
	case m.Sets > 0:
		return m.Sets
	case m.Budget > 0:
		return 1 // the solver adds those that pay
	case r.keepsAll():
		return max(1, r.atOnce(func(x *model.MoE) bool { return x.Width == width }))
	}
	return 2
}

// keepsAll reports whether rows stay in their sets: if all experts are on this rank, each
// layer gets tokens times top-k rows, less those that a capacity drops, so that pages
// would save little. Modules to stash ask for pages in any case.
func (r *rank) keepsAll() bool {
	m := &r.cfg.Memory
	return m.Rows == layer.Stashed && m.Sets == 0 && m.Budget == 0 && len(m.Stash) == 0 && !m.hostRows() && r.cfg.Layout.EP == 1
}

// setRows returns the number of rows in a set.
func (m *Memory) setRows(balanced, worst int) int {
	return min(worst, max(1, int(cmp.Or(m.Room, 2)*float64(balanced))))
}

func (m *Memory) check(c *Config) error {
	switch {
	case m.Budget < 0:
		return refuse("Memory.Budget", m.Budget.String(), "is negative", "give what a rank may hold on its device")
	case !(m.Fraction >= 0 && m.Fraction <= 1):
		return refuse("Memory.Fraction", fmt.Sprint(m.Fraction), "is outside of 0 to 1", "give 1 to offload all of the modules")
	case m.Sets < 0 || !(m.Room >= 0 && m.Room <= 1e6):
		return fmt.Errorf("train: %d sets of %g times the balanced rows; neither may be negative, nor the latter above a million", m.Sets, m.Room)
	case len(m.Stash) > 0 && m.Rows != layer.Stashed:
		return refuse("StashModules", strings.Join(m.Stash, " "), "cannot be stashed, because this policy has no pages for rows", "use a policy that has them, such as stash")
	case len(m.Stash) > 0 && !c.hasExperts():
		return refuse("StashModules", strings.Join(m.Stash, " "), "cannot be stashed, because "+c.Model.Name+" has no experts, whose rows are stashed", "leave it out")
	case m.Scopes != 0 && m.Rows == layer.Exact:
		return refuse("Memory.Scopes", "", "cannot be captured while the host waits for row counts", "use the policy stash or static")
	case m.Scopes != 0 && c.Sharding != nil && c.Sharding.Pool == bucket.Dynamic:
		return refuse("Memory.Scopes", "", "cannot be captured over a dynamic pool, whose parameters lie elsewhere in each step", "use another pool, such as arena")
	case m.Scopes.Has(memory.MoE) && m.Rows == layer.Stashed:
		return refuse("Memory.Scopes", "moe", "cannot be captured while rows are stashed inside it, because compute would wait at the end of each graph for their copies", "use the policy static, or capture full_iteration")
	}
	if h := m.byHand(); h != nil {
		return h.Check()
	}
	return nil
}

// byHand returns the runtime's settings, or nil if the policy names no modules.
func (m *Memory) byHand() *policy.ByHand {
	re := m.recomputed()
	if len(m.Offload)+len(re)+len(m.Stash) == 0 {
		return nil
	}
	h := policy.Defaults()
	h.OffloadModules, h.RecomputeModules, h.StashModules, h.OffloadFraction = m.Offload, re, m.Stash, m.Fraction
	return &h
}

// openRuntime opens the rank's runtime and allocates its workspaces.
func (r *rank) openRuntime() error {
	m := &r.cfg.Memory
	c := engine.Config{
		Device: r.dev, Compute: r.s, ByHand: m.byHand(), Scopes: m.Scopes, Links: m.Links,
		Budget: m.Budget, Effort: r.cfg.Effort, Rank: r.index, Stage: r.pp, Reduce: r.agree, Log: r.cfg.Log,
	}
	if r.cfg.Layout.Ranks() > 1 {
		if _, ok := r.world.(comm.Capturer); !ok && (m.Scopes.Has(memory.FullIteration) || m.Scopes.Has(memory.MoE)) {
			return refuse("Memory.Scopes", m.Scopes.String(), "cannot be captured, because these ranks exchange data through the host", "capture attn, mlp and moe_router, or run all ranks in one process")
		}
		c.Together = sharedScopes{r}
	}
	if r.cfg.Trace != nil {
		c.Trace = r.cfg.Trace(r.index)
	}
	if held := r.dev.Memory().Kind[memory.Device].Current; m.Budget > 0 && held >= m.Budget {
		return &memory.BudgetError{Rank: r.index, Budget: m.Budget, Need: held + 1, Held: held}
	}
	mixtures := r.mixtures()
	if m.Rows == layer.Stashed && r.cfg.hasExperts() { // ranks without experts need it too: all ranks agree whether a step is rerun
		c.Stash = r.stash(mixtures)
	}
	var err error
	if r.rt, err = engine.Open(c); err != nil {
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

// mixtures returns the mixtures of experts in this rank's layers.
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

// layers returns the layers of one of the rank's chunks, with those of
// multi-token-prediction heads.
func (r *rank) layers(chunk int) []model.Layer {
	m := r.cfg.Model
	stages := r.cfg.Layout.PP * r.cfg.Layout.VPP
	at := chunk*r.cfg.Layout.PP + r.pp
	from, to := r.cfg.span(at)
	out := slices.Clone(m.Layers[from:to])
	if m.MTP != nil && at == stages-1 {
		for range m.MTP.Depth {
			out = append(out, m.MTP.Layers...)
		}
	}
	return out
}

// setRows returns the rows of a set for experts of a width, and the most rows that one
// layer can get. Mixtures of one width share a set and may differ in everything else.
func (r *rank) setRows(width int) (rows, worst int) {
	for _, x := range r.mixtures() {
		if x.Width == width {
			b, w := r.env.RowBounds(x)
			rows, worst = max(rows, r.cfg.Memory.setRows(b, w)), max(worst, w)
		}
	}
	return rows, worst
}

// stash returns the sizes of the stores for rows. Without a budget a store begins with
// the pages that balanced routing needs and grows with the routing counts. Under a
// budget the runtime decides the number of device pages.
func (r *rank) stash(mixtures []*model.MoE) *stash.ManagerConfig {
	page := 16 * memory.KiB
	var balanced, worst schedule.Pages
	for _, x := range mixtures {
		b, w := r.env.RowBounds(x)
		balanced += r.rowPages(x, page, b)
		worst += r.rowPages(x, page, w)
	}
	live := schedule.Pages(r.inFlight())
	c := &stash.ManagerConfig{KeepAll: r.keepsAll()}
	c.Store.Page = page
	if r.cfg.forecast {
		c.Store.Assume = r.assumed
	}
	// Take a tenth more than balanced routing needs on the device, and an eighth of it in
	// host memory. Routing is never balanced, and a spill costs less than a rerun.
	room, net := max(1, balanced*live*11/10), max(1, balanced*live/8)
	c.Store.Pages = [stash.Tiers]schedule.Pages{room, net}
	most := max(worst*live, room+net)
	c.Store.Max = [stash.Tiers]schedule.Pages{most, most}
	switch m := &r.cfg.Memory; {
	case c.KeepAll:
		c.Store.Pages = [stash.Tiers]schedule.Pages{}
	case m.hostRows():
		c.Store.Pages, c.Store.Max = [stash.Tiers]schedule.Pages{}, [stash.Tiers]schedule.Pages{0, 1}
		c.HostPages, c.HostMax = room+net, most
	case m.Budget > 0 && m.DevicePages > 0:
		n := schedule.Pages(m.DevicePages)
		c.Fixed, c.Store.Max[stash.Device] = true, n
		c.Store.Pages = [stash.Tiers]schedule.Pages{n, max(1, room+net-n)}
	case m.Budget > 0:
		c.HostPages, c.HostMax = room+net, most
	}
	c.Tables = r.pageTables(c, mixtures)
	return c
}

// rowPages returns the number of pages that rows of a mixture's experts take.
func (r *rank) rowPages(x *model.MoE, page memory.Bytes, rows int) schedule.Pages {
	var sizes []memory.Bytes
	for _, t := range layer.RowTensors(r.cfg.Model.Hidden, x.Width, r.cfg.Number, 1) {
		sizes = append(sizes, t.Row*memory.Bytes(rows))
	}
	return schedule.PagesOf(page, sizes...)
}

// pageTables returns the device memory of page tables: a control block for every store,
// and a table of pages for every group of rows.
func (r *rank) pageTables(c *stash.ManagerConfig, mixtures []*model.MoE) memory.Bytes {
	n, groups := kernels.StashControlBytes, memory.Bytes(0)
	for _, x := range mixtures {
		_, worst := r.setRows(x.Width)
		record := kernels.StashRecordSize(len(layer.RowTensors(1, 1, r.cfg.Number, 1)), uint64(r.rowPages(x, c.Store.Page, worst)))
		n += memory.Bytes(r.cfg.Batch.Microbatches) * (record + device.Align + 8)
		groups += memory.Bytes(r.cfg.Batch.Microbatches)
	}
	if c.HostMax > 0 { // a group may have a table in each store, and both are reported together
		n += n + 2*(kernels.StashControlBytes+8*groups+device.Align)
	}
	return n
}

// inFlight returns the most microbatches that are between their forward and their
// backward pass at once, as a mean over the chunks, rounded up.
func (r *rank) inFlight() int {
	chunks := r.cfg.Layout.VPP
	return (r.most(func(int) int { return 1 }) + chunks - 1) / chunks
}

// atOnce returns the most groups of rows that are saved at once, of the mixtures that of
// reports.
func (r *rank) atOnce(of func(*model.MoE) bool) int {
	return r.most(func(chunk int) (n int) {
		for _, l := range r.layers(chunk) {
			if l.MoE != nil && of(l.MoE) {
				n++
			}
		}
		return n
	})
}

// most returns the greatest sum, at any time, of what each of the chunks that are between
// their forward and their backward pass has.
func (r *rank) most(has func(chunk int) int) (most int) {
	now := 0
	for _, a := range r.program {
		if a.verb != compute {
			continue
		}
		n := has(a.pass.Chunk)
		if a.pass.Backward {
			n = -n
		}
		now += n
		most = max(most, now)
	}
	return most
}
