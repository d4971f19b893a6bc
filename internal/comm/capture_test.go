// This file owns the tests of graphs of several ranks: how they fail, and what the host
// does. check_test.go compares their results.

package comm

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// SPEC S7.4: one call of the host issues the work of all ranks.
func TestOneReplay(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	before := make([]device.Counters, 3)
	err := Run(x.comms, func(c Comm) error {
		s, b := x.streamAndBuffer(c)
		g, err := c.(Capturer).Capture(s, func() error {
			c.AllGather(s, b.Slice(0, 48), b.Slice(512, 16))
			return c.Err()
		})
		if err != nil {
			return err
		}
		defer g.Close()
		before[c.Rank()] = x.places[c.Rank()].Counters()
		for range 5 {
			if err := g.Replay(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for r, at := range x.places {
		got, want := at.Counters(), before[r]
		if r == 0 {
			want.Replays += 5
		}
		if got != want {
			t.Errorf("rank %d: %+v, want %+v", r, got, want)
		}
	}
}

// If a body fails or panics on one rank, all ranks leave the capture, and nothing of it is
// executed.
func TestFailedBody(t *testing.T) {
	for name, drive := range map[string]driver{"run": Run, "lockstep": Lockstep} {
		for i := range 4 {
			n, broken := 3, i
			if i == 3 { // a single rank
				n, broken = 1, 0
			}
			for _, panics := range []bool{false, true} {
				t.Run(fmt.Sprintf("%s, rank %d of %d, panic %v", name, broken, n, panics), func(t *testing.T) {
					x := ofTest(t, n, 1, Options{})
					var err error
					p := panicOf(func() {
						err = drive(x.comms, func(c Comm) error {
							s, b := x.streamAndBuffer(c)
							g, err := c.(Capturer).Capture(s, func() error {
								s.Fill(b.All(), 1)
								c.Barrier(s)
								switch {
								case c.Rank() == broken && panics:
									panic(errBroken)
								case c.Rank() == broken:
									return errBroken
								}
								c.Barrier(s)
								return c.Err()
							})
							if g != nil || err == nil {
								t.Errorf("rank %d: a graph, and error %v", c.Rank(), err)
							}
							return err
						})
					})
					switch {
					case panics && p != any(errBroken):
						t.Errorf("panic %v", p)
					case !panics:
						wantError(t, err, fmt.Sprintf("rank %d: the disk is full", broken))
						if !errors.Is(err, errBroken) {
							t.Error(err)
						}
					}
					for r, at := range x.places {
						got := make([]byte, 1)
						if err := at.streams[0].Download(got, at.bufs[0].Slice(0, 1)); err != nil || got[0] != at.first[0] || at.streams[0].Capturing() {
							t.Errorf("rank %d: the stream is captured, or its work was done: %v", r, err)
						}
					}
				})
			}
		}
	}
}

// Work that cannot be captured gives all ranks the same error. The communicator then works
// as before.
func TestSpoiltCapture(t *testing.T) {
	x := ofTest(t, 3, 1, Options{})
	err := Run(x.comms, func(c Comm) error {
		s, b := x.streamAndBuffer(c)
		_, err := c.(Capturer).Capture(s, func() error {
			if c.Rank() == 1 {
				s.Upload(b.Slice(0, 1), []byte{1})
			}
			c.Barrier(s)
			return c.Err()
		})
		var spoilt *device.CaptureError
		if !errors.As(err, &spoilt) || spoilt.Stream != "rank 1 stream 0" {
			t.Errorf("rank %d: %v", c.Rank(), err)
		}
		c.Barrier(s)
		return c.Err()
	})
	if err != nil {
		t.Error(err)
	}
}

// A graph is closed once, by the first rank that closes its end. Ranks that do not replay
// the same graph panic.
func TestGraphMisuse(t *testing.T) {
	x := ofTest(t, 2, 1, Options{})
	graphs := make([][2]Graph, 2)
	err := Run(x.comms, func(c Comm) error {
		s, _ := x.streamAndBuffer(c)
		for i := range 2 {
			g, err := c.(Capturer).Capture(s, func() error { c.Barrier(s); return nil })
			if err != nil {
				return err
			}
			graphs[c.Rank()][i] = g
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	wantPanic(t, "but rank", func() {
		_ = Run(x.comms, func(c Comm) error { return graphs[c.Rank()][c.Rank()].Replay() })
	})
	for _, both := range graphs {
		for _, g := range both {
			if err := g.Close(); err != nil {
				t.Error(err)
			}
		}
	}
	s := x.places[0].streams[0]
	s.BeginCapture()
	wantPanic(t, "stream rank 0 stream 0 is being captured already; end that capture first", func() { _, _ = x.comms[0].(Capturer).Capture(s, nil) })
	if g, err := s.EndCapture(); err != nil || g.Close() != nil {
		t.Error(err)
	}
}
