// This file owns the loss on Hopper: which rows its kernels keep in shared memory, and with
// which grid and cluster. losshopper.cu is compiled for the same shapes.

package nn

import (
	_ "embed"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

//go:embed losshopper_sm90a.ptx
var lossHopperPTX string

var lossHopperImage = hopperImage("nn/losshopper.cu", lossHopperPTX)

// lossForm is a kernel for rows of some length.
type lossForm struct {
	device.Kernel
	threads, keep int // of a block; vectors of a row that a thread keeps
	cluster       int // blocks that share a row
}

// lossSums are the bytes behind a row: two sets of sums of warps and of blocks, and a barrier.
const lossSums = 2 * 8 * (32 + 8 + 2)

// Of at least lossMany rows a cluster computes lossTurns, one after the other, and copies the next
// one while it writes.
const (
	lossMany  = 256
	lossTurns = 2
)

func newLossForm(name string, threads, keep, cluster int) lossForm {
	return lossForm{device.Kernel{Name: "stowage_nn_cross_entropy_" + name, Image: lossHopperImage}, threads, keep, cluster}
}

// lossForms has the kernels by the type of logits, those for short rows first.
var lossForms = [2][]lossForm{
	kernels.F32: {
		newLossForm("f32_1", 1024, 8, 1), newLossForm("f32_1_long", 1024, 13, 1),
		newLossForm("f32_4", 512, 8, 4), newLossForm("f32_8", 512, 8, 8),
	},
	kernels.BF16: {
		newLossForm("bf16_1", 512, 8, 1), newLossForm("bf16_2", 512, 8, 2),
		newLossForm("bf16_8_short", 256, 8, 8), newLossForm("bf16_8", 512, 8, 8),
	},
}

// tune adds the kernel for Hopper to the launch of a loss if vectors of logits and of the
// gradient are aligned and a cluster can keep a row.
func (e Loss) tune(l *device.Launch) {
	n := 16 / int(e.Logits.Type.Size())
	if !e.Logits.aligned(n) || e.Grad.Buf != nil && !e.Grad.aligned(min(n, 16/int(e.Grad.Type.Size()))) {
		return
	}
	for i := range lossForms[e.Logits.Type] {
		f := &lossForms[e.Logits.Type][i]
		if divUp(e.Logits.Cols/n, f.cluster) > f.threads*f.keep {
			continue
		}
		rows := 1 // of a cluster
		if f.cluster > 1 && e.Logits.Rows >= lossMany {
			rows = lossTurns
		}
		l.Tuned = device.Tuned{
			Kernel: &f.Kernel, Grid: [3]uint32{uint32(divUp(e.Logits.Rows, rows) * f.cluster), 1, 1}, Block: [3]uint32{uint32(f.threads), 1, 1},
			Shared: uint32(16*f.threads*f.keep + lossSums), Cluster: uint32(f.cluster),
		}
		return
	}
}
