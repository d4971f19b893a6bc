// This file owns the example: a training step that stashes one group a layer.

package stash_test

import (
	"encoding/binary"
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/schedule"
	"github.com/stowage-dev/stowage/internal/stash"
	"github.com/stowage-dev/stowage/memory"
)

// Three layers share two sets of buffers for up to 1024 rows. How many rows are
// live, the host never asks; the store begins with nothing and grows to what the
// step needs.
func Example() {
	dev, err := cpu.Open(cpu.Options{})
	check(err)
	compute, err := dev.NewStream("compute")
	check(err)
	m, err := stash.NewManager(dev, compute, stash.ManagerConfig{
		Store: stash.Config{Page: 4 * memory.KiB, Max: [stash.Tiers]schedule.Pages{stash.Device: 1000}},
	})
	check(err)
	experts, err := m.NewWorkspace("experts", 2, 0, stash.Tensor{Name: "fc1_in", Row: 512, MaxRows: 1024})
	check(err)

	step := func(attempt int) error {
		for layer := range 3 {
			set := experts.Forward(memory.GroupID{Name: "expert_fc1", Layer: layer})
			// A dispatcher would write rows and their count on the device.
			compute.Fill(set.Tensor(0), byte(layer+1))
			compute.Upload(set.Counts(), binary.LittleEndian.AppendUint64(nil, uint64(100*(layer+1))))
			set.Saved()
		}
		for layer := 2; layer >= 0; layer-- {
			set := experts.Backward(memory.GroupID{Name: "expert_fc1", Layer: layer})
			// Here the backward kernels would read set.Tensor(0).
			set.Done()
		}
		return nil
	}
	for range 2 {
		check(m.Step(memory.Key{Microbatches: 1}, step))
	}
	st := m.Stats()
	fmt.Printf("%d steps, %d rerun, %d pages in the pool\n", st.Steps, st.Reruns, m.Store().Pages(stash.Device))
	check(m.Close())
	check(compute.Close())
	check(dev.Close())
	// Output: 2 steps, 1 rerun, 79 pages in the pool
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
