// This file owns the example: two ranks train two layers, and each rank has half of every
// layer.

package fsdp_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/fsdp"
	"github.com/stowage-dev/stowage/memory"
)

// Each rank keeps half of every layer. A step gathers a layer ahead of its use,
// through a pool that has room for two, and reduces gradients behind.
func Example() {
	var devs []device.Device
	for range 2 {
		dev, err := cpu.Open(cpu.Options{})
		check(err)
		devs = append(devs, dev)
	}
	ranks, err := comm.NewLocal(devs, comm.Options{})
	check(err)
	err = comm.Run(ranks, func(c comm.Comm) error {
		dev := devs[c.Rank()]
		compute, err := dev.NewStream("compute")
		check(err)
		weight := []fsdp.Param{{Name: "w", Shape: []int64{256, 256}, Type: fsdp.BF16}}
		p, err := fsdp.New(dev, fsdp.Config{
			Rank: c.Rank(), Groups: []fsdp.RankGroup{{Name: "dense", Comm: c, Op: comm.Mean}},
			Units: []fsdp.FSDPUnit{{Name: "layer 0", Params: weight}, {Name: "layer 1", Params: weight}},
			Pool:  bucket.Arena, Prefetch: 1, Behind: 1, GradComm: fsdp.BF16, MainGrads: fsdp.FP32,
		})
		check(err)
		dev.Freeze()
		for range 2 { // the first step records the order, the second follows it
			step := p.Begin(memory.Key{Microbatches: 1}, compute)
			for i := range 4 {
				layer := min(i, 3-i) // forward, then back
				u, err := step.Use(layer, compute)
				check(err)
				if i >= 2 {
					g, err := step.Grad(layer, compute)
					check(err)
					compute.Copy(g.Param(0), u.Param(0)) // where a kernel would compute
					g.Done()
				}
				u.Done()
			}
			check(step.End())
			for _, s := range p.Shards() {
				compute.Copy(s.Weights, s.Grads) // where an optimiser would update
			}
			p.Cast(compute)
		}
		for _, use := range devs[c.Rank()].Memory().Owners {
			if use.Owner == "rank 0 gathered parameters" {
				fmt.Println("both layers are gathered into", use.Current)
			}
		}
		check(p.Close())
		return compute.Close()
	})
	check(err)
	for r := range ranks {
		check(ranks[r].Close())
		check(devs[r].Close())
	}
	// Output: both layers are gathered into 256.00 KiB
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
