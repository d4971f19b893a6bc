// This file owns `stowage plan ring`: what a ring of experts stores for backward,
// by the way it is stored.

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/plan"
	"github.com/stowage-dev/stowage/plan/page"
)

func newPlanRing() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ring",
		Short: "Size the store of a ring of experts",
		Long: `In a ring of experts every rank's tokens are gathered around the ring, so a compute
buffer holds the rows that all of them could send. Show what it takes to keep one
tensor of every MoE layer until backward: whole buffers, half of them, a chunk of
the expected rows with a margin, and one store that all layers share. Without
flags it is DeepSeek-V3's moe_mlpwo; moe_mlpwi_0 and moe_mlpwi_1 have a width of
2048.`,
		Example: `  stowage plan ring
  stowage plan ring --width 2048 --margin 1.25 --json`,
		Args: noArgs,
	}
	r := plan.Ring{ElementBytes: 2}
	var experts int
	var margin float64
	f := cmd.Flags()
	f.SortFlags = false
	f.IntVar(&r.Batch, "batch", 2, "`sequences` of a device's microbatch")
	f.IntVar(&r.Seq, "seq", 4096, "`tokens` of a sequence")
	f.IntVar(&r.TopK, "top-k", 8, "`experts` a token chooses")
	f.IntVar(&experts, "experts", 256, "`experts` of a layer")
	f.IntVar(&r.EP, "ep", 4, "expert-parallel `ranks`")
	f.IntVar(&r.Layers, "layers", 60, "`layers` with experts")
	f.IntVar(&r.Width, "width", 7168, "`elements` of a row, in bf16")
	f.Float64Var(&margin, "margin", 1.5, "rows of a chunk over those expected, a `factor`")
	asJSON := jsonFlag(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if !cmd.Flags().Changed("margin") {
			margin = min(margin, float64(r.EP))
		}
		all := float64(r.Batch) * float64(r.Seq) * float64(r.TopK) * float64(r.EP) * float64(r.Width) * float64(r.Layers) * float64(r.ElementBytes)
		switch err := r.Check(); {
		case err != nil:
			return planError(err)
		case experts < 1 || experts%r.EP != 0:
			return usagef("--experts %d do not divide by --ep %d", experts, r.EP)
		case !(margin >= 1 && margin <= float64(r.EP)):
			return usagef("--margin must be between 1 and the %d ranks, not %g; more rows than that cannot come", r.EP, margin)
		case all > 1<<60:
			return usagef("these sizes come to %.3g bytes; give a smaller --batch, --seq, --top-k, --ep, --layers or --width", all)
		}
		r.LocalExperts = experts / r.EP
		t := ringTable(r, margin)
		if *asJSON {
			return printJSON(cmd, t)
		}
		t.text(cmd.OutOrStdout())
		return nil
	}
	return cmd
}

// ringSizes is what `stowage plan ring --json` prints.
type ringSizes struct {
	Rows      int64       `json:"rows"`       // every token of the ring, for each expert it chooses
	TightRows int64       `json:"tight_rows"` // no more copies of a token than experts are on a rank
	Expected  int64       `json:"expected_rows"`
	Layer     int64       `json:"layer_bytes"`
	Layers    int         `json:"layers"`
	Stores    []ringStore `json:"stores"`
}

type ringStore struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

func ringTable(r plan.Ring, margin float64) ringSizes {
	return ringSizes{
		Rows: r.Rows(), TightRows: r.TightRows(), Expected: r.ExpectedRows(), Layer: r.LayerBytes(), Layers: r.Layers,
		Stores: []ringStore{
			{"whole buffers", r.Whole()},
			{"half of them", r.Capped(0.5)},
			{fmt.Sprintf("a chunk of %g times what is expected", margin), r.Paged(margin)},
			{"a chunk of what is expected", r.Paged(1)},
			{"one shared store, with a chunk of slack", r.Shared(margin)},
		},
	}
}

func (t ringSizes) text(w io.Writer) {
	fmt.Fprintf(w, "compute buffer of a layer: %d rows, %s GiB", t.Rows, page.GiB(t.Layer))
	if t.TightRows < t.Rows {
		fmt.Fprintf(w, "; %d rows suffice", t.TightRows)
	}
	fmt.Fprintf(w, "; %d rows are expected\n\n%-42s  %9s\n", t.Expected, fmt.Sprintf("kept until backward, %d layers", t.Layers), "GiB")
	for _, s := range t.Stores {
		fmt.Fprintf(w, "%-42s  %9.1f\n", s.Name, float64(s.Bytes)/(1<<30))
	}
}
