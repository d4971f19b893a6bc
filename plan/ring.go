// This file owns the sizes of ring-of-experts dispatch (SPEC S3). The ring gathers the
// tokens of all expert ranks, so a compute buffer must hold what every rank could send.
// Only the rows that were routed to a rank must be kept for the backward pass.

package plan

import (
	"fmt"
	"math"

	"github.com/stowage-dev/stowage/memory"
)

// Ring describes a ring of expert ranks that keep one tensor of every MoE layer for the
// backward pass.
type Ring struct {
	Batch, Seq int // sequences and tokens of a device's microbatch
	TopK       int
	EP         int
	// LocalExperts is how many experts a rank holds. It bounds the copies of a token
	// that reach the rank.
	LocalExperts int
	Width        int // elements of a row
	ElementBytes int
	Layers       int
}

// Check returns an error if a size is missing, or if a token chooses more experts than
// there are.
func (r Ring) Check() error {
	for _, f := range []struct {
		name string
		v    int
	}{{"batch", r.Batch}, {"seq", r.Seq}, {"top-k", r.TopK}, {"ep", r.EP}, {"width", r.Width}, {"element size", r.ElementBytes}, {"layers", r.Layers}} {
		if f.v < 1 {
			return &memory.SettingError{Setting: f.name, Asked: fmt.Sprint(f.v), Problem: "is out of range", Remedy: "give at least 1"}
		}
	}
	if all := r.LocalExperts * r.EP; r.LocalExperts > 0 && r.TopK > all {
		return &memory.SettingError{Setting: "top-k", Asked: fmt.Sprint(r.TopK), Problem: fmt.Sprintf("is more than the %d experts of a layer", all), Remedy: "give fewer"}
	}
	return nil
}

// Rows returns the rows of the compute buffer: every token of every rank of the ring,
// once for each expert that it chooses.
func (r Ring) Rows() int64 {
	return int64(r.Batch) * int64(r.EP) * int64(r.Seq) * int64(r.TopK)
}

// TightRows returns a tighter bound of Rows: a token chooses each expert once, so no
// more copies of it arrive than the rank has experts.
func (r Ring) TightRows() int64 {
	k := r.TopK
	if r.LocalExperts > 0 {
		k = min(k, r.LocalExperts)
	}
	return int64(r.Batch) * int64(r.EP) * int64(r.Seq) * int64(k)
}

// ExpectedRows returns the rows that balanced routing sends to a rank.
func (r Ring) ExpectedRows() int64 { return r.Rows() / int64(r.EP) }

// rowBytes returns the size of a row.
func (r Ring) rowBytes() memory.Bytes { return memory.Bytes(r.Width) * memory.Bytes(r.ElementBytes) }

// LayerBytes returns the size of the compute buffer of one layer.
func (r Ring) LayerBytes() memory.Bytes { return memory.Bytes(r.Rows()) * r.rowBytes() }

// Whole returns the memory that keeps the compute buffers of all layers.
func (r Ring) Whole() memory.Bytes { return memory.Bytes(r.Layers) * r.LayerBytes() }

// Capped returns the memory that keeps a share of the compute buffers of all layers.
func (r Ring) Capped(share float64) memory.Bytes { return memory.Bytes(float64(r.Whole()) * share) }

// chunk returns how many rows a layer may store at once, with a safety margin over the
// expected rows.
func (r Ring) chunk(margin float64) int64 {
	return int64(math.Ceil(float64(r.ExpectedRows()) * margin))
}

// Paged returns the memory that gives every layer a chunk.
func (r Ring) Paged(margin float64) memory.Bytes {
	return memory.Bytes(r.Layers) * memory.Bytes(r.chunk(margin)) * r.rowBytes()
}

// Shared returns the memory of one store for all layers: the rows that they are expected
// to keep together, and one chunk of slack, because a layer writes its chunk at a moving
// offset.
func (r Ring) Shared(margin float64) memory.Bytes {
	return memory.Bytes(int64(r.Layers)*r.ExpectedRows()+r.chunk(margin)) * r.rowBytes()
}
