// This file checks the layout of the driver's structures.

package cuda

import (
	"testing"
	"unsafe"
)

func TestLayouts(t *testing.T) {
	var (
		prop   allocationProp
		access accessDesc
		copy2D memcpy2D
		node   kernelNodeParams
		config launchConfig
		attr   launchAttribute
	)
	for _, c := range []struct {
		what      string
		got, want uintptr
	}{
		{"CUmemAllocationProp", unsafe.Sizeof(prop), 32},
		{"CUmemAllocationProp.location", unsafe.Offsetof(prop.location), 8},
		{"CUmemAccessDesc", unsafe.Sizeof(access), 12},
		{"CUmemAccessDesc.flags", unsafe.Offsetof(access.flags), 8},
		{"CUDA_MEMCPY2D", unsafe.Sizeof(copy2D), 128},
		{"CUDA_MEMCPY2D.srcMemoryType", unsafe.Offsetof(copy2D.src.kind), 16},
		{"CUDA_MEMCPY2D.srcDevice", unsafe.Offsetof(copy2D.src.device), 32},
		{"CUDA_MEMCPY2D.srcPitch", unsafe.Offsetof(copy2D.src.pitch), 48},
		{"CUDA_MEMCPY2D.dstMemoryType", unsafe.Offsetof(copy2D.dst) + unsafe.Offsetof(copy2D.dst.kind), 72},
		{"CUDA_MEMCPY2D.dstDevice", unsafe.Offsetof(copy2D.dst) + unsafe.Offsetof(copy2D.dst.device), 88},
		{"CUDA_MEMCPY2D.dstPitch", unsafe.Offsetof(copy2D.dst) + unsafe.Offsetof(copy2D.dst.pitch), 104},
		{"CUDA_MEMCPY2D.WidthInBytes", unsafe.Offsetof(copy2D.width), 112},
		{"CUDA_MEMCPY2D.Height", unsafe.Offsetof(copy2D.height), 120},
		{"CUDA_KERNEL_NODE_PARAMS", unsafe.Sizeof(node), 72},
		{"CUDA_KERNEL_NODE_PARAMS.gridDimX", unsafe.Offsetof(node.grid), 8},
		{"CUDA_KERNEL_NODE_PARAMS.blockDimX", unsafe.Offsetof(node.block), 20},
		{"CUDA_KERNEL_NODE_PARAMS.sharedMemBytes", unsafe.Offsetof(node.shared), 32},
		{"CUDA_KERNEL_NODE_PARAMS.kernelParams", unsafe.Offsetof(node.params), 40},
		{"CUDA_KERNEL_NODE_PARAMS.ctx", unsafe.Offsetof(node.ctx), 64},
		{"CUlaunchConfig", unsafe.Sizeof(config), 56},
		{"CUlaunchConfig.sharedMemBytes", unsafe.Offsetof(config.shared), 24},
		{"CUlaunchConfig.hStream", unsafe.Offsetof(config.stream), 32},
		{"CUlaunchConfig.numAttrs", unsafe.Offsetof(config.count), 48},
		{"CUlaunchAttribute", unsafe.Sizeof(attr), 72},
		{"CUlaunchAttribute.value", unsafe.Offsetof(attr.value), 8},
	} {
		if c.got != c.want {
			t.Errorf("%s is %d, want %d", c.what, c.got, c.want)
		}
	}
}

// A frame's pointers lead to its own parameters, whoever borrows it.
func TestFrame(t *testing.T) {
	f := newFrame().(*frame)
	for i := range f.params {
		f.params[i] = uint64(100 + i)
	}
	for i, at := range f.where {
		if at != uintptr(unsafe.Pointer(&f.params[i])) {
			t.Errorf("pointer %d leads elsewhere", i)
		}
	}
}
