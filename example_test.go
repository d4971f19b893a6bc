// This file shows training loops: under a budget, with settings made by hand in a
// captured step, with one captured scope, with a recomputed group, and with a stash.

package stowage_test

import (
	"encoding/binary"
	"fmt"

	"github.com/stowage-dev/stowage"
	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// A loop of eight layers saves 8 MiB in its forward pass. Under a budget of 4 MiB
// the runtime moves what it must to the host and back.
func Example() {
	dev, compute := open()
	defer closeAll(dev, compute)
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, Budget: 4 * memory.MiB})
	check(err)
	defer func() { check(rt.Close()) }()
	key := memory.Key{Microbatches: 1}
	for range 3 {
		check(rt.Step(key, func(s *stowage.Step) error {
			for layer := range 8 { // forward
				g := s.BeginGroup(memory.GroupID{Name: "mlp", Layer: layer})
				x, err := s.New(memory.MiB)
				if err != nil {
					return err
				}
				compute.Fill(x.Range(), byte(layer)) // the work of the layer
				g.Save(x)
				x.Free()
				if err := g.End(); err != nil {
					return err
				}
			}
			for layer := 7; layer >= 0; layer-- { // backward
				l, err := s.Load(memory.GroupID{Name: "mlp", Layer: layer})
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
	fmt.Println("within the budget:", sum.Extent <= 4*memory.MiB)
	fmt.Println("at least what is over it was offloaded:", sum.Groups[0].Moved >= 4*memory.MiB)
	// Output:
	// within the budget: true
	// at least what is over it was offloaded: true
}

// The settings of Megatron-LM, with the whole step captured as one graph: the body
// is called for two warm-up steps and for the capture, and then replayed. Attention
// goes through Run, so that it can be computed again.
func ExampleConfig_byHand() {
	dev, compute := open()
	defer closeAll(dev, compute)
	hand := stowage.DefaultModuleSettings()
	hand.OffloadModules, hand.RecomputeModules = []string{"moe_act"}, []string{"core_attn"}
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, ByHand: &hand, Scopes: memory.ScopesOf(memory.FullIteration)})
	check(err)
	defer func() { check(rt.Close()) }()
	key, calls := memory.Key{Microbatches: 2}, 0
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
			g.Name, g.Bytes, g.Moved, g.Units[memory.Keep], g.Units[memory.Offload], g.Units[memory.Recompute])
	}
	// Output:
	// calls of the body in 5 steps: 3
	// attn_norm: 1.00 MiB saved, 0 B of it offloaded; units: 4 kept, 0 offloaded, 0 recomputed
	// core_attn: 2.00 MiB saved, 0 B of it offloaded; units: 0 kept, 0 offloaded, 4 recomputed
	// moe_act: 4.00 MiB saved, 3.00 MiB of it offloaded; units: 1 kept, 3 offloaded, 0 recomputed
}

// microbatch is the forward and the backward pass of four layers.
func microbatch(s *stowage.Step, m int) error {
	for layer := range 4 {
		id := func(name string) memory.GroupID { return memory.GroupID{Name: name, Layer: layer, Microbatch: m} }
		save := func(n memory.Bytes) func(*stowage.Group) error {
			return func(g *stowage.Group) error {
				if g.Recomputing() { // the second time its input comes from the group that saved it
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
			bytes memory.Bytes
		}{{"attn_norm", 128 * memory.KiB}, {"core_attn", 256 * memory.KiB}, {"moe_act", 512 * memory.KiB}} {
			if err := s.Run(id(module.name), save(module.bytes)); err != nil {
				return err
			}
		}
	}
	for layer := 3; layer >= 0; layer-- {
		for _, name := range []string{"moe_act", "core_attn", "attn_norm"} {
			l, err := s.Load(memory.GroupID{Name: name, Layer: layer, Microbatch: m})
			if err != nil {
				return err
			}
			_ = l.Range(0) // work on compute that reads it
			l.Done()
		}
	}
	return nil
}

// A policy recomputes the attention of one layer. Forward runs a second time when the
// backward pass loads the group.
func ExampleStep_Run() {
	dev, compute := open()
	defer closeAll(dev, compute)
	attention := memory.GroupID{Name: "core_attn"}
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, Policy: memory.Policy{attention.Unit(): memory.Recompute}})
	check(err)
	defer func() { check(rt.Close()) }()
	check(rt.Step(memory.Key{Microbatches: 1}, func(s *stowage.Step) error {
		err := s.Run(attention, func(g *stowage.Group) error {
			fmt.Println("forward, recomputing:", g.Recomputing())
			x, err := s.New(memory.MiB)
			if err != nil {
				return err
			}
			compute.Fill(x.Range(), 1) // the work of the module
			g.Save(x)
			x.Free()
			return nil
		})
		if err != nil {
			return err
		}
		l, err := s.Load(attention)
		if err != nil {
			return err
		}
		fmt.Println("backward:", l.Range(0).Len)
		l.Done()
		return nil
	}))
	// Output:
	// forward, recomputing: false
	// forward, recomputing: true
	// backward: 1.00 MiB
}

// The dense part of a layer is captured as a graph. After two eager steps and the
// capture the body of the scope is not called again.
func ExampleStep_Scope() {
	dev, compute := open()
	defer closeAll(dev, compute)
	rt, err := stowage.Open(stowage.Config{Device: dev, Compute: compute, Scopes: memory.ScopesOf(memory.MLP)})
	check(err)
	defer func() { check(rt.Close()) }()
	key, calls := memory.Key{Microbatches: 1}, 0
	for range 6 {
		check(rt.Step(key, func(s *stowage.Step) error {
			made, err := s.Scope(memory.MLP, stowage.Pass{Layer: 3}, func() ([]*stowage.Tensor, error) {
				calls++
				x, err := s.New(memory.KiB)
				if err != nil {
					return nil, err
				}
				compute.Fill(x.Range(), 7)
				return []*stowage.Tensor{x}, nil
			})
			if err != nil {
				return err
			}
			made[0].Free() // later work would use it before
			return nil
		}))
	}
	fmt.Println("calls:", calls, "replays:", rt.Summary(key).Graphs.Replays)
	// Output:
	// calls: 3 replays: 3
}

// Experts of four layers share two sets of buffers for 1,024 rows. Only the live rows
// are kept, in pages of the stash.
func ExampleRuntime_NewWorkspace() {
	dev, compute := open()
	defer closeAll(dev, compute)
	rt, err := stowage.Open(stowage.Config{
		Device: dev, Compute: compute,
		Stash: &stowage.StashConfig{Page: 4 * memory.KiB, Device: 256 * memory.KiB, Host: 64 * memory.KiB},
	})
	check(err)
	defer func() { check(rt.Close()) }()
	space, err := rt.NewWorkspace("expert_fc1", 2, 0, stowage.RowTensor{Name: "rows", Row: 256, MaxRows: 1024})
	check(err)
	key := memory.Key{Microbatches: 1}
	for range 3 {
		check(rt.Step(key, func(s *stowage.Step) error {
			for layer := range 4 {
				set := s.Lease(space, memory.GroupID{Name: "expert_fc1", Layer: layer})
				// A kernel counts the rows; here 100 of them are live.
				compute.Upload(set.Counts(), binary.LittleEndian.AppendUint64(nil, 100))
				compute.Fill(set.Tensor(0), byte(layer))
				set.Save()
			}
			for layer := 3; layer >= 0; layer-- {
				set := s.Restore(space, memory.GroupID{Name: "expert_fc1", Layer: layer})
				_ = set.Tensor(0) // work on compute that reads the live rows
				set.Done()
			}
			return nil
		}))
	}
	st := rt.Summary(key).Stash
	fmt.Println("steps:", st.Steps, "reruns:", st.Reruns, "pages of the largest step:", st.Demand)
	// Output:
	// steps: 3 reruns: 0 pages of the largest step: 28
}

func open() (device.Device, device.Stream) {
	dev, err := cpu.Open(cpu.Options{})
	check(err)
	compute, err := dev.NewStream("compute")
	check(err)
	return dev, compute
}

func closeAll(dev device.Device, compute device.Stream) {
	check(compute.Close())
	check(dev.Close())
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
