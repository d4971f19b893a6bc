// Package kernels holds the device code of Stowage. A kernel x is four files side
// by side: x.cu is the source for GPUs, x_sm80.ptx what clang makes of it, and x.go
// the typed launch together with the same work in Go, which the CPU device runs
// and every test takes as the truth.
//
// For each kernel there is a function that gives the launch (CopyLaunch), for
// those who label it or change it between replays of a graph, and one that issues
// it on a stream (Copy). Neither allocates. Ranges may lie in device or in pinned
// host memory, in any mix. A kernel is right with any number of blocks, so that an
// update between replays, which keeps the shape, may change the size: it takes
// over the Grid of the captured launch.
//
// After a change of a .cu or .cuh file run go generate; it needs clang-19 and no
// CUDA toolkit.
//
// This file owns what all kernels share: their shape on the GPU and the making of
// images.
package kernels

//go:generate go run ../internal/ptx/ptxgen

import (
	"fmt"

	"github.com/stowage-dev/stowage/device"
)

const (
	// moveThreads threads of a block move moveChunk bytes, two vectors of 16
	// bytes each. Small blocks that come and go in order beat resident ones: see
	// each_chunk in prelude.cuh.
	moveThreads = 128
	moveChunk   = device.Bytes(moveThreads * 2 * 16)

	// linkBlocks fill the link to the host: 24 blocks of moveChunk bytes reached
	// 52 GB/s out and 51 in on an H200, 128 blocks no more. They need the threads
	// of 4 of its 132 multiprocessors; the rest is left to compute.
	linkBlocks = 64
)

// image is a source with its portable variant, which runs on every GPU from
// Ampere on.
func image(source, sm80 string) *device.Image {
	return &device.Image{Name: source, Variants: []device.Variant{{Major: 8, Minor: 0, PTX: sm80}}}
}

// blocksFor is the number of blocks that move n bytes, per bytes a block. Kernels
// are right with any grid of at least one block: this is the fast one.
func blocksFor(n, per device.Bytes, ranges ...device.Range) int {
	blocks := int((n + per - 1) / per)
	for _, r := range ranges {
		if r.Buf.Kind() == device.Host {
			blocks = min(blocks, linkBlocks)
		}
	}
	return max(blocks, 1)
}

// mustAlign panics unless a range begins at a multiple of n bytes.
func mustAlign(what string, r device.Range, n device.Bytes) {
	if r.Addr()%uintptr(n) != 0 {
		panic(fmt.Sprintf("kernels: %s, %s, does not begin at a multiple of %d bytes", what, r, n))
	}
}

// mustHold panics unless a range is at least n bytes long.
func mustHold(what string, r device.Range, n device.Bytes) {
	if r.Len < n {
		panic(fmt.Sprintf("kernels: %s, %s, is shorter than %d bytes", what, r, n))
	}
}
