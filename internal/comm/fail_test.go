// This file owns the tests of failures: ranks that give up, return early, do not come, or
// disagree.

package comm

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/memory"

	"github.com/stowage-dev/stowage/device"
)

var errBroken = errors.New("the disk is full")

// streamAndBuffer returns the stream and the buffer of a rank.
func (x *setting) streamAndBuffer(c Comm) (device.Stream, *device.Buffer) {
	at := x.places[c.(*Local).g.ranks[c.Rank()]]
	return at.streams[0], at.bufs[0]
}

func wantError(t *testing.T, err error, words string) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), words) {
		t.Errorf("the error is %v; want one with %q", err, words)
	}
}

func panicOf(f func()) (p any) {
	defer func() { p = recover() }()
	f()
	return nil
}

func wantPanic(t *testing.T, words string, f func()) {
	t.Helper()
	if p := fmt.Sprint(panicOf(f)); !strings.Contains(p, words) {
		t.Errorf("panic %q; want one with %q", p, words)
	}
}

// A rank that gives up wakes those that wait for it, in every communicator. Their calls
// are not made, later ones do nothing, and Err says who gave up, why, and in which call.
func TestAbort(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		t.Run(name, func(t *testing.T) {
			x := ofTest(t, 4, 1, Options{})
			if err := x.comms[0].Err(); err != nil {
				t.Fatal(err)
			}
			err := drive(x.comms, func(c Comm) error {
				s, b := x.streamAndBuffer(c)
				idle, err := c.Split([]int{3, 2, 1, 0}) // which nobody calls
				if err != nil {
					return err
				}
				if c.Rank() == 3 {
					c.Abort(errBroken)
					c.Barrier(s)
					wantError(t, c.Err(), "comm: barrier #1 of rank 3 was not made: rank 3 gave up: the disk is full")
					return nil
				}
				switch c.Rank() {
				case 0:
					c.AllGather(s, b.Slice(0, 64), b.Slice(512, 16))
					wantError(t, c.Err(), "comm: all-gather #1 of 16 bytes a rank of rank 0 was not made: rank 3 gave up: the disk is full")
				case 1:
					sub, err := c.Split([]int{1, 3})
					if err != nil {
						return err
					}
					sub.Recv(s, b.Slice(0, 8), 1)
					wantError(t, sub.Err(), "comm: receive #1 of 8 bytes from rank 3 of rank 1 was not made: rank 3 gave up: the disk is full")
					wantError(t, c.Err(), "comm: rank 3 gave up: the disk is full")
				case 2:
					c.AllGather(s, b.Slice(0, 64), b.Slice(512, 16))
				}
				first := c.Err()
				c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), F32, Sum)
				for _, again := range []error{c.Err(), idle.Err()} {
					var f *Failure
					if !errors.As(again, &f) || !errors.Is(again, errBroken) || f.By != 3 || f.Rank != c.Rank() {
						t.Errorf("rank %d: %v, then %v", c.Rank(), first, again)
					}
				}
				return nil
			})
			if !errors.Is(err, errBroken) { // though no rank says so
				t.Errorf("the driver returns %v", err)
			}
			for r, at := range x.places {
				if n := at.Counters(); n.Launches != 0 || n.Copies != 0 {
					t.Errorf("rank %d was given work: %+v", r, n)
				}
			}
		})
	}
}

// No rank waits for a rank that has closed. What others do without it goes on.
func TestCloseWakesPeers(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		t.Run(name, func(t *testing.T) {
			x := ofTest(t, 3, 1, Options{})
			err := drive(x.comms, func(c Comm) error {
				s, b := x.streamAndBuffer(c)
				sub, err := c.Split([]int{2, 0, 1})
				if err != nil {
					return err
				}
				switch c.Rank() {
				case 0:
					return sub.Close()
				case 1:
					sub.Send(s, b.Slice(0, 8), 0)
				case 2:
					sub.Recv(s, b.Slice(0, 8), 2)
				}
				if err := sub.Err(); err != nil {
					return err
				}
				sub.Barrier(s)
				var f *Failure
				if !errors.As(sub.Err(), &f) || f.By != 0 {
					t.Errorf("rank %d: %v", c.Rank(), sub.Err())
				}
				wantError(t, sub.Err(), fmt.Sprintf("comm: barrier #2 of rank %d was not made: rank 0 has closed the communicator", c.Rank()))
				if c.Err() != nil {
					t.Errorf("the other communicator fails too: %v", c.Err())
				}
				return sub.Close()
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// A call with several messages passes those whose ends have met.
func TestExchangeInPart(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		x := ofTest(t, 3, 1, Options{})
		err := drive(x.comms, func(c Comm) error {
			s, b := x.streamAndBuffer(c)
			switch c.Rank() {
			case 0:
				// Rank 1 goes on before rank 2 has come, which waits for rank 1.
				c.Exchange(s, []Message{{1, b.Slice(0, 8)}, {2, b.Slice(0, 8)}}, []Message{{2, b.Slice(half, 8)}})
			case 1:
				c.Recv(s, b.Slice(half, 8), 0)
				c.Send(s, b.Slice(half, 8), 2)
				return c.Close()
			case 2:
				c.Recv(s, b.Slice(half, 8), 1)
				c.Exchange(s, []Message{{0, b.Slice(half, 8)}}, []Message{{0, b.Slice(half+8, 8)}})
				c.Exchange(s, nil, []Message{{1, b.Slice(0, 8)}, {0, b.Slice(8, 8)}}) // which has closed
				wantError(t, c.Err(), "comm: exchange #3 of 8 bytes from rank 1, 8 bytes from rank 0 of rank 2 was not made: rank ")
				return c.Close()
			}
			if err := errors.Join(c.Err(), c.Close()); err != nil {
				return err
			}
			got := make([]byte, 8)
			err := s.Download(got, b.Slice(half, 8))
			if string(got) != string(x.places[0].first[:8]) {
				t.Errorf("%s: rank 0 got %v back", name, got)
			}
			return err
		})
		x.comms = nil
		var f *Failure
		if !errors.As(err, &f) {
			t.Error(err)
		}
	}
}

// The error names the ranks that do not come before the timeout. SPEC S6.3
func TestPatience(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, err := newSetting(4, 1, false, openCPU, Options{Patience: time.Minute}, 1)
		if err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		err = Run(x.comms, func(c Comm) error {
			s, b := x.streamAndBuffer(c)
			for range 3 { // late, but not too late
				time.Sleep(time.Duration(c.Rank()) * 10 * time.Second)
				c.Barrier(s)
			}
			switch c.Rank() {
			case 1:
				time.Sleep(time.Hour)
				return nil
			case 2:
				c.Recv(s, b.Slice(0, 8), 1)
			default:
				c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), BF16, Mean)
			}
			if d := time.Since(began); d != 90*time.Second+time.Minute {
				t.Errorf("it took %v", d)
			}
			return c.Err()
		})
		var a *Absent
		if !errors.As(err, &a) || a.Waited != time.Minute {
			t.Fatalf("%v", err)
		}
		switch a.Rank { // all three tire at the same moment
		case 2:
			wantError(t, a, "rank 2 waited 1m0s in receive #4 of 8 bytes from rank 1 for rank 1; find out what delays them, or raise Patience")
		default:
			wantError(t, a, "waited 1m0s in all-reduce #4 of 64 bytes (bf16, mean) for ranks 1, 2; find out")
		}
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
}

// A rank that waits for a message names its peer alone, though no other rank has made the
// call either.
func TestPatienceOfAMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, err := newSetting(4, 1, false, openCPU, Options{Patience: time.Minute}, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = Run(x.comms, func(c Comm) error {
			if c.Rank() != 2 {
				time.Sleep(time.Hour)
				return nil
			}
			s, b := x.streamAndBuffer(c)
			c.Recv(s, b.Slice(0, 8), 1)
			return c.Err()
		})
		wantError(t, err, "rank 2 waited 1m0s in receive #1 of 8 bytes from rank 1 for rank 1; find out")
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
}

// Ranks that wait for messages of each other are not in the collective that a rank waits in.
func TestPatienceWithARing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, err := newSetting(4, 1, false, openCPU, Options{Patience: time.Minute}, 1)
		if err != nil {
			t.Fatal(err)
		}
		err = Run(x.comms, func(c Comm) error {
			s, b := x.streamAndBuffer(c)
			if c.Rank() == 0 {
				c.Barrier(s)
				return c.Err()
			}
			time.Sleep(time.Second)
			c.Recv(s, b.Slice(0, 8), c.Rank()%3+1)
			return c.Err()
		})
		wantError(t, err, "rank 0 waited 1m0s in barrier #1 for ranks 1, 2, 3; find out")
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
}

// A timer that fires late finds its rank in no call, or in a recent one, and nobody gives
// up.
func TestPatienceOfAnEarlierCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		x, err := newSetting(2, 1, false, openCPU, Options{Patience: time.Minute}, 1)
		if err != nil {
			t.Fatal(err)
		}
		g := x.comms[0].(*Local).g
		err = Run(x.comms, func(c Comm) error {
			s, _ := x.streamAndBuffer(c)
			for range 3 {
				if c.Rank() == 1 {
					time.Sleep(59 * time.Second) // the other waits
					g.timeOut(0)
					time.Sleep(time.Second / 2)
				}
				c.Barrier(s)
				if c.Rank() == 0 {
					time.Sleep(2 * time.Second) // its timer fires while it computes
					g.timeOut(0)
				}
				c.Barrier(s)
			}
			return c.Err()
		})
		if err != nil {
			t.Error(err)
		}
		if err := x.close(); err != nil {
			t.Error(err)
		}
	})
}

// Calls that can never meet panic on every rank, and the message names both ranks and
// calls.
func TestMismatch(t *testing.T) {
	whole := []Part{{0, 8}, {8, 8}}
	type side struct {
		words string // of the message, about this rank
		call  func(c Comm, s device.Stream, b *device.Buffer)
	}
	gather := func(n memory.Bytes) side {
		return side{fmt.Sprintf("calls all-gather #1 of %d bytes a rank", n), func(c Comm, s device.Stream, b *device.Buffer) {
			c.AllGather(s, b.Slice(0, 2*n), b.Slice(512, n))
		}}
	}
	reduce := func(t Type, op Op, words string) side {
		return side{"calls all-reduce #1 of 64 bytes " + words, func(c Comm, s device.Stream, b *device.Buffer) {
			c.AllReduce(s, b.Slice(0, 64), b.Slice(0, 64), t, op)
		}}
	}
	cast := func(root int) side {
		return side{fmt.Sprintf("calls broadcast #1 of 64 bytes from rank %d", root), func(c Comm, s device.Stream, b *device.Buffer) {
			c.Broadcast(s, b.Slice(0, 64), root)
		}}
	}
	some := func(recv []Part, words string) side {
		return side{words, func(c Comm, s device.Stream, b *device.Buffer) {
			c.AllToAllV(s, b.Slice(0, 64), b.Slice(512, 64), whole, recv)
		}}
	}
	sends := func(to int) side {
		return side{fmt.Sprintf("calls send #1 of 8 bytes to rank %d", to), func(c Comm, s device.Stream, b *device.Buffer) {
			c.Send(s, b.Slice(0, 8), to)
		}}
	}
	receives := func(n memory.Bytes) side {
		return side{fmt.Sprintf("calls receive #1 of %d bytes from rank 0", n), func(c Comm, s device.Stream, b *device.Buffer) {
			c.Recv(s, b.Slice(0, n), 0)
		}}
	}
	exchanges := func(sends, recvs memory.Bytes) side {
		words := "calls exchange #1 of"
		var to, from []Message
		return side{words, func(c Comm, s device.Stream, b *device.Buffer) {
			peer := 1 - c.Rank()
			if to, from = nil, nil; sends > 0 {
				to = []Message{{peer, b.Slice(0, sends)}}
			}
			if recvs > 0 {
				from = []Message{{peer, b.Slice(64, recvs)}}
			}
			c.Exchange(s, to, from)
		}}
	}
	scatters := side{"calls reduce-scatter #1 of 8 bytes (f32, mean)", func(c Comm, s device.Stream, b *device.Buffer) {
		c.ReduceScatter(s, b.Slice(0, 8), b.Slice(64, 16), F32, Mean)
	}}
	exchange := side{"calls all-to-all #1 of 32 bytes a rank", func(c Comm, s device.Stream, b *device.Buffer) {
		c.AllToAll(s, b.Slice(0, 64), b.Slice(512, 64))
	}}
	wait := side{"calls barrier #1", func(c Comm, s device.Stream, b *device.Buffer) { c.Barrier(s) }}
	for _, sides := range [][2]side{
		{gather(32), exchange},
		{gather(32), gather(16)},
		{reduce(F32, Sum, "(f32, sum)"), reduce(BF16, Sum, "(bf16, sum)")},
		{reduce(F32, Mean, "(f32, mean)"), reduce(F32, Max, "(f32, max)")},
		{scatters, wait},
		{cast(0), cast(1)},
		{some([]Part{{0, 8}, {8, 7}}, "in all-to-all-v #1"), some(whole, "rank 1 sends 8 bytes to rank 0, which expects 7")},
		{side{"calls send #1 of 8 bytes to rank 1 and sends 8 bytes", sends(1).call}, side{"calls receive #1 of 9 bytes from rank 0 and expects 9", receives(9).call}},
		{sends(1), sends(0)},
		{wait, receives(8)},
		{exchanges(8, 8), wait},
		{exchanges(8, 8), exchanges(9, 8)},
		{exchanges(8, 0), exchanges(8, 0)},
		{exchanges(0, 8), receives(8)},
	} {
		t.Run(sides[0].words+" and "+sides[1].words, func(t *testing.T) {
			x := ofTest(t, 2, 1, Options{})
			var both sync.WaitGroup
			for r, mine := range sides {
				both.Go(func() {
					c := x.comms[r]
					s, b := x.streamAndBuffer(c)
					for _, words := range []string{sides[0].words, sides[1].words} {
						// The call, and then whatever comes later.
						wantPanic(t, words, func() { mine.call(c, s, b) })
					}
					wantError(t, c.Err(), "ranks do not agree: comm: ")
				})
			}
			both.Wait()
			if n := x.places[0].Counters(); n.Launches+n.Copies != 0 {
				t.Errorf("work was issued: %+v", n)
			}
		})
	}
}

// If only some streams are captured, an event would draw the others into the capture.
func TestPartlyCaptured(t *testing.T) {
	for _, c := range []struct{ ranks, captured, other int }{{3, 1, 2}, {2, 0, 1}, {2, 1, 0}} {
		x := ofTest(t, c.ranks, 1, Options{})
		s, _ := x.streamAndBuffer(x.comms[c.captured])
		s.BeginCapture()
		want := fmt.Sprintf("comm: in barrier #1, the stream of rank %d is being captured and that of rank %d is not; make the streams of all ranks join one capture", c.captured, c.other)
		wantPanic(t, want, func() {
			_ = Lockstep(x.comms, func(c Comm) error {
				s, _ := x.streamAndBuffer(c)
				c.Barrier(s)
				return nil
			})
		})
		if g, err := s.EndCapture(); err != nil || g.Nodes() != 0 {
			t.Errorf("the capture was touched: %v", err)
		} else if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A message of a call that was not made is never received: rank 0 would have sent it in a
// call that also needed rank 2, which has closed.
func TestMessagesOfFailedCallsAreGone(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	if err := x.comms[2].Close(); err != nil {
		t.Fatal(err)
	}
	s, b := x.streamAndBuffer(x.comms[0])
	x.comms[0].Exchange(s, []Message{{1, b.Slice(0, 8)}}, []Message{{2, b.Slice(8, 8)}})
	wantError(t, x.comms[0].Err(), "rank 2 has closed the communicator")
	over := make(chan struct{})
	go func() {
		defer close(over)
		s, b := x.streamAndBuffer(x.comms[1])
		x.comms[1].Recv(s, b.Slice(0, 8), 0)
	}()
	for received := false; waiting(x.comms[0]) == 0 && !received; runtime.Gosched() {
		select {
		case <-over:
			received = true
		default:
		}
	}
	if err := x.comms[0].Close(); err != nil {
		t.Error(err)
	}
	<-over
	wantError(t, x.comms[1].Err(), "rank 0 has closed the communicator")
	x.comms = x.comms[1:2] // the others have closed
}

// Closing also wakes a rank that waits already, without a driver.
func TestCloseWakesWaiting(t *testing.T) {
	x := ofTest(t, 2, 1, Options{})
	var first sync.WaitGroup
	first.Go(func() {
		s, _ := x.streamAndBuffer(x.comms[0])
		x.comms[0].Barrier(s)
		wantError(t, x.comms[0].Err(), "rank 1 has closed the communicator")
	})
	for waiting(x.comms[0]) == 0 {
		runtime.Gosched()
	}
	if err := x.comms[1].Close(); err != nil {
		t.Error(err)
	}
	first.Wait()
	if err := x.comms[0].Close(); err != nil {
		t.Error(err)
	}
	x.comms = nil
}

// Work that cannot be issued panics on the rank that came last, and no rank keeps
// waiting.
func TestPanicWakesPeers(t *testing.T) {
	x := ofTest(t, 2, 1, Options{})
	closed, err := x.places[1].NewStream("closed")
	if err == nil {
		err = closed.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	var first sync.WaitGroup
	first.Go(func() {
		s, b := x.streamAndBuffer(x.comms[0])
		x.comms[0].AllGather(s, b.Slice(0, 64), b.Slice(512, 32))
		wantError(t, x.comms[0].Err(), "rank 1 panicked in all-gather #1 of 32 bytes a rank")
	})
	for waiting(x.comms[0]) == 0 {
		runtime.Gosched()
	}
	_, b := x.streamAndBuffer(x.comms[1])
	wantPanic(t, "work on the closed stream", func() { x.comms[1].AllGather(closed, b.Slice(0, 64), b.Slice(512, 32)) })
	first.Wait()
}

// The error names one absent rank in the singular, and several in the plural.
func TestAbsentRanks(t *testing.T) {
	for want, ranks := range map[string][]int{"for rank 7;": {7}, "for ranks 7, 2;": {7, 2}, "for ranks 1, 2, 3;": {1, 2, 3}} {
		wantError(t, &Absent{Rank: 5, Call: "barrier #1", Ranks: ranks, Waited: time.Second}, "rank 5 waited 1s in barrier #1 "+want)
	}
}
