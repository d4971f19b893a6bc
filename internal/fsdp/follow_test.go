// This file owns the tests of consecutive steps, on several streams and with delays.

package fsdp

import (
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/bucket"
	"github.com/stowage-dev/stowage/internal/comm"
	"github.com/stowage-dev/stowage/memory"
)

// A stream that is new to a step waits for the steps before it, whose memory it may get.
func TestNewStreamComesAfterEarlierSteps(t *testing.T) {
	program := check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLone(dev, Config{Units: units(2), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		if err != nil {
			return err
		}
		other, err := dev.NewStream("other")
		if err != nil {
			return err
		}
		for i, s := range []device.Stream{l.s, other} {
			step := l.p.Begin(memory.Key{Microbatches: i}, l.s)
			g, err := step.Grad(0, s)
			if err != nil {
				return err
			}
			g.Done()
			if err := step.End(); err != nil {
				return err
			}
		}
		return errors.Join(l.s.Sync(), l.close(), other.Close())
	})
	if err := check.Explore(check.Options{}, 5, program); err != nil {
		t.Fatal(err)
	}
}

// train runs a step of lone units, forward and backward, with an optimiser that copies.
func (l *lone) train(s device.Stream, units int) error {
	step := l.p.Begin(memory.Key{}, s)
	for i := range 2 * units {
		unit := min(i, 2*units-1-i)
		u, err := step.Use(unit, s)
		if err != nil {
			return err
		}
		if i >= units {
			g, err := step.Grad(unit, s)
			if err != nil {
				return err
			}
			s.Copy(g.Param(0), u.Param(0))
			g.Done()
		}
		u.Done()
	}
	if err := step.End(); err != nil {
		return err
	}
	for _, x := range l.p.Shards() {
		s.Copy(x.Weights, x.Grads)
	}
	l.p.Cast(s)
	return nil
}

// SPEC S2.1: consecutive steps may run on several streams that the caller orders, and any
// of them may be captured.
func TestStepsOnSeveralStreams(t *testing.T) {
	const steps = 5
	for captured := range 1 << steps {
		if testing.Short() && captured%5 != 0 {
			continue
		}
		program := check.On(cpuDevice, func(dev device.Device) error {
			l, err := newLone(dev, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
			if err != nil {
				return err
			}
			other, err := dev.NewStream("other")
			if err != nil {
				return err
			}
			over, err := dev.NewEvent(0)
			if err != nil {
				return err
			}
			var graphs []device.Graph
			for i := range steps {
				s, next := l.s, other
				if i%2 == 1 {
					s, next = next, s
				}
				if captured>>i&1 == 0 {
					err = l.train(s, 3)
				} else {
					s.BeginCapture()
					err = l.train(s, 3)
					g, failed := s.EndCapture()
					if err = errors.Join(err, failed); err == nil {
						graphs = append(graphs, g)
						s.Replay(g)
					}
				}
				if err != nil {
					return err
				}
				s.Record(over)
				next.Wait(over)
			}
			err = dev.Sync()
			for _, g := range graphs {
				err = errors.Join(err, g.Close())
			}
			return errors.Join(err, over.Close(), l.close(), other.Close())
		})
		if err := check.Explore(check.Options{}, 2, program); err != nil {
			t.Fatalf("captured %b: %v", captured, err)
		}
	}
}

// executed counts the gathers that the device has executed.
type executed struct {
	comm.Comm
	n atomic.Int64
}

func (c *executed) AllGather(s device.Stream, dst, src device.Range) {
	c.Comm.AllGather(s, dst, src)
	s.Host(func() { c.n.Add(1) })
}

// SPEC S2.1: a full pool holds back streams, not the host, and fails nothing. While a
// unit is in use, no more units are gathered than the pool has room for, and the host can
// issue a whole step behind it.
func TestFullPoolHoldsStreamsBack(t *testing.T) {
	for _, kind := range []bucket.PoolKind{bucket.Rotary, bucket.Fixed, bucket.Max, bucket.Arena, bucket.Recorded} {
		for prefetch := 1; prefetch <= 3; prefetch++ {
			dev, err := cpuDevice()
			if err != nil {
				t.Fatal(err)
			}
			cs, err := comm.NewLocal([]device.Device{dev}, comm.Options{})
			if err != nil {
				t.Fatal(err)
			}
			seen := &executed{Comm: cs[0]}
			var equal []FSDPUnit
			for i := range 8 {
				equal = append(equal, FSDPUnit{Name: fmt.Sprint("unit ", i), Params: []Param{{Name: "w", Shape: []int64{100}, Type: BF16}}})
			}
			l, err := newLone(dev, Config{Groups: []RankGroup{{Comm: seen}}, Units: equal, Pool: kind, Prefetch: prefetch, Behind: 1})
			if err != nil {
				t.Fatal(err)
			}
			dev.Freeze()
			if err := errors.Join(l.train(l.s, 8), l.s.Sync()); err != nil {
				t.Fatal(err)
			}
			gate := make(chan struct{})
			before, done := dev.Counters(), seen.n.Load()
			step := l.p.Begin(memory.Key{}, l.s)
			for i := range 16 {
				unit := min(i, 15-i)
				u, err := step.Use(unit, l.s)
				if err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					l.s.Host(func() { <-gate })
				}
				if i >= 8 {
					g, err := step.Grad(unit, l.s)
					if err != nil {
						t.Fatal(err)
					}
					g.Done()
				}
				u.Done()
			}
			if err := step.End(); err != nil {
				t.Fatal(err)
			}
			if after := dev.Counters(); after.HostSyncs != before.HostSyncs || after.HostReads != before.HostReads {
				t.Error("the host waited")
			}
			for seen.n.Load() < done+int64(prefetch)+1 {
				time.Sleep(time.Millisecond)
			}
			time.Sleep(5 * time.Millisecond)
			if n := seen.n.Load() - done; n != int64(prefetch)+1 {
				t.Errorf("%v, prefetch %d: %d units were gathered while the first was in use", kind, prefetch, n)
			}
			close(gate)
			if err := errors.Join(l.s.Sync(), l.p.Close(), l.s.Close(), l.comm.Close(), dev.Close()); err != nil {
				t.Error(err)
			}
		}
	}
}

// Read and Load wait for all work that is under way between steps.
func TestLoadAndReadWait(t *testing.T) {
	program := check.On(cpuDevice, func(dev device.Device) error {
		l, err := newLone(dev, Config{Units: units(3), Pool: bucket.Arena, Prefetch: 1, Behind: 1})
		if err != nil {
			return err
		}
		for i := range 3 {
			if err := l.train(l.s, 3); err != nil {
				return err
			}
			if i%2 == 0 {
				if _, err := l.p.Read(1, 0, Grads); err != nil {
					return err
				}
			}
			if i > 0 {
				if err := l.p.Load(1, 0, make([]float32, 240)); err != nil {
					return err
				}
			}
		}
		return errors.Join(l.train(l.s, 3), l.close())
	})
	if err := check.Explore(check.Options{}, 3, program); err != nil {
		t.Fatal(err)
	}
}
