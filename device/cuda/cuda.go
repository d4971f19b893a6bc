// Package cuda is an NVIDIA GPU as a [device.Device]. It calls the driver (libcuda)
// directly: it needs no cgo and no toolkit, and nothing is installed beside the driver.
//
//	gpu, err := cuda.Open(cuda.Options{})
//	var missing *device.Unsupported
//	if errors.As(err, &missing) {
//		// no driver, an old one, or no GPU: missing.Need says what to do
//	}
//
// Any goroutine can use any device: every call makes the device's context current on its
// thread first.
//
// # Sharing a GPU
//
// [Open] uses the primary context of the GPU, which other libraries of the process use
// too, and [OpenContext] a context that the caller owns. [Device.BorrowStream] and
// [Device.Borrow] use the streams and the memory of such a library, and
// [Device.Relaxed] makes calls possible while that library captures a graph.
package cuda

// This file owns the device; driver.go and abi.go the bindings, memory.go, arena.go,
// region.go and slab.go memory, backdrop.go zeros behind it, pieces.go the borders inside
// of it, stream.go, event.go, capture.go and graph.go the queues, kernel.go the loading of
// kernels, assist.go libraries that do a kernel's work, host.go callbacks, borrowed.go
// borrowed streams, observe.go what an observer is told, pending.go what waits for work,
// close.go the end, list.go what doctor shows.

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
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/internal/sysinfo"
	"github.com/stowage-dev/stowage/memory"
)

// Options configure a device. The zero value is the first GPU with all of its free
// memory.
type Options struct {
	// Ordinal is the number of the GPU, as the driver counts from zero.
	Ordinal int
	// DeviceCapacity is the most that may be allocated of the GPU's memory. Zero means
	// what is free when the device is opened.
	DeviceCapacity memory.Bytes
	// HostCapacity is the most that may be allocated of pinned host memory. Zero means
	// what the machine and its control groups leave, which is always a bound.
	HostCapacity memory.Bytes
	// CopyKernel, if not nil, returns a launch that copies src to dst inside of the
	// GPU's memory, or false. Copies that become nodes of graphs use it: on an H200, a
	// single copy node of 1 GiB ran at only 2.7 TB/s. Cutting the copy into pieces
	// avoids that too.
	CopyKernel func(dst, src device.Range) (device.Launch, bool)
	// Assist, if not nil, returns the library that does the work of some kernels. It is
	// called with the device's context current. If it returns a [device.Unsupported],
	// kernels do all work.
	Assist func() (Assist, error)
	// Peers are the ordinals of other GPUs whose streams read and write this device's memory:
	// those of ranks in the same process. Open returns a [device.Unsupported] if one of them
	// cannot.
	Peers []int
	// Shareable makes device memory that other processes and network cards can be given access
	// to, if the driver offers that, as NCCL does with memory that is registered.
	Shareable bool
	// Observe, if not nil, is told what the device does.
	Observe device.Observer
}

// Device is one GPU. It implements [device.Device], which documents most of its methods.
type Device struct {
	name         string
	info         device.Info
	drv          *driver
	gpu          int32
	numa         int32   // the host's NUMA node beside the GPU
	handleTypes  int32   // by which device memory can be given to others
	rdma         uint8   // whether network cards may reach it
	peers        []int32 // other GPUs that access its memory
	major, minor int
	granule      memory.Bytes
	ctx          [1]uintptr // an array, so that passing it on allocates nothing
	retained     bool       // the context is the primary one: threads keep it, Close releases it
	copyKernel   func(dst, src device.Range) (device.Launch, bool)
	assist       Assist // or nil
	watch        *watch // or nil
	ledger       *devicekit.Ledger
	pools        [memory.Kinds]pool
	growing      sync.Mutex // serialises Grow and Backdrop
	zeros        zeros      // guarded by growing

	failed atomic.Pointer[device.DriverError]
	gone   atomic.Bool // Close is done: no handle is valid any more

	hostReads, hostSyncs, launches, copies, copiedBytes, replays atomic.Uint64

	functions sync.Map // *device.Kernel to *function
	loading   sync.Mutex
	modules   []uintptr // guarded by loading

	callsMu sync.Mutex             // callbacks take it: never held over a call of the driver
	calls   map[*hostCall]struct{} // callbacks that the driver may still make

	reaping sync.Mutex // serialises runPassed; taken before mu

	mu      sync.Mutex // never held over a call of the driver
	streams map[*stream]struct{}
	graphs  map[*graph]struct{}
	pending []pending       // in the order of their events, per stream
	events  []uintptr       // events to be used again
	users   map[uintptr]int // of the callers' events: handles and graphs that need them
	closed  bool
}

var _ device.Device = (*Device)(nil)

// Open opens a GPU with its primary context, which other libraries in this process, such
// as PyTorch, share. Threads that call the device keep that context current. Open returns
// a [device.Unsupported] if there is no working driver or GPU, and a [device.OutOfMemory]
// if the GPU has no memory left for a context. The caller must close the device.
func Open(o Options) (*Device, error) {
	v, err := openDriver(libraries)
	if err != nil {
		return nil, err
	}
	return v.open(o)
}

func (v *driver) open(o Options) (*Device, error) {
	gpu, err := v.gpuHandle(o.Ordinal)
	if err != nil {
		return nil, err
	}
	name := fmt.Sprintf("cuda:%d", o.Ordinal)
	var ctx uint64
	switch r := v.callPtr(&v.primaryCtxRetain, uintptr(pointer(&ctx)), uintptr(gpu)); r {
	case success:
	case errOutOfMemory:
		return nil, &device.OutOfMemory{Device: name, Kind: memory.Device, Owner: "context", Capacity: v.total(gpu)}
	default:
		return nil, unsupported(fmt.Sprintf("GPU %d cannot make a context: %s", o.Ordinal, v.text(r)), "check with nvidia-smi whether another process uses the GPU exclusively")
	}
	d, err := newDevice(v, name, gpu, uintptr(ctx), true, o)
	if err != nil {
		v.call(&v.primaryCtxRelease, uintptr(gpu))
		return nil, err
	}
	return d, nil
}

// OpenContext opens a GPU with a context that the caller owns and keeps alive until the
// device is closed. It ignores the ordinal of the options. After each call of the device,
// the thread has the context that it had before.
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

// gpuHandle returns the driver's handle of a GPU.
func (v *driver) gpuHandle(ordinal int) (int32, error) {
	var n, gpu int32
	if r := v.callPtr(&v.deviceGetCount, uintptr(pointer(&n))); r != success {
		return 0, unsupported("the driver does not count its GPUs: "+v.text(r), "see whether nvidia-smi works on this machine")
	}
	if ordinal < 0 || ordinal >= int(n) {
		return 0, &device.Unsupported{
			What: fmt.Sprintf("CUDA device %d", ordinal), Why: fmt.Sprintf("the driver finds %d GPUs", n),
			Need: "choose one of them; they are numbered from 0",
		}
	}
	if r := v.callPtr(&v.deviceGet, uintptr(pointer(&gpu)), uintptr(ordinal)); r != success {
		return 0, unsupported("the driver does not open the GPU: "+v.text(r), "see whether nvidia-smi works on this machine")
	}
	return gpu, nil
}

// peersOf returns the driver's handles of other GPUs that access the memory of one.
func (v *driver) peersOf(gpu int32, ordinals []int) (peers []int32, err error) {
	for _, ordinal := range ordinals {
		peer, err := v.gpuHandle(ordinal)
		if err != nil {
			return nil, err
		}
		if peer == gpu || slices.Contains(peers, peer) {
			continue
		}
		var can int32
		if r := v.callPtr(&v.deviceCanAccessPeer, uintptr(pointer(&can)), uintptr(peer), uintptr(gpu)); r != success || can == 0 {
			return nil, &device.Unsupported{
				What: fmt.Sprintf("GPU %d with the memory of GPU %d", peer, gpu), Why: "the driver offers no access from one to the other",
				Need: "start a process for each GPU (docs/CLUSTER.md)",
			}
		}
		peers = append(peers, peer)
	}
	return peers, nil
}

func newDevice(v *driver, name string, gpu int32, ctx uintptr, retained bool, o Options) (*Device, error) {
	if o.DeviceCapacity < 0 || o.HostCapacity < 0 {
		return nil, fmt.Errorf("cuda: expected capacities of at least zero, got %v of device memory and %v of host memory; give positive sizes, or zero for all that is free", o.DeviceCapacity, o.HostCapacity)
	}
	if why, need := v.unusable(gpu); why != "" {
		return nil, &device.Unsupported{What: "CUDA device " + strconv.Itoa(int(gpu)), Why: why, Need: need}
	}
	d := &Device{
		name: name, drv: v, gpu: gpu, ctx: [1]uintptr{ctx}, retained: retained, copyKernel: o.CopyKernel,
		major: v.attribute(gpu, attrMajor), minor: v.attribute(gpu, attrMinor),
		numa:    int32(max(v.attribute(gpu, attrHostNuma), 0)),
		streams: map[*stream]struct{}{},
		graphs:  map[*graph]struct{}{},
		calls:   map[*hostCall]struct{}{},
		users:   map[uintptr]int{},
	}
	if o.Shareable && v.attribute(gpu, attrFileHandles) != 0 {
		d.handleTypes = handleFile
		d.rdma = uint8(v.attribute(gpu, attrVirtualRDMA) & 1)
	}
	var err error
	if d.peers, err = v.peersOf(gpu, o.Peers); err != nil {
		return nil, err
	}
	if o.DeviceCapacity == 0 {
		o.DeviceCapacity = d.freeMemory()
	}
	bound := hostBound(sysinfo.Read().Memory.Usable())
	if o.HostCapacity == 0 || o.HostCapacity > bound {
		o.HostCapacity = bound
	}
	capacity := [memory.Kinds]memory.Bytes{memory.Device: o.DeviceCapacity, memory.Host: o.HostCapacity}
	d.ledger = devicekit.NewLedger(name, capacity)
	d.info = device.Info{
		Backend: "cuda", Ordinal: int(gpu), Name: v.name(gpu), Driver: versionString(v.version),
		Capability: fmt.Sprintf("%d.%d", d.major, d.minor),
		Units:      v.attribute(gpu, attrUnits), Capacity: capacity,
	}
	limit := [memory.Kinds]memory.Bytes{memory.Device: v.total(gpu), memory.Host: bound}
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

// run makes a call with a frame that is filled in.
func (d *Device) run(f *frame, p *proc, n int) (r result) {
	d.within(func() { r = f.call(p, n) })
	return r
}

// within runs fn with the context current. It locks the thread, so that all calls happen
// on the same one. If the context is the caller's, the thread gets its earlier context
// back.
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

// enqueue makes a call that takes handles and no addresses. A handle knows its context,
// and today's drivers do not need a current one as well, which saves 0.2 µs. A driver that
// does need it refuses the call, and the call is made again.
func (d *Device) enqueue(f *frame, p *proc, n int) result {
	r := f.call(p, n)
	if r == errInvalidContext || r == errInvalidHandle {
		r = d.run(f, p, n)
	}
	return r
}

// callOrFail makes a call unless the device has failed. A call that fails becomes the
// device's error.
func (d *Device) callOrFail(p *proc, args ...uintptr) bool {
	if d.failed.Load() != nil {
		return false
	}
	r := d.call(p, args...)
	if r != success {
		d.broken(&failure{p, r})
	}
	return r == success
}

// insist makes a call on a failed device too, to wait for work and to clean up. A failure
// that does not break the context, such as a callback's panic, stops no work in flight and
// unmaps nothing. A broken context refuses the call, which changes nothing.
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

// err returns the device's first error, or nil.
func (d *Device) err() error {
	if e := d.failed.Load(); e != nil {
		return e
	}
	return nil
}

// refused returns the error of an operation whose call failed. Running out of memory is
// not final; every other failure is.
func (d *Device) refused(f *failure, kind memory.Kind, asked memory.Bytes, owner string) error {
	if !f.outOfMemory() {
		return d.broken(f)
	}
	return d.ledger.OutOfMemory(kind, asked, d.pools[kind].largestPossible(), owner)
}

// mustBeOpen panics on a closed device.
func (d *Device) mustBeOpen(what string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cuda: " + what + " on the closed device " + d.name)
	}
}

// Info implements [device.Device].
func (d *Device) Info() device.Info { return d.info }

// Freeze implements [device.Device].
func (d *Device) Freeze() { d.ledger.Freeze() }

// Context returns the driver's handle of the context, for other libraries that use the
// GPU.
func (d *Device) Context() uintptr { return d.ctx[0] }

// Memory implements [device.Device].
func (d *Device) Memory() device.Usage {
	d.runPassed()
	return d.ledger.Usage()
}

// Counters implements [device.Device].
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

// allStreams returns a snapshot of the streams.
func (d *Device) allStreams() []*stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Collect(maps.Keys(d.streams))
}

// Sync waits for the work that all streams were given so far. Captured work is not part
// of it.
func (d *Device) Sync() error {
	d.hostSyncs.Add(1)
	for _, s := range d.allStreams() {
		s.await()
		s.report()
	}
	d.runPassed()
	return d.err()
}
