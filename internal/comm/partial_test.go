// This file owns the tests of worlds with absent ranks.

package comm

import (
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Ranks of a partial world do not wait for absent ones, and hold the memory that they hold
// beside all of them. Where the data of present ranks goes to present ranks it arrives, and
// that of an absent rank is that of the rank that stands for it.
func TestPartial(t *testing.T) {
	const n, dp = 26, 13 // more than a reduction takes as sources
	devs, like := make([]device.Device, n), make([]int, n)
	var held [2]memory.Bytes
	var bufs []*device.Buffer
	var streams []device.Stream
	for i, r := range []int{0, dp} {
		d, err := openCPU(r)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		s, err := d.NewStream("work")
		if err != nil {
			t.Fatal(err)
		}
		b, err := d.Alloc(memory.Device, n*64, "test")
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			s.Free(b)
			if err := s.Close(); err != nil {
				t.Error(err)
			}
		}()
		s.Fill(b.All(), 0)
		s.Fill(b.Slice(0, 16), byte(1+i))
		devs[r], bufs, streams = d, append(bufs, b), append(streams, s)
	}
	for r := range like {
		like[r] = r / dp * dp
	}
	all, err := NewPartial(devs, like)
	if err != nil {
		t.Fatal(err)
	}
	err = Run(all, func(c Comm) error {
		i := c.Rank() / dp
		s, b := streams[i], bufs[i]
		var stage []int
		for r := range dp {
			stage = append(stage, i*dp+r)
		}
		sub, err := c.Split(stage)
		if err != nil {
			return err
		}
		if c.Size() != n || sub.Size() != dp || sub.Rank() != 0 {
			t.Errorf("rank %d of %d, %d of %d", c.Rank(), c.Size(), sub.Rank(), sub.Size())
		}
		gathered := b.Slice(64, n*16)
		c.AllGather(s, gathered, b.Slice(0, 16))
		sub.AllGather(s, b.Slice(1024, dp*16), b.Slice(0, 16))
		sub.ReduceScatter(s, b.Slice(1280, 16), b.Slice(1024, dp*16), F32, Max)
		sub.AllReduce(s, b.Slice(1280, 16), b.Slice(1280, 16), F32, Max)
		sub.AllToAll(s, b.Slice(1024, dp*16), b.Slice(64, dp*16))
		c.Broadcast(s, b.Slice(1296, 16), 5)
		c.Barrier(s)
		if i == 0 {
			c.Send(s, b.Slice(0, 16), dp)
		} else {
			c.Recv(s, b.Slice(16, 16), 0)
		}
		said, err := c.Gather([]byte{byte(i)})
		if err != nil || len(said) != n || said[dp-1][0] != 0 || said[dp][0] != 1 {
			t.Errorf("rank %d heard %v, %v", c.Rank(), said, err)
		}
		got := make([]byte, n*16)
		if err := s.Download(got, gathered); err != nil {
			return err
		}
		for r := range n {
			if want := byte(1 + r/dp); got[r*16] != want {
				t.Errorf("rank %d got %d of rank %d, want %d", c.Rank(), got[r*16], r, want)
			}
		}
		held[i] = devs[i*dp].Memory().Kind[memory.Device].Current
		return sub.Close()
	})
	if err != nil {
		t.Fatal(err)
	}
	if want := n*64 + 2*memory.MiB; held[0] != want || held[1] != want { // scratch of both groups
		t.Errorf("ranks hold %v, want %v each", held, want)
	}
	wantPanic(t, "rank 3 is absent", func() { all[0].Send(streams[0], bufs[0].Slice(0, 16), 3) })
	for _, c := range all {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, r := range []int{0, dp} {
		if got := devs[r].Memory().Kind[memory.Device].Current; got != n*64 {
			t.Error(fmt.Sprint("after closing, rank ", r, " holds ", got))
		}
	}
}
