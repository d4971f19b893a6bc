// This file owns the tests of what calls cost: no allocation, and benchmarks.

package comm

import (
	"bytes"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/device"
)

// everyCollective makes each call once, on ranges that are the same every time.
func everyCollective(c Comm, s device.Stream, b *device.Buffer, send, recv []Part, sends, recvs []Message) {
	n := memory.Bytes(c.Size())
	dst, src := b.Slice(half, 32*n), b.Slice(0, 32*n)
	c.AllGather(s, dst, src.Slice(0, 32))
	c.ReduceScatter(s, dst.Slice(0, 32), src, BF16, Mean)
	c.AllReduce(s, src, src, F32, Sum)
	c.AllReduce(s, dst, src, BF16, Max)
	c.AllToAll(s, dst, src)
	c.AllToAllV(s, dst, src, send, recv)
	c.Broadcast(s, dst, 0)
	c.Barrier(s)
	switch c.Rank() {
	case 0:
		c.Send(s, src, 1)
	case 1:
		c.Recv(s, dst, 0)
	}
	c.Exchange(s, sends, recvs)
}

// A call allocates nothing once it has been made, with few ranks, with as many as a
// launch declares, and with more. SPEC S6.3
func TestCallsAllocateNothing(t *testing.T) {
	for _, n := range []int{2, 3, 8, 12, 14} {
		x := ofTest(t, n, 1, Options{Patience: 1 << 40})
		const runs, warm = 20, 3
		err := Run(x.comms, func(c Comm) error {
			s, b := x.streamAndBuffer(c)
			var parts []Part
			for i := range n {
				parts = append(parts, Part{memory.Bytes(32 * i), 16})
			}
			next, last := (c.Rank()+1)%n, (c.Rank()+n-1)%n
			sends := []Message{{next, b.Slice(0, 8)}, {last, b.Slice(8, 8)}}
			recvs := []Message{{last, b.Slice(half, 8)}, {next, b.Slice(half+8, 8)}}
			step := func() {
				everyCollective(c, s, b, parts, parts, sends, recvs)
				if err := s.Sync(); err != nil {
					t.Error(err)
				}
				c.Barrier(s)
			}
			for range warm {
				step()
			}
			if c.Rank() != 0 {
				for range runs + 1 {
					step()
				}
				return c.Err()
			}
			if a := testing.AllocsPerRun(runs, step); a != 0 {
				t.Errorf("%d ranks: %v allocations in a step of all ranks", n, a)
			}
			return c.Err()
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// Ranks share the work of an all-reduce evenly. Each sums a vector of 16 bytes if there
// is one for each, and none sums more than one vector more than the others. SPEC S6.3
func TestAllReduceIsShared(t *testing.T) {
	for _, n := range []int{2, 3, 5} {
		for _, vectors := range []int{1, n - 1, n, n + 1, 2 * n} {
			x := ofTest(t, n, 1, Options{})
			err := Run(x.comms, func(c Comm) error {
				s, b := x.streamAndBuffer(c)
				c.AllReduce(s, b.Slice(0, memory.Bytes(16*vectors)), b.Slice(0, memory.Bytes(16*vectors)), F32, Sum)
				return errors.Join(c.Err(), s.Sync())
			})
			if err != nil {
				t.Fatal(err)
			}
			each := (vectors + n - 1) / n
			for r, at := range x.places {
				if sums := at.Counters().Launches; (sums > 0) != (r*each < vectors) {
					t.Errorf("%d vectors on %d ranks: rank %d was given %d launches", vectors, n, r, sums)
				}
			}
		}
	}
}

// Two communicators of the same ranks work at the same time, each with goroutines
// and streams of its own.
func TestTwoCommunicators(t *testing.T) {
	const n, rounds = 4, 200
	x := ofTest(t, n, 2, Options{})
	err := Run(x.comms, func(c Comm) error {
		other, err := c.Split([]int{3, 1, 0, 2})
		if err != nil {
			return err
		}
		at := x.places[c.Rank()]
		var both sync.WaitGroup
		for i, c := range []Comm{c, other} {
			both.Go(func() {
				s, b := at.streams[i], at.bufs[i]
				for k := range rounds {
					s.Fill(b.Slice(0, 64), byte(16*k+c.Rank()))
					c.AllGather(s, b.Slice(half, 64*n), b.Slice(0, 64))
				}
				got, want := make([]byte, 64*n), []byte(nil)
				if err := s.Download(got, b.Slice(half, 64*n)); err != nil {
					t.Error(err)
				}
				for r := range n {
					want = append(want, bytes.Repeat([]byte{byte((16*(rounds-1) + r) & 255)}, 64)...)
				}
				if !bytes.Equal(got, want) {
					t.Errorf("rank %d of communicator %d: %v", c.Rank(), i, got)
				}
			})
		}
		both.Wait()
		return other.Close()
	})
	if err != nil {
		t.Error(err)
	}
	if n := len(x.comms[0].(*Local).g.w.groups); n != 1 {
		t.Errorf("one communicator is left, and %d are known", n)
	}
}

// BenchmarkCall measures a small call of all ranks: the cost of meeting and issuing.
func BenchmarkCall(b *testing.B) {
	for _, n := range []int{1, 2, 4, 8} {
		b.Run(fmt.Sprintf("barrier/ranks=%d", n), func(b *testing.B) {
			benchmark(b, n, func(c Comm, s device.Stream, buf *device.Buffer) { c.Barrier(s) })
		})
		b.Run(fmt.Sprintf("all-reduce/ranks=%d", n), func(b *testing.B) {
			benchmark(b, n, func(c Comm, s device.Stream, buf *device.Buffer) {
				c.AllReduce(s, buf.Slice(0, half), buf.Slice(0, half), F32, Sum)
			})
		})
	}
}

func benchmark(b *testing.B, n int, call func(Comm, device.Stream, *device.Buffer)) {
	x := ofTest(b, n, 1, Options{})
	b.ReportAllocs()
	_ = Run(x.comms, func(c Comm) error {
		s, buf := x.streamAndBuffer(c)
		for range b.N {
			call(c, s, buf)
		}
		return s.Sync()
	})
}

// BenchmarkLarge moves 16 MiB for each rank, beside a plain copy of the same size on the
// device.
func BenchmarkLarge(b *testing.B) {
	const size = 16 * memory.MiB
	for _, n := range []int{2, 4} {
		for name, call := range map[string]func(c Comm, s device.Stream, dst, src device.Range){
			"copy": func(c Comm, s device.Stream, dst, src device.Range) { s.Copy(dst, src) },
			"all-gather": func(c Comm, s device.Stream, dst, src device.Range) {
				c.AllGather(s, dst, src.Slice(0, size/memory.Bytes(n)))
			},
			"reduce-scatter f32": func(c Comm, s device.Stream, dst, src device.Range) {
				c.ReduceScatter(s, dst.Slice(0, size/memory.Bytes(n)), src, F32, Sum)
			},
			"reduce-scatter bf16": func(c Comm, s device.Stream, dst, src device.Range) {
				c.ReduceScatter(s, dst.Slice(0, size/memory.Bytes(n)), src, BF16, Sum)
			},
			"all-reduce f32": func(c Comm, s device.Stream, dst, src device.Range) { c.AllReduce(s, src, src, F32, Sum) },
		} {
			b.Run(fmt.Sprintf("%s/ranks=%d", name, n), func(b *testing.B) {
				x := ofTest(b, n, 1, Options{})
				b.SetBytes(int64(size) * int64(n))
				_ = Run(x.comms, func(c Comm) error {
					s, _ := x.streamAndBuffer(c)
					d := x.places[c.Rank()]
					dst, err := d.Alloc(memory.Device, size, "dst")
					if err != nil {
						return err
					}
					src, err := d.Alloc(memory.Device, size, "src")
					if err != nil {
						return err
					}
					s.Fill(src.All(), 0)
					for range b.N {
						call(c, s, dst.All(), src.All())
					}
					s.Free(dst)
					s.Free(src)
					return s.Sync()
				})
			})
		}
	}
}
