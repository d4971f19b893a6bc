// This file owns the checks of calls, registered memory and groups that cannot be made.

package comm

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/internal/kernels"
	"github.com/stowage-dev/stowage/memory"
)

// Every call checks its stream and both of its ranges on the rank that makes it.
func TestEveryCallIsChecked(t *testing.T) {
	x := ofTest(t, 4, 1, Options{})
	s, b := x.streamAndBuffer(x.comms[1])
	at := func(off, n memory.Bytes) device.Range { return b.Slice(off, n) }
	dead, err := x.places[1].Alloc(memory.Device, 64, "dead")
	if err != nil {
		t.Fatal(err)
	}
	gone := dead.All()
	s.Free(dead)
	c := Caller{Rank: 1, Size: 4, World: 5}
	none := make([]Part, 4)
	calls := map[string]func(s device.Stream, a, b device.Range){
		"all-gather":     func(s device.Stream, a, b device.Range) { c.AllGather(s, a, b.Slice(0, 16)) },
		"reduce-scatter": func(s device.Stream, a, b device.Range) { c.ReduceScatter(s, a.Slice(0, 16), b, F32, Sum) },
		"all-reduce":     func(s device.Stream, a, b device.Range) { c.AllReduce(s, a, b, F32, Sum) },
		"all-to-all":     func(s device.Stream, a, b device.Range) { c.AllToAll(s, a, b) },
		"all-to-all-v":   func(s device.Stream, a, b device.Range) { c.AllToAllV(s, a, b, none, none) },
		"broadcast":      func(s device.Stream, a, _ device.Range) { c.Broadcast(s, a, 0) },
		"send":           func(s device.Stream, a, _ device.Range) { c.Send(s, a, 0) },
		"receive":        func(s device.Stream, a, _ device.Range) { c.Recv(s, a, 0) },
		"exchange":       func(s device.Stream, a, b device.Range) { c.Exchange(s, []Message{{0, a}}, []Message{{2, b}}) },
		"barrier":        func(s device.Stream, _, _ device.Range) { c.Barrier(s) },
		"begin":          func(s device.Stream, _, _ device.Range) { c.Capture(s) },
	}
	for name, call := range calls {
		call(s, at(0, 64), at(512, 64))
		wantPanic(t, " on rank 5: the stream is nil", func() { call(nil, at(0, 64), at(512, 64)) })
		if name == "barrier" || name == "begin" {
			continue
		}
		wantPanic(t, `use after free of device buffer "dead"`, func() { call(s, gone, at(512, 64)) })
		if one := map[string]bool{"broadcast": true, "send": true, "receive": true}; !one[name] {
			wantPanic(t, `use after free of device buffer "dead"`, func() { call(s, at(0, 64), gone) })
		}
	}
	part := func(p Part) []Part { return []Part{p, {}, {}, {}} }
	for want, f := range map[string]func(){
		"rank 1 calls Split with [1 -1]; expected a list of its own rank and others below 4, each once": func() { c.Split([]int{1, -1}) },
		"reduce-scatter on rank 5: expected a known type and operation":                                 func() { c.ReduceScatter(s, at(0, 16), at(512, 64), 2, Sum) },
		"reduce-scatter on rank 5: expected whole numbers of 4 bytes":                                   func() { c.ReduceScatter(s, at(0, 15), at(512, 60), F32, Sum) },
		"expected ranges that do not overlap, have the same length":                                     func() { c.AllToAll(s, at(0, 64), at(512, 32)) },
		"divide into 4 equal parts":                  func() { c.AllToAll(s, at(0, 64), at(32, 64)) },
		"and ranges that do not overlap":             func() { c.AllToAllV(s, at(0, 64), at(32, 64), none, none) },
		"send[0] is bytes [-1,0), which lie outside": func() { c.AllToAllV(s, at(0, 64), at(512, 64), part(Part{-1, 1}), none) },
		"recv[0] is bytes [8,7), which lie outside":  func() { c.AllToAllV(s, at(0, 64), at(512, 64), none, part(Part{8, -1})) },
	} {
		wantPanic(t, want, f)
	}
	// Either range may be the one without whole numbers.
	for _, whole := range []func(){
		func() { c.AllReduce(s, at(2, 16), at(512, 16), F32, Sum) },
		func() { c.AllReduce(s, at(0, 16), at(514, 16), F32, Sum) },
		func() { c.AllReduce(s, at(0, 16), at(513, 16), BF16, Max) },
		func() { c.ReduceScatter(s, at(2, 16), at(512, 64), F32, Sum) },
		func() { c.ReduceScatter(s, at(0, 16), at(514, 64), F32, Sum) },
	} {
		wantPanic(t, "expected whole numbers of ", whole)
	}
	c.AllReduce(s, at(2, 16), at(514, 16), BF16, Sum)
	dev, err := openCPU(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := NewLocal([]device.Device{dev}, Options{Patience: -1}); err == nil || !strings.Contains(err.Error(), "got 1 devices and -1ns") {
		t.Error(err)
	}
	if err := dev.Close(); err != nil {
		t.Error(err)
	}
}

// told is a communicator that can be told of memory.
type told struct {
	Comm
	name string
	log  *[]string
}

func (c told) Register(r device.Range) func() {
	*c.log = append(*c.log, fmt.Sprint(c.name, " ", r.Len))
	return func() { *c.log = append(*c.log, c.name+" forgets") }
}

// All communicators that can be are told of memory, and told when it goes.
func TestRegister(t *testing.T) {
	var log []string
	release := Register(device.Range{Len: 7}, told{name: "a", log: &log}, nil, &Local{}, told{name: "b", log: &log})
	if got := fmt.Sprint(log); got != "[a 7 B b 7 B]" {
		t.Error(got)
	}
	release()
	if got := fmt.Sprint(log[2:]); got != "[a forgets b forgets]" {
		t.Error(got)
	}
}

// eventless is a device that makes a number of events.
type eventless struct {
	device.Device
	n   int
	err error
}

func (d *eventless) NewEvent(f device.EventFlags) (device.Event, error) {
	if d.n--; d.n < 0 {
		return nil, d.err
	}
	return d.Device.NewEvent(f)
}

// A group whose events or scratch memory cannot be made is an error on all of its ranks, and
// leaves nothing.
func TestGroupsMayFail(t *testing.T) {
	lost := errors.New("no events")
	for n := range 6 {
		inner, err := openCPU(0)
		if err != nil {
			t.Fatal(err)
		}
		d := &eventless{inner, n, lost}
		devs := []device.Device{d, d, d}
		all, err := NewLocal(devs, Options{})
		if (err == nil) != (n >= 3) || err != nil && !errors.Is(err, lost) {
			t.Errorf("%d events: %v", n, err)
		}
		for _, c := range all[:min(2, len(all))] {
			sub, err := c.Split([]int{1, 0})
			if (err == nil) != (n >= 5) || err != nil && !errors.Is(err, lost) {
				t.Errorf("%d events: rank %d has %v", n, c.Rank(), err)
			}
			if err == nil {
				defer sub.Close()
			}
		}
		if len(all) > 0 {
			if k := len(all[0].(*Local).g.w.splits); k != 0 {
				t.Errorf("%d events: %d splits are left", n, k)
			}
		}
		for _, c := range all {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		defer inner.Close()
	}
}

// A reducer whose scratch cannot be freed, because the device makes no stream, says so and leaves its event closed.
func TestScratchThatCannotBeFreed(t *testing.T) {
	// The event is made first, and the stream that frees when the reducer is closed.
	err := check.On(func() (device.Device, error) { return openCPU(0) }, func(d device.Device) error {
		x, err := NewReducer(d, kernels.MaxReduceSources+1, 64)
		if err != nil {
			t.Fatal(err)
		}
		if err := x.Close(); err == nil || !strings.HasPrefix(err.Error(), "comm: freeing scratch: ") {
			t.Errorf("the reducer was closed: %v", err)
		}
		return nil
	})(check.New(check.Options{Faults: []check.Fault{{Class: check.Makes, N: 1, Do: check.Fail}}}))
	if said := fmt.Sprint(err); !strings.Contains(said, "never freed") || strings.Contains(said, "left open") {
		t.Errorf("the device was closed: %v", err)
	}
}
