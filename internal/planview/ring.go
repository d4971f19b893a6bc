// This file owns the sizes of a ring of experts: what it keeps for the backward pass,
// by the way of keeping it.

package planview

import (
	"fmt"
	"io"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan"
)

// RingSizes is the memory of a ring of experts, by the way of keeping rows.
type RingSizes struct {
	Rows      int64        `json:"rows"`       // every token of the ring, for each expert it chooses
	TightRows int64        `json:"tight_rows"` // no more copies of a token than experts are on a rank
	Expected  int64        `json:"expected_rows"`
	Layer     memory.Bytes `json:"layer_bytes"`
	Layers    int          `json:"layers"`
	Stores    []RingStore  `json:"stores"`
}

// RingStore is one way of keeping rows.
type RingStore struct {
	Name  string       `json:"name"`
	Bytes memory.Bytes `json:"bytes"`
}

// NewRingSizes returns the sizes of a ring whose chunks have a margin over the expected
// rows.
func NewRingSizes(r plan.Ring, margin float64) RingSizes {
	return RingSizes{
		Rows: r.Rows(), TightRows: r.TightRows(), Expected: r.ExpectedRows(), Layer: r.LayerBytes(), Layers: r.Layers,
		Stores: []RingStore{
			{"whole buffers", r.Whole()},
			{"half of them", r.Capped(0.5)},
			{fmt.Sprintf("a chunk of %g times what is expected", margin), r.Paged(margin)},
			{"a chunk of what is expected", r.Paged(1)},
			{"one shared store, with a chunk of slack", r.Shared(margin)},
		},
	}
}

// WriteText writes the sizes for a terminal.
func (t RingSizes) WriteText(w io.Writer) {
	fmt.Fprintf(w, "compute buffer of a layer: %d rows, %s GiB", t.Rows, GiB(t.Layer))
	if t.TightRows < t.Rows {
		fmt.Fprintf(w, "; %d rows suffice", t.TightRows)
	}
	fmt.Fprintf(w, "; %d rows are expected\n\n%-42s  %9s\n", t.Expected, fmt.Sprintf("kept until backward, %d layers", t.Layers), "GiB")
	for _, s := range t.Stores {
		fmt.Fprintf(w, "%-42s  %9.1f\n", s.Name, float64(s.Bytes)/(1<<30))
	}
}
