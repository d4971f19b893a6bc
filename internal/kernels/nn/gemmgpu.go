// This file owns matrix products on a GPU: which compiled kernel computes which of them,
// with which grid and shared memory.

package nn

import (
	_ "embed"
	"fmt"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

var (
	//go:embed gemm_sm80.ptx
	gemmPTX string

	gemmImage = image("nn/gemm.cu", gemmPTX)
)

// gemmWays are the kernels of a product: tensor cores for two matrices of bf16, by what is
// transposed, A first; and plain fp32 for all others.
type gemmWays struct {
	tensor [2][2]device.Kernel
	plain  device.Kernel
}

func newGemmWays(name string, twin func(*device.Launch)) *gemmWays {
	kernel := func(way string) device.Kernel {
		return device.Kernel{Name: "stowage_nn_" + name + "_" + way, Image: gemmImage, Go: twin}
	}
	return &gemmWays{
		tensor: [2][2]device.Kernel{{kernel("nn"), kernel("nt")}, {kernel("tn"), kernel("tt")}},
		plain:  kernel("plain"),
	}
}

var (
	gemmKernels        = newGemmWays("gemm", gemmTwin)
	groupedKernels     = newGemmWays("grouped", groupedTwin)          // nn and nt
	groupedGradKernels = newGemmWays("grouped_grad", groupedGradTwin) // tn
)

const (
	// A block computes tiles of gemmTile x gemmTile of C.
	gemmTile = 128
	// gemmShared is the shared memory of a block: a tile of fp32, or four stages of A and B
	// of 128 x 32 bf16 each, which have the same size.
	gemmShared = gemmTile * gemmTile * 4
	// A warp of tensorThreads computes 64 x 64 of the tile, and each of plainThreads 8 x 8.
	tensorThreads, plainThreads = 128, 256
	// groupedBlocks is the most blocks of a product over experts. Each of them first counts
	// the experts' tiles, and then computes every groupedBlocks-th.
	groupedBlocks = 2048
	// maxExperts is the most experts that a block has room to count.
	maxExperts = 512
)

// A block of a thin product computes thinHigh x thinWide numbers.
const thinThreads, thinHigh, thinWide = 256, 8, 32

var thinKernel = device.Kernel{Name: "stowage_nn_gemm_thin", Image: gemmImage, Go: gemmTwin}

// thin reports whether a product is one of few columns of A, whose tiles would leave most of a
// GPU idle, with a matrix that is not bf16: the gradient of a router.
func (p Product) thin() bool {
	return p.TransA && !p.TransB && p.A.Cols <= 512 && (p.A.Type != kernels.BF16 || p.B.Type != kernels.BF16)
}

func thinBlocks(m, n int) int {
	return min((m+thinHigh-1)/thinHigh*((n+thinWide-1)/thinWide), 1<<16)
}

func gemmTiles(n int) int { return (n + gemmTile - 1) / gemmTile }

// launch returns a launch with a number of blocks.
func (w *gemmWays) launch(a, b Matrix, transA, transB bool, blocks int) device.Launch {
	k, threads := &w.plain, plainThreads
	if a.Type == kernels.BF16 && b.Type == kernels.BF16 {
		k, threads = &w.tensor[gemmSide(transA)][gemmSide(transB)], tensorThreads
	}
	l := device.NewLaunch(k, blocks, threads)
	l.Shared = gemmShared
	return l
}

func gemmSide(trans bool) int {
	if trans {
		return 1
	}
	return 0
}

// countable panics if there are too many experts.
func (s Segments) countable() {
	if s.Experts > maxExperts {
		panic(fmt.Sprintf("nn: expected a product over at most %d experts, got %d", maxExperts, s.Experts))
	}
}
