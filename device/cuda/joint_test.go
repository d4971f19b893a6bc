// This file owns the test of a capture that streams of several devices share, as the ranks
// of one process do.

package cuda

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// Two ranks share a GPU: each has a device, and both are captured as one graph. One replay
// does the work of both, and nothing of either is left behind.
func TestCaptureOverTwoDevices(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	var d [2]*Device
	var s [2]device.Stream
	var b [2]*device.Buffer
	var e [2]device.Event
	for i := range d {
		var err error
		if d[i], err = v.open(Options{HostCapacity: memory.GiB}); err != nil {
			t.Fatal(err)
		}
		s[i] = newStream(t, d[i], "s")
		if b[i], err = d[i].Alloc(memory.Device, 8, "b"); err != nil {
			t.Fatal(err)
		}
		if e[i], err = d[i].NewEvent(0); err != nil {
			t.Fatal(err)
		}
		s[i].Fill(b[i].All(), byte(i+1))
	}
	follow := func(i, j int) {
		s[j].Record(e[j])
		s[i].Wait(e[j])
	}
	calls := 0
	s[0].BeginCapture()
	follow(1, 0)
	s[1].Copy(b[1].Slice(0, 4), b[0].Slice(0, 4))
	s[1].Host(func() { calls++ })
	follow(0, 1)
	g, err := s[0].EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	if s[1].Capturing() || g.Nodes() != 2 {
		t.Errorf("the second stream is captured, or %d nodes", g.Nodes())
	}
	for range 3 {
		follow(0, 1)
		s[0].Replay(g)
		follow(1, 0)
	}
	got := make([]byte, 8)
	if err := s[1].Download(got, b[1].All()); err != nil || string(got) != "\x01\x01\x01\x01\x02\x02\x02\x02" || calls != 3 {
		t.Errorf("%v, %d calls, error %v", got, calls, err)
	}
	if n := f.count("cuGraphLaunch"); n != 3 || d[0].Counters().Replays != 3 || d[1].Counters().Replays != 0 {
		t.Errorf("%d launches, %d and %d replays", n, d[0].Counters().Replays, d[1].Counters().Replays)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	synced(t, s[0])
	if d[0].Memory(); len(d[0].callsLeft())+len(d[1].callsLeft()) != 0 {
		t.Error("a callback is left")
	}
	for i := range d {
		s[i].Free(b[i])
		closeDevice(t, d[i])
	}
}
