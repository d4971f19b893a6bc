// Package cuda is the device for NVIDIA GPUs. It calls the driver (libcuda)
// through purego: no cgo, no toolkit, nothing to install beside the driver.
// Where there is no driver or no GPU, Open says so with [device.Unsupported].
//
// A context is current per thread and goroutines change threads, so every call
// that needs one makes the device's context current first, and any goroutine
// can use any device.
//
// This file owns the device; driver.go and abi.go the bindings, memory.go,
// arena.go, region.go and slab.go memory, pieces.go the borders inside it,
// stream.go, event.go, capture.go and graph.go the queues, kernel.go the loading
// of kernels, assist.go libraries that do a kernel's work, host.go callbacks,
// observe.go what is told of work,
// pending.go what waits for work, close.go the end, list.go what doctor shows.
package cuda

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/sysinfo"
)

// Options configure a device. The zero value is the first GPU with all the
// memory that is free.
type Options struct {
	// Ordinal numbers the GPU as the driver does.
	Ordinal int
	// DeviceCapacity is the most that may be allocated of the GPU's memory;
	// zero stands for what is free when the device is opened.
	DeviceCapacity device.Bytes
	// HostCapacity is the most that may be allocated of pinned host memory.
	// What the machine and its control groups leave is a bound in any case, and
	// zero stands for that bound.
	HostCapacity device.Bytes
	// CopyKernel makes a launch that copies src to dst inside the GPU's memory,
	// or says no. Copies in graphs use it where it is given. One case for it was
	// seen: on an H200 a single copy node of 1 GiB ran at 2.7 TB/s. Cutting the
	// copy into pieces, as pieces.go does at borders, removes that as well.
	CopyKernel func(dst, src device.Range) (device.Launch, bool)
	// Assist makes the device's assistant, with its context current. One that is
	// not to be had, which [device.Unsupported] says, leaves all work to kernels.
	Assist func() (Assist, error)
	// Observe is told what the device does; nil is nobody.
	Observe device.Observer
}

// Device is one GPU.
type Device struct {
	name         string
	info         device.Info
	drv          *driver
	gpu          int32
	numa         int32 // the host's NUMA node beside the GPU
	major, minor int
	granule      device.Bytes
	ctx          [1]uintptr // an array, so that passing it on allocates nothing
	retained     bool       // the context is the primary one: threads keep it, Close releases it
	copyKernel   func(dst, src device.Range) (device.Launch, bool)
	assist       Assist // or nil
	watch        *watch // or nil
	ledger       *device.Ledger
	pools        [device.Kinds]pool
	growing      sync.Mutex // serialises Grow and Backdrop
	zeros        zeros      // guarded by growing

	failed atomic.Pointer[device.DriverError]
	gone   atomic.Bool // Close is through: no handle is good any more

	hostReads, hostSyncs, launches, copies, copiedBytes, replays atomic.Uint64

	functions sync.Map // *device.Kernel to *function
	loading   sync.Mutex
	modules   map[*device.Image]uintptr // guarded by loading

	callsMu sync.Mutex             // callbacks take it: never held over a call of the driver
	calls   map[*hostCall]struct{} // callbacks that the driver may still make

	reaping sync.Mutex // serialises reap; taken before mu

	mu      sync.Mutex // never held over a call of the driver
	streams map[*stream]struct{}
	graphs  map[*graph]struct{}
	pending []pending       // in the order of their events, per stream
	events  []uintptr       // events to be used again
	users   map[uintptr]int // of the callers' events: handles and graphs that need them
	closed  bool
}

var _ device.Device = (*Device)(nil)

// Open opens a GPU with its primary context, which other users of the GPU in
// this process, PyTorch for instance, share. Threads that call the device are left
// with that context current.
func Open(o Options) (*Device, error) {
	v, err := openDriver(libraries)
	if err != nil {
		return nil, err
	}
	return v.open(o)
}

func (v *driver) open(o Options) (*Device, error) {
	gpu, err := v.gpu(o.Ordinal)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("cuda:%d", o.Ordinal)
	var ctx uint64
	switch r := v.callPtr(&v.primaryCtxRetain, uintptr(pointer(&ctx)), uintptr(gpu)); r {
	case success:
	case errOutOfMemory:
		return nil, &device.OutOfMemory{Device: name, Kind: device.Accel, Owner: "context", Capacity: v.total(gpu)}
	default:
		return nil, unsupported(fmt.Sprintf("GPU %d gives no context: %s", o.Ordinal, v.text(r)), "see whether another process holds the GPU for itself (nvidia-smi)")
	}
	d, err := newDevice(v, name, gpu, uintptr(ctx), true, o)
	if err != nil {
		v.call(&v.primaryCtxRelease, uintptr(gpu))
		return nil, err
	}
	return d, nil
}

// OpenContext uses a context that somebody else owns and keeps alive; the
// options' ordinal is not looked at. After each call the thread has the context
// that it had before.
func OpenContext(ctx uintptr, o Options) (*Device, error) {
	v, err := openDriver(libraries)
	if err != nil {
		return nil, err
	}
	return v.openContext(ctx, o)
}

func (v *driver) openContext(ctx uintptr, o Options) (*Device, error) {
	var gpu int32
	var r result
	v.within(ctx, func() { r = v.callPtr(&v.ctxGetDevice, uintptr(pointer(&gpu))) })
	if r != success {
		return nil, &device.DriverError{Device: "cuda", Call: v.ctxGetDevice.name, Code: int(r), Text: v.text(r)}
	}
	return newDevice(v, fmt.Sprintf("cuda:%d", gpu), gpu, ctx, false, o)
}

// gpu is the driver's handle of a GPU.
func (v *driver) gpu(ordinal int) (int32, error) {
	var n, gpu int32
	if r := v.callPtr(&v.deviceGetCount, uintptr(pointer(&n))); r != success {
		return 0, unsupported("the driver does not count its GPUs: "+v.text(r), "see whether nvidia-smi works on this machine")
	}
	if ordinal < 0 || ordinal >= int(n) {
		return 0, &device.Unsupported{
			What: fmt.Sprintf("CUDA device %d", ordinal), Why: fmt.Sprintf("the driver shows %d GPUs", n),
			Need: "choose one that is there; they are numbered from 0",
		}
	}
	if r := v.callPtr(&v.deviceGet, uintptr(pointer(&gpu)), uintptr(ordinal)); r != success {
		return 0, unsupported("the driver does not open the GPU: "+v.text(r), "see whether nvidia-smi works on this machine")
	}
	return gpu, nil
}

func newDevice(v *driver, name string, gpu int32, ctx uintptr, retained bool, o Options) (*Device, error) {
	if o.DeviceCapacity < 0 || o.HostCapacity < 0 {
		return nil, fmt.Errorf("cuda: capacities of %d and %d bytes; give positive sizes, or zero for all there is", o.DeviceCapacity, o.HostCapacity)
	}
	if why, need := v.unusable(gpu); why != "" {
		return nil, &device.Unsupported{What: "CUDA device " + strconv.Itoa(int(gpu)), Why: why, Need: need}
	}
	d := &Device{
		name: name, drv: v, gpu: gpu, ctx: [1]uintptr{ctx}, retained: retained, copyKernel: o.CopyKernel,
		major: v.attribute(gpu, attrMajor), minor: v.attribute(gpu, attrMinor),
		numa:    int32(max(v.attribute(gpu, attrHostNuma), 0)),
		modules: map[*device.Image]uintptr{},
		streams: map[*stream]struct{}{},
		graphs:  map[*graph]struct{}{},
		calls:   map[*hostCall]struct{}{},
		users:   map[uintptr]int{},
	}
	if o.DeviceCapacity == 0 {
		o.DeviceCapacity = d.free()
	}
	bound := hostBound(sysinfo.Read().Memory.Usable())
	if o.HostCapacity == 0 || o.HostCapacity > bound {
		o.HostCapacity = bound
	}
	capacity := [device.Kinds]device.Bytes{device.Accel: o.DeviceCapacity, device.Host: o.HostCapacity}
	d.ledger = device.NewLedger(name, capacity)
	d.info = device.Info{
		Backend: "cuda", Ordinal: int(gpu), Name: v.name(gpu), Driver: versionString(v.version),
		Capability: fmt.Sprintf("%d.%d", d.major, d.minor),
		Units:      v.attribute(gpu, attrUnits), Capacity: capacity,
	}
	limit := [device.Kinds]device.Bytes{device.Accel: v.total(gpu), device.Host: bound}
	if err := d.openPools(capacity, limit); err != nil {
		d.closePools()
		return nil, err
	}
	if err := d.observe(o.Observe); err != nil {
		d.closePools()
		return nil, err
	}
	if err := d.openAssist(o.Assist); err != nil {
		d.unwatch(d.watch)
		d.closePools()
		return nil, err
	}
	return d, nil
}

// call calls the driver with the context current. It allocates nothing.
func (d *Device) call(p *proc, args ...uintptr) result {
	f := d.drv.frames.Get().(*frame)
	n := copy(f.args[:], args)
	r := d.run(f, p, n)
	d.drv.frames.Put(f)
	return r
}

// run is call with a frame that is filled in.
func (d *Device) run(f *frame, p *proc, n int) (r result) {
	d.within(func() { r = f.call(p, n) })
	return r
}

// within does fn with the context current. The thread is locked so that all calls
// happen on the same one. With somebody else's context the thread gets back what
// it had.
func (d *Device) within(fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if d.retained {
		_, _, _ = purego.SyscallN(d.drv.ctxSetCurrent.addr, d.ctx[:]...)
		fn()
		return
	}
	_, _, _ = purego.SyscallN(d.drv.ctxPushCurrent.addr, d.ctx[:]...)
	fn()
	d.drv.call(&d.drv.ctxPopCurrent, 0)
}

// enqueue is run for calls that take handles and no addresses. A handle brings
// its context along, and today's drivers do not ask for a current one as well,
// which saves 0.2 µs; a driver that does refuses the call and gets it again.
func (d *Device) enqueue(f *frame, p *proc, n int) result {
	r := f.call(p, n)
	if r == errInvalidContext || r == errInvalidHandle {
		r = d.run(f, p, n)
	}
	return r
}

// do makes a call unless the device has failed; a call that fails is the
// device's error.
func (d *Device) do(p *proc, args ...uintptr) bool {
	if d.failed.Load() != nil {
		return false
	}
	r := d.call(p, args...)
	if r != success {
		d.broken(&failure{p, r})
	}
	return r == success
}

// insist makes a call on a failed device as well: to wait for work and to take
// things down. A failure that is not the context's own, such as a callback's
// panic, stops no work in flight and unmaps nothing; a context that is broken
// refuses the call, which is no news then.
func (d *Device) insist(p *proc, args ...uintptr) {
	if d.gone.Load() {
		return
	}
	if r := d.call(p, args...); r != success {
		d.broken(&failure{p, r})
	}
}

// broken makes a failed call the device's error, unless it has one already, and
// returns that error.
func (d *Device) broken(f *failure) error {
	text := d.drv.text(f.result)
	if f.result >= errIllegalAddress && f.result <= errLaunchFailure {
		text += "; work issued earlier caused it"
	}
	d.fail(&device.DriverError{Device: d.name, Call: f.proc.name, Code: int(f.result), Text: text})
	return d.err()
}

// fail makes err the device's error unless it has one already.
func (d *Device) fail(err *device.DriverError) { d.failed.CompareAndSwap(nil, err) }

// err is the device's first error, or nil.
func (d *Device) err() error {
	if e := d.failed.Load(); e != nil {
		return e
	}
	return nil
}

// refused turns a failed call of an operation that may run out of memory into
// the error it returns. Running out is not final, everything else is.
func (d *Device) refused(f *failure, kind device.Kind, asked device.Bytes, owner string) error {
	if !f.oom() {
		return d.broken(f)
	}
	return d.ledger.OutOfMemory(kind, asked, d.pools[kind].room(), owner)
}

// mustBeOpen panics on a closed device.
func (d *Device) mustBeOpen(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cuda: " + what + " on the closed device " + d.name)
	}
}

func (d *Device) Info() device.Info { return d.info }
func (d *Device) Freeze()           { d.ledger.Freeze() }

// Context is the driver's handle, for libraries that are called beside.
func (d *Device) Context() uintptr { return d.ctx[0] }

func (d *Device) Memory() device.Usage {
	d.reap()
	return d.ledger.Usage()
}

func (d *Device) Counters() device.Counters {
	return device.Counters{
		HostReads:   d.hostReads.Load(),
		HostSyncs:   d.hostSyncs.Load(),
		Launches:    d.launches.Load(),
		Copies:      d.copies.Load(),
		CopiedBytes: d.copiedBytes.Load(),
		Replays:     d.replays.Load(),
	}
}

// all is a snapshot of the streams.
func (d *Device) all() []*stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.streams))
}

// Sync waits for what all streams have been given so far. The recorded work of
// a stream that captures is not given yet.
func (d *Device) Sync() error {
	d.hostSyncs.Add(1)
	for _, s := range d.all() {
		s.await()
		s.report()
	}
	d.reap()
	return d.err()
}
