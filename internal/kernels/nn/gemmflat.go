// This file owns flat products, whose tiles of tensor cores would be mostly empty.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

//go:embed gemmflat_sm80.ptx
var flatPTX string

var flatKernel = device.Kernel{Name: "stowage_nn_gemm_flat", Image: image("nn/gemmflat.cu", flatPTX), Go: gemmTwin}

// A block of a flat product computes flatHigh x flatWide numbers, of sums of at most flatDeep.
// On an H200, 8192 x 2048 numbers of 8 products take 26 µs, and 46 in tiles; of 64 products,
// tiles are as fast.
const flatThreads, flatHigh, flatWide, flatDeep = 256, 32, 256, 32

// flat reports whether a product is one of a few columns of fp32 with bf16, in vectors: the
// input gradient of a router.
func (p Product) flat() bool {
	if p.TransA || p.TransB || p.A.Type != kernels.F32 || p.A.Cols > flatDeep || !p.A.aligned(4) {
		return false
	}
	for _, m := range []Matrix{p.B, p.C, p.Plus} {
		if m.Buf != nil && (m.Type != kernels.BF16 || !m.aligned(8)) {
			return false
		}
	}
	return true
}

func flatBlocks(m, n int) int {
	return min(runsOf(m, flatHigh)*runsOf(n, flatWide), 1<<20)
}
