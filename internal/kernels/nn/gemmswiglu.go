// This file owns products that end with SwiGLU or with its gradient: one kernel on Hopper, and
// elsewhere the launches of gemm.go and act.go one after the other. The kernels round as
// those do, so both give the same bits but for the gradient of weights, which is a sum in
// another order.

package nn

import (
	"cmp"
	_ "embed"
	"slices"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

//go:embed gemmswiglu_sm90a.ptx
var gemmSwigluPTX string

var gemmSwigluImage = hopperImage("nn/gemmswiglu.cu", gemmSwigluPTX)

var (
	gatedHopper = map[hopperForm]*device.Kernel{
		hopperShared: {Name: "stowage_nn_hopper_gemm_swiglu", Image: gemmSwigluImage},
		hopperSlim:   {Name: "stowage_nn_hopper_gemm_swiglu_slim", Image: gemmSwigluImage},
	}
	// To compute SwiGLU's gradient takes so long that tiles must be stored while others are
	// multiplied.
	gatedGradHopper = device.Kernel{Name: "stowage_nn_hopper_gemm_swiglu_grad_slim", Image: gemmSwigluImage}
	sumTilesHopper  = device.Kernel{Name: "stowage_nn_hopper_sum_tiles", Image: gemmSwigluImage}

	gatedKernel     = device.Kernel{Name: "stowage_nn_gemm_swiglu", Go: runSteps}
	gatedGradKernel = device.Kernel{Name: "stowage_nn_gemm_swiglu_grad", Go: runSteps}
	sumTilesKernel  = device.Kernel{Name: "stowage_nn_sum_tiles", Go: runSteps}
)

// Experts with fewer rows than gatedFew, on average, fill lower tiles better.
const gatedFew = 1024

const sumThreads = 256

// runSteps is the twin of work that consists of other launches.
func runSteps(l *device.Launch) {
	for i := range l.Steps {
		l.Steps[i].Kernel.Go(&l.Steps[i])
	}
}

// fused returns a launch of work that consists of steps.
func fused(k *device.Kernel, steps []device.Launch) device.Launch {
	l := device.NewLaunch(k, 1, 1)
	l.Steps, l.Flops = steps, steps[0].Flops
	return l
}

// GatedProduct is C = A Bᵀ and SwiGLU of it, which both are stored: a dense product, or one
// over experts if there are segments. If Y has no memory, it is the product alone, with the
// same bits on every device.
type GatedProduct struct {
	A, B, C, Y Matrix
	Weight     device.Range // as that of Gate
	Seg        Segments     // as that of Experts, or none
	Expect     int          // as that of Experts
}

// GatedGemm issues a product and SwiGLU.
func GatedGemm(s device.Stream, p GatedProduct) {
	for _, l := range gatedLaunches(p) {
		s.Launch(l)
	}
}

// gatedLaunches returns one launch if there is a kernel for Hopper, and otherwise its steps.
// The arguments of the one:
//
//	0..2  A, B, C
//	3     Seg or zero
//	4     columns of Y | A.Cols << 32
//	5     A.Rows | experts << 32
//	6     pitch of C | pitch of Y << 32
//	7, 8  Y or zero, Weight or zero
func gatedLaunches(p GatedProduct) []device.Launch {
	var steps []device.Launch
	if p.Seg.live() {
		steps = append(steps, GroupedGemmLaunch(Experts{A: p.A, B: p.B, C: p.C, TransB: true, Seg: p.Seg, Expect: p.Expect}))
	} else {
		steps = append(steps, GemmLaunch(Product{A: p.A, B: p.B, C: p.C, TransB: true}))
	}
	if p.Y.Buf != nil {
		steps = append(steps, swigluLaunch(Gate{Y: p.Y, X: p.C, Weight: p.Weight, Seg: p.Seg}))
	}
	if !boxable(p.A, p.B) || !whole(p.C, p.Y) || p.C.Cols%16 != 0 {
		return steps
	}
	l := fused(&gatedKernel, steps)
	passMatrix(&l, "A of a product with SwiGLU", p.A, device.Read)
	passMatrix(&l, "B of a product with SwiGLU", p.B, device.Read)
	passMatrix(&l, "C of a product with SwiGLU", p.C, device.Write)
	passSegments(&l, p.Seg)
	l.Arg(packPair(p.C.Cols/2, p.A.Cols))
	l.Arg(packPair(p.A.Rows, max(1, p.Seg.Experts)))
	l.Arg(packPair(p.C.pitch(), p.Y.pitch()))
	passMaybe(&l, "what SwiGLU writes", p.Y, device.Write)
	passRun(&l, "SwiGLU's weights", p.Weight, p.A.Rows, 4, device.Read, true)
	f := hopperShared
	if cmp.Or(p.Expect, p.A.Rows)/max(1, p.Seg.Experts) < gatedFew {
		f = hopperSlim
	}
	f.resident(&l, gatedHopper[f], p.A, p.B, f.tiles(p.A.Rows+p.Seg.Experts*f.high, p.C.Cols+f.wide))
	return []device.Launch{l}
}

// boxable reports whether boxes of all matrices can be copied by the copying unit.
func boxable(ms ...Matrix) bool {
	return !slices.ContainsFunc(ms, func(m Matrix) bool { return !m.boxable() })
}

// whole reports whether matrices, of which some may be missing, are even and of bf16.
func whole(ms ...Matrix) bool {
	return !slices.ContainsFunc(ms, func(m Matrix) bool { return m.Buf != nil && m.Type != kernels.BF16 || !m.even() })
}

// GatedProductGrad is the product of A, the gradient of an output, and B, which is the
// gradient of SwiGLU's result, and SwiGLU's gradient: it writes DX, which may be X, and Y,
// which is SwiGLU's result, and DWeight. The product is dense, or one over experts if there
// are segments.
type GatedProductGrad struct {
	A, B, DX, X, Y Matrix
	Weight         device.Range // as that of GateGrad
	DWeight        device.Range
	Sums           device.Range // TileSums numbers of fp32 if there is DWeight, of which any may be left
	Seg            Segments     // as that of Experts, or none
	Expect         int          // as that of Experts
}

// TileSums returns how many numbers Sums has for rows with cols columns of Y.
func TileSums(rows, cols int) int { return rows * divUp(cols, hopperSlim.wide) }

// GatedGemmGrad issues it.
func GatedGemmGrad(s device.Stream, p GatedProductGrad) {
	for _, l := range gatedGradLaunches(p) {
		s.Launch(l)
	}
}

// gatedGradLaunches returns the product with SwiGLU's gradient, and the sums of what tiles
// have for the gradient of weights, of which only Hopper has a kernel; or the steps of the
// first. Its arguments:
//
//	0..2   A, B, DX
//	3      Seg or zero
//	4      Y.Cols | A.Cols << 32
//	5      A.Rows | experts << 32
//	6      pitch of DX | pitch of X << 32
//	7      pitch of Y
//	8..10  X, Y, Weight or zero
//	11     DWeight or zero, which the kernel for Hopper leaves alone
//	12     Sums or zero: a row has one for each tile
//
// and those of the second:
//
//	0..2  Sums, DWeight, Seg or zero
//	3     rows | tiles of a row << 32
//	4     number of segments, zero for all rows
func gatedGradLaunches(p GatedProductGrad) []device.Launch {
	rows, cols := p.Y.Rows, p.Y.Cols
	var steps []device.Launch
	if p.Seg.live() {
		steps = append(steps, GroupedGemmLaunch(Experts{A: p.A, B: p.B, C: p.Y, Seg: p.Seg, Expect: p.Expect}))
	} else {
		steps = append(steps, GemmLaunch(Product{A: p.A, B: p.B, C: p.Y}))
	}
	steps = append(steps, swigluGradLaunch(GateGrad{DX: p.DX, X: p.X, DY: p.Y, Y: p.Y, Weight: p.Weight, DWeight: p.DWeight, Seg: p.Seg}))
	// The last rows of k that are copied at once may be those of the next expert.
	if !boxable(p.A, p.B) || !whole(p.DX, p.X, p.Y) || p.Seg.live() && p.A.Cols%hopperBox != 0 {
		return steps
	}
	l := fused(&gatedGradKernel, steps)
	passMatrix(&l, "A of a product with SwiGLU's gradient", p.A, device.Read)
	passMatrix(&l, "B of a product with SwiGLU's gradient", p.B, device.Read)
	passMatrix(&l, "what SwiGLU's gradient writes", p.DX, device.Write)
	passSegments(&l, p.Seg)
	l.Arg(packPair(cols, p.A.Cols))
	l.Arg(packPair(rows, max(1, p.Seg.Experts)))
	l.Arg(packPair(p.DX.pitch(), p.X.pitch()))
	l.Arg(uint64(p.Y.pitch()))
	passMatrix(&l, "what SwiGLU's gradient reads", p.X, device.Read)
	passMatrix(&l, "SwiGLU's result", p.Y, device.Write)
	passRun(&l, "SwiGLU's weights", p.Weight, rows, 4, device.Read, true)
	passRun(&l, "the gradient of SwiGLU's weights", p.DWeight, rows, 4, device.Write, true)
	passRun(&l, "the sums of SwiGLU's tiles", p.Sums, TileSums(rows, cols), 4, device.Write, p.DWeight.Buf == nil)
	f := hopperSlim
	f.resident(&l, &gatedGradHopper, p.A, p.B, f.tiles(rows+p.Seg.Experts*f.high, cols))
	if p.DWeight.Buf == nil {
		return []device.Launch{l}
	}
	sum := device.NewLaunch(&sumTilesKernel, 1, 1)
	sum.Steps = []device.Launch{} // others have no such sums
	passRun(&sum, "the sums of SwiGLU's tiles", p.Sums, TileSums(rows, cols), 4, device.Read, false)
	passRun(&sum, "the gradient of SwiGLU's weights", p.DWeight, rows, 4, device.Write, false)
	passSegments(&sum, p.Seg)
	sum.Arg(packPair(rows, divUp(cols, f.wide)))
	sum.Arg(uint64(p.Seg.Experts))
	sum.Tuned = device.Tuned{Kernel: &sumTilesHopper, Grid: [3]uint32{uint32(divUp(rows, sumThreads)), 1, 1}, Block: [3]uint32{sumThreads, 1, 1}}
	return []device.Launch{l, sum}
}
