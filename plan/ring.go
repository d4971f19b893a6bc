// This file owns the sizes of ring-of-experts dispatch (SPEC S3): tokens are
// gathered around the ring of expert ranks, so that a compute buffer must hold
// what every rank could send, while only the rows that were really routed here
// need be stored until backward.

package plan

import (
	"fmt"
	"math"
)

// Ring is a ring of expert ranks that store one tensor of every MoE layer.
type Ring struct {
	Batch, Seq int // sequences and tokens of a device's microbatch
	TopK       int
	EP         int
	// LocalExperts is how many experts a rank holds; a token reaches no more of
	// them than there are.
	LocalExperts int
	Width        int // elements of a row
	ElementBytes int
	Layers       int
}

// Check tells whether all sizes are there.
func (r Ring) Check() error {
	for _, f := range []struct {
		name string
		v    int
	}{{"batch", r.Batch}, {"seq", r.Seq}, {"top-k", r.TopK}, {"ep", r.EP}, {"width", r.Width}, {"element size", r.ElementBytes}, {"layers", r.Layers}} {
		if f.v < 1 {
			return fmt.Errorf("plan: a ring of experts with %s %d; it must be at least 1", f.name, f.v)
		}
	}
	return nil
}

// Rows is the plain bound of the compute buffer: every token of every rank of the
// ring, once for each expert it chooses.
func (r Ring) Rows() int64 {
	return int64(r.Batch) * int64(r.EP) * int64(r.Seq) * int64(r.TopK)
}

// TightRows is the bound that knows that a token chooses each expert once, so
// that no more copies of it come here than experts are here.
func (r Ring) TightRows() int64 {
	k := r.TopK
	if r.LocalExperts > 0 {
		k = min(k, r.LocalExperts)
	}
	return int64(r.Batch) * int64(r.EP) * int64(r.Seq) * int64(k)
}

// ExpectedRows is what balanced routing sends to a rank.
func (r Ring) ExpectedRows() int64 { return r.Rows() / int64(r.EP) }

// RowBytes is the size of a row.
func (r Ring) RowBytes() int64 { return int64(r.Width) * int64(r.ElementBytes) }

// LayerBytes is one layer's compute buffer.
func (r Ring) LayerBytes() int64 { return r.Rows() * r.RowBytes() }

// Whole stores every layer's compute buffer, Capped so large a share of it.
func (r Ring) Whole() int64 { return int64(r.Layers) * r.LayerBytes() }

func (r Ring) Capped(share float64) int64 { return int64(float64(r.Whole()) * share) }

// Chunk is how many rows a layer may store at once with a safety margin over
// what is expected.
func (r Ring) Chunk(margin float64) int64 {
	return int64(math.Ceil(float64(r.ExpectedRows()) * margin))
}

// Paged gives every layer a chunk.
func (r Ring) Paged(margin float64) int64 { return int64(r.Layers) * r.Chunk(margin) * r.RowBytes() }

// Shared is one store for all layers: what they are expected to store together,
// and one chunk of slack, because a layer writes its chunk at a moving offset.
func (r Ring) Shared(margin float64) int64 {
	return (int64(r.Layers)*r.ExpectedRows() + r.Chunk(margin)) * r.RowBytes()
}
