// This file owns the tests of what communicators are told of memory.

package fsdp

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// registrar is told of memory, and notes gathers of other memory.
type registrar struct {
	comm.Comm
	told    []device.Range
	unknown []string
	gathers int
}

func (x *registrar) Register(r device.Range) func() {
	x.told = append(x.told, r)
	return func() { x.told = slices.DeleteFunc(x.told, func(o device.Range) bool { return o == r }) }
}

func (x *registrar) AllGather(s device.Stream, dst, src device.Range) {
	x.gathers++
	for _, r := range []device.Range{dst, src} {
		if !slices.ContainsFunc(x.told, func(o device.Range) bool {
			return o.Addr() <= r.Addr() && r.Addr()+uintptr(r.Len) <= o.Addr()+uintptr(o.Len)
		}) {
			x.unknown = append(x.unknown, r.String())
		}
	}
	x.Comm.AllGather(s, dst, src)
}

// Communicators are told of all memory that gathers read and write, whatever the types of
// parameters, of nothing that they never read, and of its end.
func TestRegisteredMemory(t *testing.T) {
	for _, types := range [][]bucket.Type{{BF16, FP32}, {FP32, BF16, FP32}, {BF16}, {FP32}} {
		dev, err := cpuDevice()
		if err != nil {
			t.Fatal(err)
		}
		ranks, err := comm.NewLocal([]device.Device{dev}, comm.Options{})
		if err != nil {
			t.Fatal(err)
		}
		var units []FSDPUnit
		for i := range 3 {
			u := FSDPUnit{Name: fmt.Sprint("layer ", i)}
			for k, typ := range types {
				u.Params = append(u.Params, Param{Name: fmt.Sprint("w", k), Shape: []int64{int64(8 * (k + 1)), 16}, Type: typ})
			}
			units = append(units, u)
		}
		x := &registrar{Comm: ranks[0]}
		err = comm.Run(ranks, func(comm.Comm) error {
			p, err := New(dev, Config{
				Groups: []RankGroup{{Name: "dense", Comm: x, Op: comm.Mean}}, Units: units,
				Pool: bucket.Arena, Prefetch: 1, Behind: 1, GradComm: BF16, MainGrads: FP32,
			})
			if err != nil {
				return err
			}
			compute, err := dev.NewStream("compute")
			if err != nil {
				return err
			}
			var told, needed memory.Bytes
			for _, r := range x.told {
				told += r.Len
			}
			for _, s := range p.Shards() {
				needed += s.Params.Len
			}
			if told != needed+p.params.buf.Size() {
				t.Errorf("%v: told of %v, want %v of shards and %v of the pool", types, told, needed, p.params.buf.Size())
			}
			for range 2 {
				step := p.Begin(memory.Key{Microbatches: 1}, compute)
				for u := range units {
					use, err := step.Use(u, compute)
					if err != nil {
						return err
					}
					use.Done()
				}
				if err := step.End(); err != nil {
					return err
				}
			}
			return errors.Join(p.Close(), compute.Close())
		})
		if err := errors.Join(err, ranks[0].Close(), dev.Close()); err != nil {
			t.Fatal(err)
		}
		if x.unknown != nil || x.gathers == 0 || len(x.told) > 0 {
			t.Errorf("%v: %d gathers, of unknown memory %q, and %v is still registered", types, x.gathers, x.unknown, x.told)
		}
	}
}
