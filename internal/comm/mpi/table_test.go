// This file owns the table of the messages that calls take.

package mpi

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

// listed are calls of rank 1 of 3 and what the others do with it.
var listed = []struct {
	name string
	call func(c comm.Comm, s device.Stream, b *device.Buffer)
}{
	{"barrier", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Barrier(s) }},
	{"all-gather of 40 bytes", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		c.AllGather(s, b.Slice(0, 120), b.Slice(200, 40))
	}},
	{"all-gather of nothing", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.AllGather(s, b.Slice(0, 0), b.Slice(40, 0)) }},
	{"all-gather of 70,000 bytes", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		c.AllGather(s, b.Slice(0, 210_000), b.Slice(300_000, 70_000))
	}},
	{"broadcast from 1", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Broadcast(s, b.Slice(0, 50_000), 1) }},
	{"broadcast from 2", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Broadcast(s, b.Slice(0, 30), 2) }},
	{"broadcast of nothing from 2", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Broadcast(s, b.Slice(0, 0), 2) }},
	{"all-reduce of nothing", reduced(0)}, {"all-reduce of 4 bytes", reduced(4)},
	{"all-reduce of half of 16 KiB", reduced(8192)}, {"all-reduce of more than half of 16 KiB", reduced(8196)},
	{"all-reduce of 160,004 bytes", reduced(160_004)},
	{"reduce-scatter of 40 bytes", scattered(40)}, {"reduce-scatter of nothing", scattered(0)}, {"reduce-scatter of 70,000 bytes", scattered(70_000)},
	{"all-to-all of 24 bytes", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.AllToAll(s, b.Slice(100, 72), b.Slice(0, 72)) }},
	{"all-to-all of nothing", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.AllToAll(s, b.Slice(100, 0), b.Slice(0, 0)) }},
	{"all-to-all-v", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		var send, recv []comm.Part // rank i sends 1000*i+100*k bytes to rank k, and 0 sends nothing to 1
		n := func(i, k int) memory.Bytes {
			if i == 0 && k == 1 {
				return 0
			}
			return memory.Bytes(1000*i + 100*k)
		}
		for k := range 3 {
			send = append(send, comm.Part{Off: memory.Bytes(5000 * k), Len: n(c.Rank(), k)})
			recv = append(recv, comm.Part{Off: memory.Bytes(5000 * k), Len: n(k, c.Rank())})
		}
		c.AllToAllV(s, b.Slice(100_000, 20_000), b.Slice(0, 20_000), send, recv)
	}},
	{"exchange round", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		c.Exchange(s, []comm.Message{{Peer: (c.Rank() + 1) % 3, Range: b.Slice(0, 11_000)}, {Peer: (c.Rank() + 1) % 3, Range: b.Slice(0, 12)}},
			[]comm.Message{{Peer: (c.Rank() + 2) % 3, Range: b.Slice(20_000, 11_000)}, {Peer: (c.Rank() + 2) % 3, Range: b.Slice(40_000, 12)}})
	}},
	{"exchange of nothing", func(c comm.Comm, s device.Stream, b *device.Buffer) { c.Exchange(s, nil, nil) }},
	{"message from 1 to 2", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		switch c.Rank() {
		case 1:
			c.Send(s, b.Slice(0, 9), 2)
		case 2:
			c.Recv(s, b.Slice(0, 9), 1)
		}
	}},
	{"message from 0 to 1", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		switch c.Rank() {
		case 0:
			c.Send(s, b.Slice(0, 10), 1)
		case 1:
			c.Recv(s, b.Slice(0, 10), 0)
		}
	}},
	{"split into 2 and 1", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		if c.Rank() > 0 {
			sub, err := c.Split([]int{2, 1})
			if err != nil {
				panic(err)
			}
			sub.AllGather(s, b.Slice(0, 14), b.Slice(20, 7))
			if err := sub.Close(); err != nil {
				panic(err)
			}
		}
	}},
	{"gather", func(c comm.Comm, s device.Stream, b *device.Buffer) {
		if _, err := c.Gather(make([]byte, 5*c.Rank())); err != nil {
			panic(err)
		}
	}},
}

func reduced(n memory.Bytes) func(c comm.Comm, s device.Stream, b *device.Buffer) {
	return func(c comm.Comm, s device.Stream, b *device.Buffer) {
		c.AllReduce(s, b.Slice(0, n), b.Slice(0, n), comm.F32, comm.Sum)
	}
}

func scattered(n memory.Bytes) func(c comm.Comm, s device.Stream, b *device.Buffer) {
	return func(c comm.Comm, s device.Stream, b *device.Buffer) {
		c.ReduceScatter(s, b.Slice(300_000, n), b.Slice(0, 3*n), comm.F32, comm.Sum)
	}
}

// The calls of a rank take the messages of the table: one letter for each other rank in each
// direction, and the fewest messages of bytes that fit the buffers. What the device is told is a sum.
func TestMessages(t *testing.T) {
	var book strings.Builder
	for _, staged := range []bool{false, true} {
		j, ps := startJob(t, 3, 7)
		j.tidy = true
		var said []string
		ps[1].mu.Lock()
		j.libs[1].note = func(what string) { said = append(said, what) }
		ps[1].mu.Unlock()
		marks, did := make([]int, len(listed)+1), make([]string, len(listed))
		err := together(ps, func(p *Process) error {
			bare, err := cpu.Open(cpu.Options{Ordinal: p.Rank()})
			if err != nil {
				return err
			}
			d, log := devicelog.Wrap(bare)
			s, err := d.NewStream("test")
			if err != nil {
				return err
			}
			b, err := d.Alloc(memory.Device, memory.MiB, "test")
			if err != nil {
				return err
			}
			c, err := p.Open(d, Options{Scratch: 64 * memory.KiB, Staged: staged, largest: 50_000})
			if err != nil {
				return err
			}
			log.Take()
			for i, l := range listed {
				l.call(c, s, b)
				if err := errors.Join(s.Sync(), c.Err()); err != nil {
					return fmt.Errorf("%s: %w", l.name, err)
				}
				if p.Rank() == 1 {
					p.mu.Lock()
					marks[i+1], did[i] = len(said), log.Take()
					p.mu.Unlock()
				}
			}
			s.Free(b)
			return errors.Join(s.Close(), c.Close(), d.Close())
		})
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range listed {
			fmt.Fprintf(&book, "%s, staged %v: %s\n", l.name, staged, did[i])
			for _, m := range said[marks[i]:marks[i+1]] {
				fmt.Fprintf(&book, "\t%s\n", m)
			}
		}
	}
	golden.Check(t, "messages.txt", book.String())
}
