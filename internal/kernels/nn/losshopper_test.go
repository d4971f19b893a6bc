package nn

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/kernels"
)

// The source for Hopper, compiled for the host, computes what the twin computes, with any
// grid. SPEC S6.3
func TestHopperLossSourceOnTheHost(t *testing.T) {
	program := newTensorProgram(t, "losshopper.cu", lossHopperPTX)
	memory, b := trialMemory(t)
	forms := map[*device.Kernel]bool{}
	for seed := range uint64(40) {
		x, ops, want := twin(keptLossTrial, seed, false, memory, b)
		l := ops[0].Launch
		if l.Tuned.Kernel == nil {
			t.Fatalf("trial %d has no kernel for Hopper", seed)
		}
		forms[l.Tuned.Kernel] = true
		l.Kernel, l.Grid, l.Block, l.Shared = l.Tuned.Kernel, l.Tuned.Grid, l.Tuned.Block, l.Tuned.Shared
		l.Grid[0] = min(l.Grid[0], uint32(1+seed%2)*l.Tuned.Cluster)
		if err := x.compare(program.run(t, x.data, b.Addr(), l), want); err != nil {
			t.Fatalf("trial %d, %d blocks a row: %v", seed, l.Tuned.Cluster, err)
		}
	}
	if len(forms) != len(lossForms[0])+len(lossForms[1]) {
		t.Errorf("trials ran %d kernels", len(forms))
	}
}

// Rows that are not aligned, and those that no cluster keeps, have no kernel for Hopper.
func TestHopperLossIsForSomeShapes(t *testing.T) {
	_, b := trialMemory(t)
	for cols, want := range map[int]uint32{8: 1, 32000: 1, 53248: 1, 53252: 4, 65536: 4, 65540: 8, 131072: 8, 131076: 0, 6: 0} {
		logits := NewMatrix(b.Slice(32, b.Size()-32), kernels.F32, 1, cols)
		l := Loss{Logits: logits, Targets: b.Slice(0, 16), Losses: b.Slice(16, 16), Grad: logits}
		if got := lossLaunch(l).Tuned.Cluster; got != want {
			t.Errorf("a loss of %d columns has clusters of %d blocks, want %d", cols, got, want)
		}
	}
}
