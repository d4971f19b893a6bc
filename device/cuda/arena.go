// This file owns the memory of each kind as a whole: how much of it is mapped,
// and the slab that buffers are carved from.

package cuda

import (
	"sync"

	"github.com/stowage-dev/stowage/memory"
)

const (
	// arenaStep is what a slab grows by: mapping has a cost per call, and at
	// most one step lies idle.
	arenaStep = 16 * memory.MiB
	// stagingSize bounds the host memory that uploads in flight pass through.
	// It is no user's memory and does not count as such.
	stagingSize = 64 * memory.MiB
)

// hostBound returns how much of the memory that the machine offers may be pinned. A
// sixteenth, but at least a gigabyte, is left for the process itself and the page cache; on
// a small machine a quarter. If the machine does not say what it offers, the driver
// decides.
func hostBound(usable memory.Bytes) memory.Bytes {
	if usable <= 0 {
		return 1 << 40
	}
	return usable - min(usable/4, max(usable/16, memory.GiB))
}

// pool is all memory of one kind. At every point
//
//	mapped = sum of the regions' mapped bytes <= limit
//
// Buffers are blocks of one arena. The host frees a block by itself and, unlike
// cuMemFree, does not wait for the whole device.
type pool struct {
	dev  *Device
	kind memory.Kind

	mu      sync.Mutex // guards everything here, and the regions of this kind
	limit   memory.Bytes
	mapped  memory.Bytes
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
func (d *Device) openPools(capacity, limit [memory.Kinds]memory.Bytes) error {
	if f := d.measureGranule(); f != nil {
		return cannotMap(d.drv.text(f.result))
	}
	h := &d.pools[memory.Host]
	var f *failure
	for k := range d.pools {
		p := &d.pools[k]
		p.dev, p.kind, p.limit = d, memory.Kind(k), limit[k]
		if p.buffers.region, f = d.reserve(p.kind, 2*capacity[k]+arenaStep); f != nil {
			return d.broken(f)
		}
	}
	h.limit += stagingSize
	if h.staging.region, f = d.reserve(memory.Host, stagingSize); f != nil {
		return d.broken(f)
	}
	f = h.grow(h.staging.region, d.granule)
	h.staging.slab.resize(h.staging.region.mapped())
	if f != nil && f.outOfMemory() {
		return d.refused(f, memory.Host, d.granule, "staging")
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

// allocate carves n bytes and returns their address.
func (p *pool) allocate(a *arena, n memory.Bytes) (uintptr, *failure) {
	p.mu.Lock()
	defer p.mu.Unlock()
	off, ok := a.slab.allocate(n)
	if !ok {
		// The hole at the end, if there is one, becomes a part of the block. If
		// a whole step is too much, what is needed may not be.
		need := a.slab.usedEnd() + blockSize(n)
		f := p.grow(a.region, roundUp(need, arenaStep))
		if f != nil && f.outOfMemory() {
			f = p.grow(a.region, need)
		}
		a.slab.resize(a.region.mapped())
		if f != nil {
			return 0, f
		}
		off, _ = a.slab.allocate(n)
	}
	return a.region.addr + uintptr(off), nil
}

func (p *pool) freeBlock(a *arena, addr uintptr, n memory.Bytes) {
	p.mu.Lock()
	defer p.mu.Unlock()
	a.slab.free(memory.Bytes(addr-a.region.addr), n)
}

// largestHole returns the largest block that is there without mapping more.
func (p *pool) largestHole(a *arena) memory.Bytes {
	p.mu.Lock()
	defer p.mu.Unlock()
	return a.slab.largest()
}

// grow maps memory for the first size bytes of a region. If that fails, it frees idle
// memory and tries again. The caller holds mu.
func (p *pool) grow(r *region, size memory.Bytes) *failure {
	f := p.tryGrow(r, size)
	if f != nil && f.outOfMemory() && p.trim() {
		f = p.tryGrow(r, size)
	}
	return f
}

func (p *pool) tryGrow(r *region, size memory.Bytes) *failure {
	before, size := r.mapped(), roundUp(size, p.dev.granule)
	if size > r.limit || p.mapped+size-before > p.limit {
		return &failure{&p.dev.drv.memCreate, errOutOfMemory}
	}
	f := r.grow(size)
	p.mapped += r.mapped() - before
	return f
}

// trim unmaps the idle memory behind the last buffer and reports whether there was any.
func (p *pool) trim() bool {
	a := &p.buffers
	before := a.region.mapped()
	a.region.shrink(a.slab.usedEnd())
	a.slab.resize(a.region.mapped())
	p.mapped -= before - a.region.mapped()
	return a.region.mapped() < before
}

// extend grows the region of a buffer.
func (p *pool) extend(r *region, size memory.Bytes) *failure {
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

// largestPossible returns the size of the largest buffer that could still be allocated: a
// hole, or what can be mapped behind the last one.
func (p *pool) largestPossible() memory.Bytes {
	free := p.dev.freeMemory()
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.kind == memory.Host || free > p.limit-p.mapped {
		free = p.limit - p.mapped
	}
	s := &p.buffers.slab
	return max(s.largest(), s.size-s.usedEnd()+free)
}
