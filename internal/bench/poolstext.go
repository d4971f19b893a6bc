// This file owns the table of pools as people read it.

package bench

import (
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/memory"
)

// PoolsText prints the table, and the slots of the max-pool if there is only one model.
func PoolsText(w io.Writer, r *Pools) {
	fmt.Fprintf(w, "prefetch %d; DP %d, TP %d, EP %d, ETP %d; gradients reduced in %s; GiB, and percent over the lower bound\n\n",
		r.Prefetch, r.DP, r.TP, r.EP, r.ETP, r.GradType)
	fmt.Fprintf(w, "%-26s %-9s %7s", "model", "", "bound")
	for _, p := range r.Models[0].Weights.Pools {
		fmt.Fprintf(w, "  %12s", p.Pool)
	}
	fmt.Fprintf(w, "  %7s\n", "outside")
	for _, m := range r.Models {
		poolLine(w, m.Model, "weights", m.Weights)
		poolLine(w, "", "gradients", m.Gradients)
	}
	fmt.Fprintf(w, `
bound    the largest set of buckets live at once: no pool can be smaller
dynamic  a caching allocator that reuses blocks of the same size; no fixed addresses
rotary   blocks of the largest layer in turn
fixed    slots for the most common layer; %s memory for layers of other shapes
max      slots for the largest buckets of any layer
arena    blocks that layers share which are never live together
trace    offsets from the recorded order
outside  %s memory that rotary, fixed and max keep for the embedding, the
         output layer and other modules that are no units
`, r.Fallback, r.Fallback)
	if len(r.Models) == 1 {
		poolSlots(w, "weights", r.Models[0].Weights)
		poolSlots(w, "gradients", r.Models[0].Gradients)
	}
}

func poolLine(w io.Writer, model, what string, s PoolSide) {
	fmt.Fprintf(w, "%-26s %-9s %7.2f", model, what, gib(s.Lower))
	for _, p := range s.Pools {
		fmt.Fprintf(w, "  %6.2f %4.0f%%", gib(p.Bytes), 100*p.Waste)
	}
	fmt.Fprintf(w, "  %7.2f\n", gib(s.Outside))
}

func poolSlots(w io.Writer, what string, s PoolSide) {
	fmt.Fprintf(w, "\nthe max-pool of %s: %d sets of slots, as large as\n", what, s.Live)
	for _, slot := range s.Slots {
		fmt.Fprintf(w, "%11v  %-4s  %s, %s\n", slot.Bytes, slot.Type, slot.Unit, slot.Bucket)
	}
}

func gib(n memory.Bytes) float64 { return float64(n) / float64(memory.GiB) }
