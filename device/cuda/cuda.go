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
// of kernels, host.go callbacks, list.go what doctor shows.
package cuda

import (
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
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
	// or says no. Copies in graphs use it: as a node of a graph the driver's own
	// copy ran at 2.8 TB/s on an H200 where a kernel reaches 4.
	CopyKernel func(dst, src device.Range) (device.Launch, bool)
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
	owned        bool       // the context is ours alone to make current
	copyKernel   func(dst, src device.Range) (device.Launch, bool)
	ledger       *device.Ledger
	pools        [device.Kinds]pool
	growing      sync.Mutex // serialises Grow

	failed atomic.Pointer[device.DriverError]

	hostReads, hostSyncs, launches, copies, copiedBytes, replays atomic.Uint64

	functions sync.Map // *device.Kernel to *function
	loading   sync.Mutex
	modules   map[*device.Image]uintptr // guarded by loading

	mu      sync.Mutex
	streams map[*stream]struct{}
	graphs  map[*graph]struct{}
	calls   map[*hostCall]struct{} // callbacks that the driver may still make
	pending []pending              // in the order of their events, per stream
	events  []uintptr              // events to be used again
	closed  bool
}

var _ device.Device = (*Device)(nil)

// Open opens a GPU with its primary context, which other users of the GPU in
// this process, PyTorch for instance, share.
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
// options' ordinal is not looked at.
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

func newDevice(v *driver, name string, gpu int32, ctx uintptr, owned bool, o Options) (*Device, error) {
	if o.DeviceCapacity < 0 || o.HostCapacity < 0 {
		return nil, fmt.Errorf("cuda: capacities of %d and %d bytes; give positive sizes, or zero for all there is", o.DeviceCapacity, o.HostCapacity)
	}
	if v.attribute(gpu, attrVirtualMemory) == 0 {
		return nil, unsupported("the GPU or its driver has no virtual memory management", "use a GPU of capability 7.0 or later, outside of modes that take it away")
	}
	d := &Device{
		name: name, drv: v, gpu: gpu, ctx: [1]uintptr{ctx}, owned: owned, copyKernel: o.CopyKernel,
		major: v.attribute(gpu, attrMajor), minor: v.attribute(gpu, attrMinor),
		numa:    int32(max(v.attribute(gpu, attrHostNuma), 0)),
		modules: map[*device.Image]uintptr{},
		streams: map[*stream]struct{}{},
		graphs:  map[*graph]struct{}{},
		calls:   map[*hostCall]struct{}{},
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
		d.failed.Store(nil) // so that what was opened can be closed
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

// run is call with a frame that is filled in. The thread is locked so that
// all calls happen on the same one. Where others use the thread too, it gets
// its own context back.
func (d *Device) run(f *frame, p *proc, n int) result {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if d.owned {
		_, _, _ = purego.SyscallN(d.drv.ctxSetCurrent.addr, d.ctx[:]...)
		return f.call(p, n)
	}
	_, _, _ = purego.SyscallN(d.drv.ctxPushCurrent.addr, d.ctx[:]...)
	r := f.call(p, n)
	d.drv.call(&d.drv.ctxPopCurrent, 0)
	return r
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
		s.settle()
	}
	d.reap()
	return d.err()
}

// Close waits for all work, ends the streams and graphs that are left and
// reports what went wrong: the first error, then memory that was never freed.
// A capture under way is dropped.
func (d *Device) Close() error {
	d.mu.Lock()
	if d.closed {
		d.mu.Unlock()
		panic("cuda: device closed twice")
	}
	d.closed = true
	graphs := slices.Collect(maps.Keys(d.graphs))
	d.mu.Unlock()
	for _, s := range d.all() {
		s.drop()
	}
	for _, g := range graphs {
		_ = g.Close()
	}
	for _, s := range d.all() {
		s.settle()
		s.destroy()
	}
	d.reap()
	d.forget(slices.Collect(maps.Keys(d.calls)))
	err := errors.Join(d.err(), d.ledger.Leaks())
	d.closePools()
	for _, e := range d.events {
		d.do(&d.drv.eventDestroy, e)
	}
	for _, m := range d.modules {
		d.do(&d.drv.moduleUnload, m)
	}
	if d.owned {
		d.drv.call(&d.drv.primaryCtxRelease, uintptr(d.gpu))
	}
	// Handles of the context are dangling from here on: let nothing use them.
	d.fail(&device.DriverError{Device: d.name, Call: "Close", Text: "the device is closed"})
	return err
}
