// This file owns what the paged stash costs: the workspaces that experts compute in, and
// the pages that hold their rows between the passes.

package plan

import (
	"math"
	"slices"

	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

const (
	// stashPage is the default size of a page. stashSets is how many sets of a workspace
	// let one layer compute while another is stashed or restored.
	stashPage = 64 * memory.KiB
	stashSets = 2
)

// stash is the memory of a rank's stash.
type stash struct {
	sets, device, host memory.Bytes
}

// stash sizes the pages by walking the schedule with balanced rows.
func (d *dims) stash(w *walk) stash {
	o := d.s.Stash
	if len(o.Modules) == 0 {
		return stash{}
	}
	page := o.PageBytes
	if page == 0 {
		page = stashPage
	}
	var out stash
	demand := make([]schedule.Pages, len(w.chunks))
	for i, c := range w.chunks {
		for _, u := range c.units {
			var set memory.Bytes
			for _, g := range u.stash {
				// Sizes have the received rows. The pages are sized for balanced ones.
				received, balanced := d.load()
				even := memory.Bytes(float64(g.Bytes) * balanced / received)
				demand[i] += schedule.PagesOf(page, even)
				set += max(g.Bytes, memory.Bytes(math.Ceil(float64(even)*o.RankCapacity)))
			}
			out.sets = max(out.sets, stashSets*set)
		}
	}
	var live, most schedule.Pages
	for _, p := range w.passes {
		if p.Backward {
			live -= demand[p.Chunk]
			continue
		}
		live += demand[p.Chunk]
		most = max(most, live)
	}
	size := func(factor float64) memory.Bytes {
		return memory.Bytes(schedule.Balanced{Expected: most, Factor: factor}.Next(schedule.Seen{})) * page
	}
	out.device = memory.Bytes(most) * page
	if o.Factor > 0 {
		out.device = size(o.Factor)
	}
	if o.HostFactor > 0 {
		out.host = size(o.HostFactor)
	}
	return out
}

// capacity returns the factor by which static receive buffers enlarge the rows. Without a
// stash every layer saves its whole buffer.
func (d *dims) capacity() float64 {
	if c := d.s.Stash.RankCapacity; c > 0 && len(d.s.Stash.Modules) == 0 {
		return c
	}
	return 1
}

func hasExperts(m *model.Model) bool {
	return slices.ContainsFunc(m.Layers, func(l model.Layer) bool { return l.MoE != nil })
}
