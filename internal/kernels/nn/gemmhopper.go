// This file owns matrix products on Hopper: when its kernels compute a product, with which
// grid, shared memory and tensor maps.

package nn

import (
	"cmp"
	_ "embed"
	"math"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

//go:embed gemmhopper_sm90a.ptx
var gemmHopperPTX string

var gemmHopperImage = hopperImage("nn/gemmhopper.cu", gemmHopperPTX)

// hopperForm is a way to compute tiles. All but hopperHalf add up k in the same order.
type hopperForm struct {
	suffix     string
	high, wide int // rows and columns of a tile
	stages     int // of A and B in shared memory, with 64 of k each
	box        int // rows of B that are copied at once, if not hopperBox
}

var (
	// Two groups of warps share a tile, which reads least. Nobody multiplies while they
	// store it. The others fit some results better; the last two are for a transposed B.
	hopperShared = hopperForm{suffix: "", high: 128, wide: 256, stages: 4}
	hopperSquare = hopperForm{suffix: "_square", high: 128, wide: 128, stages: 6}
	hopperMiddle = hopperForm{suffix: "_middle", high: 128, wide: 192, stages: 5}
	hopperBroad  = hopperForm{suffix: "_broad", high: 128, wide: 288, stages: 4, box: 144}
	hopperNarrow = hopperForm{suffix: "_narrow", high: 128, wide: 144, stages: 6, box: 72}
	// These are for gradients of weights. Columns of their last box are those of the next tile.
	hopper160 = hopperForm{suffix: "_160", high: 128, wide: 160, stages: 5}
	hopper224 = hopperForm{suffix: "_224", high: 128, wide: 224, stages: 4}
	// Two groups of warps take turns: one stores its tile while the other multiplies.
	hopperTurns = hopperForm{suffix: "_turns", high: 128, wide: 128, stages: 6}
	hopperSlim  = hopperForm{suffix: "_slim", high: 64, wide: 256, stages: 5}
	hopperLean  = hopperForm{suffix: "_lean", high: 64, wide: 144, stages: 8, box: 72}
	// They take turns, and sums begin with the fp32 numbers that they are added to: for gradients
	// of weights, which take long to read and to store.
	hopperLow = hopperForm{suffix: "_low", high: 64, wide: 256, stages: 5}
	// For gradients of experts' weights that are stored in fp32: hopperSlim, or tiles of 128 x 256 with seven stages
	// of A and three of B for each group if those experts that have rows have many, which the host does not know.
	hopperFirst = hopperForm{suffix: "_first", high: 64, wide: 256, stages: 5}
	// The blocks of a cluster compute one tile: each adds up one half of k.
	hopperHalf = hopperForm{suffix: "_half", high: 128, wide: 128, stages: 6}
)

// hopperKernels are the kernels of a product, by form and by whether B is transposed.
type hopperKernels map[hopperForm]*[2]device.Kernel

func newHopperKernels(name string) hopperKernels {
	all := hopperKernels{}
	for _, f := range []hopperForm{hopperShared, hopperTurns, hopperLow, hopperFirst, hopperHalf, hopperSlim, hopperSquare, hopperMiddle, hopperBroad, hopperNarrow, hopperLean, hopper160, hopper224} {
		all[f] = new([2]device.Kernel)
		for side, b := range []string{"n", "t"} {
			all[f][side] = device.Kernel{Name: "stowage_nn_hopper_" + name + b + f.suffix, Image: gemmHopperImage}
		}
	}
	return all
}

var (
	gemmHopper        = newHopperKernels("gemm_n")
	gemmTurnedHopper  = newHopperKernels("gemm_t") // tn: shared, square, middle, 160, 224, low, half
	groupedHopper     = newHopperKernels("grouped_n")
	groupedGradHopper = newHopperKernels("grouped_grad_t") // tn: low, first
)

const (
	// A cluster of two blocks computes two tiles.
	hopperCluster = 2
	// One group of 128 threads brings A and B, and two multiply.
	hopperThreads = 3 * 128
	// hopperBox is the rows of the boxes that are copied.
	hopperBox = 64
	// hopperUnits is the multiprocessors that forms are chosen for. It is no GPU's own number, so that
	// every GPU adds up in the same order.
	hopperUnits = 132
)

// shared returns the shared memory of a block: the stages and their barriers, two barriers
// for the turns, a count of tiles, the rows of experts and their ends, and what aligns them.
func (f hopperForm) shared() uint32 {
	box, stages := f.rows(), f.stages
	each := f.high + (f.wide+box-1)/box*box
	if f == hopperFirst {
		stages, each = 7+2*3, 128
	}
	return uint32(stages*each*64*2 + stages*16 + 32 + 12*maxExperts + 1024)
}

// rows returns the rows of B that are copied at once.
func (f hopperForm) rows() int { return cmp.Or(f.box, hopperBox) }

// tiles returns how many tiles a matrix consists of.
func (f hopperForm) tiles(rows, cols int) int {
	return (rows + f.high - 1) / f.high * ((cols + f.wide - 1) / f.wide)
}

// blocks returns the most blocks that compute a number of tiles.
func (f hopperForm) blocks(tiles int) int {
	if f == hopperHalf {
		return hopperCluster * tiles
	}
	return (tiles + hopperCluster - 1) / hopperCluster * hopperCluster
}

// rounds returns how many tiles a multiprocessor computes one after the other.
func (f hopperForm) rounds(rows, cols int) int {
	return (f.tiles(rows, cols) + hopperUnits - 1) / hopperUnits
}

// hopperDenseForm returns the fastest form for a product of m x n numbers, each a sum of k. A
// multiprocessor computes its tiles one after the other. To add up takes some percent longer than
// in hopperShared, and by other percentages if there are few rounds. To store a tile
// takes as long as to add up so many products as store says, if nobody multiplies meanwhile. The
// figures are those that fit the measurements of 54 products on an H200 best.
func hopperDenseForm(m, n, k int, transB bool) (best hopperForm) {
	least := math.MaxInt
	for _, c := range []struct {
		hopperForm
		slower, store, few int
	}{
		{hopperShared, 0, 120, 0},
		{hopperSquare, 4, 60, -2},
		{hopperMiddle, 1, 80, 0},
		{hopperBroad, 3, 90, 0},
		{hopperNarrow, 6, 60, 0},
		{hopperLean, 12, 0, 0},
		{hopperSlim, 6, 0, 6},
		{hopperTurns, 3, 40, 6},
	} {
		rounds := c.rounds(m, n)
		if rounds <= 4 {
			c.slower += c.few
		}
		if c.hopperForm == hopperLean && (n-1)%c.wide < c.wide/2 {
			continue
		}
		if cost := rounds * c.high * c.wide * (k*(100+c.slower) + 100*c.store); cost < least && (transB || c.box == 0) {
			best, least = c.hopperForm, cost
		}
	}
	return best
}

// hopperGroupedForm returns the faster form for a product of rows over experts, with n columns. A
// multiprocessor computes its tiles one after the other, half of the last rows of an expert is no work, and
// hopperTurns takes longer for as many numbers, because it reads more.
func hopperGroupedForm(experts, rows, n int) (best hopperForm) {
	least := math.MaxInt
	for _, c := range []struct {
		hopperForm
		cost int
	}{{hopperShared, 100}, {hopperTurns, 108}} {
		if cost := c.cost * c.high * c.wide * c.rounds(rows+experts*c.high/2, n); cost < least {
			best, least = c.hopperForm, cost
		}
	}
	return best
}

// hopperGradForm returns the form for the gradient of experts' weights. A gradient that is stored in fp32 has a kernel of
// its own, with the same bits.
func hopperGradForm(p ExpertsGrad) hopperForm {
	if p.First && p.C.Type == kernels.F32 {
		return hopperFirst
	}
	return hopperLow
}

// hopperTurnedForm returns the fastest form for the gradient of m x n weights. They add up in
// different orders, so the choice does not depend on the number of rows. cost is what a tile takes in
// percent of one of hopperShared, as measured on an H200. Tiles of which half is empty run ahead of the others,
// so that B is read again: a row of them counts half as much again.
func hopperTurnedForm(m, n int) (best hopperForm) {
	if hopperCluster*hopperHalf.tiles(m, n) <= hopperUnits {
		return hopperHalf
	}
	least := math.Inf(1)
	for _, c := range []struct {
		hopperForm
		cost float64
	}{{hopperShared, 100}, {hopper224, 89}, {hopperMiddle, 76}, {hopper160, 68}, {hopperSquare, 52}, {hopperLow, 55}} {
		cost := c.cost * float64(c.rounds(m, n))
		if (m-1)%c.high < c.high-hopperLow.high {
			cost *= 1 + 0.5*float64(c.high)/float64(m)
		}
		if cost < least {
			best, least = c.hopperForm, cost
		}
	}
	return best
}

// even reports whether rows consist of whole steps of eight numbers at multiples of 16
// bytes. A matrix without memory is even.
func (m Matrix) even() bool {
	return m.Buf == nil || m.Cols%8 == 0 && m.Addr()%16 == 0 && memory.Bytes(m.pitch())*m.Type.Size()%16 == 0
}

// tune adds the kernel for Hopper to the launch of a product of at most a number of tiles.
// Which products it computes depends on the operands' types and alignment, and not on the
// number of rows.
func (f hopperForm) tune(l *device.Launch, of hopperKernels, transB bool, a, b Matrix, tiles int) {
	if a.boxable() && b.boxable() {
		f.resident(l, &of[f][gemmSide(transB)], a, b, tiles)
	}
}

// resident adds a kernel whose blocks stay resident, and the tensor maps of A and B.
func (f hopperForm) resident(l *device.Launch, k *device.Kernel, a, b Matrix, tiles int) {
	l.Tuned = device.Tuned{
		Kernel: k, Grid: [3]uint32{uint32(f.blocks(tiles)), 1, 1}, Block: [3]uint32{hopperThreads, 1, 1},
		Shared: f.shared(), Cluster: hopperCluster, Resident: f != hopperHalf,
	}
	l.Tuned.Map(a.boxes(hopperBox))
	l.Tuned.Map(b.boxes(f.rows()))
}
