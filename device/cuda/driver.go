// This file owns the bindings. libcuda is opened when a device is, and its functions are
// called through cached addresses; no toolkit is needed.

package cuda

import (
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"github.com/ebitengine/purego"

	"github.com/stowage-dev/stowage/device"
)

// The oldest driver that works. CUDA 12.2 introduced host memory that is mapped to reserved
// addresses.
const (
	minVersion = 12020
	needDriver = "install the NVIDIA driver, version 535 (CUDA 12.2) or later"
)

// libraries lists where the driver is looked for, in order: where the linker finds it, then
// where containers, WSL and NixOS put it without telling the linker.
var libraries = []string{
	"libcuda.so.1",
	"/usr/local/nvidia/lib64/libcuda.so.1",
	"/usr/lib/wsl/lib/libcuda.so.1",
	"/run/opengl-driver/lib/libcuda.so.1",
}

// proc is one function of the driver. Its name includes the version of the interface, as the
// symbol does; libcuda keeps old versions for ever.
type proc struct {
	name string
	addr uintptr
}

// driver is the opened library.
type driver struct {
	version int // 13000 is CUDA 13.0
	frames  sync.Pool

	init, driverGetVersion, getErrorName, getErrorString                proc
	deviceGetCount, deviceGet, deviceGetName, deviceGetAttribute        proc
	deviceTotalMem, primaryCtxRetain, primaryCtxRelease                 proc
	ctxSetCurrent, ctxPushCurrent, ctxPopCurrent, ctxGetDevice          proc
	deviceCanAccessPeer                                                 proc
	moduleLoadDataEx, moduleUnload, moduleGetFunction, funcSetAttribute proc
	memGetInfo, memGetAddressRange                                      proc
	memAddressReserve, memAddressFree, memCreate, memRelease            proc
	memMap, memUnmap, memSetAccess, memGetAllocationGranularity         proc
	memcpyAsync, memcpy2DAsync, memsetD8Async                           proc
	streamCreate, streamDestroy, streamSynchronize, streamWaitEvent     proc
	streamBeginCapture, streamEndCapture, streamGetCaptureInfo          proc
	threadCaptureMode                                                   proc
	eventCreate, eventDestroy, eventRecord, eventRecordWithFlags        proc
	eventQuery, eventSynchronize, eventElapsedTime                      proc
	launchKernel, launchKernelEx, launchHostFunc                        proc
	graphInstantiate, graphLaunch, graphExecDestroy, graphDestroy       proc
	graphExecKernelNodeSetParams                                        proc

	tensorMapEncode proc // without an address if the driver has none
}

// symbols pairs every function with its name in the library.
func (v *driver) symbols() map[string]*proc {
	return map[string]*proc{
		"cuInit": &v.init, "cuDriverGetVersion": &v.driverGetVersion,
		"cuGetErrorName": &v.getErrorName, "cuGetErrorString": &v.getErrorString,
		"cuDeviceGetCount": &v.deviceGetCount, "cuDeviceGet": &v.deviceGet,
		"cuDeviceGetName": &v.deviceGetName, "cuDeviceGetAttribute": &v.deviceGetAttribute,
		"cuDeviceCanAccessPeer": &v.deviceCanAccessPeer,
		"cuDeviceTotalMem_v2":   &v.deviceTotalMem, "cuDevicePrimaryCtxRetain": &v.primaryCtxRetain,
		"cuDevicePrimaryCtxRelease_v2": &v.primaryCtxRelease,
		"cuCtxSetCurrent":              &v.ctxSetCurrent, "cuCtxGetDevice": &v.ctxGetDevice,
		"cuCtxPushCurrent_v2": &v.ctxPushCurrent, "cuCtxPopCurrent_v2": &v.ctxPopCurrent,
		"cuModuleLoadDataEx": &v.moduleLoadDataEx, "cuModuleUnload": &v.moduleUnload,
		"cuModuleGetFunction": &v.moduleGetFunction, "cuFuncSetAttribute": &v.funcSetAttribute,
		"cuMemGetInfo_v2": &v.memGetInfo, "cuMemGetAddressRange_v2": &v.memGetAddressRange,
		"cuMemAddressReserve": &v.memAddressReserve, "cuMemAddressFree": &v.memAddressFree,
		"cuMemCreate": &v.memCreate, "cuMemRelease": &v.memRelease,
		"cuMemMap": &v.memMap, "cuMemUnmap": &v.memUnmap, "cuMemSetAccess": &v.memSetAccess,
		"cuMemGetAllocationGranularity": &v.memGetAllocationGranularity,
		"cuMemcpyAsync":                 &v.memcpyAsync, "cuMemcpy2DAsync_v2": &v.memcpy2DAsync,
		"cuMemsetD8Async": &v.memsetD8Async,
		"cuStreamCreate":  &v.streamCreate, "cuStreamDestroy_v2": &v.streamDestroy,
		"cuStreamSynchronize": &v.streamSynchronize, "cuStreamWaitEvent": &v.streamWaitEvent,
		"cuStreamBeginCapture_v2": &v.streamBeginCapture, "cuStreamEndCapture": &v.streamEndCapture,
		"cuStreamGetCaptureInfo_v2": &v.streamGetCaptureInfo, "cuThreadExchangeStreamCaptureMode": &v.threadCaptureMode,
		"cuEventCreate": &v.eventCreate, "cuEventDestroy_v2": &v.eventDestroy,
		"cuEventRecord": &v.eventRecord, "cuEventRecordWithFlags": &v.eventRecordWithFlags,
		"cuEventQuery": &v.eventQuery, "cuEventSynchronize": &v.eventSynchronize,
		"cuEventElapsedTime": &v.eventElapsedTime,
		"cuLaunchKernel":     &v.launchKernel, "cuLaunchKernelEx": &v.launchKernelEx,
		"cuLaunchHostFunc":            &v.launchHostFunc,
		"cuGraphInstantiateWithFlags": &v.graphInstantiate, "cuGraphLaunch": &v.graphLaunch,
		"cuGraphExecDestroy": &v.graphExecDestroy, "cuGraphDestroy": &v.graphDestroy,
		"cuGraphExecKernelNodeSetParams_v2": &v.graphExecKernelNodeSetParams,
		"cuTensorMapEncodeTiled":            &v.tensorMapEncode,
	}
}

// openDriver loads the library and starts it. The library stays loaded, because its threads
// outlive any handle.
func openDriver(names []string) (*driver, error) {
	var lib uintptr
	var first error
	runtime.LockOSThread() // the reason of a failure is kept by thread
	defer runtime.UnlockOSThread()
	for _, name := range names {
		h, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
		if err == nil {
			lib = h
			break
		}
		if first == nil {
			first = err
		}
	}
	if lib == 0 {
		return nil, unsupported(fmt.Sprintf("the driver library could not be loaded (%v)", first), needDriver)
	}
	v := &driver{frames: sync.Pool{New: newFrame}}
	missing := ""
	for name, p := range v.symbols() {
		addr, err := purego.Dlsym(lib, name)
		if err != nil && p != &v.tensorMapEncode && (missing == "" || name < missing) {
			missing = name
		}
		*p = proc{name, addr}
	}
	if missing != "" {
		return nil, unsupported("the driver is too old: it has no "+missing, needDriver)
	}
	return v, v.start()
}

// start initialises the driver. It returns a [device.Unsupported] if the machine has no
// working GPU.
func (v *driver) start() error {
	var n int32
	if r := v.callPtr(&v.driverGetVersion, uintptr(pointer(&n))); r != success {
		return unsupported("the driver does not tell its version: "+v.text(r), needDriver)
	}
	v.version = int(n)
	if v.version < minVersion {
		return unsupported("the driver is too old: it offers CUDA "+versionString(v.version), needDriver)
	}
	switch r := v.call(&v.init, 0); r {
	case success:
		return nil
	case errNoDevice:
		return unsupported("the driver found no GPU", "run where an NVIDIA GPU is visible (nvidia-smi lists it; check CUDA_VISIBLE_DEVICES and the container's GPU option)")
	case errStubLibrary:
		return unsupported("the toolkit's stub of libcuda was loaded", "put the driver's own libcuda.so.1 first in the library path")
	case errDriverMismatch:
		return unsupported("the driver library does not match the kernel module", "restart the machine after the driver's update, or use the driver's own libcuda.so.1")
	default:
		return unsupported("the driver does not start: "+v.text(r), "see whether nvidia-smi works on this machine")
	}
}

func unsupported(why, need string) *device.Unsupported {
	return &device.Unsupported{What: "CUDA device", Why: why, Need: need}
}

func versionString(v int) string { return fmt.Sprintf("%d.%d", v/1000, v%1000/10) }

// frame holds the arguments of a call. Calls borrow frames from a pool, which
// saves the allocation that a variadic call of purego makes. Arguments of
// kernels lie in params, and where points at them one by one, as cuLaunchKernel
// wants it: a frame is a heap object, so that these addresses never change.
type frame struct {
	args   [12]uintptr
	params [16]uint64
	where  [16]uintptr
	rect   memcpy2D
	maps   *frameMaps // nil until a tuned launch needs it
	early  *frameEarly
}

func newFrame() any {
	f := new(frame)
	for i := range f.where {
		f.where[i] = uintptr(pointer(&f.params[i]))
	}
	return f
}

// call calls the driver with numbers and handles. It allocates nothing.
func (v *driver) call(p *proc, args ...uintptr) result {
	f := v.frames.Get().(*frame)
	n := copy(f.args[:], args)
	r := f.call(p, n)
	v.frames.Put(f)
	return r
}

func (f *frame) call(p *proc, n int) result {
	r, _, _ := purego.SyscallN(p.addr, f.args[:n]...)
	return result(int32(r))
}

// callPtr calls the driver with arguments of exactly the form uintptr(pointer(&x)). The
// compiler then moves x to the heap and keeps it until the call returns.
//
//go:uintptrescapes
func (v *driver) callPtr(p *proc, args ...uintptr) result { return v.call(p, args...) }

// within makes a context current on this thread for the length of fn.
func (v *driver) within(ctx uintptr, fn func()) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	v.call(&v.ctxPushCurrent, ctx)
	fn()
	v.call(&v.ctxPopCurrent, 0)
}

type pointer = unsafe.Pointer

// text returns the driver's name and description of a result.
func (v *driver) text(r result) string {
	name, text := v.message(&v.getErrorName, r), v.message(&v.getErrorString, r)
	if name == "" {
		return fmt.Sprintf("error %d, which the driver does not know", r)
	}
	return name + ": " + text
}

func (v *driver) message(p *proc, r result) string {
	var s uint64
	if v.callPtr(p, uintptr(r), uintptr(pointer(&s))) != success || s == 0 {
		return ""
	}
	return goString(s)
}

// goString copies a string of C's.
func goString(addr uint64) string {
	n := 0
	for device.Slice[byte](addr+uint64(n), 1)[0] != 0 {
		n++
	}
	return string(device.Slice[byte](addr, n))
}
