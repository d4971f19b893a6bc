// This file owns the table of a replay as people read it.

package bench

import (
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/memory"
)

// ReplayHead prints the head of the table. It needs no rank.
func ReplayHead(w io.Writer, r *Replay) {
	fmt.Fprintf(w, "%s:%d  %s\n", r.Device.Backend, r.Device.Ordinal, describe(r.Device))
	fmt.Fprintf(w, "%d steps, %d layers, %d microbatches; PP %d, VPP %d, pipeline rank %d\n",
		r.Steps, r.Layers, r.Microbatches, r.PP, r.VPP, r.Stage)
	fmt.Fprintf(w, "%v a row, %d rows a rank if balanced and %d at worst; tensors of a group: %d; pages of %v\n\n",
		r.Width, r.Balanced, r.Worst, r.Tensors, r.Page)
	fmt.Fprintf(w, "%5s  %7s  %11s  %11s  %11s  %11s  %6s  %6s  %6s  %7s  %11s  %7s  %11s\n",
		"rank", "most", "live", "stored", "bound", "pool", "/live", "/bound", "reruns", "growths", "spilled", "dropped", "static")
}

// ReplayText prints the line of one rank.
func ReplayText(w io.Writer, r ReplayRank) {
	fmt.Fprintf(w, "%5d  %6.2fx  ", r.Rank, r.Imbalance)
	replayFigures(w, r.ReplayFigures)
}

// ReplayFoot prints the line of all ranks and explains the columns.
func ReplayFoot(w io.Writer, r *Replay) {
	fmt.Fprintf(w, "%5s  %7s  ", "all", "")
	replayFigures(w, r.Total)
	fmt.Fprintf(w, `
most    the largest number of rows of a layer and microbatch, over the rank's share
live    the live rows at the worst moment of any step, exactly
stored  those that cannot stay in the buffers they were computed in
bound   stored and one page for each tensor; the pool is to stay within 5 %% of it
static  worst-case buffers for every layer and microbatch in flight; the stash shares %v
`, r.Total.Sets/memory.Bytes(max(len(r.Ranks), 1)))
	if r.StepsRerun > 0 {
		fmt.Fprintf(w, "%d of %d steps were run twice because a pool had to grow\n", r.StepsRerun, r.Steps)
	}
}

func replayFigures(w io.Writer, f ReplayFigures) {
	fmt.Fprintf(w, "%11v  %11v  %11v  %11v  %6.3f  %6.3f  %6d  %7d  %11v  %7d  %11v\n",
		f.Live, f.Stored, f.Bound, f.Pool, f.OverLive, f.OverBound, f.Reruns, f.Growths, f.Spilled, f.Dropped, f.Static)
}
