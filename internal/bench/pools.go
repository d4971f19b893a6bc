// This file owns the comparison of the pools of sharded parameters: the size of each kind
// for a model's weights and gradients, and the lower bound of any pool.

package bench

import (
	"fmt"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/model"
)

// PoolFigures has the figures of one pool.
type PoolFigures struct {
	Pool    string       `json:"pool"`
	Bytes   memory.Bytes `json:"bytes"`
	Waste   float64      `json:"waste"`                   // over the lower bound: 0.02 is 2 %
	Dynamic memory.Bytes `json:"dynamic_bytes,omitempty"` // the part of it at no fixed address
	Outside int          `json:"units_outside"`           // units and modules that its slots do not serve
	Moves   int          `json:"moves"`                   // buckets that change their place within a step
}

// PoolSlot is a slot of one set of the max-pool, with the bucket that decides it.
type PoolSlot struct {
	Type   string       `json:"type"`
	Bytes  memory.Bytes `json:"bytes"`
	Unit   string       `json:"unit"`
	Bucket string       `json:"bucket"`
}

// PoolSide has the sizes of all pools for the weights, or the gradients, of a model.
type PoolSide struct {
	Lower memory.Bytes  `json:"lower_bound_bytes"`
	Live  int           `json:"live_units"`
	Pools []PoolFigures `json:"pools"`
	// Slots lists the slots of one set of the max-pool. Outside is what the pool needs
	// beside its sets, for modules that are not units.
	Slots   []PoolSlot   `json:"max_slots"`
	Outside memory.Bytes `json:"max_outside_bytes"`
}

// PoolModel is one model.
type PoolModel struct {
	Model     string   `json:"model"`
	Units     int      `json:"units"`
	Loose     int      `json:"loose_modules"`
	Weights   PoolSide `json:"weights"`
	Gradients PoolSide `json:"gradients"`
}

// Pools is the result.
type Pools struct {
	Prefetch  int         `json:"prefetch"`
	DP        int         `json:"dp"`
	TP        int         `json:"tp"`
	EP        int         `json:"ep"`
	ETP       int         `json:"etp"`
	Recompute int         `json:"recompute_layers"`
	FP8       bool        `json:"fp8"`
	GradType  string      `json:"grad_comm_dtype"`
	Fallback  string      `json:"fallback"`
	Models    []PoolModel `json:"models"`
}

// ComparePools plans every pool for every model.
func ComparePools(models []*model.Model, o PoolOptions) (*Pools, error) {
	res := &Pools{
		Prefetch: o.Prefetch, DP: o.DP, TP: o.TP, EP: o.EP, ETP: o.ETP, Recompute: o.Recompute, FP8: o.FP8,
		GradType: o.Gradients.Name, Fallback: o.Fallback.String(),
	}
	for _, m := range models {
		weights, err := o.Weights(m)
		if err != nil {
			return nil, err
		}
		grads, err := o.Grads(m)
		if err != nil {
			return nil, err
		}
		x := PoolModel{Model: m.Name}
		for _, u := range weights.Units {
			if u.Loose {
				x.Loose++
			} else {
				x.Units++
			}
		}
		if x.Weights, err = o.planPools(weights); err == nil {
			x.Gradients, err = o.planPools(grads)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", m.Name, err)
		}
		res.Models = append(res.Models, x)
	}
	return res, nil
}

func (o PoolOptions) planPools(s bucket.Spec) (side PoolSide, err error) {
	for _, kind := range bucket.PoolKinds {
		p, err := bucket.NewPoolPlan(kind, s, bucket.Options{Fallback: o.Fallback})
		if err != nil {
			return side, err
		}
		side.Lower, side.Live = p.LowerBound, p.Live
		side.Pools = append(side.Pools, PoolFigures{
			Pool: kind.String(), Bytes: p.Bytes, Waste: p.Waste(), Dynamic: p.Dynamic,
			Outside: len(p.Fallback), Moves: len(p.Moves),
		})
		if kind == bucket.Max {
			side.Slots, side.Outside = oneSet(p)
		}
	}
	return side, nil
}

// oneSet returns the slots of the first set of a max-pool, and what the pool needs beside
// its sets.
func oneSet(p *bucket.PoolPlan) (slots []PoolSlot, outside memory.Bytes) {
	sets := p.Slots
	if p.Options.Fallback == bucket.Persistent {
		sets = sets[:len(sets)-len(p.Fallback)] // a slot for each comes last
	}
	outside = p.Bytes
	for i, s := range sets {
		outside -= s.Bytes
		if i < len(sets)/max(1, p.Live) {
			u := p.Spec.Units[s.Decides.Unit]
			slots = append(slots, PoolSlot{Type: s.Type.Name, Bytes: s.Bytes, Unit: u.Name, Bucket: u.Buckets[s.Decides.Bucket].Name})
		}
	}
	return slots, outside
}
