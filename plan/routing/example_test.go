// This file owns the example.

package routing_test

import (
	"fmt"
	"log"
	"strings"

	"github.com/stowage-dev/stowage/plan/routing"
)

// Read the counts of one step: ten tokens, each of which two experts receive.
func ExampleRead() {
	counts, err := routing.Read(strings.NewReader(`{"version":1,"ranks":2,"tokens":10,"top_k":2,"layers":1,"microbatches":1}
{"step":0,"layer":0,"microbatch":0,"rank":0,"rows":13}
{"step":0,"layer":0,"microbatch":0,"rank":1,"rows":7}
`))
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(counts.Rows(0, 0, 0, 0), "of", counts.Total(), "rows on rank 0")
	fmt.Println("imbalance", counts.Imbalance())
	// Output:
	// 13 of 20 rows on rank 0
	// imbalance 1.3
}
