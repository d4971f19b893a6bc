// This file owns captures on a device: numbers equal the eager run's.

package capture

import (
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

func cpuDevice() (device.Device, error) { return cpu.Open(cpu.Options{CopyThreads: 1}) }

// blend does not commute and reads what it writes: a launch lost, made twice or
// out of order leaves other numbers.
var blend = device.Kernel{Name: "capture_blend", Go: func(l *device.Launch) {
	a := l.Args()
	dst, src := device.Slice[uint64](a[0], words), device.Slice[uint64](a[1], words)
	for i := range dst {
		dst[i] = dst[i]*6364136223846793005 + src[i] + a[2]
	}
}}

const words = 32

// toy is a model of a few layers: its state runs through them forward and
// backward, and each forward pass is copied to the host on a stream of its own and
// read by the backward pass.
type toy struct {
	dev          device.Device
	compute, out device.Stream
	state, seen  *device.Buffer
	saved        *device.Buffer // on the host, by layer
	fork, join   device.Event
	generation   int
}

const layers = 2

func newToy(dev device.Device) (y *toy, err error) {
	y = &toy{dev: dev}
	if y.compute, err = dev.NewStream("compute"); err != nil {
		return nil, err
	}
	if y.out, err = dev.NewStream("copy-out"); err != nil {
		return nil, err
	}
	for _, e := range []*device.Event{&y.fork, &y.join} {
		if *e, err = dev.NewEvent(0); err != nil {
			return nil, err
		}
	}
	if y.state, err = dev.Alloc(memory.Device, words*8, "state"); err != nil {
		return nil, err
	}
	if y.seen, err = dev.Alloc(memory.Device, words*8, "seen"); err != nil {
		return nil, err
	}
	if y.saved, err = dev.Alloc(memory.Host, layers*words*8, "saved"); err != nil {
		return nil, err
	}
	y.compute.Fill(y.state.All(), 1)
	y.compute.Fill(y.seen.All(), 2)
	return y, nil
}

func (y *toy) close() error {
	for _, b := range []*device.Buffer{y.state, y.seen, y.saved} {
		y.compute.Free(b)
	}
	return errors.Join(y.compute.Close(), y.out.Close(), y.fork.Close(), y.join.Close())
}

func (y *toy) blend(dst, src device.Range, add int) {
	l := device.NewLaunch(&blend, 1, words)
	l.Write(dst)
	l.Read(src)
	l.Arg(uint64(add))
	y.compute.Launch(l)
}

// pass is one layer, forward or backward. The copy forks and joins, so that the
// pass can be a graph.
func (y *toy) pass(layer int, backward bool) error {
	kept := y.saved.Slice(memory.Bytes(layer)*words*8, words*8)
	if backward {
		y.blend(y.state.All(), kept, layer+100)
		y.blend(y.seen.All(), y.state.All(), layer)
		return nil
	}
	y.blend(y.state.All(), y.seen.All(), layer)
	y.compute.Record(y.fork)
	y.out.Wait(y.fork)
	y.out.Copy(kept, y.state.All())
	y.out.Record(y.join)
	y.blend(y.seen.All(), y.state.All(), 7)
	y.compute.Wait(y.join)
	return nil
}

// move puts the state elsewhere: graphs that hold its address must not be replayed.
func (y *toy) move() error {
	b, err := y.dev.Alloc(memory.Device, words*8, "state")
	if err != nil {
		return err
	}
	y.compute.Copy(b.All(), y.state.All())
	y.compute.Free(y.state)
	y.state = b
	y.generation++
	return nil
}

func (y *toy) result() ([]byte, error) {
	got := make([]byte, 2*words*8)
	err := errors.Join(y.compute.Download(got[:words*8], y.state.All()), y.compute.Download(got[words*8:], y.seen.All()))
	return got, err
}

// manner is how the steps of a run are done.
type manner uint8

const (
	eager manner = iota
	byLayer
	whole
)

const (
	steps  = 7
	warmUp = 2
	moving = 5 // the step before which the state moves
)

// train runs steps with an evaluation, which changes nothing that is compared,
// behind each, and gives the numbers and the counts.
func train(dev device.Device, how manner) (got []byte, c Counts, err error) {
	y, err := newToy(dev)
	if err != nil {
		return nil, c, err
	}
	s := New(OnStream(y.compute), Config{WarmUp: warmUp, Generation: func() int { return y.generation }})
	do := func(key Key, body func() error) error {
		if how == byLayer && key.Scope == memory.FullIteration || how == whole && key.Scope != memory.FullIteration || how == eager {
			return body()
		}
		return s.Run(key, body)
	}
	step := func(phase memory.Phase) error {
		return do(Key{Key: memory.Key{Phase: phase, Microbatches: 1}, Scope: memory.FullIteration}, func() error {
			for i := range 2 * layers {
				layer, backward := i, i >= layers
				if backward {
					layer = 2*layers - 1 - i
				}
				err := do(Key{Key: memory.Key{Phase: phase, Microbatches: 1}, Scope: memory.MLP, Layer: layer, Backward: backward}, func() error { return y.pass(layer, backward) })
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	for i := range steps {
		if i == moving {
			err = errors.Join(err, y.move())
		}
		err = errors.Join(err, step(memory.Train))
		if i%2 == 1 {
			err = errors.Join(err, step(memory.Evaluate))
		}
	}
	got, failed := y.result()
	return got, s.Counts(), errors.Join(err, failed, s.Close(), y.close())
}

// SPEC S4.1, S4.6: a step captured in scopes or whole, with the state moved in
// between, gives the numbers of the eager run, under any schedule of the streams.
func TestCapturedEqualsEager(t *testing.T) {
	var want []byte
	numbers := func(how manner, calls, replays, captures int) check.Program {
		return check.On(cpuDevice, func(dev device.Device) error {
			got, c, err := train(dev, how)
			if err != nil {
				return err
			}
			if want == nil {
				want = got
			}
			if !slices.Equal(got, want) {
				return errors.New("the numbers differ from the eager run's")
			}
			if c.Calls != calls || c.Replays != replays || c.Captures != captures || c.Refused+c.Failed+c.Moved != 0 {
				return fmt.Errorf("counts %+v, want %d calls, %d replays, %d captures", c, calls, replays, captures)
			}
			return nil
		})
	}
	seeds := 20
	if testing.Short() {
		seeds = 3
	}
	// Seven steps of training and three of evaluation: two of each are warm-up.
	// Training captures at the third and, because the state moves, at the sixth;
	// evaluation at its third.
	const calls, replays, captures = 10, 3, 2 + 1
	for _, c := range []struct {
		name string
		how  manner
		each int
	}{{"eager", eager, 0}, {"by layer", byLayer, 2 * layers}, {"whole", whole, 1}} {
		t.Run(c.name, func(t *testing.T) {
			if err := check.Explore(check.Options{}, seeds, numbers(c.how, calls*c.each, replays*c.each, captures*c.each)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// What cannot be captured runs eagerly, and the stream works on.
func TestUncapturable(t *testing.T) {
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	y, err := newToy(dev)
	if err != nil {
		t.Fatal(err)
	}
	s := New(OnStream(y.compute), Config{WarmUp: 1})
	key := Key{Key: memory.Key{Microbatches: 1}, Scope: memory.MoE}
	for i := range 4 {
		value := byte(i + 10)
		err := s.Run(key, func() error {
			y.compute.Upload(y.state.All(), slices.Repeat([]byte{value}, words*8))
			return nil
		})
		got, failed := y.result()
		if err != nil || failed != nil || got[0] != value {
			t.Fatalf("call %d: %v, %v, first byte %d", i, err, failed, got[0])
		}
	}
	if st := s.Status(key); st.State != StateRefused || st.Eager != 4 || s.Counts().Refused != 1 || s.Held() != 0 {
		t.Errorf("%+v, %+v", st, s.Counts())
	}
	if err := errors.Join(s.Close(), y.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// counted is a stream whose captures end in graphs that count.
type counted struct {
	device.Stream
	made, closed int
	failed       error // of EndCapture, besides the graph
	bad          error // of Close
}

type countedGraph struct {
	device.Graph
	s *counted
}

func (s *counted) EndCapture() (device.Graph, error) {
	g, err := s.Stream.EndCapture()
	if err != nil {
		return nil, err
	}
	s.made++
	return countedGraph{g, s}, s.failed
}

func (g countedGraph) Close() error {
	g.s.closed++
	return errors.Join(g.Graph.Close(), g.s.bad)
}

// A graph that nobody gets is closed: that of a body that fails, of one that panics, and
// of a capture that ends with an error.
func TestNoGraphIsLeft(t *testing.T) {
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	y, err := newToy(dev)
	if err != nil {
		t.Fatal(err)
	}
	s := &counted{Stream: y.compute}
	r := &streamRecorder{s}
	left := func(want int, what string) {
		t.Helper()
		if n := s.made - s.closed; n != want {
			t.Errorf("%s: %d graphs are left, want %d", what, n, want)
		}
	}
	pass := func() error { return y.pass(0, false) }

	if _, err := r.record(func() error { return errors.Join(pass(), errBody) }); !errors.Is(err, errBody) {
		t.Errorf("the body's error is %v", err)
	}
	left(0, "a body that fails")
	mustPanic(t, "body", func() { _, _ = r.record(func() error { _ = pass(); panic("body") }) })
	left(0, "a body that panics")
	s.failed, s.bad = errors.New("late"), errors.New("stuck")
	if g, err := r.record(pass); g != nil || !errors.Is(err, s.failed) || !errors.Is(err, s.bad) {
		t.Errorf("a capture that ends with an error: %v, %v", g, err)
	}
	left(0, "a capture that ends with an error")
	s.failed, s.bad = nil, nil
	g, err := r.record(pass)
	if err != nil {
		t.Fatal(err)
	}
	left(1, "a capture that went well")
	if err := errors.Join(g.Close(), y.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A body that fails or panics during its capture leaves the stream as it was, and
// so does a capture inside another.
func TestCaptureLeavesTheStream(t *testing.T) {
	dev, err := cpuDevice()
	if err != nil {
		t.Fatal(err)
	}
	y, err := newToy(dev)
	if err != nil {
		t.Fatal(err)
	}
	before, err := y.result()
	if err != nil {
		t.Fatal(err)
	}
	r := OnStream(y.compute)
	if c, err := r.Capture(func() error { return errors.Join(y.pass(0, false), errBody) }); c != nil || !errors.Is(err, errBody) {
		t.Errorf("%v, %v", c, err)
	}
	mustPanic(t, "body", func() {
		_, _ = r.Capture(func() error { _ = y.pass(0, false); panic("body") })
	})
	var inner error
	c, err := r.Capture(func() error {
		_, inner = r.Capture(func() error { return nil })
		return nil
	})
	var refused *device.CaptureError
	if err != nil || !errors.As(inner, &refused) {
		t.Errorf("outside %v, inside %v", err, inner)
	}
	after, err := y.result()
	if err != nil || y.compute.Capturing() || !slices.Equal(before, after) {
		t.Errorf("%v, capturing %v; numbers equal: %v", err, y.compute.Capturing(), slices.Equal(before, after))
	}
	if err := errors.Join(c.Close(), y.close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
