// This file owns fully sharded data parallelism: what is held between steps, what is
// gathered during a step, and which gradients wait to be scattered.

package plan

import (
	"slices"

	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/memory"
)

// leastCommunication is the least number of elements in a unit of communication.
// Megatron-FSDP gathers FSDP units ahead until they have half of such a unit, and lets the
// gradients of a whole one wait for their scatter. Its size is twice the mean FSDP unit of
// the rank, but at least leastCommunication; the comment in its source says at most.
const leastCommunication = 1_000_000_000

// sharded is how parameters are gathered and gradients scattered.
type sharded struct {
	weight, grad memory.Bytes // of an element
	ahead        int64        // elements that are gathered ahead
	units        int          // units that are gathered ahead, if not zero
	queue        int64        // elements whose gradients wait
	pooled       bool         // fixed buffers hold all of it; see shardedItems
}

// communication returns the size of a rank's unit of communication, in elements.
func communication(held share) int64 {
	var all, n int64
	for _, u := range held.units {
		if u.gathers() {
			all, n = all+u.dense+u.expert, n+1
		}
	}
	return max(leastCommunication, 2*all/max(n, 1))
}

// sharded returns nil if every rank holds all parameters and gradients. If only gradients
// are sharded, nothing is gathered, but gradients still wait.
func (d *dims) sharded(held share) *sharded {
	f := d.s.Layout.FSDP
	unit := communication(held)
	switch f.Shard {
	case ShardGradients:
		return &sharded{grad: d.gradBytes(), queue: unit}
	case NoShard, ShardOptimizer:
		return nil
	}
	s := &sharded{weight: d.elem, grad: d.gradBytes(), ahead: unit / 2, queue: unit, units: f.Prefetch, pooled: f.DoubleBuffer}
	if d.lowPrecision() && d.s.Precision.ParamGather {
		s.weight = 1
	}
	return s
}

// forward returns what is gathered in the forward pass of a unit: its own parameters and
// those of the next units.
func (s *sharded) forward(units []cost, at int) memory.Bytes {
	if s == nil || s.pooled {
		return 0
	}
	return s.weight * memory.Bytes(s.window(units, at, 1))
}

// backward returns what is gathered in the backward pass of a unit, and the gradients of
// later units that wait to be scattered.
func (s *sharded) backward(units []cost, at int) memory.Bytes {
	if s == nil || s.pooled {
		return 0
	}
	var waiting int64
	for _, u := range units[at+1:] {
		waiting += u.params
	}
	return s.weight*memory.Bytes(s.window(units, at, -1)) + s.grad*memory.Bytes(min(waiting, s.queue)+units[at].params)
}

// window returns the parameters of a unit and of the units that are gathered ahead of it in
// one direction.
func (s *sharded) window(units []cost, at, step int) int64 {
	n := units[at].params
	var ahead int64
	count := 0
	for i := at + step; i >= 0 && i < len(units); i += step {
		if units[i].params == 0 {
			continue
		}
		if s.units > 0 && count == s.units || s.units == 0 && ahead >= s.ahead {
			break
		}
		ahead += units[i].params
		count++
	}
	return n + ahead
}

// shardedItems returns the weights, gradients and optimiser state that are held between
// steps, and what belongs to no unit: the embedding, the output layer and the last norm
// stay gathered during a step.
func (d *dims) shardedItems(s share) []Item {
	l, f := d.s.Layout, d.s.Layout.FSDP
	outer := int64(max(f.Outer, 1))
	dense, expert := max(int64(l.DP()*l.CP)/outer, 1), max(int64(l.EDP())/outer, 1)
	at := func(bytes memory.Bytes, dense, expert int64) memory.Bytes {
		return bytes * memory.Bytes(ceilDiv(s.dense, dense)+ceilDiv(s.expert, expert))
	}
	weights := at(d.elem, dense, expert)
	if d.lowPrecision() && d.s.Precision.ParamGather {
		weights -= (d.elem - 1) * memory.Bytes(s.narrowDense/dense+s.narrowExpert/expert)
	}
	state := d.optimizerBytes(s)
	items := []Item{
		{CauseWeights, "sharded weights", weights, true},
		{CauseGradients, "sharded gradients", at(d.gradBytes(), dense, expert), true},
		{CauseOptimizer, "optimizer state", state - memory.Bytes(float64(state)*d.s.Optimizer.OffloadFraction), true},
	}
	var loose int64
	for _, u := range s.units {
		if !u.gathers() {
			loose += u.dense
		}
	}
	items = append(items, Item{CausePools, "gathered embedding and output layer", d.size(loose), false})
	if f.DoubleBuffer {
		items = append(items,
			Item{CausePools, "buffers of gathered units", d.poolBytes(s, d.sharded(s).weight, max(f.Prefetch, 1), 0), true},
			Item{CausePools, "buffers of units' gradients", d.poolBytes(s, d.gradBytes(), 0, 1), true})
	}
	return items
}

// gathers reports whether a unit is gathered and released on its own.
func (u unitShare) gathers() bool { return u.name == "layer" || u.name == "mtp" }

// poolBytes returns the size of a pool with fixed addresses that holds a rank's units in
// both passes.
func (d *dims) poolBytes(s share, size memory.Bytes, prefetch, behind int) memory.Bytes {
	spec := bucket.Spec{Prefetch: prefetch, Behind: behind, Align: 256, Multiple: 1}
	for _, u := range s.units {
		if !u.gathers() {
			continue
		}
		unit := bucket.FSDPUnit{Name: u.name}
		for _, n := range []int64{u.dense, u.expert} {
			if n > 0 {
				unit.Buckets = append(unit.Buckets, bucket.Bucket{Name: u.name, Type: bucket.Type{Name: "element", Size: size}, Elements: n})
			}
		}
		spec.Units = append(spec.Units, unit)
	}
	if len(spec.Units) == 0 {
		return 0
	}
	use := func(i int) {
		spec.Order = append(spec.Order, bucket.OrderEntry{Unit: i}, bucket.OrderEntry{Unit: i, Release: true})
	}
	for i := range spec.Units {
		use(i)
	}
	for i := range slices.Backward(spec.Units) {
		use(i)
	}
	kind := bucket.Fixed
	if name := d.s.Layout.FSDP.Pool; name != "" {
		var err error
		if kind, err = bucket.ParsePoolKind(name); err != nil {
			panic("plan: a normalised setup has the pool " + name)
		}
	}
	p, err := bucket.NewPoolPlan(kind, spec, bucket.Options{})
	if err != nil {
		panic("plan: the units of a sound model make no pool: " + err.Error())
	}
	return p.Bytes
}

// gatheredEarly returns what is gathered for the next step before it begins: the first
// units without those of experts.
func (d *dims) gatheredEarly(s share) memory.Bytes {
	f := d.s.Layout.FSDP
	if f.Shard != ShardParameters || !f.EarlyGather || f.DoubleBuffer {
		return 0
	}
	var n int64
	for _, u := range s.units {
		n += u.dense
		if n >= communication(s)/2 {
			break
		}
	}
	return d.size(n)
}
