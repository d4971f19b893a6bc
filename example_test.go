// This file shows training loops: under a budget, and with settings made by hand in
// a captured step.

package stowage_test

import (
	"fmt"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/capture"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/policy"
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

// The settings of Megatron-LM, with the whole step captured as one graph: the body
// is called for two warm-up steps and for the capture, and then replayed. Attention
// goes through Run, so that it can be computed again.
func ExampleConfig_byHand() {
	dev, err := cpu.Open(cpu.Options{})
	check(err)
	compute, err := dev.NewStream("compute")
	check(err)
	hand := policy.Defaults()
	hand.OffloadModules, hand.RecomputeModules = []string{"moe_act"}, []string{"core_attn"}
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, ByHand: &hand, Scopes: capture.Of(capture.FullIteration)})
	check(err)
	key, calls := stowage.Key{Microbatches: 2}, 0
	for range 5 {
		check(rt.Step(key, func(s *stowage.Step) error {
			calls++
			for m := range 2 {
				if err := microbatch(s, m); err != nil {
					return err
				}
			}
			return nil
		}))
	}
	fmt.Println("calls of the body in 5 steps:", calls)
	for _, g := range rt.Summary(key).Groups {
		fmt.Printf("%s: %v saved, %v of it offloaded; units: %d kept, %d offloaded, %d recomputed\n",
			g.Name, g.Bytes, g.Moved, g.Units[policy.Keep], g.Units[policy.Offload], g.Units[policy.Recompute])
	}
	check(rt.Close())
	check(compute.Close())
	check(dev.Close())
	// Output:
	// calls of the body in 5 steps: 3
	// attn_norm: 1.00 MiB saved, 0 B of it offloaded; units: 4 kept, 0 offloaded, 0 recomputed
	// core_attn: 2.00 MiB saved, 0 B of it offloaded; units: 0 kept, 0 offloaded, 4 recomputed
	// moe_act: 4.00 MiB saved, 3.00 MiB of it offloaded; units: 1 kept, 3 offloaded, 0 recomputed
}

// microbatch is the forward and the backward pass of four layers.
func microbatch(s *stowage.Step, m int) error {
	for layer := range 4 {
		id := func(name string) stowage.GroupID { return stowage.GroupID{Name: name, Layer: layer, Microbatch: m} }
		save := func(n device.Bytes) func(*stowage.Group) error {
			return func(g *stowage.Group) error {
				if g.Again() { // the second time its input comes from the group that saved it
					in, err := s.Load(id("attn_norm"))
					if err != nil {
						return err
					}
					defer in.Done()
				}
				x, err := s.New(n)
				if err != nil {
					return err
				}
				s.Compute().Fill(x.Range(), byte(layer)) // the work of the module
				g.Save(x)
				x.Free()
				return nil
			}
		}
		for _, module := range []struct {
			name  string
			bytes device.Bytes
		}{{"attn_norm", 128 * device.KiB}, {"core_attn", 256 * device.KiB}, {"moe_act", 512 * device.KiB}} {
			if err := s.Run(id(module.name), save(module.bytes)); err != nil {
				return err
			}
		}
	}
	for layer := 3; layer >= 0; layer-- {
		for _, name := range []string{"moe_act", "core_attn", "attn_norm"} {
			l, err := s.Load(stowage.GroupID{Name: name, Layer: layer, Microbatch: m})
			if err != nil {
				return err
			}
			_ = l.Range(0) // work on compute that reads it
			l.Done()
		}
	}
	return nil
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
