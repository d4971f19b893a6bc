// This file owns the tests of arguments that are wrong.

package comm

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
)

// Misuse panics on the rank that is wrong, before any other is met.
func TestMisuse(t *testing.T) {
	x := ofTest(t, 4, 1, Options{})
	c := x.comms[1]
	s, b := x.of(c)
	at := func(off, n device.Bytes) device.Range { return b.Slice(off, n) }
	parts := func(ps ...Part) []Part { return append(ps, make([]Part, 4-len(ps))...) }
	dead, err := x.places[1].Alloc(device.Accel, 64, "dead")
	if err != nil {
		t.Fatal(err)
	}
	gone := dead.All()
	s.Free(dead)
	for want, f := range map[string]func(){
		"all-gather on rank 1: 16 bytes of each rank do not fill 60 bytes":            func() { c.AllGather(s, at(0, 60), at(512, 16)) },
		"the source is neither the rank's own place":                                  func() { c.AllGather(s, at(0, 64), at(32, 16)) },
		"reduce-scatter on rank 1: 64 bytes are not a part of 8 bytes for each":       func() { c.ReduceScatter(s, at(0, 8), at(512, 64), F32, Sum) },
		"the destination is neither the rank's own place":                             func() { c.ReduceScatter(s, at(0, 16), at(0, 64), F32, Sum) },
		"bytes [2,10) of device buffer \"rank 1 buffer 0\" is no run of numbers of 4": func() { c.AllReduce(s, at(2, 8), at(2, 8), F32, Sum) },
		"bytes [0,7) of device buffer \"rank 1 buffer 0\" is no run of numbers of 2":  func() { c.AllReduce(s, at(0, 7), at(0, 7), BF16, Sum) },
		"Type(2) and sum are not known":                                               func() { c.AllReduce(s, at(0, 8), at(0, 8), 2, Sum) },
		"f32 and Op(3) are not known":                                                 func() { c.AllReduce(s, at(0, 8), at(0, 8), F32, 3) },
		"all-reduce on rank 1: 8 bytes cannot become 12 bytes":                        func() { c.AllReduce(s, at(0, 12), at(512, 8), F32, Sum) },
		"the two ranges are neither the same nor apart":                               func() { c.AllReduce(s, at(0, 8), at(4, 8), F32, Sum) },
		"and of a part for each of 4 ranks":                                           func() { c.AllToAll(s, at(0, 66), at(512, 66)) },
		"there must be one for each of 4 ranks":                                       func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts()[:3]) },
		"send[1] is bytes [60,68), which lie outside of":                              func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(Part{}, Part{60, 8}), parts()) },
		"recv[0] is bytes [0,65), which lie outside of":                               func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{0, 65})) },
		"the parts received from ranks 0 and 2 overlap":                               func() { c.AllToAllV(s, at(0, 64), at(512, 64), parts(), parts(Part{0, 9}, Part{}, Part{8, 9})) },
		"broadcast on rank 1: there is no rank 4 among 4":                             func() { c.Broadcast(s, at(0, 8), 4) },
		"send on rank 1: there is no rank -1 among 4":                                 func() { c.Send(s, at(0, 8), -1) },
		"send on rank 1: a rank passes no message to itself":                          func() { c.Send(s, at(0, 8), 1) },
		"receive on rank 1: a rank passes no message to itself":                       func() { c.Recv(s, at(0, 8), 1) },
		"exchange on rank 1: there is no rank 7 among 4":                              func() { c.Exchange(s, nil, []Message{{7, at(0, 8)}}) },
		"exchange on rank 1: bytes [8,16) of device buffer \"rank 1 buffer 0\" is received into and used by another message": func() {
			c.Exchange(s, []Message{{0, at(0, 9)}}, []Message{{0, at(8, 8)}})
		},
		"exchange on rank 1: bytes [0,9) of device buffer \"rank 1 buffer 0\" is received into and used by another message": func() {
			c.Exchange(s, nil, []Message{{0, at(8, 8)}, {2, at(0, 9)}})
		},
		"barrier on rank 1: there is no stream":    func() { c.Barrier(nil) },
		"use after free of device buffer \"dead\"": func() { c.Send(s, gone, 0) },
		"rank 1 splits off [];":                    func() { _, _ = c.Split(nil) },
		"rank 1 splits off [0 2]":                  func() { _, _ = c.Split([]int{0, 2}) },
		"rank 1 splits off [1 1]":                  func() { _, _ = c.Split([]int{1, 1}) },
		"rank 1 splits off [1 4]":                  func() { _, _ = c.Split([]int{1, 4}) },
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
	// No memory stands for no bytes.
	only.AllGather(s, device.Range{}, device.Range{})
	only.AllReduce(s, device.Range{}, device.Range{}, F32, Sum)
	only.Exchange(s, nil, nil)
	only.AllToAllV(s, device.Range{}, device.Range{}, make([]Part, 1), make([]Part, 1))
	if err := only.Close(); err != nil {
		t.Error(err)
	}
	wantPanic(t, "barrier on rank 1 after it closed the communicator", func() { only.Barrier(s) })
	wantPanic(t, "rank 1 closes its communicator twice", func() { _ = only.Close() })
}
