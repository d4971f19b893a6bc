// This file owns what collectives issue beside a golden file: every call of the device as a
// sum, on every rank. Other tests show that results are exact and that no wait is missing;
// this table shows waits, copies and memory too many.

package comm

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

func TestWorkStaysGood(t *testing.T) {
	var b strings.Builder
	var logs []*devicelog.Log
	open := func(rank int) (device.Device, error) {
		d, err := openCPU(rank)
		if err != nil {
			return nil, err
		}
		d, log := devicelog.Wrap(d)
		logs = append(logs, log)
		return d, nil
	}
	take := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(what, err)
		}
		fmt.Fprintln(&b, what)
		for rank, log := range logs {
			fmt.Fprintf(&b, "  rank %d: %s\n", rank, log.Take())
		}
		logs = nil
	}
	for n := 2; n <= 4; n++ {
		for _, a := range everyCall(n, uint64(n)).actions {
			if !a.touch {
				p := &program{n: n, streams: 1, ranks: [][]int{ranksBelow(n)}, actions: []action{a}}
				take(fmt.Sprintf("%v of %d ranks", a.kind, n), p.play(Lockstep, false, open, Options{}))
			}
		}
		take(fmt.Sprintf("captured, %d ranks", n), everyCall(n, uint64(n)).capture(open, 2))
	}
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 0))
		take(fmt.Sprintf("drawn calls %d", seed), randomProgram(rng, 1+rng.IntN(5), 1+rng.IntN(3), 12, false).play(Lockstep, false, open, Options{scratch: 64}))
	}
	take("five ranks, of which two are there", partial(open))
	golden.Check(t, "work.txt", b.String())
}

// partial makes every call among five ranks, of which 1 and 3 are there and stand for the
// others.
func partial(open opener) (err error) {
	const n, part = 5, 48
	devs, like := make([]device.Device, n), []int{1, 1, 3, 3, 3}
	var streams [n]device.Stream
	var bufs [n]*device.Buffer
	for _, r := range []int{1, 3} {
		if devs[r], err = open(r); err != nil {
			return err
		}
		if streams[r], err = devs[r].NewStream("work"); err != nil {
			return err
		}
		if bufs[r], err = devs[r].Alloc(memory.Device, 4096, "test"); err != nil {
			return err
		}
		streams[r].Fill(bufs[r].All(), byte(r))
	}
	all, err := NewPartial(devs, like)
	if err != nil {
		return err
	}
	err = Run(all, func(c Comm) error {
		s, b := streams[c.Rank()], bufs[c.Rank()]
		one, other, whole, more := b.Slice(0, part), b.Slice(part, part), b.Slice(1024, n*part), b.Slice(2048, n*part)
		c.AllGather(s, whole, one)
		c.ReduceScatter(s, one, whole, F32, Sum)
		c.AllReduce(s, other, one, F32, Max)
		c.AllReduce(s, b.Slice(0, 16), b.Slice(0, 16), F32, Max) // of which few own a part
		c.AllToAll(s, more, whole)
		for root := range n {
			c.Broadcast(s, one, root)
		}
		var ps []Part
		for i := range memory.Bytes(n) {
			ps = append(ps, Part{i * part, 8 * i})
		}
		c.AllToAllV(s, more, whole, alike(ps, c.Rank()), ps)
		c.Barrier(s)
		sub, err := c.Split([]int{4, 3, 1, 0})
		if err != nil {
			return err
		}
		sub.AllGather(s, b.Slice(3072, 4*part), one)
		for root := range sub.Size() {
			sub.Broadcast(s, one, root)
		}
		return errors.Join(sub.Close(), c.Err(), c.Close())
	})
	for _, r := range []int{1, 3} {
		streams[r].Free(bufs[r])
		err = errors.Join(err, streams[r].Close(), devs[r].Close())
	}
	return err
}

// alike returns parts to send of which those to rank r have the size that is received from r.
func alike(recv []Part, r int) (send []Part) {
	for _, p := range recv {
		send = append(send, Part{p.Off, recv[r].Len})
	}
	return send
}
