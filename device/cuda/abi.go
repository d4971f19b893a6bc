// This file owns the driver's binary interface: results, constants and the
// layout of structures, as the documentation of the driver API defines them. A
// test checks every size and offset.

package cuda

// result is what every call of the driver returns (CUresult).
type result int32

const (
	success           result = 0
	errOutOfMemory    result = 2
	errStubLibrary    result = 34
	errNoDevice       result = 100
	errNoBinary       result = 209
	errInvalidContext result = 201
	errInvalidHandle  result = 400
	errNotReady       result = 600
	errIllegalAddress result = 700
	errLaunchFailure  result = 719
	errDriverMismatch result = 803

	// What a capture refuses lies in this span.
	errCaptureFirst result = 900
	errCaptureLast  result = 908
)

const (
	streamNonBlocking   = 1
	eventDisableTiming  = 2
	eventExternal       = 1 // of cuEventRecordWithFlags and of cuStreamWaitEvent
	captureActive       = 1
	captureRelaxed      = 2
	memoryTypeUnified   = 4
	funcMaxDynamicShare = 8
	launchEarly         = 6 // programmatic stream serialization

	jitErrorLog     = 5
	jitErrorLogSize = 6

	attrUnits          = 16
	attrPCIBus         = 33
	attrPCIDevice      = 34
	attrPCIDomain      = 50
	attrMajor          = 75
	attrMinor          = 76
	attrVirtualMemory  = 102
	attrFileHandles    = 103
	attrVirtualRDMA    = 110
	attrHostNuma       = 134
	locationDevice     = 1
	locationHostNuma   = 3
	allocationPinned   = 1
	accessReadWrite    = 3
	handleFile         = 1 // memory can be given to another process as a file
	granularityMinimum = 0
	maxPitch           = 1<<31 - 1 // the largest pitch of a 2-D copy

	tensorBF16       = 9
	tensorSwizzle128 = 3
	tensorPromote256 = 3 // L2 fetches 256 bytes at a time
)

// memLocation is CUmemLocation.
type memLocation struct{ kind, id int32 }

// allocationProp is CUmemAllocationProp, 32 bytes.
type allocationProp struct {
	kind        int32
	handleTypes int32
	location    memLocation
	_           uintptr // security attributes, of another system
	_           uint8   // compression: none
	rdma        uint8   // network cards may reach it
	_           [6]byte // usage: none
}

// accessDesc is CUmemAccessDesc, 12 bytes.
type accessDesc struct {
	location memLocation
	flags    int32
}

// pitched is one side of CUDA_MEMCPY2D, 56 bytes. With the unified memory type
// the address goes into device, whatever memory it is in.
type pitched struct {
	x, y   uintptr
	kind   uint32
	host   uintptr
	device uintptr
	array  uintptr
	pitch  uintptr
}

// memcpy2D is CUDA_MEMCPY2D, 128 bytes.
type memcpy2D struct {
	src, dst      pitched
	width, height uintptr
}

// launchConfig is CUlaunchConfig, 56 bytes.
type launchConfig struct {
	grid, block [3]uint32
	shared      uint32
	stream      uintptr
	attributes  uintptr
	count       uint32
}

// launchAttribute is CUlaunchAttribute, 72 bytes.
type launchAttribute struct {
	id    int32
	_     int32
	value [16]int32
}

// kernelNodeParams is CUDA_KERNEL_NODE_PARAMS, version 2, 72 bytes.
type kernelNodeParams struct {
	function    uintptr
	grid, block [3]uint32
	shared      uint32
	params      uintptr
	extra       uintptr
	kernel, ctx uintptr // for functions of libraries: none
}
