// This file owns the example: a step that is captured whole.

package capture_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/capture"
	"github.com/stowage-dev/stowage/memory"
)

func must[T any](v T, err error) T {
	check(err)
	return v
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

// The first two steps run eagerly, the third is captured, later ones are
// replayed: the host issues one piece of work each.
func Example() {
	dev := must(cpu.Open(cpu.Options{}))
	compute := must(dev.NewStream("compute"))
	x := must(dev.Alloc(memory.Device, 1024, "x"))
	y := must(dev.Alloc(memory.Device, 1024, "y"))

	scopes := capture.New(capture.OnStream(compute), capture.Config{WarmUp: 2})
	key := capture.Key{Key: memory.Key{Phase: memory.Train, Microbatches: 1}, Scope: memory.FullIteration}
	for range 5 {
		check(scopes.Run(key, func() error {
			fmt.Println("the host issues a step")
			compute.Fill(x.All(), 7)
			compute.Copy(y.All(), x.All())
			return nil
		}))
	}
	fmt.Printf("%v: %d eager, %d replayed\n", scopes.Status(key).State, scopes.Status(key).Eager, scopes.Status(key).Replays)

	// What a policy asks for is judged before anything runs.
	report := capture.Detect(must(memory.ParseScopes("attn")), capture.Settings{
		WarmUp: 2, Choices: map[string]memory.Choice{"core_attn": memory.Offload, "moe_act": memory.Stash},
	})
	fmt.Print(report)

	check(scopes.Close())
	compute.Free(x)
	compute.Free(y)
	check(compute.Close())
	check(dev.Close())
	// Output:
	// the host issues a step
	// the host issues a step
	// the host issues a step
	// captured: 2 eager, 2 replayed
	// captured: attn
	//   core_attn                      offload   inside       offloaded as a part of the captured scope attn
	//   moe_act                        stash     outside      stashed eagerly, outside of the captured scopes
}
