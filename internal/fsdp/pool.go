// This file owns pools: the memory of a plan at fixed addresses, and the order in which
// uses get it.

package fsdp

import (
	"fmt"
	"log/slog"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/memory"
)

// pool gives each use of a plan the memory of its buckets. Each use has a life cycle,
// which begins again in every step:
//
//  1. idle: nothing holds its bytes.
//  2. held: acquire made a stream wait for the uses that had the bytes before. Work
//     issued on that stream, and work ordered after it, may use them.
//  3. idle again: release marked the last work. The next use of the bytes waits for
//     that mark on its stream; the host waits for nothing.
//
// No two held uses share a byte. The pool panics if a use is acquired before the uses
// that have its bytes first are released, acquired twice, released twice, or touched
// after its release.
//
// The memory lies in one buffer. Only what the plan marks as dynamic is allocated for
// each use and freed on the stream that releases it: all of a Dynamic pool, and units
// outside the slots if the plan's options say so. Dynamic memory cannot be captured,
// and cannot be allocated after Device.Freeze.
//
// One goroutine drives a pool.
type pool struct {
	name  string
	plan  *bucket.PoolPlan // nil while the order is recorded
	lanes *lanes
	buf   *device.Buffer // nil if all is dynamic
	uses  []*poolUse
}

type poolUse struct {
	unit     int
	places   []bucket.Place
	ranges   []device.Range   // of the buckets
	dynamic  []*device.Buffer // of those that are, while held
	former   []int            // the uses that had the bytes last
	heir     int              // the use that takes over dynamic memory, or -1
	round    uint64           // how often the use was released
	held     bool
	released *order.Mark
}

// lanes holds the streams that exchange memory.
type lanes struct {
	*order.Set
	dev     device.Device
	unfreed []*device.Buffer // memory that a capture refused to free
}

func newLanes(dev device.Device) *lanes { return &lanes{Set: order.NewSet(dev), dev: dev} }

// free frees dynamic memory. A stream that is being captured refuses and invalidates
// the capture; close frees the memory then.
func (ls *lanes) free(buf *device.Buffer, s device.Stream) {
	if s.Free(buf); buf.Live() {
		ls.unfreed = append(ls.unfreed, buf)
	}
}

// close frees what a capture refused to free and closes the events.
func (ls *lanes) close(s device.Stream) error {
	for _, buf := range ls.unfreed {
		s.Free(buf)
	}
	return ls.Close()
}

// lease is a use's right to its bytes. release ends it.
type lease struct {
	pool  *pool
	use   int
	round uint64
}

// newPool makes a pool of existing memory as the plan says.
func newPool(ls *lanes, buf *device.Buffer, plan *bucket.PoolPlan, name string, log *slog.Logger) (*pool, error) {
	p := &pool{name: name, plan: plan, lanes: ls, buf: buf}
	latest := make([]int, len(plan.Spec.Units)) // by unit: one more than its last use
	for i, u := range plan.Uses {
		if err := p.add(u.Unit, plan.Spec, plan.Places[i]); err != nil {
			p.dropMarks()
			return nil, err
		}
		if v := latest[u.Unit] - 1; u.Kept && p.isDynamic(i) {
			p.uses[v].heir = i
			p.uses[i].former = append(p.uses[i].former, v)
		}
		latest[u.Unit] = i + 1
	}
	p.linkUses()
	if log != nil {
		p.logMoves(log)
	}
	return p, nil
}

// add appends a use at the given places.
func (p *pool) add(unit int, spec bucket.Spec, places []bucket.Place) error {
	u := &poolUse{unit: unit, places: places, heir: -1}
	for b, at := range places {
		// The place includes the alignment behind a bucket; the gather does not.
		r := device.Range{Len: spec.PaddedBytes(spec.Units[unit].Buckets[b])}
		if !at.Dynamic {
			r.Buf, r.Off = p.buf, at.Offset
		}
		u.ranges = append(u.ranges, r)
	}
	var err error
	if u.released, err = p.lanes.Mark(); err != nil {
		return err
	}
	p.uses = append(p.uses, u)
	return nil
}

func (p *pool) isDynamic(use int) bool {
	return slices.ContainsFunc(p.uses[use].places, func(a bucket.Place) bool { return a.Dynamic })
}

// linkUses finds, for each use, the uses that have its bytes last before it: in the
// same round, or at the end of the round before. It cuts the pool at all borders of
// buckets and walks two rounds. Every piece has had a holder after the first round.
func (p *pool) linkUses() {
	var cuts []memory.Bytes
	for _, u := range p.uses {
		for _, a := range u.places {
			if !a.Dynamic && a.Bytes > 0 {
				cuts = append(cuts, a.Offset, a.Offset+a.Bytes)
			}
		}
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	last, noted := make([]int, len(cuts)), make([]int, len(p.uses))
	for round := range 2 {
		for i, u := range p.uses {
			for _, a := range u.places {
				if a.Dynamic || a.Bytes == 0 {
					continue
				}
				from, _ := slices.BinarySearch(cuts, a.Offset)
				for c := from; cuts[c] < a.Offset+a.Bytes; c++ {
					if v := last[c]; round == 1 && noted[v] != i+1 {
						noted[v] = i + 1
						u.former = append(u.former, v)
					}
					last[c] = i
				}
			}
		}
	}
}

// logMoves logs every bucket that changes its place within a step, once. Nothing is wrong
// then, and users can do nothing about it, so the messages are for debugging.
func (p *pool) logMoves(log *slog.Logger) {
	type which struct{ unit, bucket int }
	logged := map[which]bool{}
	for _, m := range p.plan.Moves {
		if logged[which{m.Unit, m.Bucket}] {
			continue
		}
		logged[which{m.Unit, m.Bucket}] = true
		log.Debug("fsdp: a bucket changes its place within a step: "+p.plan.Describe(m), "pool", p.name)
	}
}

// acquire leases the bytes of a use. Work issued on the lane from now on may use them.
// Uses that share bytes must be acquired and released in the plan's order. acquire
// returns an error only if dynamic memory runs out.
func (p *pool) acquire(i int, l *order.Lane) (lease, error) {
	u := p.uses[i]
	if u.held {
		panic(fmt.Sprintf("fsdp: use %d of pool %q is acquired twice; release it first", i, p.name))
	}
	for _, v := range u.former {
		w, want := p.uses[v], u.round
		if v < i {
			want++ // its turn was earlier in the same round
		}
		if w.held || w.round != want {
			panic(fmt.Sprintf("fsdp: use %d of pool %q is acquired out of turn; release use %d first, which has the same bytes", i, p.name, v))
		}
		l.After(w.released)
	}
	if err := p.allocate(u); err != nil {
		return lease{}, err
	}
	l.Flush()
	u.held = true
	return lease{p, i, u.round}, nil
}

// allocate allocates the dynamic buckets of a use, except those that the use before
// handed over.
func (p *pool) allocate(u *poolUse) error {
	for b, a := range u.places {
		if u.ranges[b].Buf != nil {
			continue
		}
		buf, err := p.lanes.dev.Alloc(memory.Device, a.Bytes, p.name)
		if err != nil {
			return err // reset frees the others
		}
		u.dynamic = append(u.dynamic, buf)
		u.ranges[b].Buf = buf
	}
	return nil
}

// free frees a use's dynamic memory.
func (p *pool) free(u *poolUse, s device.Stream) {
	for _, buf := range u.dynamic {
		p.lanes.free(buf, s)
	}
	p.forget(u)
}

// forget removes dynamic memory from a use without freeing it.
func (p *pool) forget(u *poolUse) {
	u.dynamic = u.dynamic[:0]
	for b, a := range u.places {
		if a.Dynamic {
			u.ranges[b].Buf = nil
		}
	}
}

// mustHold returns the use of a lease. It panics if the lease was released.
func (l lease) mustHold() *poolUse {
	u := l.pool.uses[l.use]
	if !u.held || u.round != l.round {
		panic(fmt.Sprintf("fsdp: use %d of pool %q was released; its bytes may belong to another use; use them before Done", l.use, l.pool.name))
	}
	return u
}

// bucket returns the memory of a bucket: its padded elements.
func (l lease) bucket(b int) device.Range { return l.mustHold().ranges[b] }

// release ends a lease. All work with the bytes must have been issued: on the given
// lane, or ordered before it.
func (l lease) release(on *order.Lane) {
	u, p := l.mustHold(), l.pool
	on.Record(u.released)
	u.held = false
	u.round++
	if u.heir < 0 {
		p.free(u, on.Stream)
		return
	}
	h := p.uses[u.heir]
	h.dynamic = append(h.dynamic, u.dynamic...)
	copy(h.ranges, u.ranges)
	p.forget(u)
}

// reset makes all uses idle after a step that failed. Work that the uses issued must
// be ordered before what the stream is given from now on.
func (p *pool) reset(s device.Stream) {
	most := uint64(0)
	for _, u := range p.uses {
		p.free(u, s)
		most = max(most, u.round)
	}
	for _, u := range p.uses {
		u.held, u.round = false, most+1
	}
}

// dropMarks gives back the marks of all uses.
func (p *pool) dropMarks() {
	for _, u := range p.uses {
		p.lanes.Drop(u.released)
	}
}
