// This file owns the tests of nodes.

package plan

import (
	"testing"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/plan/hardware"
)

// The node that pins most is the one that counting every GPU of every node finds.
func TestNodeCountsEveryGPU(t *testing.T) {
	for _, gpus := range []int{1, 2, 4, 8, 72} {
		for _, pp := range []int{1, 2, 3, 8} {
			for _, span := range []int{1, 2, 3, 4, 8, 9, 12, 20, 64} {
				s := &Setup{Layout: Layout{World: pp * span, PP: pp, NodeGPUs: gpus}, HostMemory: 1}
				pinned := make([]memory.Bytes, pp)
				for r := range pinned {
					pinned[r] = memory.Bytes((r*7 + 3) % 11)
				}
				sums := make([]memory.Bytes, (pp*span+gpus-1)/gpus)
				most := memory.Bytes(0)
				for gpu := range pp * span {
					sums[gpu/gpus] += pinned[gpu/span]
					most = max(most, sums[gpu/gpus])
				}
				n := s.Node(pinned)
				if n.Pinned != most || sums[n.Number] != most || n.GPUs != min(gpus, pp*span) || n.Missing != most-1 {
					t.Errorf("%d GPUs a node, %d ranks of %d: got %+v, want %d pinned", gpus, pp, span, n, most)
				}
			}
		}
	}
}

// A node's memory is the setup's, or what the hardware's nodes leave beside their
// processes; without either nothing is known and nothing is missing.
func TestNodeRoom(t *testing.T) {
	h100, err := hardware.ByName("h100")
	if err != nil {
		t.Fatal(err)
	}
	s := &Setup{Layout: Layout{World: 16, PP: 1}}
	if n := s.Node([]memory.Bytes{5}); n != (Node{}) {
		t.Errorf("without hardware: %+v", n)
	}
	s.Layout.NodeGPUs = 8
	if n := s.Node([]memory.Bytes{5}); n.Pinned != 40 || n.Room != 0 || n.Missing != 0 {
		t.Errorf("without a node's memory: %+v", n)
	}
	s.Hardware = h100
	if n := s.Node([]memory.Bytes{5}); n.Room != h100.NodeMemory-8*hostReserve {
		t.Errorf("by hardware: %+v", n)
	}
	s.HostMemory = 39
	if n := s.Node([]memory.Bytes{5}); n.Room != 39 || n.Missing != 1 {
		t.Errorf("by setting: %+v", n)
	}
}
