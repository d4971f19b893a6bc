// This file owns `stowage plan ring`: its flags and its errors.

package main

import (
	"github.com/spf13/cobra"

	"github.com/stowage-dev/stowage/internal/planview"
	"github.com/stowage-dev/stowage/plan"
)

func newPlanRing() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ring",
		Short: "Size what a ring of experts keeps for the backward pass",
		Long: `In a ring of experts the tokens of every rank are gathered around the ring, so a compute
buffer holds the rows that all ranks could send. Print the memory that keeps one tensor
of every MoE layer until the backward pass: whole buffers, half of them, a chunk of the
expected rows with a margin, and one store that all layers share. The defaults are those
of DeepSeek-V3's moe_mlpwo; moe_mlpwi_0 and moe_mlpwi_1 have a width of 2048.`,
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
		if r.EP >= 1 && experts >= 1 {
			r.LocalExperts = experts / r.EP
		}
		all := float64(r.Batch) * float64(r.Seq) * float64(r.TopK) * float64(r.EP) * float64(r.Width) * float64(r.Layers) * float64(r.ElementBytes)
		switch err := r.Check(); {
		case experts < 1:
			return usagef("--experts %d is out of range; give at least 1", experts)
		case r.EP >= 1 && experts%r.EP != 0:
			return usagef("--experts %d is not a multiple of --ep %d; choose a multiple", experts, r.EP)
		case err != nil:
			return planError(err)
		case !(margin >= 1 && margin <= float64(r.EP)):
			return usagef("--margin %s: expected a number from 1 to %d; no more rows can arrive than all %d ranks send", figures(margin, -1), r.EP, r.EP)
		case all > 1<<60:
			return usagef("these sizes come to %s bytes; give a smaller --batch, --seq, --top-k, --ep, --layers or --width", figures(all, 3))
		}
		t := planview.NewRingSizes(r, margin)
		if *asJSON {
			return printJSON(cmd, t)
		}
		t.WriteText(cmd.OutOrStdout())
		return nil
	}
	return cmd
}
