// This file compares what the checker asks of the device that it wraps with a golden file.

package check_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/check"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/memory"
)

var emptyKernel = &device.Kernel{Name: "empty", Go: func(*device.Launch) {}}

// useEverything uses each operation of a device and returns what it says.
func useEverything(d device.Device, say func(string)) (err error) {
	keep := func(what string, e error) bool {
		if e != nil {
			say(what + ": " + e.Error())
		}
		if err == nil {
			err = e
		}
		return e == nil
	}
	s, e := d.NewStream("s")
	other, e2 := d.NewStream("other")
	if !keep("stream", e) || !keep("stream", e2) {
		return err
	}
	var events [3]device.Event
	for i, flags := range []device.EventFlags{device.Timing, 0, device.External | device.Timing} {
		if events[i], e = d.NewEvent(flags); !keep("event", e) {
			return err
		}
	}
	a, e := d.Alloc(memory.Device, 4096, "a")
	h, e2 := d.Alloc(memory.Host, 2048, "h")
	if !keep("alloc", e) || !keep("alloc", e2) {
		return err
	}
	pool, e := d.Reserve(memory.Device, 1<<20, "pool")
	if !keep("reserve", e) {
		return err
	}
	keep("grow", d.Grow(pool, 1000))
	keep("grow", d.Grow(pool, 3000))
	launch := func(v uint64) device.Launch {
		l := device.NewLaunch(emptyKernel, 3, 32)
		l.Read(h.Slice(0, 10))
		l.Write(a.Slice(20, 30))
		l.Arg(v)
		l.Slot = 4
		return l
	}
	work := func() {
		s.Copy(a.Slice(1, 2), h.Slice(3, 2))
		s.Copy2D(device.Rect{Range: a.Slice(5, 6), Pitch: 7, Rows: 8}, device.Rect{Range: h.Slice(9, 6), Pitch: 10, Rows: 8})
		s.Fill(h.Slice(11, 12), 13)
		s.Launch(launch(1))
		s.Host(func() {})
		s.Record(events[1])
		other.Wait(events[1])
	}
	say("work")
	work()
	other.Upload(a.Slice(14, 15), make([]byte, 15))
	keep("download", other.Download(make([]byte, 16), h.Slice(17, 16)))
	s.Wait(events[1])
	other.Record(events[0])
	s.Wait(events[0])
	keep("sync", events[0].Sync())
	s.Record(events[2])
	keep("sync", s.Sync())
	_, e = events[2].Since(events[0])
	keep("since", e)
	say(fmt.Sprint("done: ", events[2].Done()))
	say("capture")
	s.BeginCapture()
	work()
	other.Record(events[1])
	s.Wait(events[1])
	s.Record(events[2])
	g, e := s.EndCapture()
	if !keep("capture", e) {
		return err
	}
	s.Replay(g)
	keep("update", g.Update(4, launch(2)))
	s.Replay(g)
	say(fmt.Sprint("nodes: ", g.Nodes()))
	keep("close", g.Close())
	for name, spoil := range map[string]func(){
		"upload": func() { s.Upload(a.Slice(0, 1), []byte{1}) },
	} {
		say("a capture with an " + name)
		s.BeginCapture()
		spoil()
		_, e = s.EndCapture()
		say(fmt.Sprint(e))
	}
	say("a capture with a download, a sync and a free")
	s.BeginCapture()
	say(fmt.Sprint(s.Download(make([]byte, 1), a.Slice(0, 1))))
	say(fmt.Sprint(s.Sync()))
	s.Free(pool)
	_, e = s.EndCapture()
	say(fmt.Sprint(e))
	say("the end")
	keep("sync", d.Sync())
	for _, b := range []*device.Buffer{a, h, pool} {
		if b.Live() {
			s.Free(b)
		}
	}
	say(fmt.Sprintf("%+v", d.Counters()))
	keep("sync", s.Sync())
	for _, e := range events {
		keep("event", e.Close())
	}
	keep("stream", other.Close())
	keep("stream", s.Close())
	return err
}

// Everything reaches the wrapped device, in its order and with its arguments, and what the
// checker does beside it is written down too.
func TestCallsOfTheWrappedDevice(t *testing.T) {
	var b strings.Builder
	for _, o := range []check.Options{{}, {Schedule: &check.Schedule{}}, {Schedule: &check.Schedule{Seed: 3}}} {
		c, err := cpu.Open(cpu.Options{})
		if err != nil {
			t.Fatal(err)
		}
		inner, log := devicelog.Wrap(c)
		d := check.New(o).Wrap(inner)
		seen := 0
		say := func(what string) {
			for _, line := range log.Lines()[seen:] {
				fmt.Fprintf(&b, "\t%s\n", line)
				seen++
			}
			fmt.Fprintln(&b, what)
		}
		if err := useEverything(d, say); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
		say("---")
	}
	golden.Check(t, "calls.txt", b.String())
}

// A device that was closed is asked for nothing any more, whichever device had work last.
func TestNothingAfterClose(t *testing.T) {
	for _, s := range []*check.Schedule{nil, {}, {Seed: 3}} {
		c := check.New(check.Options{Schedule: s})
		var worlds [2]*world
		var logs [2]*devicelog.Log
		for i := range worlds {
			inner, err := cpu.Open(cpu.Options{Ordinal: i, CopyThreads: 1})
			if err != nil {
				t.Fatal(err)
			}
			logged, log := devicelog.Wrap(inner)
			worlds[i], logs[i] = worldOn(c, logged), log
		}
		first, last := worlds[0], worlds[1]
		last.a.Fill(last.x.All(), 1)
		if err := last.dev.Sync(); err != nil {
			t.Error(err)
		}
		first.a.Fill(first.x.All(), 2)
		if err := first.close(); err != nil {
			t.Error(err)
		}
		n := len(logs[0].Lines())
		last.b.Copy(last.y.All(), last.x.All())
		if err := last.close(); err != nil {
			t.Error(err)
		}
		if after := logs[0].Lines()[n:]; len(after) > 0 {
			t.Errorf("under %+v the closed device was asked for %q", s, after)
		}
	}
}

// A checker passes on every failure of the device that it wraps, here another checker.
func TestFailuresOfTheWrappedDevice(t *testing.T) {
	for _, class := range []check.Class{check.Allocs, check.Grows, check.Copies, check.Launches, check.Makes} {
		f, err := check.FailEach(class, 1, func() (device.Device, error) { return cpu.Open(cpu.Options{}) }, func(d device.Device) error {
			return useEverything(check.New(check.Options{}).Wrap(d), func(string) {})
		})
		if err != nil || f.Calls == 0 || f.Survived > 0 {
			t.Errorf("%v: of %d failures %d were reported and %d not, %v", class, f.Calls, f.Reported, f.Survived, err)
		}
	}
}
