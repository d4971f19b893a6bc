//go:build linux

// This file owns a driver made of Go: every function of libcuda that the
// package calls, on top of the CPU device. It lets machines without a GPU run
// the package's own code through the same calls, checks that each call finds
// its context current, and fails on demand.

package cuda

import (
	"cmp"
	"fmt"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

const (
	errInvalidValue result = 1
	errNotFound     result = 500
	errNotPermitted result = 800
	errUnmatched    result = 903
	errUnjoined     result = 904
	errCaptured     result = 907
)

// fake is one such driver with one GPU, or with several that share their memory.
type fake struct {
	test    testing.TB // that it was made for
	gpu     device.Device
	total   uint64
	version int32

	coarser map[int32]int // by the kind of location: powers of two by which its granules are larger

	mu      sync.Mutex
	used    uint64
	handles map[uintptr]any
	next    uintptr
	current map[int]uintptr       // contexts by thread
	maps    map[uintptr][]byte    // what was reserved and a granule more, by aligned address
	chunks  map[uintptr]*physical // what is mapped, by address
	fail    map[string]result     // what a function shall return from now on
	full    map[string]int        // after how many calls a function shall run out of memory, once
	fullAs  result                // what it returns then, if that is not that memory has run out
	calls   map[string]int
	attrs   map[int]int32
	gpus    int32                          // how many there are
	made    map[int32][2]int               // by place: handle types and RDMA of the memory made last
	refuses bool                           // to make memory that can be given to others
	apart   map[[2]int]bool                // GPUs of which the first cannot access the memory of the second
	shared  map[uintptr]uintptr            // how much dynamic shared memory functions may use
	excused bool                           // from giving everything back
	heard   func(name string, a []uintptr) // is told of every call that succeeded, if not nil
}

// fakeEvent is two events of the CPU device: one that stays inside a capture
// or outside, and one that crosses.
type fakeEvent struct {
	inner, outer device.Event
	capture      *fakeCapture // where it was recorded last, or nil
}

// fakeStream's and fakeEvent's captures are guarded by the driver's mutex.
type fakeStream struct {
	device.Stream
	capture *fakeCapture
	slot    device.Slot // of the last launch captured
}

type fakeCapture struct{ streams []*fakeStream }

// theFake is the driver that the C functions lead to: purego makes only a
// limited number of them, so all tests share one set.
var theFake atomic.Pointer[fake]

// fakeProcs makes a C function of each function once.
var fakeProcs = sync.OnceValue(func() map[string]uintptr {
	procs := map[string]uintptr{}
	for name := range new(driver).symbols() {
		procs[name] = purego.NewCallback(func(a, b, c, d, e, f, g, h, i, j, k, l uintptr) uintptr {
			return uintptr(theFake.Load().call(name, []uintptr{a, b, c, d, e, f, g, h, i, j, k, l}))
		})
	}
	return procs
})

// newFake makes the driver, with a GPU of the given memory. A test that asks again
// gets the same one.
func newFake(t testing.TB, total memory.Bytes) (*driver, *fake) {
	t.Helper()
	v := &driver{frames: sync.Pool{New: newFrame}}
	for name, p := range v.symbols() {
		*p = proc{name, fakeProcs()[name]}
	}
	if f := theFake.Load(); f != nil && f.test == t {
		return v, f
	}
	gpu, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	f := &fake{
		test: t, gpu: gpu, total: uint64(total), version: 13000, next: 0x1000, gpus: 1, made: map[int32][2]int{},
		handles: map[uintptr]any{}, current: map[int]uintptr{}, maps: map[uintptr][]byte{}, chunks: map[uintptr]*physical{},
		fail: map[string]result{}, full: map[string]int{}, calls: map[string]int{},
		shared: map[uintptr]uintptr{}, attrs: map[int]int32{attrUnits: 4, attrMajor: 9, attrVirtualMemory: 1, attrHostNuma: -1},
	}
	theFake.Store(f)
	t.Cleanup(func() {
		f.checkLeft()
		if err := gpu.Close(); err != nil {
			t.Error(err)
		}
	})
	return v, f
}

// checkLeft fails the test if anything of the driver is left: a device gives back all that
// it took. A driver that fails may keep something.
func (f *fake) checkLeft() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.excused || len(f.fail) > 0 || f.test.Failed() {
		return
	}
	if what := f.remains(); what != "" {
		f.test.Errorf("the driver is left with %s", what)
	}
}

// remains says what the driver is left with, or nothing. The caller holds the mutex.
func (f *fake) remains() string {
	left := map[string]int{}
	for _, x := range f.handles {
		switch x.(type) {
		case *uintptr, *device.Kernel: // nodes and functions, which go with their graph and module
		default:
			left[fmt.Sprintf("%T", x)]++
		}
	}
	if len(left)+len(f.maps)+len(f.chunks) == 0 && f.used == 0 {
		return ""
	}
	return fmt.Sprintf("%v, %d reservations, %d mappings and %d bytes", left, len(f.maps), len(f.chunks), f.used)
}

// fakeFunc is one function: its arguments and what it returns.
type fakeFunc func(f *fake, a []uintptr) result

// needsNoContext are the functions that the driver documents so.
var needsNoContext = map[string]bool{
	"cuInit": true, "cuDriverGetVersion": true, "cuGetErrorName": true, "cuGetErrorString": true,
	"cuDeviceGetCount": true, "cuDeviceGet": true, "cuDeviceGetName": true, "cuDeviceGetAttribute": true,
	"cuDeviceTotalMem_v2": true, "cuDevicePrimaryCtxRetain": true, "cuDeviceCanAccessPeer": true, "cuDevicePrimaryCtxRelease_v2": true,
	"cuCtxSetCurrent": true, "cuCtxPushCurrent_v2": true, "cuCtxPopCurrent_v2": true,
}

func (f *fake) call(name string, a []uintptr) result {
	f.mu.Lock()
	f.calls[name]++
	r := f.fail[name]
	if left, planned := f.full[name]; planned && left == 0 {
		r = cmp.Or(f.fullAs, errOutOfMemory)
		delete(f.full, name)
	} else if planned {
		f.full[name]--
	}
	ctx := f.current[syscall.Gettid()]
	f.mu.Unlock()
	switch {
	case r != success:
		return r
	case ctx == 0 && !needsNoContext[name]:
		return errInvalidContext
	}
	if r = fakeFuncs[name](f, a); r == success && f.heard != nil {
		f.heard(name, a)
	}
	return r
}

// out stores a result where the caller wants it.
func out[T any](at uintptr, v T) result {
	device.Slice[T](uint64(at), 1)[0] = v
	return success
}

// add keeps an object under a new handle.
func (f *fake) add(at uintptr, x any) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.next += 16
	f.handles[f.next] = x
	return out(at, f.next)
}

func get[T any](f *fake, h uintptr) T {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.handles[h].(T)
}

func (f *fake) drop(h uintptr) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.handles[h] == nil {
		return errInvalidHandle
	}
	delete(f.handles, h)
	return success
}

// setContext makes a context current on this thread.
func (f *fake) setContext(ctx uintptr) result {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current[syscall.Gettid()] = ctx
	return success
}

// texts are the strings of the driver, outside of Go's heap as they would be.
var texts = sync.OnceValue(func() [2]uintptr {
	m, err := syscall.Mmap(-1, 0, 4096, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		panic(err)
	}
	copy(m, "CUDA_ERROR_MADE_UP\x00")
	copy(m[64:], "a test asked for it\x00")
	base := uintptr(unsafe.Pointer(&m[0]))
	return [2]uintptr{base, base + 64}
})

var fakeFuncs map[string]fakeFunc

func init() {
	fakeFuncs = map[string]fakeFunc{
		"cuInit":             func(*fake, []uintptr) result { return success },
		"cuDriverGetVersion": func(f *fake, a []uintptr) result { return out(a[0], f.version) },
		"cuGetErrorName":     func(_ *fake, a []uintptr) result { return out(a[1], texts()[0]) },
		"cuGetErrorString":   func(_ *fake, a []uintptr) result { return out(a[1], texts()[1]) },
		"cuDeviceGetCount":   func(f *fake, a []uintptr) result { return out(a[0], f.gpus) },
		"cuDeviceCanAccessPeer": func(f *fake, a []uintptr) result {
			if f.apart[[2]int{int(a[1]), int(a[2])}] {
				return out(a[0], int32(0))
			}
			return out(a[0], int32(1))
		},
		"cuDeviceGet": func(_ *fake, a []uintptr) result { return out(a[0], int32(a[1])) },
		"cuDeviceGetName": func(_ *fake, a []uintptr) result {
			copy(device.Slice[byte](uint64(a[0]), int(a[1])), "Made-up GPU\x00")
			return success
		},
		"cuDeviceGetAttribute":         func(f *fake, a []uintptr) result { return out(a[0], f.attrs[int(a[1])]) },
		"cuDeviceTotalMem_v2":          func(f *fake, a []uintptr) result { return out(a[0], f.total) },
		"cuDevicePrimaryCtxRetain":     func(_ *fake, a []uintptr) result { return out(a[0], uintptr(0xC0)) },
		"cuDevicePrimaryCtxRelease_v2": func(*fake, []uintptr) result { return success },
		"cuCtxSetCurrent":              func(f *fake, a []uintptr) result { return f.setContext(a[0]) },
		"cuCtxPushCurrent_v2":          func(f *fake, a []uintptr) result { return f.setContext(a[0]) },
		"cuCtxPopCurrent_v2":           func(f *fake, _ []uintptr) result { return f.setContext(0) },
		"cuCtxGetDevice":               func(_ *fake, a []uintptr) result { return out(a[0], int32(0)) },
	}
	for _, more := range []map[string]fakeFunc{fakeMemory, fakeStreams, fakeEvents, fakeKernels} {
		for name, fn := range more {
			fakeFuncs[name] = fn
		}
	}
}
