// This file owns the steps that the tests describe.

package choose

import (
	"time"

	"github.com/stowage-dev/stowage/memory"
)

// model is a model of equal blocks. Each has a unit that is cheap to recompute, a dear one,
// and its input, which can only be offloaded.
type model struct {
	blocks, microbatches int
	saved                memory.Bytes  // in one microbatch, without inputs
	forward              time.Duration // of one microbatch
	cheap, rest          time.Duration // to recompute the units of a block
}

// dense is a dense model that saves 32 GB in a forward pass of 90 ms.
func dense(blocks, microbatches int) model {
	return model{blocks, microbatches, 32e9, 90 * time.Millisecond, 300 * time.Microsecond, 3500 * time.Microsecond}
}

// fast is a link of 55 GB/s each way.
var fast = &Links{Out: 55e9, In: 55e9, Latency: 10 * time.Microsecond}

// request describes a step of the model: microbatch after microbatch, forward and backward,
// with a temporary in every pass of a block.
func (m model) request(share float64) *Request {
	r := &Request{Span: 0, Offload: true, Recompute: true, Links: fast}
	block := m.saved / memory.Bytes(m.blocks)
	sizes := []memory.Bytes{block / 30, block / 3, 2 * block / 3}
	each := m.forward / time.Duration(m.blocks)
	r.Limit = memory.Bytes(share * float64(m.saved+memory.Bytes(m.blocks)*sizes[0]))
	for b := range m.blocks {
		r.Units = append(r.Units,
			Unit{Name: "input", Layer: b, Offload: true},
			Unit{Name: "cheap", Layer: b, Offload: true, Recompute: m.cheap},
			Unit{Name: "rest", Layer: b, Offload: true, Recompute: m.rest})
	}
	for mb := range m.microbatches {
		for b := range m.blocks {
			r.temporary(sizes[0])
			for k, n := range sizes {
				if k == 2 {
					r.Span += each
				}
				unit := 3*b + k
				r.Storages = append(r.Storages, n)
				r.Ops = append(r.Ops, Op{Kind: "save", Unit: &unit, Microbatch: mb, Storages: []int{len(r.Storages) - 1}, At: r.Span})
			}
		}
		for b := m.blocks - 1; b >= 0; b-- {
			for k := range sizes {
				unit := 3*b + k
				r.Ops = append(r.Ops, Op{Kind: "load", Unit: &unit, Microbatch: mb, At: r.Span})
			}
			r.Span += 2 * each
			r.temporary(2 * sizes[0])
			for k := range sizes {
				unit := 3*b + k
				r.Ops = append(r.Ops, Op{Kind: "release", Unit: &unit, Microbatch: mb, At: r.Span})
			}
		}
	}
	return r
}

// temporary adds a storage that is taken and given back at once.
func (r *Request) temporary(n memory.Bytes) {
	id := len(r.Storages)
	r.Storages = append(r.Storages, n)
	r.Ops = append(r.Ops, Op{Kind: "take", Storage: &id, At: r.Span}, Op{Kind: "give", Storage: &id, At: r.Span})
}
