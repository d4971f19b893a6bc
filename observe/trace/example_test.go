// This file shows how a trace is written and read.

package trace_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/memory"
	"github.com/stowage-dev/stowage/observe/trace"
)

func Example() {
	var file bytes.Buffer // usually an os.File
	w := trace.NewWriter(&file, trace.Header{Rank: 0, Compute: "compute"}, 0)
	const mib = 1 << 20
	w.Emit(trace.Event{Kind: trace.Begin, Step: 1})
	w.Emit(trace.Event{Kind: trace.Alloc, Step: 1, Storage: 1, Bytes: mib, InUse: [2]int64{mib, 0}})
	w.Emit(trace.Event{Kind: trace.Save, Step: 1, Storage: 1, Name: "core_attn", Layer: 3, InUse: [2]int64{mib, 0}})
	w.Emit(trace.Event{Kind: trace.Free, Step: 1, Storage: 1, Tier: memory.Device, Bytes: mib})
	w.Emit(trace.Event{Kind: trace.End, Step: 1, Bytes: mib})
	if err := w.Close(); err != nil {
		log.Fatal(err)
	}

	t, err := trace.Read(&file)
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range t.Events {
		fmt.Printf("%-6v %-9s %v in use\n", e.Kind, e.Name, memory.Bytes(e.InUse[memory.Device]))
	}
	fmt.Println("complete:", t.Cut == nil, "laws:", t.Check())
	// Output:
	// begin            0 B in use
	// alloc            1.00 MiB in use
	// save   core_attn 1.00 MiB in use
	// free             0 B in use
	// end              0 B in use
	// complete: true laws: <nil>
}
