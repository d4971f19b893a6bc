package order_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"testing"

	"go.uber.org/goleak"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/order"
	"github.com/stowage-dev/stowage/memory"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func open() (device.Device, error) {
	return cpu.Open(cpu.Options{CopyThreads: 1, Capacity: [memory.Kinds]memory.Bytes{memory.MiB, memory.MiB}})
}

// passing is a program in which lanes hand cells of memory to each other: whoever
// writes one comes after who wrote it last, and marks that. Now and then all of it
// is settled, marks are exchanged, and a lane joins that was not there. If the host looks,
// all lanes are there, and what it sees to be over costs none of them a wait.
func passing(seed uint64, settled, looks bool) check.Program {
	return func(ck *check.Checker) error { return pass(ck, seed, settled, looks) }
}

func pass(ck *check.Checker, seed uint64, settled, looks bool) error {
	return check.On(open, func(dev device.Device) (err error) {
		rng := rand.New(rand.NewPCG(seed, 0))
		set := order.NewSet(dev)
		const cells = 4
		mem, err := dev.Alloc(memory.Device, cells, "cells")
		if err != nil {
			return err
		}
		var streams []device.Stream
		marks := make([]*order.Mark, cells)
		for range 60 {
			for len(streams) < 5 && (looks || rng.IntN(8) == 0) || len(streams) < 2 {
				s, err := dev.NewStream("lane")
				if err != nil {
					return err
				}
				streams = append(streams, s)
				if looks {
					set.Lane(s)
				}
			}
			if k := marks[rng.IntN(cells)]; looks && k != nil && rng.IntN(4) == 0 {
				for !k.Done() {
					runtime.Gosched()
				}
				for _, l := range set.Lanes() {
					l.Passed(k)
				}
			}
			if settled && rng.IntN(20) == 0 {
				if err := set.Sync(); err != nil {
					return err
				}
				for i, k := range marks {
					if marks[i] = nil; k != nil {
						set.Drop(k)
					}
				}
			}
			l := set.Lane(streams[rng.IntN(len(streams))])
			some := rng.Perm(cells)[:1+rng.IntN(2)]
			for _, i := range some {
				l.After(marks[i])
			}
			issued, waits := ck.Count(check.Waits), l.Waits()
			l.Flush()
			if n := ck.Count(check.Waits) - issued; waits != (n > 0) {
				return fmt.Errorf("Waits is %v, and %d waits are issued", waits, n)
			}
			for _, i := range some {
				l.Stream.Fill(mem.Slice(memory.Bytes(i), 1), byte(i))
				if marks[i] == nil {
					if marks[i], err = set.Mark(); err != nil {
						return err
					}
				}
				l.Record(marks[i])
			}
		}
		last := set.Lanes()[0]
		for _, l := range set.Lanes() {
			last.Join(l)
		}
		last.Flush()
		last.Stream.Fill(mem.All(), 0)
		last.Stream.Free(mem)
		for _, s := range streams {
			err = errors.Join(err, s.Close())
		}
		return errors.Join(err, set.Close())
	})(ck)
}

// Nothing is unordered, and no wait is issued that another implies.
func TestOrder(t *testing.T) {
	waits, seeds := map[bool]int{}, uint64(12)
	if testing.Short() {
		seeds = 2
	}
	for seed := range seeds {
		for i := range 4 {
			settled, looks := i%2 == 1, i > 1
			p := passing(seed, settled, looks)
			if err := check.Explore(check.Options{}, 3, p); err != nil {
				t.Fatal(seed, err)
			}
			e, err := check.DropEach(check.Waits, 0, p)
			if err != nil {
				t.Fatal(seed, err)
			}
			if waits[looks] += e.Total; e.Caught != e.Total {
				t.Error(seed, settled, looks, e)
			}
		}
	}
	t.Logf("%d waits, and %d where the host looks, each of them missed", waits[false], waits[true])
	if waits[true] == 0 || waits[false] == 0 {
		t.Error("there was nothing to wait for")
	}
}

// closeAll closes the streams of a set and its events.
func closeAll(set *order.Set) (err error) {
	for _, l := range set.Lanes() {
		err = errors.Join(err, l.Stream.Close())
	}
	return errors.Join(err, set.Close())
}

// What nobody can be waiting for costs no wait: a mark that was given back and is
// not recorded anew, and all that was settled, for a lane that was not there.
func TestNoWait(t *testing.T) {
	ck := check.New(check.Options{})
	err := check.On(open, func(dev device.Device) error {
		set := order.NewSet(dev)
		var lanes []*order.Lane
		for range 3 {
			s, err := dev.NewStream("lane")
			if err != nil {
				return err
			}
			if len(lanes) < 2 {
				lanes = append(lanes, set.Lane(s))
				continue
			}
			a, b := lanes[0], lanes[1]
			k, err := set.Mark()
			if err != nil {
				return err
			}
			a.Record(k)
			set.Drop(k)
			again, err := set.Mark()
			if err != nil {
				return err
			}
			if again != k {
				t.Error("a mark that was given back is not used again")
			}
			b.After(again)
			b.Flush()
			a.Record(again)
			if err := set.Sync(); err != nil { // and settles
				return err
			}
			c := set.Lane(s)
			c.After(again)
			c.Join(a)
			c.Flush()
		}
		return errors.Join(dev.Sync(), closeAll(set))
	})(ck)
	if n := ck.Count(check.Waits); err != nil || n != 0 {
		t.Errorf("%d waits, %v", n, err)
	}
}

// Of what a graph waits for, the marks that graphs record become part of it and the
// others come before it, each of which once: also one that a later wait inside
// implies, since work before that wait needs it.
func TestGather(t *testing.T) {
	ck := check.New(check.Options{})
	err := check.On(open, func(dev device.Device) error {
		set := order.NewSet(dev)
		var lanes [3]*order.Lane
		for i := range lanes {
			s, err := dev.NewStream("lane")
			if err != nil {
				return err
			}
			lanes[i] = set.Lane(s)
		}
		a, b, c := lanes[0], lanes[1], lanes[2]
		e, err := dev.NewEvent(device.External)
		if err != nil {
			return err
		}
		first, err1 := set.Mark()
		second, err2 := set.Mark()
		if err := errors.Join(err1, err2); err != nil {
			return err
		}
		a.Record(first)
		a.Record(second)
		c.After(second)
		c.Flush()
		c.Stream.Record(e)
		inside := order.External(e)
		c.Recorded(inside)
		before, parts := ck.Count(check.Waits), 0
		b.Gather(map[*order.Mark]bool{inside: true}, func(got device.Event) {
			if parts++; got != e {
				t.Error("another event")
			}
		})
		for _, k := range []*order.Mark{first, second, inside, inside, first} {
			b.After(k)
			b.Flush()
		}
		if n := ck.Count(check.Waits) - before; n != 0 || parts != 1 {
			t.Errorf("%d waits and %d inside before the graph is there", n, parts)
		}
		b.Gathered()
		b.After(inside)
		b.After(second)
		b.Flush()
		if n := ck.Count(check.Waits) - before; n != 1 || parts != 1 {
			t.Errorf("%d waits and %d inside", n, parts)
		}
		b.Gather(nil, nil)
		b.Record(first)
		a.Record(second)
		b.After(second)
		func() {
			defer func() {
				if recover() == nil {
					t.Error("a graph ends with waits")
				}
			}()
			b.Gathered()
		}()
		set.Settle()
		return errors.Join(dev.Sync(), e.Close(), closeAll(set))
	})(ck)
	if err != nil {
		t.Error(err)
	}
}

// Settling leaves nothing of a lane's past: no wait that it has not issued, no graph
// that it gathers, and nothing that it would wait for.
func TestSettleForgets(t *testing.T) {
	ck := check.New(check.Options{})
	err := check.On(open, func(dev device.Device) error {
		set := order.NewSet(dev)
		var lanes [2]*order.Lane
		for i := range lanes {
			s, err := dev.NewStream("lane")
			if err != nil {
				return err
			}
			lanes[i] = set.Lane(s)
		}
		a, b := lanes[0], lanes[1]
		first, err1 := set.Mark()
		second, err2 := set.Mark()
		mem, err3 := dev.Alloc(memory.Device, 1, "cell")
		if err := errors.Join(err1, err2, err3); err != nil {
			return err
		}
		waits := func(want int, what string) {
			t.Helper()
			if n := ck.Count(check.Waits); n != want {
				t.Errorf("%s: %d waits, want %d", what, n, want)
			}
		}
		a.Record(first)
		b.After(first)
		if err := set.Sync(); err != nil { // and settles
			return err
		}
		a.Record(first)
		if b.Waits() {
			t.Error("a wait from before is still to be issued")
		}
		b.Flush()
		waits(0, "a wait that was not issued before")

		a.Record(second)
		b.Record(first)
		if err := set.Sync(); err != nil {
			return err
		}
		a.After(first)
		a.Flush()
		b.After(second)
		b.Flush()
		waits(0, "a mark that was settled")

		b.Gather(nil, nil)
		if err := set.Sync(); err != nil { // the graph is given up
			return err
		}
		a.Stream.Fill(mem.All(), 1)
		a.Record(first)
		b.After(first)
		b.Flush()
		waits(1, "work behind a graph that was given up")
		b.Stream.Fill(mem.All(), 2)
		b.Stream.Free(mem)
		return errors.Join(dev.Sync(), closeAll(set))
	})(ck)
	if err != nil {
		t.Error(err)
	}
}

// A stream too many is told of.
func TestTooManyLanes(t *testing.T) {
	dev, err := open()
	if err != nil {
		t.Fatal(err)
	}
	set := order.NewSet(dev)
	for i := range order.MaxLanes + 1 {
		s, err := dev.NewStream("s")
		if err != nil {
			t.Fatal(err)
		}
		func() {
			defer func() {
				if x := recover(); (x != nil) != (i == order.MaxLanes) {
					t.Error(i, x)
				}
			}()
			if l := set.Lane(s); set.Lane(s) != l {
				t.Error("a stream has two lanes")
			}
		}()
	}
	if err := errors.Join(set.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A device without events makes no marks.
func TestNoEvents(t *testing.T) {
	dev, err := open()
	if err != nil {
		t.Fatal(err)
	}
	defer dev.Close()
	want := errors.New("no events")
	if k, err := order.NewSet(noEvents{dev, want}).Mark(); k != nil || err != want {
		t.Errorf("%v, %v", k, err)
	}
}

type noEvents struct {
	device.Device
	err error
}

func (d noEvents) NewEvent(device.EventFlags) (device.Event, error) { return nil, d.err }

// broken is a device whose streams cannot be waited for and whose events fail to close,
// each with its own error.
type broken struct {
	device.Device
	syncs  map[string]error
	events []error // of the next events
	closed int
	synced int
}

type brokenStream struct {
	device.Stream
	d   *broken
	err error
}

type brokenEvent struct {
	device.Event
	d   *broken
	err error
}

func (d *broken) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	return &brokenStream{s, d, d.syncs[name]}, err
}

func (d *broken) NewEvent(f device.EventFlags) (device.Event, error) {
	e, err := d.Device.NewEvent(f)
	x := &brokenEvent{e, d, d.events[0]}
	d.events = d.events[1:]
	return x, err
}

func (s *brokenStream) Sync() error {
	s.d.synced++
	return errors.Join(s.Stream.Sync(), s.err)
}

func (e *brokenEvent) Close() error {
	e.d.closed++
	return errors.Join(e.Event.Close(), e.err)
}

// Sync and Close return the first error, and wait for and close the rest all the same.
func TestFirstErrorCounts(t *testing.T) {
	a, b := errors.New("a"), errors.New("b")
	for _, c := range []struct{ first, second, want error }{{nil, nil, nil}, {a, nil, a}, {nil, b, b}, {a, b, a}} {
		inner, err := open()
		if err != nil {
			t.Fatal(err)
		}
		dev := &broken{Device: inner, syncs: map[string]error{"first": c.first, "second": c.second}, events: []error{c.first, c.second}}
		set := order.NewSet(dev)
		for _, name := range []string{"first", "second"} {
			s, err := dev.NewStream(name)
			if err != nil {
				t.Fatal(err)
			}
			k, err := set.Mark()
			if err != nil {
				t.Fatal(err)
			}
			set.Lane(s).Recorded(k)
			set.Lanes()[0].After(k)
		}
		if err := set.Sync(); !errors.Is(err, c.want) || c.want == a && errors.Is(err, b) || dev.synced != 2 {
			t.Errorf("Sync returns %v, want %v; %d streams are waited for", err, c.want, dev.synced)
		}
		if set.Lanes()[0].Waits() {
			t.Error("a lane waits for what the host has waited for")
		}
		if err := set.Close(); !errors.Is(err, c.want) || c.want == a && errors.Is(err, b) || dev.closed != 2 {
			t.Errorf("Close returns %v, want %v; %d events are closed", err, c.want, dev.closed)
		}
		if err := inner.Close(); err != nil {
			t.Error(err)
		}
	}
}
