package kernels

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Rows that all cross the link leave the multiprocessors to compute.
func TestGridOfRowsInHostPages(t *testing.T) {
	set := device.Range{Len: memory.GiB}
	m := &StashMemory{Units: 132}
	m.Pool[StashHost].Len = memory.GiB
	if got := m.blocks(set); got != 8 {
		t.Errorf("without device pages: %d blocks, want 8", got)
	}
	if got := m.blocks(device.Range{Len: 40 * memory.KiB}); got != 2 {
		t.Errorf("for 40 KiB: %d blocks, want 2", got)
	}
	m.Pool[StashDevice].Len = memory.MiB
	if got := m.blocks(set); got != 264 {
		t.Errorf("with device pages: %d blocks, want 264", got)
	}
}
