// This file owns the memory of each kind as a whole: how much of it is mapped,
// and the slab that buffers are carved from.

package cuda

import (
	"sync"

	"github.com/stowage-dev/stowage/device"
)

const (
	// arenaStep is what a slab grows by: mapping has a cost per call, and at
	// most one step lies idle.
	arenaStep = 16 * device.MiB
	// stagingSize bounds the host memory that uploads in flight pass through.
	// It is no user's memory and does not count as such.
	stagingSize = 64 * device.MiB
)

// hostBound is how much of the memory that the machine offers may be pinned. A
// sixteenth stays, a gigabyte at least, for the process itself and the page
// cache; on a small machine a quarter. A machine that does not say what it
// offers leaves the judgement to the driver.
func hostBound(usable device.Bytes) device.Bytes {
	if usable <= 0 {
		return 1 << 40
	}
	return usable - min(usable/4, max(usable/16, device.GiB))
}

// pool is all memory of one kind. At every point
//
//	mapped = sum of the regions' mapped bytes <= limit
//
// Buffers are blocks of one arena: giving one back is a matter of the host, and
// unlike cuMemFree does not wait for the whole device.
type pool struct {
	dev  *Device
	kind device.Kind

	mu      sync.Mutex // guards everything here, and the regions of this kind
	limit   device.Bytes
	mapped  device.Bytes
	buffers arena
	staging arena // of host memory only
}

// arena is a region with a slab over it.
type arena struct {
	region *region
	slab   slab
}

// openPools reserves the addresses. Holes between buffers can make a slab
// longer than what it holds, so it may use twice as many addresses. The first
// of the staging memory is mapped, to see whether the driver can.
func (d *Device) openPools(capacity, limit [device.Kinds]device.Bytes) error {
	if f := d.measureGranule(); f != nil {
		return cannotMap(d.drv.text(f.result))
	}
	h := &d.pools[device.Host]
	var f *failure
	for k := range d.pools {
		p := &d.pools[k]
		p.dev, p.kind, p.limit = d, device.Kind(k), limit[k]
		if p.buffers.region, f = d.reserve(p.kind, 2*capacity[k]+arenaStep); f != nil {
			return d.broken(f)
		}
	}
	h.limit += stagingSize
	if h.staging.region, f = d.reserve(device.Host, stagingSize); f != nil {
		return d.broken(f)
	}
	f = h.grow(h.staging.region, d.granule)
	h.staging.slab.resize(h.staging.region.mapped())
	if f != nil && f.oom() {
		return d.refused(f, device.Host, d.granule, "staging")
	} else if f != nil {
		return cannotMap(d.drv.text(f.result))
	}
	return nil
}

func cannotMap(text string) error {
	return unsupported("the driver does not map host memory into a reserved range: "+text, needDriver)
}

func (d *Device) closePools() {
	for k := range d.pools {
		d.pools[k].close()
	}
}

func (p *pool) close() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, a := range []*arena{&p.buffers, &p.staging} {
		if a.region != nil {
			a.region.close()
		}
	}
}

// take carves n bytes and returns their address.
func (p *pool) take(a *arena, n device.Bytes) (uintptr, *failure) {
	p.mu.Lock()
	defer p.mu.Unlock()
	off, ok := a.slab.take(n)
	if !ok {
		// The hole at the end, if there is one, becomes a part of the block. If
		// a whole step is too much, what is needed may not be.
		need := a.slab.used() + blockSize(n)
		f := p.grow(a.region, roundUp(need, arenaStep))
		if f != nil && f.oom() {
			f = p.grow(a.region, need)
		}
		a.slab.resize(a.region.mapped())
		if f != nil {
			return 0, f
		}
		off, _ = a.slab.take(n)
	}
	return a.region.addr + uintptr(off), nil
}

func (p *pool) give(a *arena, addr uintptr, n device.Bytes) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a.slab.give(device.Bytes(addr-a.region.addr), n)
}

// hole is the largest block that is there without mapping more.
func (p *pool) hole(a *arena) device.Bytes {
	p.mu.Lock()
	defer p.mu.Unlock()
	return a.slab.largest()
}

// grow maps memory behind the first size bytes of a region, after giving back
// what lies idle if need be. The caller holds mu.
func (p *pool) grow(r *region, size device.Bytes) *failure {
	f := p.tryGrow(r, size)
	if f != nil && f.oom() && p.trim() {
		f = p.tryGrow(r, size)
	}
	return f
}

func (p *pool) tryGrow(r *region, size device.Bytes) *failure {
	before, size := r.mapped(), roundUp(size, p.dev.granule)
	if size > r.limit || p.mapped+size-before > p.limit {
		return &failure{&p.dev.drv.memCreate, errOutOfMemory}
	}
	f := r.grow(size)
	p.mapped += r.mapped() - before
	return f
}

// trim unmaps what lies idle behind the last buffer, and tells whether that
// was anything.
func (p *pool) trim() bool {
	a := &p.buffers
	before := a.region.mapped()
	a.region.shrink(a.slab.used())
	a.slab.resize(a.region.mapped())
	p.mapped -= before - a.region.mapped()
	return a.region.mapped() < before
}

// extend grows the region of a buffer.
func (p *pool) extend(r *region, size device.Bytes) *failure {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.grow(r, size)
}

// release ends the region of a buffer.
func (p *pool) release(r *region) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mapped -= r.mapped()
	r.close()
}

// room is the largest buffer that could still be had: a hole, or what can be
// mapped behind the one at the end.
func (p *pool) room() device.Bytes {
	free := p.dev.free()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kind == device.Host || free > p.limit-p.mapped {
		free = p.limit - p.mapped
	}
	s := &p.buffers.slab
	return max(s.largest(), s.size-s.used()+free)
}
