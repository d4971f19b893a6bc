// This file owns the example: the pools of a small hybrid model side by side.

package bucket_test

import (
	"fmt"
	"log"

	"github.com/stowage-dev/stowage/internal/bucket"
)

// Large and small layers alternate. A pool of slots holds two of the largest. The arena and
// the recorded pool use that two large layers are never live at once.
func Example() {
	bf16 := bucket.Type{Name: "bf16", Size: 2}
	layer := func(name string, elements ...int64) bucket.FSDPUnit {
		u := bucket.FSDPUnit{Name: name}
		for i, n := range elements {
			u.Buckets = append(u.Buckets, bucket.Bucket{Name: fmt.Sprintf("%s %d", name, i), Type: bf16, Elements: n})
		}
		return u
	}
	s := bucket.Spec{
		Units: []bucket.FSDPUnit{
			layer("attention", 600), layer("experts", 100, 1900), layer("mamba", 700), layer("experts", 100, 1900),
		},
		Prefetch: 1, Align: 256, Multiple: 8,
	}
	for _, unit := range []int{0, 1, 2, 3, 3, 2, 1, 0} { // forward, then backward
		s.Order = append(s.Order, bucket.OrderEntry{Unit: unit}, bucket.OrderEntry{Unit: unit, Release: true})
	}
	for _, kind := range bucket.PoolKinds {
		p, err := bucket.NewPoolPlan(kind, s, bucket.Options{})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%-9s%5d bytes, %3.0f %% over the lower bound\n", kind, p.Bytes, 100*p.Waste())
	}
	// Output:
	// dynamic   6912 bytes,  23 % over the lower bound
	// rotary    8192 bytes,  45 % over the lower bound
	// fixed    11008 bytes,  95 % over the lower bound
	// max       8192 bytes,  45 % over the lower bound
	// arena     5632 bytes,   0 % over the lower bound
	// recorded  5632 bytes,   0 % over the lower bound
}
