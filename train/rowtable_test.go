// This file owns the sizes of stores and workspaces for rows beside a golden file, for drawn
// set-ups: they cost memory or time, and change no result.

package train

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
	"github.com/stowage-dev/stowage/train/internal/layer"
)

// twoWidths has experts of two widths, in every other layer, and a further head.
func twoWidths(layers int, mtp bool) *model.Model {
	m := &model.Model{Name: "two widths", Hidden: 64, Vocab: 256}
	for i := range layers {
		m.Layers = append(m.Layers, model.Layer{MoE: &model.MoE{Experts: 8, TopK: 1 + i%3, Width: 48 >> (i % 2), Gated: true}})
	}
	m.Layers[0] = model.Layer{Dense: &model.Dense{Width: 96, Gated: true}}
	if mtp {
		m.MTP = &model.MTP{Depth: 2, Layers: m.Layers[1:2]}
	}
	return m
}

// rowsRank returns a rank that knows sizes and has no device.
func rowsRank(t *testing.T, c *Config, index int) *rank {
	t.Helper()
	all, err := programs(schedule.Pipeline{Ranks: c.Layout.PP, Chunks: c.Layout.VPP, Microbatches: c.Batch.Microbatches})
	if err != nil {
		t.Fatal(err)
	}
	r := &rank{cfg: c, index: index, pp: index / c.Layout.DP, dp: index % c.Layout.DP}
	r.program = all[r.pp]
	r.env = &layer.Env{
		Model: c.Model, Settings: c.Settings, Dispatch: c.Dispatch, Expert: layer.Place{Rank: r.dp % c.Layout.EP, Ranks: c.Layout.EP},
		Shape: layer.Shape{Batch: c.Batch.Micro, Seq: c.Batch.Seq, Number: c.Number},
	}
	return r
}

func TestRowsOfDrawnSetups(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	one := func(of ...int) int { return of[r.IntN(len(of))] }
	var b strings.Builder
	for range 80 {
		c := &Config{Model: twoWidths(one(8, 11), one(0, 1) == 1), Settings: layer.DefaultSettings(), Number: kernels.Number(r.IntN(2)), Dispatch: layer.Dispatch(r.IntN(2))}
		c.Layout = Layout{PP: one(1, 2, 4), EP: one(1, 1, 2, 4)}
		c.Layout.VPP, c.Layout.DP = 1, c.Layout.EP*one(1, 2)
		if c.Layout.PP > 1 {
			c.Layout.VPP = one(1, 2)
		}
		c.Batch = Batch{Micro: one(1, 2), Seq: one(32, 96), Microbatches: c.Layout.PP * one(1, 2, 3)}
		if one(0, 1) == 1 {
			c.Settings.Routing.Capacity = 1.25
		}
		c.Memory = Memory{Rows: layer.Stashed}
		policy := []string{"plain", "plain", "host rows", "named", "budget", "pages", "sets"}[r.IntN(7)]
		switch policy {
		case "host rows":
			c.Memory.Offload = []string{layer.RowsGroup}
		case "named":
			c.Memory.Stash = []string{layer.RowsGroup}
		case "budget":
			c.Memory.Budget = memory.GiB
		case "pages":
			c.Memory.Budget, c.Memory.DevicePages = memory.GiB, 100
		case "sets":
			c.Memory.Sets, c.Memory.Room = 3, 1.5
		}
		fmt.Fprintf(&b, "%d layers, mtp %v, %v, %v, %+v, %+v, capacity %g, %s\n", len(c.Model.Layers), c.Model.MTP != nil, numberName(c.Number), c.Dispatch, c.Layout, c.Batch, c.Settings.Routing.Capacity, policy)
		for pp := range c.Layout.PP {
			k := rowsRank(t, c, pp*c.Layout.DP+c.Layout.DP-1)
			s := k.stash(k.mixtures())
			fmt.Fprintf(&b, "  stage %d: in flight %d, keeps %v, fixed %v, pages %v of %v, host %d of %d, tables %d\n", pp, k.inFlight(), s.KeepAll, s.Fixed, s.Store.Pages, s.Store.Max, s.HostPages, s.HostMax, s.Tables)
			for _, width := range []int{24, 48} {
				rows, worst := k.setRows(width)
				fmt.Fprintf(&b, "    width %d: %d sets of %d rows, at most %d\n", width, k.sets(width), rows, worst)
				if s.KeepAll && k.sets(width) != max(1, savedAtOnce(k, width)) {
					t.Errorf("stage %d of %+v saves %d groups of width %d at once, and has %d sets", pp, c.Layout, savedAtOnce(k, width), width, k.sets(width))
				}
			}
		}
	}
	golden.Check(t, "rows.txt", b.String())
}

// savedAtOnce counts groups of a width that are between their forward and their backward pass,
// one by one.
func savedAtOnce(r *rank, width int) (most int) {
	var live []int // chunks
	for _, a := range r.program {
		switch {
		case a.verb != compute:
		case !a.pass.Backward:
			live = append(live, a.pass.Chunk)
		default:
			i := slices.Index(live, a.pass.Chunk)
			live = slices.Delete(live, i, i+1)
		}
		n := 0
		for _, chunk := range live {
			for _, l := range r.layers(chunk) {
				if l.MoE != nil && l.MoE.Width == width {
					n++
				}
			}
		}
		most = max(most, n)
	}
	return most
}
