//go:build linux

// This file owns the benchmarks: bandwidths, by the GPU's own clock, and the
// host's cost of issuing work. They skip without a GPU.

package cuda

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

const benchSize = memory.GiB

// bench is a device for one benchmark.
type bench struct {
	*testing.B
	d    *Device
	s    device.Stream
	bufs []*device.Buffer
}

func newBench(b *testing.B, o Options) *bench {
	d := open(b, o)
	return &bench{B: b, d: d, s: newStream(b, d, "s")}
}

func (x *bench) buffer(k memory.Kind, n memory.Bytes) *device.Buffer {
	b := alloc(x, x.d, k, n)
	x.s.Fill(b.All(), 0x5A)
	x.bufs = append(x.bufs, b)
	return b
}

// run times fn, which moves n bytes, and ends the device.
func (x *bench) run(n memory.Bytes, fn func()) {
	start, _ := x.d.NewEvent(device.Timing)
	end, _ := x.d.NewEvent(device.Timing)
	fn()
	synced(x, x.s)
	x.ReportAllocs()
	x.ResetTimer()
	x.s.Record(start)
	for range x.N {
		fn()
	}
	x.s.Record(end)
	synced(x, x.s)
	x.StopTimer()
	took, err := end.Since(start)
	if err != nil {
		x.Fatal(err)
	}
	if n > 0 {
		x.ReportMetric(float64(n)*float64(x.N)/took.Seconds()/1e9, "GB/s")
	}
	for _, b := range x.bufs {
		x.s.Free(b)
	}
	closeDevice(x, x.d)
}

// Counted is read plus written.
func BenchmarkCopyOnDevice(b *testing.B) {
	x := newBench(b, Options{})
	to, from := x.buffer(memory.Device, benchSize), x.buffer(memory.Device, benchSize)
	x.run(2*benchSize, func() { x.s.Copy(to.All(), from.All()) })
}

func BenchmarkCopyOnDeviceInGraph(b *testing.B) {
	for name, o := range map[string]Options{"driver": {}, "kernel": {CopyKernel: copyLaunch}} {
		b.Run(name, func(b *testing.B) {
			x := newBench(b, o)
			to, from := x.buffer(memory.Device, benchSize), x.buffer(memory.Device, benchSize)
			x.s.BeginCapture()
			x.s.Copy(to.All(), from.All())
			g, err := x.s.EndCapture()
			if err != nil {
				b.Fatal(err)
			}
			x.run(2*benchSize, func() { x.s.Replay(g) })
		})
	}
}

func BenchmarkCopyOut(b *testing.B) {
	x := newBench(b, Options{})
	to, from := x.buffer(memory.Host, benchSize), x.buffer(memory.Device, benchSize)
	x.run(benchSize, func() { x.s.Copy(to.All(), from.All()) })
}

func BenchmarkCopyIn(b *testing.B) {
	x := newBench(b, Options{})
	to, from := x.buffer(memory.Device, benchSize), x.buffer(memory.Host, benchSize)
	x.run(benchSize, func() { x.s.Copy(to.All(), from.All()) })
}

// Both ways at once, and between reserved buffers grown in pieces.
func BenchmarkCopyBothWays(b *testing.B) {
	x := newBench(b, Options{})
	other := newStream(b, x.d, "other")
	host := x.buffer(memory.Host, benchSize)
	pool, err := x.d.Reserve(memory.Host, benchSize, "pool")
	if err != nil {
		b.Fatal(err)
	}
	x.bufs = append(x.bufs, pool)
	for pool.Size() < benchSize {
		if err := x.d.Grow(pool, pool.Size()+benchSize/8); err != nil {
			b.Fatal(err)
		}
	}
	in, out := x.buffer(memory.Device, benchSize), x.buffer(memory.Device, benchSize)
	fork, _ := x.d.NewEvent(0)
	join, _ := x.d.NewEvent(0)
	x.run(2*benchSize, func() {
		x.s.Record(fork)
		other.Wait(fork)
		x.s.Copy(in.All(), host.All())
		other.Copy(pool.All(), out.All())
		other.Record(join)
		x.s.Wait(join)
	})
}

func BenchmarkFill(b *testing.B) {
	for _, k := range []memory.Kind{memory.Device, memory.Host} {
		b.Run(k.String(), func(b *testing.B) {
			x := newBench(b, Options{})
			to := x.buffer(k, benchSize)
			x.run(benchSize, func() { x.s.Fill(to.All(), 1) })
		})
	}
}

func BenchmarkLaunch(b *testing.B) {
	x := newBench(b, Options{})
	to := x.buffer(memory.Device, 4096)
	x.run(0, func() { x.s.Launch(addLaunch(to.All(), 1)) })
}

// A graph of a hundred launches; the host's share is one call.
func BenchmarkReplay(b *testing.B) {
	x := newBench(b, Options{})
	to := x.buffer(memory.Device, 4096)
	x.s.BeginCapture()
	for range 100 {
		x.s.Launch(addLaunch(to.All(), 1))
	}
	g, err := x.s.EndCapture()
	if err != nil {
		b.Fatal(err)
	}
	x.run(0, func() { x.s.Replay(g) })
}

// Mapping 64 MiB into a reserved range, and back out.
func BenchmarkGrow(b *testing.B) {
	for _, k := range []memory.Kind{memory.Device, memory.Host} {
		b.Run(k.String(), func(b *testing.B) {
			x := newBench(b, Options{})
			b.SetBytes(int64(64 * memory.MiB))
			b.ResetTimer()
			for range b.N {
				p, err := x.d.Reserve(k, 64*memory.MiB, "pool")
				if err != nil {
					b.Fatal(err)
				}
				if err := x.d.Grow(p, 64*memory.MiB); err != nil {
					b.Fatal(err)
				}
				x.s.Free(p)
				synced(b, x.s)
			}
			b.StopTimer()
			closeDevice(b, x.d)
		})
	}
}
