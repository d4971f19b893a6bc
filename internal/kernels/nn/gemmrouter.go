// This file owns the products of a router on Hopper: which ones its kernels compute, and with
// which grid. gemmrouter.cu is compiled for the same tiles.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

//go:embed gemmrouter_sm90a.ptx
var routerPTX string

var (
	routerImage    = hopperImage("nn/gemmrouter.cu", routerPTX)
	routerNNKernel = device.Kernel{Name: "stowage_nn_gemm_router_nn", Image: routerImage} // of the input
	routerTNKernel = device.Kernel{Name: "stowage_nn_gemm_router_tn", Image: routerImage} // of the weights
)

const (
	routerThreads = 256
	routerHigh    = 64 // rows of C that a block computes at a time

	// Of the gradient of weights: columns of C, rows of A and B at a time, and how many of
	// those exist at once. Blocks of a cluster share the sums.
	routerWide, routerDeep, routerStages, routerCluster = 64, 64, 4, 8
	routerTNShared                                      = routerStages * routerDeep * ((routerHigh+4)*4 + (routerWide+8)*2)
	routerTNMost                                        = 512 // columns of A

	// Of the gradient of the input: columns of C, and the blocks that are resident on an H200.
	routerBroad, routerBlocks = 128, 264
	routerNNMost              = 128 // columns of A
)

// tuneRouter adds the kernel for Hopper to the launch of a gradient of a router: a product of
// fp32 with few columns, one of each expert, and bf16.
func (p Product) tuneRouter(l *device.Launch, m, n int) {
	if p.A.Type != kernels.F32 || !p.A.aligned(4) || p.TransB || p.B.Type != kernels.BF16 || !p.B.aligned(8) {
		return
	}
	vector := 8
	if p.TransA {
		vector = 4
	}
	for _, x := range []Matrix{p.C, p.Plus} {
		if x.Buf != nil && (int(x.Type.Size())*vector != 16 || !x.aligned(vector)) {
			return
		}
	}
	tuned := func(k *device.Kernel, blocks, shared, cluster int) {
		l.Tuned = device.Tuned{Kernel: k, Grid: [3]uint32{uint32(blocks), 1, 1}, Block: [3]uint32{routerThreads, 1, 1}, Shared: uint32(shared), Cluster: uint32(cluster)}
	}
	high := divUp(m, routerHigh)
	switch {
	case p.TransA && p.A.Cols <= routerTNMost:
		tuned(&routerTNKernel, high*divUp(n, routerWide)*routerCluster, routerTNShared, routerCluster)
	case !p.TransA && p.A.Cols <= routerNNMost:
		deep, wide := divUp(p.A.Cols, 16)*16, divUp(n, routerBroad)
		edge := (routerBroad + 8) * 2
		tuned(&routerNNKernel, wide*min(high, max(1, routerBlocks/wide)), deep*edge+2*routerHigh*((deep+8)*4+edge), 1)
	}
}
