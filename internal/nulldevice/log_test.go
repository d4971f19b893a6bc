// This file compares what the null device does with the device that it wraps with a golden file.

package nulldevice_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/internal/devicelog"
	"github.com/stowage-dev/stowage/internal/golden"
	"github.com/stowage-dev/stowage/internal/nulldevice"
	"github.com/stowage-dev/stowage/memory"
)

// All work reaches the wrapped device in its order, without bytes and kernels.
func TestCallsOfTheWrappedDevice(t *testing.T) {
	c, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	inner, log := devicelog.Wrap(c)
	d, err := nulldevice.Wrap(inner, pace)
	if err != nil {
		t.Fatal(err)
	}
	e := env{t, d}
	s, other := e.stream(), e.stream()
	a, h, ev := e.alloc(memory.Device, 4096), e.alloc(memory.Host, 4096), e.event()
	launch := func() device.Launch {
		l := device.NewLaunch(wild, 3, 32)
		l.Read(h.Slice(0, 10))
		l.Write(a.Slice(20, 30))
		l.Slot = 4
		return l
	}
	work := func() {
		s.Copy(a.Slice(1, 2), h.Slice(3, 2))
		s.Copy2D(device.Rect{Range: a.Slice(5, 6), Pitch: 7, Rows: 8}, device.Rect{Range: h.Slice(9, 6), Pitch: 10, Rows: 8})
		s.Copy2D(device.Rect{Range: a.Slice(5, 6), Pitch: 7}, device.Rect{Range: h.Slice(9, 6), Pitch: 10})
		s.Fill(h.Slice(11, 12), 13)
		s.Launch(launch())
		s.Host(func() {})
		s.Record(ev)
		other.Wait(ev)
	}
	work()
	other.Upload(a.Slice(14, 15), make([]byte, 15))
	if err := other.Download(make([]byte, 16), h.Slice(17, 16)); err != nil {
		t.Error(err)
	}
	s.BeginCapture()
	work()
	other.Record(ev)
	s.Wait(ev)
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	s.Replay(g)
	if err := g.Update(4, launch()); err != nil {
		t.Error(err)
	}
	if err := g.Update(5, launch()); err == nil {
		t.Error("a launch is updated that the graph does not have")
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	s.Free(a)
	s.Free(h)
	if u := d.Memory(); u.Kind[memory.Device].Current != 0 {
		t.Errorf("%+v", u)
	}
	golden.Check(t, "calls.txt", strings.Join(log.Lines(), "\n")+"\n")
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// The pace has a word for each of its figures.
func TestPaceInWords(t *testing.T) {
	_, err := nulldevice.Wrap(nil, nulldevice.Pace{Local: 5, Link: -6, Latency: 7})
	const want = "nulldevice: expected rates above zero and a latency of at least zero, got 5 bytes a second, -6 over the link and 7ns"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
	if got := fmt.Sprint(nulldevice.DefaultPace()); got != "{1e+09 5e+09 1µs}" {
		t.Error(got)
	}
	if _, err := nulldevice.Wrap(nil, nulldevice.Pace{Local: 1, Link: 1, Latency: 0 * time.Second}); err != nil {
		t.Error(err)
	}
}
