//go:build linux

// This file owns the made-up driver's memory: physical memory, the addresses it is
// mapped to, and the copies and fills of it.

package cuda

import (
	"bytes"
	"slices"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

var fakeMemory = map[string]fakeFunc{
	"cuMemGetInfo_v2": func(f *fake, a []uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		out(a[1], f.total)
		return out(a[0], f.total-f.used)
	},
	"cuMemGetAddressRange_v2": func(f *fake, a []uintptr) result {
		base, n, host := f.chunk(a[2])
		if n == 0 {
			return errNotFound
		}
		if host {
			base -= 1 << 39 // as on a GPU: the driver's address, not the caller's
		}
		out(a[0], base)
		return out(a[1], n)
	},
	"cuMemGetAllocationGranularity": func(f *fake, a []uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		return out(a[0], uint64(granule)<<f.coarser[device.Slice[allocationProp](uint64(a[1]), 1)[0].location.kind])
	},
	"cuMemAddressReserve": func(f *fake, a []uintptr) result {
		m, err := syscall.Mmap(-1, 0, int(a[1]+uintptr(granule)), syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
		if err != nil {
			return errOutOfMemory
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		at := uintptr(roundUp(memory.Bytes(uintptr(unsafe.Pointer(&m[0]))), granule))
		f.maps[at] = m
		return out(a[0], at)
	},
	"cuMemAddressFree": func(f *fake, a []uintptr) result {
		f.mu.Lock()
		defer f.mu.Unlock()
		m := f.maps[a[0]]
		delete(f.maps, a[0])
		if len(m) != int(a[1]+uintptr(granule)) || syscall.Munmap(m) != nil {
			return errInvalidHandle
		}
		return success
	},
	"cuMemCreate":  func(f *fake, a []uintptr) result { return f.create(a[0], a[1], a[2]) },
	"cuMemRelease": func(f *fake, a []uintptr) result { return f.letGo(a[0]) },
	"cuMemMap":     func(f *fake, a []uintptr) result { return f.mapAt(a[0], a[1], a[2], a[3]) },
	"cuMemSetAccess": func(f *fake, a []uintptr) result {
		return f.access(a[0], a[1], device.Slice[accessDesc](uint64(a[2]), int(a[3])))
	},
	"cuMemUnmap": func(f *fake, a []uintptr) result { return f.unmap(a[0], a[1]) },
	"cuMemcpyAsync": func(f *fake, a []uintptr) result {
		to, from := bytesAt(a[0], memory.Bytes(a[2])), bytesAt(a[1], memory.Bytes(a[2]))
		s := get[*fakeStream](f, a[3])
		if f.captures(s) && (f.crosses(a[0], a[2]) || f.crosses(a[1], a[2])) {
			return errInvalidValue
		}
		s.Host(func() { copy(to, from) })
		return success
	},
	"cuMemcpy2DAsync_v2": func(f *fake, a []uintptr) result {
		c := device.Slice[memcpy2D](uint64(a[0]), 1)[0]
		for _, p := range []pitched{c.dst, c.src} {
			if f.crosses(p.device, (c.height-1)*p.pitch+c.width) {
				return errInvalidValue
			}
		}
		get[*fakeStream](f, a[1]).Host(func() {
			for i := range c.height {
				copy(bytesAt(c.dst.device+i*c.dst.pitch, memory.Bytes(c.width)), bytesAt(c.src.device+i*c.src.pitch, memory.Bytes(c.width)))
			}
		})
		return success
	},
	"cuMemsetD8Async": func(f *fake, a []uintptr) result {
		if f.crosses(a[0], a[2]) {
			return errInvalidValue
		}
		to := bytesAt(a[0], memory.Bytes(a[2]))
		get[*fakeStream](f, a[3]).Host(func() { copy(to, bytes.Repeat([]byte{byte(a[1])}, len(to))) })
		return success
	},
}

// physical is memory: a file without a name, so that two addresses may show the same
// bytes. It is gone when neither a handle nor a mapping is left.
type physical struct {
	kind  int32
	size  uintptr
	file  int
	holds int          // the handle and the mappings
	open  []accessDesc // who may access it
}

// create makes memory. That of the device holds anything: here each granule begins
// and ends with a page of it.
func (f *fake) create(at, n, props uintptr) result {
	prop := device.Slice[allocationProp](uint64(props), 1)[0]
	f.mu.Lock()
	if f.refuses && prop.handleTypes != 0 {
		f.mu.Unlock()
		return errNotPermitted
	}
	f.made[prop.location.kind] = [2]int{int(prop.handleTypes), int(prop.rdma)}
	if prop.location.kind == locationDevice {
		if f.used+uint64(n) > f.total {
			f.mu.Unlock()
			return errOutOfMemory
		}
		f.used += uint64(n)
	}
	f.mu.Unlock()
	file, err := unix.MemfdCreate("memory", unix.MFD_CLOEXEC)
	if err != nil || unix.Ftruncate(file, int64(n)) != nil {
		return errNotFound
	}
	if prop.location.kind == locationDevice {
		rubbish := bytes.Repeat([]byte{0xEE}, 4096)
		for g := int64(granule); g <= int64(n); g += int64(granule) {
			_, _ = unix.Pwrite(file, rubbish, g-int64(granule))
			_, _ = unix.Pwrite(file, rubbish, g-4096)
		}
	}
	return f.add(at, &physical{prop.location.kind, n, file, 1, nil})
}

// end takes one hold of memory away. The caller holds mu.
func (f *fake) end(m *physical) {
	if m.holds--; m.holds > 0 {
		return
	}
	_ = unix.Close(m.file)
	if m.kind == locationDevice {
		f.used -= uint64(m.size)
	}
}

func (f *fake) letGo(handle uintptr) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.handles[handle].(*physical)
	if !ok {
		return errInvalidHandle
	}
	delete(f.handles, handle)
	f.end(m)
	return success
}

// reserved reports whether bytes lie inside of one reserved range. The caller holds mu.
func (f *fake) reserved(at, n uintptr) bool {
	for base, m := range f.maps {
		if at >= base && at+n <= base+uintptr(len(m))-uintptr(granule) {
			return at%uintptr(granule) == 0 && n%uintptr(granule) == 0
		}
	}
	return false
}

// mapAt takes memory whole only, where nothing is mapped yet. It cannot be accessed
// before cuMemSetAccess.
func (f *fake) mapAt(at, n, offset, handle uintptr) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	m, ok := f.handles[handle].(*physical)
	if !ok || offset != 0 || n != m.size || !f.reserved(at, n) {
		return errInvalidValue
	}
	for base, other := range f.chunks {
		if base < at+n && at < base+other.size {
			return errInvalidValue
		}
	}
	m.holds++
	f.chunks[at] = m
	return remap(at, n, syscall.PROT_NONE, syscall.MAP_SHARED, m.file)
}

// access opens bytes that are mapped without a gap.
func (f *fake) access(at, n uintptr, who []accessDesc) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	for end := at + n; at < end; {
		m := f.chunks[at]
		if m == nil || at+m.size > end {
			return errInvalidValue
		}
		if r := remap(at, m.size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED, m.file); r != success {
			return r
		}
		m.open = slices.Clone(who)
		at += m.size
	}
	return success
}

// unmap takes away what one call mapped.
func (f *fake) unmap(at, n uintptr) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	m := f.chunks[at]
	if m == nil || m.size != n {
		return errInvalidValue
	}
	delete(f.chunks, at)
	f.end(m)
	return remap(at, n, syscall.PROT_NONE, syscall.MAP_ANON|syscall.MAP_PRIVATE, -1)
}

// remap changes what lies behind addresses of a range.
func remap(at, n uintptr, how, flags, file int) result {
	_, _, errno := syscall.Syscall6(syscall.SYS_MMAP, at, n, uintptr(how), uintptr(flags|syscall.MAP_FIXED), uintptr(file), 0)
	if errno != 0 {
		return errNotFound
	}
	return success
}

// chunk returns the mapped memory that an address lies in; none has no size.
func (f *fake) chunk(at uintptr) (base, n uintptr, host bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for base, m := range f.chunks {
		if at >= base && at < base+m.size {
			return base, m.size, m.kind == locationHostNuma
		}
	}
	return 0, 0, false
}

// crosses reports whether bytes lie in more than the chunk they begin in. This
// driver refuses all work that is not documented to do so, a GPU's some of it.
func (f *fake) crosses(at, n uintptr) bool {
	base, size, _ := f.chunk(at)
	return size > 0 && at+n > base+size
}

// captures reports whether the stream is part of a capture.
func (f *fake) captures(s *fakeStream) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return s.capture != nil
}
