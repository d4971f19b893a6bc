// This file owns the tests of faults and limits.

package check_test

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/memory"
)

var schedules = []*check.Schedule{nil, {Seed: 0}, {Seed: 3}, {Seed: 5}, {Seed: 6}}

// allocating makes three buffers, gives one a backdrop and grows it twice; it
// gives back what it got and returns the first error.
func allocating(d device.Device) (err error) {
	s, err := d.NewStream("s")
	if err != nil {
		return err
	}
	var bufs []*device.Buffer
	defer func() {
		for _, b := range bufs {
			s.Free(b)
		}
		err = errors.Join(err, s.Close())
	}()
	for _, k := range []memory.Kind{memory.Device, memory.Host} {
		b, err := d.Alloc(k, 1000, "tensor")
		if err != nil {
			return err
		}
		bufs = append(bufs, b)
	}
	pool, err := d.Reserve(memory.Device, 1<<20, "pool")
	if err != nil {
		return err
	}
	bufs = append(bufs, pool)
	if err := d.Backdrop(pool); err != nil {
		return err
	}
	for _, n := range []memory.Bytes{5000, 100, 70000} {
		if err := d.Grow(pool, n); err != nil {
			return err
		}
	}
	return nil
}

// Every allocation and growth can be made to fail, one after the other, as a
// typed error, and the program that frees what it has ends clean.
func TestFailedAllocations(t *testing.T) {
	c := check.New(check.Options{})
	must(check.On(openCPU, allocating)(c))
	want := map[check.Class]int{check.Allocs: 3, check.Grows: 3}
	for class, n := range want {
		if got := c.Count(class); got != n {
			t.Fatalf("%d calls of class %v were counted, want %d", got, class, n)
		}
		for i := range n {
			for _, s := range schedules {
				c := check.New(check.Options{Schedule: s, Faults: []check.Fault{{Class: class, N: i, Do: check.Fail}}})
				inner, err := openCPU()
				must(err)
				d := c.Wrap(inner)
				err = allocating(d)
				var oom *device.OutOfMemory
				if !errors.As(err, &oom) {
					t.Errorf("%v %d: %v", class, i, err)
				} else if class == check.Grows && (oom.Owner != "pool" || oom.Asked > 70000) || class == check.Allocs && i == 1 && oom.Kind != memory.Host {
					t.Errorf("%v %d: %+v", class, i, *oom)
				}
				if err := d.Close(); err != nil {
					t.Errorf("%v %d: Close: %v", class, i, err)
				}
			}
		}
	}
}

// A limit is a capacity: shown, respected to the byte, and with the holders in
// the error.
func TestLimits(t *testing.T) {
	for limit, ok := range map[memory.Bytes]bool{71000: true, 70999: false} {
		o := check.Options{Limits: [memory.Kinds]memory.Bytes{memory.Device: limit}}
		err := check.On(openCPU, func(d device.Device) error {
			if d.Info().Capacity[memory.Device] != limit || d.Memory().Kind[memory.Device].Capacity != limit {
				t.Errorf("capacity %v and %v, want %v", d.Info().Capacity, d.Memory().Kind, limit)
			}
			return allocating(d)
		})(check.New(o))
		var oom *device.OutOfMemory
		switch {
		case ok && err != nil:
			t.Errorf("a limit of exactly what is needed: %v", err)
		case !ok && !errors.As(err, &oom):
			t.Errorf("a limit one byte too low: %v", err)
		case !ok && (oom.Free != 70999-6000 || oom.Asked != 65000 || len(oom.Owners) != 2 || oom.Owners[0].Owner != "pool"):
			t.Errorf("%+v", *oom)
		}
	}
}

// copying copies x to y by way of the host and returns the first byte.
func copying(w *world) byte {
	w.a.Fill(w.x.All(), 7)
	w.a.Copy(w.host.All(), w.x.All())
	w.order(w.a, w.b)
	w.b.Copy(w.y.All(), w.host.All())
	got := make([]byte, size)
	must(w.b.Download(got, w.y.All()))
	for _, v := range got {
		if v != 7 {
			return v
		}
	}
	return 7
}

// A failed copy is the device's error: it sticks, later work is skipped, and
// memory still comes back.
func TestFailedCopies(t *testing.T) {
	for _, s := range schedules {
		for n := range 3 {
			o := check.Options{Schedule: s, Faults: []check.Fault{{Class: check.Copies, N: n, Do: check.Fail}}}
			ran := false
			_, err := run(t, o, inWorld(func(w *world) {
				defer func() {
					w.a.Host(func() { ran = true })
					var de *device.DriverError
					if err := w.a.Sync(); !errors.As(err, &de) {
						t.Errorf("copy %d: Sync: %v", n, err)
					}
					if u := w.dev.Memory(); u.Kind[memory.Host].Current != size {
						t.Errorf("copy %d: %+v", n, u.Kind)
					}
				}()
				copying(w)
			}))
			var de *device.DriverError
			if !errors.As(err, &de) || ran || de.Device != "cpu:0" || de.Text != fmt.Sprintf("copy %d fails because of a check.Fault", n) {
				t.Errorf("copy %d under %+v: %v; later work ran: %v", n, s, err, ran)
			}
		}
	}
}

func TestFailedLaunch(t *testing.T) {
	o := check.Options{Faults: []check.Fault{{Class: check.Launches, N: 1, Do: check.Fail}}}
	_, err := run(t, o, inWorld(func(w *world) {
		w.a.Launch(mix(w.x.All(), w.y.All()))
		must(w.a.Sync())
		w.a.Launch(mix(w.x.All(), w.y.All()))
		must(w.a.Sync())
	}))
	var de *device.DriverError
	if !errors.As(err, &de) || de.Call != "kernel mix" || de.Text != "launch 1 fails because of a check.Fault" {
		t.Error(err)
	}
}

// Streams and events that cannot be made say which.
func TestFailedMakes(t *testing.T) {
	for n, call := range []string{"NewStream", "NewEvent"} {
		c := check.New(check.Options{Faults: []check.Fault{{Class: check.Makes, N: n, Do: check.Fail}}})
		d, err := openCPU()
		must(err)
		w := c.Wrap(d)
		_, first := w.NewStream("s")
		_, second := w.NewEvent(0)
		var de *device.DriverError
		if bad, good := []error{first, second}[n], []error{first, second}[1-n]; good != nil || !errors.As(bad, &de) || de.Device != "cpu:0" || de.Call != call || de.Text != fmt.Sprintf("stream or event %d fails because of a check.Fault", n) {
			t.Errorf("%s: %+v; the other: %v", call, bad, good)
		}
		if got := c.Count(check.Makes); got != 2 {
			t.Errorf("%d were counted", got)
		}
		_ = w.Close()
	}
}

// A corrupted copy has at most 16 wrong bytes, in its middle, and fewer if it is shorter.
func TestCorruptedBytes(t *testing.T) {
	for _, n := range []int{1, 15, 16, 17, 40, 41} {
		o := check.Options{Faults: []check.Fault{{Class: check.Copies, N: 0, Do: check.Corrupt}}}
		_, err := run(t, o, inWorld(func(w *world) {
			got := make([]byte, n)
			w.a.Upload(w.x.Slice(0, memory.Bytes(n)), got)
			must(w.a.Download(got, w.x.Slice(0, memory.Bytes(n))))
			wrong := min(n, 16)
			for i, b := range got {
				if want := i >= (n-wrong)/2 && i < (n-wrong)/2+wrong; (b == 0xC5) != want {
					t.Errorf("byte %d of %d is %#x", i, n, b)
				}
			}
		}))
		if err != nil {
			t.Error(err)
		}
	}
}

// A corrupted copy is noticed by whoever compares; others are not touched.
func TestCorruptedCopies(t *testing.T) {
	for _, s := range schedules {
		for n := range 4 {
			o := check.Options{Schedule: s, Faults: []check.Fault{{Class: check.Copies, N: n, Do: check.Corrupt}}}
			_, err := run(t, o, inWorld(func(w *world) {
				if got := copying(w); (got == 7) != (n == 3) {
					t.Errorf("copy %d corrupted: read %d", n, got)
				}
			}))
			if err != nil {
				t.Error(err)
			}
		}
	}
}

// Inside a graph a fault acts at every replay.
func TestFaultsInGraphs(t *testing.T) {
	for _, s := range schedules {
		for _, do := range []check.Action{check.Corrupt, check.Fail} {
			o := check.Options{Schedule: s, Faults: []check.Fault{{Class: check.Copies, N: 0, Do: do}}}
			_, err := run(t, o, inWorld(func(w *world) {
				w.a.Fill(w.x.All(), 7)
				g := w.capture(func() { w.a.Copy(w.host.All(), w.x.All()) })
				must(w.a.Sync())
				for range 2 {
					w.a.Replay(g)
					must(w.a.Sync())
					if got := w.dev.View(w.host.All(), device.Write); got[0] != 7 || got[size/2] == 7 {
						t.Errorf("%v: read %d and %d", do, got[0], got[size/2])
					} else {
						got[size/2] = 7
					}
				}
			}))
			var de *device.DriverError
			if errors.As(err, &de) != (do == check.Fail) || do == check.Corrupt && err != nil {
				t.Errorf("%v under %+v: %v", do, s, err)
			}
		}
	}
}

// A delayed copy begins late: later in time, or as late as the host allows.
func TestDelayedCopies(t *testing.T) {
	const pause = 20 * time.Millisecond
	delay := []check.Fault{{Class: check.Copies, N: 0, Do: check.Delay, For: pause}}
	start := time.Now()
	if _, err := run(t, check.Options{Faults: delay}, inWorld(func(w *world) { copying(w) })); err != nil {
		t.Error(err)
	}
	if took := time.Since(start); took < pause {
		t.Errorf("a copy delayed by %v: all took %v", pause, took)
	}
	var order string
	_, err := run(t, check.Options{Schedule: &check.Schedule{}, Faults: delay}, inWorld(func(w *world) {
		w.a.Copy(w.x.All(), w.y.All())
		w.a.Host(func() { order += "a" })
		w.b.Host(func() { order += "b" })
	}))
	if err != nil || order != "ba" {
		t.Errorf("the order is %q, %v", order, err)
	}
}

func TestFaultsWithoutMeaningPanic(t *testing.T) {
	for _, f := range []check.Fault{
		{Class: check.Waits, Do: check.Fail},
		{Class: check.Copies, Do: check.Drop},
		{Class: check.Allocs, Do: check.Corrupt},
		{Class: check.Syncs, Do: check.Delay},
		{Class: check.Copies},
		{Class: check.Copies, N: -1, Do: check.Fail},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%+v was accepted", f)
				}
			}()
			check.New(check.Options{Faults: []check.Fault{f}})
		}()
	}
}

// The fault of a captured launch acts at every replay, also after the launch got other
// arguments.
func TestUpdatedLaunchStillFails(t *testing.T) {
	for _, s := range schedules {
		for _, updated := range []bool{false, true} {
			o := check.Options{Schedule: s, Faults: []check.Fault{{Class: check.Launches, N: 0, Do: check.Fail}}}
			_, err := run(t, o, inWorld(func(w *world) {
				launch := func(dst, src device.Range) device.Launch {
					l := mix(dst, src)
					l.Slot = 7
					return l
				}
				w.a.BeginCapture()
				w.a.Launch(launch(w.x.All(), w.y.All()))
				g, err := w.a.EndCapture()
				must(err)
				defer func() { _ = g.Close() }()
				if updated {
					must(g.Update(7, launch(w.y.All(), w.x.All())))
				}
				w.a.Replay(g)
				must(w.a.Sync())
			}))
			var de *device.DriverError
			if !errors.As(err, &de) || de.Call != "kernel mix" {
				t.Errorf("%+v, updated: %v: %v", s, updated, err)
			}
		}
	}
}
