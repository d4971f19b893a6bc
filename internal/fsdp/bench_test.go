// This file owns the benchmarks of the host's cost of a step.

package fsdp

import (
	"testing"

	"github.com/stowage-dev/stowage/internal/bucket"
)

// BenchmarkGetPut measures the pool alone: one use, on two streams.
func BenchmarkGetPut(b *testing.B) {
	dev, err := cpuDevice()
	if err != nil {
		b.Fatal(err)
	}
	in, _ := dev.NewStream("in")
	on, _ := dev.NewStream("on")
	p, err := newSolo(dev, straight(b, bucket.Arena, bucket.Options{}, 40, 900, 333, 40), nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		l, _ := p.acquire(i%len(p.uses), in)
		p.release(l, on)
	}
	if err := p.close(in); err != nil {
		b.Fatal(err)
	}
	for _, s := range []interface{ Close() error }{in, on, dev} {
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
	}
}
