// Package kernels holds the device code of Stowage.
//
// A kernel x has three files side by side. x.cu is the source for GPUs. x_sm80.ptx is
// the PTX that clang compiles from it. x.go holds the typed launch and the same work in
// Go (its twin), which the CPU device runs and every test takes as the truth. The twins of
// stash and reduce have a fourth file, stashtwin.go and reducetwin.go.
//
// Each kernel has two functions. One returns the launch (CopyLaunch): use it to label a
// launch, or to change it between replays of a graph. The other issues the launch on a
// stream (Copy). Neither allocates. Ranges may lie in device memory or in pinned host
// memory, in any mix. A kernel computes the same result with any number of blocks. So an
// update between replays may change the size of the work: it keeps the Grid of the
// captured launch.
//
// Run go generate after a change of a .cu or .cuh file. It needs clang-19, and no CUDA
// toolkit.
//
// This file owns what all kernels share: the shape of their launches and their images.
package kernels

//go:generate go run ../ptx/ptxgen

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

const (
	// The moveThreads threads of a block move moveChunk bytes, two vectors of 16
	// bytes each. Small blocks that start and finish in order are faster than
	// resident ones: see each_chunk in prelude.cuh.
	moveThreads = 128
	moveChunk   = memory.Bytes(moveThreads * 2 * 16)

	// linkBlocks blocks saturate the link to the host: on an H200, 24 blocks of
	// moveChunk bytes reached 52 GB/s to the host and 51 GB/s back, and 128 blocks
	// reached no more. They occupy 4 of its 132 multiprocessors and leave the rest to
	// compute.
	linkBlocks = 64
)

// image returns the image of a source with its portable variant, which runs on every
// GPU since Ampere.
func image(source, sm80 string) *device.Image {
	return &device.Image{Name: source, Variants: []device.Variant{{Major: 8, Minor: 0, PTX: sm80}}}
}

// blocksFor returns the number of blocks that move n bytes fastest, if a block moves per
// bytes at a time. Kernels are correct with any grid of at least one block.
func blocksFor(n, per memory.Bytes, ranges ...device.Range) int {
	blocks := int((n + per - 1) / per)
	for _, r := range ranges {
		if r.Buf.Kind() == memory.Host {
			blocks = min(blocks, linkBlocks)
		}
	}
	return max(blocks, 1)
}

// mustAlign panics unless a range begins at a multiple of n bytes.
func mustAlign(what string, r device.Range, n memory.Bytes) {
	if r.Addr()%uintptr(n) != 0 {
		panic(fmt.Sprintf("kernels: expected %s at a multiple of %d bytes, got %s", what, n, r))
	}
}

// mustHold panics unless a range is at least n bytes long.
func mustHold(what string, r device.Range, n memory.Bytes) {
	if r.Len < n {
		panic(fmt.Sprintf("kernels: expected at least %d bytes for %s, got %s", n, what, r))
	}
}
