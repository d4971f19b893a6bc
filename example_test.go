// This file shows a training loop under a budget.

package stowage_test

import (
	"fmt"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
)

// A loop of eight layers saves 8 MiB in its forward pass. Under a budget of 4 MiB
// the runtime moves what it must to the host and back.
func Example() {
	dev, err := cpu.Open(cpu.Options{})
	check(err)
	compute, err := dev.NewStream("compute")
	check(err)
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, Budget: 4 * device.MiB})
	check(err)
	key := stowage.Key{Microbatches: 1}
	for range 3 {
		check(rt.Step(key, func(s *stowage.Step) error {
			for layer := range 8 { // forward
				g := s.Enter(stowage.GroupID{Name: "mlp", Layer: layer})
				x, err := s.New(device.MiB)
				if err != nil {
					return err
				}
				compute.Fill(x.Range(), byte(layer)) // the work of the layer
				g.Save(x)
				x.Free()
				if err := g.Leave(); err != nil {
					return err
				}
			}
			for layer := 7; layer >= 0; layer-- { // backward
				l, err := s.Load(stowage.GroupID{Name: "mlp", Layer: layer})
				if err != nil {
					return err
				}
				_ = l.Range(0) // work on compute that reads it
				l.Done()
			}
			return nil
		}))
	}
	sum := rt.Summary(key)
	fmt.Println("within the budget:", sum.Extent <= 4*device.MiB)
	fmt.Println("at least what is over it was offloaded:", sum.Groups[0].Moved >= 4*device.MiB)
	check(rt.Close())
	check(compute.Close())
	check(dev.Close())
	// Output:
	// within the budget: true
	// at least what is over it was offloaded: true
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
