// This file shows how a trace is exported.

package export_test

import (
	"bytes"
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/observe/export"
	"github.com/stowage-dev/stowage/observe/trace"
)

func Example() {
	// Usually trace.Read returns the traces of all ranks.
	traces := []*trace.Trace{{
		Header: trace.Header{Rank: 0, Compute: "compute"},
		Events: []trace.Event{
			{Kind: trace.Alloc, Name: "parameters", Bytes: 4096, InUse: [2]int64{4096, 0}},
			{Kind: trace.Launch, Name: "attention", Stream: "compute", Last: 1, Time: 1000, Took: 500},
		},
	}}

	var perfetto, snapshot bytes.Buffer // usually trace.pftrace and snapshot.pickle
	if err := export.Perfetto(&perfetto, traces); err != nil {
		log.Fatal(err)
	}
	if err := export.MemoryViz(&snapshot, traces); err != nil {
		log.Fatal(err)
	}
	fmt.Println(bytes.Contains(perfetto.Bytes(), []byte("attention")), bytes.Contains(snapshot.Bytes(), []byte("parameters")))
	// Output: true true
}
