// This file owns the tests of wrong arguments.

package comm

import (
	"errors"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Misuse panics on the rank that is wrong, before it meets any other.
func TestMisuse(t *testing.T) {
	x := ofTest(t, 4, 1, Options{})
	c := x.comms[1]
	s, b := x.streamAndBuffer(c)
	at := func(off, n memory.Bytes) device.Range { return b.Slice(off, n) }
	parts := func(ps ...Part) []Part { return append(ps, make([]Part, 4-len(ps))...) }
	dead, err := x.places[1].Alloc(memory.Device, 64, "dead")
	if err != nil {
		t.Fatal(err)
	}
	gone := dead.All()
	s.Free(dead)
	for want, f := range map[string]func(){
		"all-gather on rank 1: expected a destination of 64 bytes for sources of 16 bytes, got 60":                    func() { c.AllGather(s, at(0, 60), at(512, 16)) },
		"the source overlaps the destination, but is not the rank's own place":                                        func() { c.AllGather(s, at(0, 64), at(32, 16)) },
		"reduce-scatter on rank 1: expected a source of 32 bytes for destinations of 8 bytes, got 64":                 func() { c.ReduceScatter(s, at(0, 8), at(512, 64), F32, Sum) },
		"the destination overlaps the source, but is not the rank's own place":                                        func() { c.ReduceScatter(s, at(0, 16), at(0, 64), F32, Sum) },
		"expected whole numbers of 4 bytes at a multiple of 4, got bytes [2,10) of device buffer \"rank 1 buffer 0\"": func() { c.AllReduce(s, at(2, 8), at(2, 8), F32, Sum) },
		"expected whole numbers of 2 bytes at a multiple of 2, got bytes [0,7) of device buffer \"rank 1 buffer 0\"":  func() { c.AllReduce(s, at(0, 7), at(0, 7), BF16, Sum) },
		"expected a known type and operation, got Type(2) and sum":                                                    func() { c.AllReduce(s, at(0, 8), at(0, 8), 2, Sum) },
		"expected a known type and operation, got f32 and Op(3)":                                                      func() { c.AllReduce(s, at(0, 8), at(0, 8), F32, 3) },
		"all-reduce on rank 1: expected a destination of 8 bytes, got 12":                                             func() { c.AllReduce(s, at(0, 12), at(512, 8), F32, Sum) },
		"the two ranges overlap, but are not the same":                                                                func() { c.AllReduce(s, at(0, 8), at(4, 8), F32, Sum) },
		"and divide into 4 equal parts":                                                                               func() { c.AllToAll(s, at(0, 66), at(512, 66)) },
		"expected 4 parts of each, one for each rank":                                                                 func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts()[:3]) },
		"send[1] is bytes [60,68), which lie outside":                                                                 func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(Part{}, Part{60, 8}), parts()) },
		"recv[0] is bytes [0,65), which lie outside":                                                                  func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{0, 65})) },
		"the parts received from ranks 0 and 2 overlap":                                                               func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{0, 9}, Part{}, Part{8, 9})) },
		"the parts received from ranks 0 and 1 overlap":                                                               func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{8, 8}, Part{4, 8})) },
		"the parts received from ranks 1 and 3 overlap": func() {
			c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{0, 8}, Part{8, 24}, Part{32, 8}, Part{16, 1}))
		},
		"broadcast on rank 1: expected a rank below 4, got 4":       func() { c.Broadcast(s, at(0, 8), 4) },
		"send on rank 1: expected a rank below 4, got -1":           func() { c.Send(s, at(0, 8), -1) },
		"send on rank 1: a rank cannot send a message to itself":    func() { c.Send(s, at(0, 8), 1) },
		"receive on rank 1: a rank cannot send a message to itself": func() { c.Recv(s, at(0, 8), 1) },
		"exchange on rank 1: expected a rank below 4, got 7":        func() { c.Exchange(s, nil, []Message{{7, at(0, 8)}}) },
		"exchange on rank 1: bytes [8,16) of device buffer \"rank 1 buffer 0\" is received into, but another message uses it": func() {
			c.Exchange(s, []Message{{0, at(0, 9)}}, []Message{{0, at(8, 8)}})
		},
		"exchange on rank 1: bytes [0,9) of device buffer \"rank 1 buffer 0\" is received into, but another message uses it": func() {
			c.Exchange(s, nil, []Message{{0, at(8, 8)}, {2, at(0, 9)}})
		},
		"barrier on rank 1: the stream is nil":     func() { c.Barrier(nil) },
		"use after free of device buffer \"dead\"": func() { c.Send(s, gone, 0) },
		"rank 1 calls Split with [];":              func() { _, _ = c.Split(nil) },
		"rank 1 calls Split with [0 2]":            func() { _, _ = c.Split([]int{0, 2}) },
		"rank 1 calls Split with [1 1]":            func() { _, _ = c.Split([]int{1, 1}) },
		"rank 1 calls Split with [1 4]":            func() { _, _ = c.Split([]int{1, 4}) },
	} {
		wantPanic(t, want, f)
	}
	for _, o := range []Options{{}, {Patience: -1}} {
		if _, err := NewLocal(nil, o); err == nil {
			t.Error("no devices make a communicator")
		}
	}
	only, err := c.Split([]int{1})
	if err != nil {
		t.Fatal(err)
	}
	// An empty range stands for no bytes.
	only.AllGather(s, device.Range{}, device.Range{})
	only.AllReduce(s, device.Range{}, device.Range{}, F32, Sum)
	only.Exchange(s, nil, nil)
	only.AllToAllV(s, device.Range{}, device.Range{}, make([]Part, 1), make([]Part, 1))
	if err := only.Close(); err != nil {
		t.Error(err)
	}
	wantPanic(t, "gather is called on rank 1 after it closed the communicator", func() { _, _ = only.Gather(nil) })
	wantPanic(t, "barrier is called on rank 1 after it closed the communicator", func() { only.Barrier(s) })
	wantPanic(t, "rank 1 closes its communicator twice", func() { _ = only.Close() })
}

// Ranges overlap if they share a byte: an empty one shares none.
func TestOverlap(t *testing.T) {
	x := ofTest(t, 1, 1, Options{})
	_, b := x.streamAndBuffer(x.comms[0])
	at := func(off, n memory.Bytes) device.Range { return b.Slice(off, n) }
	for _, c := range []struct {
		a, b device.Range
		want bool
	}{
		{at(0, 8), at(0, 8), true},
		{at(0, 8), at(7, 8), true},
		{at(0, 8), at(8, 8), false},
		{at(0, 8), at(2, 2), true},
		{at(0, 8), at(4, 0), false},
		{at(0, 8), at(0, 0), false},
	} {
		if overlap(c.a, c.b) != c.want || overlap(c.b, c.a) != c.want {
			t.Errorf("%v and %v overlap: want %v", c.a, c.b, c.want)
		}
	}
}

// The declarations of reductions are kept for the next step, and not without end.
func TestRestsAreBounded(t *testing.T) {
	g := &Reducer{rests: map[restKey][]device.Access{}}
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	b, err := dev.Alloc(memory.Device, 4*(mostRests+kernels.ReduceInline+10), "test")
	if err != nil {
		t.Fatal(err)
	}
	srcs := make([]device.Range, kernels.ReduceInline+2)
	for i := range mostRests + 5 {
		for k := range srcs {
			srcs[k] = b.Slice(memory.Bytes(4*(i+k)), 4)
		}
		first := g.rest(srcs)
		if again := g.rest(srcs); len(first) != 2 || &again[0] != &first[0] {
			t.Fatalf("declarations of %d sources are made twice: %v, %v", len(srcs), first, again)
		}
		if len(g.rests) > mostRests {
			t.Fatalf("%d declarations are kept", len(g.rests))
		}
	}
	s.Free(b)
	if err := errors.Join(s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}

// A rank that goes on after a failure is told of the first call that was not made.
func TestFirstCallThatWasNotMade(t *testing.T) {
	dev, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	s, err := dev.NewStream("s")
	if err != nil {
		t.Fatal(err)
	}
	cs, err := NewLocal([]device.Device{dev, dev}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := dev.Alloc(memory.Device, 64, "test")
	if err != nil {
		t.Fatal(err)
	}
	gone := errors.New("no more data")
	cs[1].Abort(gone)
	cs[0].Barrier(s)
	cs[0].Broadcast(s, b.All(), 0)
	cs[0].AllReduce(s, b.All(), b.All(), F32, Sum)
	var f *Failure
	if err := cs[0].Err(); !errors.As(err, &f) || !errors.Is(err, gone) || f.Call != "barrier #1" || f.By != 1 || f.Rank != 0 {
		t.Errorf("%+v", f)
	}
	if err := cs[1].Err(); !errors.As(err, &f) || f.Call != "" || f.Rank != 1 || f.By != 1 {
		t.Errorf("%+v", f)
	}
	s.Free(b)
	if err := errors.Join(cs[0].Close(), cs[1].Close(), s.Close(), dev.Close()); err != nil {
		t.Error(err)
	}
}
