// This file owns the example: a step that saves two layers' activations.

package offload_test

import (
	"fmt"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/offload"
	"github.com/stowage-dev/stowage/internal/residency"
	"github.com/stowage-dev/stowage/memory"
)

func Example() {
	dev, err := cpu.Open(cpu.Options{Capacity: [memory.Kinds]memory.Bytes{memory.MiB, memory.MiB}})
	check(err)
	compute, err := dev.NewStream("compute")
	check(err)
	m, err := offload.New(dev, compute, offload.Config{})
	check(err)
	attn, mlp := memory.GroupID{Name: "attn"}, memory.GroupID{Name: "mlp"}

	m.Begin(&residency.Plan{Offload: map[memory.GroupID]bool{attn: true}})
	for i, g := range []memory.GroupID{attn, mlp} {
		act, err := m.Alloc(64 * memory.KiB)
		check(err)
		compute.Fill(act.Range(), byte(i+1)) // the forward pass
		_, err = m.Save(g, offload.Tensor{Storage: act, Element: 2, Shape: []int{128, 256}})
		check(err)
		act.Free()
	}
	seen := make([]byte, 1)
	for _, g := range []memory.GroupID{mlp, attn} {
		check(m.Load(g))
		x := m.Saved(g)[0].Tensor()
		check(compute.Download(seen, x.Range().Slice(0, 1))) // the backward pass
		fmt.Println(g.Name, x.Shape, seen[0])
		m.Release(g)
	}
	check(m.End())
	fmt.Println(m.Last().OutBytes, "left, the most on the device was", m.Last().Device)

	check(m.Close())
	check(compute.Close())
	check(dev.Close())
	// Output:
	// mlp [128 256] 2
	// attn [128 256] 1
	// 64.00 KiB left, the most on the device was 64.00 KiB
}

func check(err error) {
	if err != nil {
		panic(err)
	}
}
