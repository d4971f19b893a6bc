// This file tests the one order of calls, of a rank, of a GPU, and of all ranks.

package nccl

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/internal/comm/nccl/nccltest"
	"github.com/stowage-dev/stowage/memory"
)

// All ranks make the calls of all communicators in the order in which they were issued,
// whatever streams these are on, and the ends of communicators come last.
func TestOneOrder(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	err := run(t, libs, func(p *place) error {
		sub, err := p.c.Split([]int{1, 0})
		if err != nil {
			return err
		}
		side, err := p.NewStream("side")
		if err != nil {
			return err
		}
		for i := range memory.Bytes(20) {
			p.c.AllReduce(p.s, p.b.Slice(0, 4*i+4), p.b.Slice(0, 4*i+4), comm.F32, comm.Max)
			sub.Broadcast(side, p.b.Slice(2048, 100+i), 0)
		}
		return errors.Join(p.c.Err(), sub.Err(), p.Sync(), sub.Close(), side.Close())
	})
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"init 1 of 2", "init 2 of 2"}
	for i := range 20 {
		want = append(want, fmt.Sprintf("allReduce %d", i+1), fmt.Sprintf("broadcast %d", 100+i))
	}
	want = append(want, "finalize", "destroy", "finalize", "destroy")
	for r, l := range libs {
		if got := l.Calls(); !slices.Equal(got, want) {
			t.Errorf("rank %d calls %v", r, got)
		}
	}
}

// Ranks that issue calls of two communicators in different orders would wait for each other
// for ever on their devices, each in the call that the other comes to later. All are told,
// whatever calls lie between, and calls of a communicator that ends early do not matter. SPEC S7.2
func TestRanksCross(t *testing.T) {
	for _, calls := range [][2]string{{"ab", "ba"}, {"abcab", "bacab"}, {"aaaab", "abaaa"}, {"acm", "amc"}} {
		err := run(t, nccltest.Libraries(2, 0), func(p *place) error {
			cs := map[rune]comm.Comm{'a': p.c}
			streams := map[rune]device.Stream{'m': p.s}
			for _, name := range "abc" {
				s, err := p.NewStream(string(name))
				if err != nil {
					return err
				}
				defer s.Close()
				streams[name] = s
				if name == 'a' {
					continue
				}
				c, err := p.c.Split([]int{1, 0})
				if err != nil {
					return err
				}
				defer c.Close()
				cs[name] = c
			}
			for _, name := range calls[p.c.Rank()] {
				switch r := p.b.Slice(0, 8); {
				case name != 'm':
					cs[name].AllReduce(streams[name], r, r, comm.F32, comm.Max)
				case p.c.Rank() == 0:
					p.c.Send(streams[name], r, 1)
				default:
					p.c.Recv(streams[name], r, 0)
				}
			}
			late := time.AfterFunc(30*time.Second, func() { p.c.Abort(errors.New("ranks wait for ever")) })
			defer late.Stop()
			err := p.Sync()
			for _, c := range cs {
				err = errors.Join(err, c.Err())
			}
			if err == nil || !strings.Contains(err.Error(), "ranks do not agree: comm: rank") || !strings.Contains(err.Error(), "make the calls of all communicators in the same order on all ranks") {
				t.Errorf("%v: rank %d: %v", calls, p.c.Rank(), err)
			}
			return nil
		})
		if err != nil && !strings.Contains(err.Error(), "same order") {
			t.Error(err)
		}
	}
}

// Two worlds that share a GPU issue their calls in one order, though their streams know
// nothing of each other: the second waits until the first has none in flight. SPEC S7.2
func TestWorldsShareAGPU(t *testing.T) {
	libs := nccltest.Libraries(2, 0)
	var worlds [2][]comm.Comm
	var places [2][]*place
	orders := []*Order{{}, {}}
	for i := range worlds {
		var devs []device.Device
		places[i], devs = openWorld(t, libs)
		var err error
		if worlds[i], err = open(t, devs, libs, orders...); err != nil {
			t.Fatal(err)
		}
	}
	var ranks sync.WaitGroup
	for r := range libs {
		a, b := places[0][r], places[1][r]
		ranks.Go(func() {
			for i := range memory.Bytes(3) {
				a.s.Host(func() { time.Sleep(20 * time.Millisecond) }) // the first world is late
				worlds[0][r].AllReduce(a.s, a.b.Slice(0, 4*i+4), a.b.Slice(0, 4*i+4), comm.F32, comm.Max)
				worlds[1][r].Broadcast(b.s, b.b.Slice(0, 100+i), 0)
			}
			if err := errors.Join(a.Sync(), b.Sync(), worlds[0][r].Close(), worlds[1][r].Close()); err != nil {
				t.Error(err)
			}
		})
	}
	ranks.Wait()
	want := []string{"init 1 of 2", "init 2 of 2", "allReduce 1", "broadcast 100", "allReduce 2", "broadcast 101", "allReduce 3", "broadcast 102", "finalize", "destroy", "finalize", "destroy"}
	for r, l := range libs {
		if got := l.Calls(); !slices.Equal(got, want) {
			t.Errorf("rank %d calls %v", r, got)
		}
		if orders[r].last != nil {
			t.Errorf("rank %d keeps a world that was closed", r)
		}
	}
}

// Meetings come in any order, as each communicator compares its own calls. Few are kept, and
// a crossing among those is found; calls of one exchange may have the same turn.
func TestCrossing(t *testing.T) {
	w := &world{met: map[int][]meeting{}}
	g := &group{w: w, ranks: []int{3, 5}, words: "ranks 3 and 5"}
	meet := func(mine, theirs uint64) string { return g.crossing(&audited{turn: mine}, 1, theirs) }
	for i := uint64(1); i <= 3*mostMet; i += 2 {
		for _, turn := range []uint64{i + 1, i, i} { // the later one is compared first
			if wrong := meet(10*turn, 20*turn); wrong != "" {
				t.Fatal(wrong)
			}
		}
		if n := len(w.met[5]); n > mostMet {
			t.Fatalf("%d meetings are kept", n)
		}
	}
	const last = 3 * mostMet
	for _, x := range [][2]uint64{{10*last + 1, 20*last - 1}, {10*last - 1, 20*last + 1}, {10*last - 25, 20*last - 11}} {
		if wrong := meet(x[0], x[1]); !strings.Contains(wrong, "rank 3 calls all-gather #0 of 0 bytes a rank of ranks 3 and 5 before") || !strings.Contains(wrong, "and rank 5 after it") {
			t.Errorf("turns %v: %q", x, wrong)
		}
	}
	if wrong := meet(10*last+1, 20*last+1); wrong != "" {
		t.Error(wrong)
	}
	if wrong := g.crossing(&audited{turn: 1}, 0, 1<<40); wrong != "" {
		t.Errorf("meetings with another rank count: %s", wrong)
	}
}
