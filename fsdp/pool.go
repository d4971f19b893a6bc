// This file owns pools: the memory of a plan at fixed addresses, and who may use
// which of its bytes when.

package fsdp

import (
	"fmt"
	"log/slog"
	"slices"

	"github.com/stowage-dev/stowage/bucket"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/order"
)

// pool gives each use of a plan the memory of its buckets. The life cycle of a
// use, which begins anew in every round through the plan:
//
//  1. idle: nobody holds its bytes.
//  2. held: get made a stream wait for the uses that had the bytes before. Work
//     of that stream, and what comes after it, may use them.
//  3. idle again: put marked the last work. Whoever has the bytes next waits for
//     that mark on its stream; the host waits for nothing.
//
// No two held uses have a byte in common: a use that is got before those that
// have its bytes first were put, got twice, put twice, or touched after it was
// put, panics.
//
// The memory lies in one buffer. Only what a plan marks as dynamic (all of a
// Dynamic pool, and units outside of the slots if the plan's options say so) is
// allocated for each use and freed on the stream that puts it: that cannot be
// captured, nor go on after Device.Freeze.
//
// One goroutine drives a pool.
type pool struct {
	name  string
	plan  *bucket.Plan // nil while the order is being recorded
	lanes *lanes
	buf   *device.Buffer // nil if all is dynamic
	uses  []*poolUse
}

type poolUse struct {
	unit     int
	places   []bucket.Place
	ranges   []device.Range   // of the buckets
	dynamic  []*device.Buffer // of those that are, while held
	former   []int            // who had the bytes last
	heir     int              // the use that keeps dynamic memory, or -1
	round    uint64           // how often the use was put
	held     bool
	released *order.Mark
}

// lanes are the streams that exchange memory.
type lanes struct {
	*order.Set
	dev  device.Device
	left []*device.Buffer // that a capture refused to free
}

func newLanes(dev device.Device) *lanes { return &lanes{Set: order.NewSet(dev), dev: dev} }

// free frees dynamic memory. A capture refuses to, and is spoilt; then it is done
// at the end.
func (ls *lanes) free(buf *device.Buffer, s device.Stream) {
	if s.Free(buf); buf.Live() {
		ls.left = append(ls.left, buf)
	}
}

// close frees what is left and closes the events.
func (ls *lanes) close(s device.Stream) error {
	for _, buf := range ls.left {
		s.Free(buf)
	}
	return ls.Close()
}

// lease is a use's right to its bytes. put ends it.
type lease struct {
	pool  *pool
	use   int
	round uint64
}

// newPool lays a plan over memory that is there.
func newPool(ls *lanes, buf *device.Buffer, plan *bucket.Plan, name string, log *slog.Logger) (*pool, error) {
	p := &pool{name: name, plan: plan, lanes: ls, buf: buf}
	latest := make([]int, len(plan.Spec.Units)) // one more than the unit's last use
	for i, u := range plan.Uses {
		if err := p.add(u.Unit, plan.Spec, plan.Places[i]); err != nil {
			p.retire()
			return nil, err
		}
		if v := latest[u.Unit] - 1; u.Kept && p.isDynamic(i) {
			p.uses[v].heir = i
			p.uses[i].former = append(p.uses[i].former, v)
		}
		latest[u.Unit] = i + 1
	}
	p.link()
	if log != nil {
		p.warn(log)
	}
	return p, nil
}

// add appends a use at given places.
func (p *pool) add(unit int, spec bucket.Spec, places []bucket.Place) error {
	u := &poolUse{unit: unit, places: places, heir: -1}
	for b, at := range places {
		// The alignment behind a bucket belongs to its place, but not to what is
		// gathered.
		of := spec.Units[unit].Buckets[b]
		r := device.Range{Len: device.Bytes(spec.Padded(of) * of.Type.Size)}
		if !at.Dynamic {
			r.Buf, r.Off = p.buf, device.Bytes(at.Offset)
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

// link finds who has each use's bytes last before it: in the same round, or at
// the end of the round before. The pool is cut at all borders of buckets, and
// two rounds are walked; after the first, every piece has had a holder.
func (p *pool) link() {
	var cuts []int64
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

// warn tells of every bucket that does not stay where it is, once.
func (p *pool) warn(log *slog.Logger) {
	type which struct{ unit, bucket int }
	told := map[which]bool{}
	for _, m := range p.plan.Moves {
		if told[which{m.Unit, m.Bucket}] {
			continue
		}
		told[which{m.Unit, m.Bucket}] = true
		log.Warn("fsdp: a bucket changes its place within a step: "+p.plan.Describe(m), "pool", p.name)
	}
}

// get leases the bytes of a use: what the lane is given from now on may use them.
// Uses are got and put in the plan's order as far as they share bytes. Only dynamic
// memory can run out.
func (p *pool) get(i int, l *order.Lane) (lease, error) {
	u := p.uses[i]
	if u.held {
		panic(fmt.Sprintf("fsdp: use %d of pool %q is got twice; put it first", i, p.name))
	}
	for _, v := range u.former {
		w, want := p.uses[v], u.round
		if v < i {
			want++ // its turn was earlier in the same round
		}
		if w.held || w.round != want {
			panic(fmt.Sprintf("fsdp: use %d of pool %q is got out of turn: use %d has its bytes before and was not put", i, p.name, v))
		}
		l.After(w.released)
	}
	if err := p.allocate(u, l.Stream); err != nil {
		return lease{}, err
	}
	l.Flush()
	u.held = true
	if p.plan == nil {
		u.former = nil // a recorded use is got once, and all before it may be here
	}
	return lease{p, i, u.round}, nil
}

// allocate gives the dynamic buckets of a use memory, unless the use before left
// them its own.
func (p *pool) allocate(u *poolUse, s device.Stream) error {
	for b, a := range u.places {
		if !a.Dynamic || u.ranges[b].Buf != nil {
			continue
		}
		buf, err := p.lanes.dev.Alloc(device.Accel, device.Bytes(a.Bytes), p.name)
		if err != nil {
			p.free(u, s)
			return err
		}
		u.dynamic = append(u.dynamic, buf)
		u.ranges[b].Buf, u.ranges[b].Off = buf, 0
	}
	return nil
}

// free ends a use's dynamic memory.
func (p *pool) free(u *poolUse, s device.Stream) {
	for _, buf := range u.dynamic {
		p.lanes.free(buf, s)
	}
	p.forget(u)
}

func (p *pool) forget(u *poolUse) {
	u.dynamic = u.dynamic[:0]
	for b, a := range u.places {
		if a.Dynamic {
			u.ranges[b].Buf = nil
		}
	}
}

// must panics unless the lease holds.
func (l lease) must() *poolUse {
	u := l.pool.uses[l.use]
	if !u.held || u.round != l.round {
		panic(fmt.Sprintf("fsdp: use %d of pool %q was put already; its bytes may be another's", l.use, l.pool.name))
	}
	return u
}

// bucket is the memory of a bucket: its padded elements.
func (l lease) bucket(b int) device.Range { return l.must().ranges[b] }

// put says that the work with the bytes has been issued: all of it on the given
// lane, or before it in the order of streams.
func (l lease) put(on *order.Lane) {
	u, p := l.must(), l.pool
	on.Record(u.released)
	u.held = false
	u.round++
	switch {
	case u.heir >= 0 && len(u.dynamic) > 0:
		h := p.uses[u.heir]
		h.dynamic = append(h.dynamic, u.dynamic...)
		copy(h.ranges, u.ranges)
		p.forget(u)
	default:
		p.free(u, on.Stream)
	}
}

// reset makes all uses idle, whatever a step that was given up left of them.
// What they did comes before what the stream is given from now on.
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

// retire takes the pool's events back.
func (p *pool) retire() {
	for _, u := range p.uses {
		p.lanes.Drop(u.released)
	}
	p.uses = nil
}
