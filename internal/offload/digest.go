// This file owns the digest of a step. Two steps with the same digest at some point have
// made the same calls under the same plan. The machine depends on nothing else, so it
// decides the same in both.

package offload

import (
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

// digest is a running hash, FNV-1a of eight bytes at a time.
type digest struct {
	sum   uint64
	plan  *residency.Plan // whose sum is known
	plans uint64
}

const (
	digestBasis = 14695981039346656037
	digestPrime = 1099511628211
)

func (d *digest) add(xs ...int64) {
	for _, x := range xs {
		d.sum = (d.sum ^ uint64(x)) * digestPrime
		d.sum ^= d.sum >> 29 // lets the high bytes of x reach the low ones
	}
}

func bit(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

func (d *digest) group(g memory.GroupID) {
	for i := range len(g.Name) {
		d.add(int64(g.Name[i]))
	}
	d.add(-1, int64(g.Chunk), int64(g.Layer), int64(g.Microbatch))
}

func (d *digest) op(op residency.Op) {
	d.add(int64(op.Kind), int64(op.ID), int64(op.Bytes), int64(len(op.Items)))
	d.group(op.Group)
	for _, it := range op.Items {
		d.add(int64(it.ID), bit(it.Stay))
	}
}

// begin starts a step.
func (d *digest) begin(cfg residency.Config, plan *residency.Plan) {
	if plan != d.plan || plan == nil {
		d.sum = digestBasis
		d.addPlan(plan)
		d.plan, d.plans = plan, d.sum
	}
	d.sum = d.plans
	d.add(int64(cfg.Device), int64(cfg.Host), int64(cfg.Window), int64(cfg.Cap), int64(cfg.Least))
}

func (d *digest) addPlan(plan *residency.Plan) {
	if plan == nil {
		return
	}
	var leave uint64 // a sum of digests, because a map has no order
	for g, yes := range plan.Offload {
		if yes {
			one := digest{sum: digestBasis}
			one.group(g)
			leave += one.sum
		}
	}
	d.add(1, int64(leave), int64(plan.Window), int64(plan.Device), bit(plan.Strict))
	if plan.Schedule == nil {
		return
	}
	for i := range plan.Schedule.Len() {
		e := plan.Schedule.At(i)
		var ahead []memory.GroupID
		if i < len(plan.Prefetch) { // a plan need not list the last events
			ahead = plan.Prefetch[i]
		}
		d.add(bit(e.Load), int64(len(ahead)))
		d.group(e.Group)
		for _, g := range ahead {
			d.group(g)
		}
	}
}
