// This file owns ranges of addresses that never move while memory is mapped to them and
// unmapped.

package cuda

import (
	"slices"
	"sync/atomic"

	"github.com/stowage-dev/stowage/memory"
)

// granule is the unit in which memory is mapped: the driver's unit on every GPU so far (a
// larger one is used if the driver has one), and the size of a huge page.
const granule = 2 * memory.MiB

// region is a reserved range of addresses. Its first bytes are mapped to memory, in the
// chunks by which it grew; pieces.go keeps work from crossing their borders. The owner of
// the region serialises grow, shrink and close.
type region struct {
	dev   *Device
	kind  memory.Kind
	addr  uintptr
	limit memory.Bytes
	// chunks are where each chunk ends. Streams read them while the region
	// grows, so a list that was stored is never written again.
	chunks atomic.Pointer[[]memory.Bytes]
	backed bool // the rest has a backdrop
}

// failure is a call of the driver that did not succeed. Nil is success.
type failure struct {
	proc   *proc
	result result
}

func (f *failure) outOfMemory() bool { return f.result == errOutOfMemory }

// tryCall makes a call and keeps the failure.
//
//go:uintptrescapes
func (d *Device) tryCall(p *proc, args ...uintptr) *failure {
	if r := d.call(p, args...); r != success {
		return &failure{p, r}
	}
	return nil
}

func (d *Device) reserve(kind memory.Kind, limit memory.Bytes) (*region, *failure) {
	r := &region{dev: d, kind: kind, limit: roundUp(max(limit, 1), d.granule)}
	var addr uint64
	if f := d.tryCall(&d.drv.memAddressReserve, uintptr(pointer(&addr)), uintptr(r.limit), 0, 0, 0); f != nil {
		return nil, f
	}
	r.addr = uintptr(addr)
	return r, nil
}

func (r *region) ends() []memory.Bytes {
	if ends := r.chunks.Load(); ends != nil {
		return *ends
	}
	return nil
}

func (r *region) mapped() memory.Bytes {
	ends := r.ends()
	if len(ends) == 0 {
		return 0
	}
	return ends[len(ends)-1]
}

// grow maps memory to the first size bytes, in one chunk. It releases the handle of the
// memory at once, because the mapping keeps the memory.
func (r *region) grow(size memory.Bytes) *failure {
	from, to := r.mapped(), roundUp(size, r.dev.granule)
	if to <= from {
		return nil
	}
	d := r.dev
	handle, f := d.create(r.kind, to-from)
	if f != nil {
		return f
	}
	if r.backed {
		f = r.replace(from, to, handle)
	} else {
		f = d.attach(r.kind, r.addr+uintptr(from), to-from, handle)
	}
	d.call(&d.drv.memRelease, handle)
	if f != nil {
		return f
	}
	ends := append(slices.Clip(r.ends()), to)
	r.chunks.Store(&ends)
	return nil
}

// location returns where memory of a kind is made.
func (d *Device) location(kind memory.Kind) memLocation {
	if kind == memory.Host {
		return memLocation{locationHostNuma, d.numa}
	}
	return memLocation{locationDevice, d.gpu}
}

// create makes memory without an address.
func (d *Device) create(kind memory.Kind, n memory.Bytes) (uintptr, *failure) {
	prop := allocationProp{kind: allocationPinned, location: d.location(kind)}
	if kind == memory.Device {
		prop.handleTypes, prop.rdma = d.handleTypes, d.rdma
	}
	var handle uint64
	f := d.tryCall(&d.drv.memCreate, uintptr(pointer(&handle)), uintptr(n), uintptr(pointer(&prop)), 0)
	if f != nil && !f.outOfMemory() && prop.handleTypes != 0 { // a container may forbid what the driver offers
		prop.handleTypes, prop.rdma = 0, 0
		f = d.tryCall(&d.drv.memCreate, uintptr(pointer(&handle)), uintptr(n), uintptr(pointer(&prop)), 0)
	}
	return uintptr(handle), f
}

// attach maps memory.
func (d *Device) attach(kind memory.Kind, at uintptr, n memory.Bytes, handle uintptr) *failure {
	if f := d.tryCall(&d.drv.memMap, at, uintptr(n), 0, handle, 0); f != nil {
		return f
	}
	f := d.permit(kind, at, n)
	if f != nil {
		d.call(&d.drv.memUnmap, at, uintptr(n))
	}
	return f
}

// permit gives the GPU access to mapped memory, its peers access to device memory, and the host
// access to host memory.
func (d *Device) permit(kind memory.Kind, at uintptr, n memory.Bytes) *failure {
	access := []accessDesc{{d.location(memory.Device), accessReadWrite}}
	if kind == memory.Host {
		access = append(access, accessDesc{d.location(memory.Host), accessReadWrite})
	} else {
		for _, p := range d.peers {
			access = append(access, accessDesc{memLocation{locationDevice, p}, accessReadWrite})
		}
	}
	return d.tryCall(&d.drv.memSetAccess, at, uintptr(n), uintptr(pointer(&access[0])), uintptr(len(access)))
}

// shrink unmaps the chunks that lie completely behind the first size bytes.
func (r *region) shrink(size memory.Bytes) {
	for ends := r.ends(); len(ends) > 0; {
		last := len(ends) - 1
		from := memory.Bytes(0)
		if last > 0 {
			from = ends[last-1]
		}
		if from < size {
			return
		}
		r.dev.insist(&r.dev.drv.memUnmap, r.addr+uintptr(from), uintptr(ends[last]-from))
		ends = ends[:last]
		less := ends
		r.chunks.Store(&less)
	}
}

func (r *region) close() {
	if r.backed {
		r.unmapWholeBackdrop()
	}
	r.shrink(0)
	r.dev.insist(&r.dev.drv.memAddressFree, r.addr, uintptr(r.limit))
}
