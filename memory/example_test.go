// This file shows the vocabulary in use.

package memory_test

import (
	"encoding/json"
	"fmt"

	"github.com/stowage-dev/stowage/memory"
)

// Sizes are read as people write them, and printed for people.
func ExampleParseBytes() {
	n, err := memory.ParseBytes("1536KiB")
	fmt.Println(n, n.Exact(), err)
	_, err = memory.ParseBytes("12 parsecs")
	fmt.Println(err)
	// Output:
	// 1.50 MiB 1536KiB <nil>
	// expected a size such as 52.5GiB, got "12 parsecs"; write a number and B, KiB, MiB, GiB or TiB, or KB, MB, GB or TB for powers of 1000
}

// A policy makes one choice for each module of each layer.
func ExamplePolicy() {
	p := memory.Policy{
		{Name: "core_attn", Layer: 0}: memory.Offload,
		{Name: "moe_act", Layer: 1}:   memory.Stash,
	}
	g := memory.GroupID{Name: "moe_act", Layer: 1, Microbatch: 7}
	fmt.Println(p[g.Unit()])
	text, err := json.Marshal(p)
	fmt.Println(string(text), err)
	// Output:
	// stash
	// [{"name":"core_attn","chunk":0,"layer":0,"choice":"offload"},{"name":"moe_act","chunk":0,"layer":1,"choice":"stash"}] <nil>
}

// The table of modules says what can be done with each.
func ExampleLookupModule() {
	m, ok := memory.LookupModule("attn_proj")
	fmt.Println(ok, m.Choices.Has(memory.Offload), m.Requires)
	fmt.Println(memory.CheckModules(map[memory.Choice][]string{memory.Offload: {"attn_proj"}}))
	// Output:
	// true true [core_attn]
	// offload module attn_proj requires core_attn; add core_attn
}
