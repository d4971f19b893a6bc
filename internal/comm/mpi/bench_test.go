// This file owns the comparison of two processes with two ranks in one process.

package mpi

import (
	"errors"
	"flag"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

var compare = flag.Bool("compare", false, "print the times of collectives between two processes beside those of two ranks in one process")

// With -compare, TestCompare prints a table.
func TestCompare(t *testing.T) {
	if !*compare {
		t.Skip("run it with -compare")
	}
	for _, l := range launchers {
		out, err := l.start(t, 2, "compare", nil)
		fmt.Printf("%s\n%s\n", l.name, out)
		if err != nil {
			t.Error(err)
		}
	}
}

func init() { roles["compare"] = compareProcesses }

// measured is a call of a size that is timed.
type measured struct {
	name string
	size memory.Bytes
	call func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes)
}

var measuredCalls = []measured{
	{"barrier", 0, func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) { c.Barrier(s) }},
	{"all-reduce", 64, allReduceOf}, {"all-reduce", memory.MiB, allReduceOf}, {"all-reduce", 16 * memory.MiB, allReduceOf},
	{"reduce-scatter", memory.MiB, func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) {
		c.ReduceScatter(s, b.Slice(32*memory.MiB, n/2), b.Slice(0, n), comm.F32, comm.Sum)
	}},
	{"all-gather", memory.MiB, func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) {
		c.AllGather(s, b.Slice(0, 2*n), b.Slice(32*memory.MiB, n))
	}},
	{"all-to-all", memory.MiB, func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) {
		c.AllToAll(s, b.Slice(0, n), b.Slice(32*memory.MiB, n))
	}},
	{"exchange", 64 * memory.KiB, func(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) {
		o := 1 - c.Rank()
		c.Exchange(s, []comm.Message{{Peer: o, Range: b.Slice(0, n)}}, []comm.Message{{Peer: o, Range: b.Slice(32*memory.MiB, n)}})
	}},
}

func allReduceOf(c comm.Comm, s device.Stream, b *device.Buffer, n memory.Bytes) {
	c.AllReduce(s, b.Slice(0, n), b.Slice(0, n), comm.F32, comm.Sum)
}

// compareProcesses times every call in both worlds in turn, so that both meet the same
// machine.
func compareProcesses(p *Process) error {
	d, err := cpu.Open(cpu.Options{})
	if err != nil {
		return err
	}
	far, err := p.Open(d, Options{})
	if err != nil {
		return err
	}
	near, err := comm.NewLocal([]device.Device{d, d}, comm.Options{})
	if err != nil {
		return err
	}
	for _, m := range measuredCalls {
		var a, b []time.Duration
		for range 7 {
			x, err := timed(d, []comm.Comm{far}, m)
			if err != nil {
				return err
			}
			a = append(a, x)
			if p.Rank() == 0 {
				if x, err = timed(d, near, m); err != nil {
					return err
				}
				b = append(b, x)
			}
		}
		if p.Rank() == 0 {
			slices.Sort(a)
			slices.Sort(b)
			fmt.Printf("%-15s %9d bytes: processes %10v, ranks in one %10v, ratio %.2f\n", m.name, m.size, a[3], b[3], float64(a[3])/float64(b[3]))
		}
	}
	err = errors.Join(far.Close(), near[0].Close(), near[1].Close())
	return errors.Join(err, d.Close())
}

// timed returns the time of one of many calls.
func timed(d device.Device, cs []comm.Comm, m measured) (time.Duration, error) {
	times := max(5, min(500, int(64*memory.MiB/(m.size+1))))
	took := make([]time.Duration, len(cs))
	err := comm.Run(cs, func(c comm.Comm) error {
		s, err := d.NewStream("timed")
		if err != nil {
			return err
		}
		b, err := d.Alloc(memory.Device, 64*memory.MiB, "timed")
		if err != nil {
			return err
		}
		s.Fill(b.All(), 0)
		c.Barrier(s)
		if err := s.Sync(); err != nil {
			return err
		}
		since := time.Now()
		for range times {
			m.call(c, s, b, m.size)
		}
		err = s.Sync()
		if len(cs) == 1 || c.Rank() == 0 {
			took[0] = time.Since(since)
		}
		c.Barrier(s)
		s.Free(b)
		return errors.Join(err, s.Close(), c.Err())
	})
	return took[0] / time.Duration(times), err
}
