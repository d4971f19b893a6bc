// This file owns the tests of captures that streams of several devices share, as
// the ranks of one process do.

package cpu_test

import (
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// pair is two devices with a stream, a byte of host memory and an event each.
type pair struct {
	d [2]device.Device
	s [2]device.Stream
	b [2]*device.Buffer
	e [2]device.Event
}

func newPair(t *testing.T) *pair {
	p := &pair{}
	for i := range p.d {
		p.d[i] = open(t, cpu.Options{Ordinal: i})
		p.s[i] = stream(t, p.d[i], "s")
		p.b[i] = alloc(t, p.d[i], memory.Host, 1)
		var err error
		if p.e[i], err = p.d[i].NewEvent(0); err != nil {
			t.Fatal(err)
		}
	}
	return p
}

// follow makes one stream wait for the other's work so far.
func (p *pair) follow(a, b int) {
	p.s[b].Record(p.e[b])
	p.s[a].Wait(p.e[b])
}

var increments = &device.Kernel{Name: "increments", Go: func(l *device.Launch) { device.Slice[byte](l.Args()[0], 1)[0]++ }}

func increment(r device.Range) device.Launch {
	l := device.NewLaunch(increments, 1, 1)
	l.Write(r)
	return l
}

// A replay on one device's stream repeats the work of both, in their order, and
// each stream tells while it captures.
func TestCaptureOverTwoDevices(t *testing.T) {
	p := newPair(t)
	capturing := func(want bool) {
		t.Helper()
		for i, s := range p.s {
			if got := s.Capturing(); got != want {
				t.Errorf("stream %d captures: %v, want %v", i, got, want)
			}
		}
	}
	capturing(false)
	p.s[0].BeginCapture()
	p.follow(1, 0)
	capturing(true)
	p.s[1].Launch(increment(p.b[1].All()))
	p.follow(0, 1)
	p.s[0].Copy(p.b[0].All(), p.b[1].All())
	p.follow(1, 0)
	p.s[1].Launch(increment(p.b[1].All()))
	p.follow(0, 1)
	g, err := p.s[0].EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	capturing(false)
	if n := g.Nodes(); n != 3 {
		t.Errorf("%d nodes, want 3", n)
	}
	const times = 50
	for range times {
		p.s[0].Replay(g)
	}
	// Behind the replay the other device's stream is ordered by an event only.
	p.follow(1, 0)
	p.s[1].Launch(increment(p.b[1].All()))
	for i, want := range []byte{2*times - 1, 2*times + 1} {
		if err := p.s[i].Sync(); err != nil {
			t.Fatal(err)
		}
		if got := p.d[i].View(p.b[i].All(), device.Read)[0]; got != want {
			t.Errorf("device %d holds %d, want %d", i, got, want)
		}
		p.s[i].Free(p.b[i])
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	for i := range p.d {
		if err := p.d[i].Close(); err != nil {
			t.Error(err)
		}
	}
}

// Work inside a graph fails the device whose stream it was captured from, and no
// other; the graph comes to its end.
func TestJointGraphFailsTheRightDevice(t *testing.T) {
	p := newPair(t)
	p.s[0].BeginCapture()
	p.follow(1, 0)
	p.s[1].Launch(device.NewLaunch(panics, 1, 1))
	p.s[1].Launch(increment(p.b[1].All()))
	p.follow(0, 1)
	p.s[0].Launch(increment(p.b[0].All()))
	g, err := p.s[0].EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	p.s[0].Replay(g)
	soon(t, "the replay", func() {
		if err := p.s[0].Sync(); err != nil {
			t.Errorf("the device whose work is well: %v", err)
		}
	})
	wantDriverError(t, p.s[1].Sync(), "kernel panics", "index out of range")
	for i, want := range []byte{1, 0} {
		if got := p.d[i].View(p.b[i].All(), device.Read)[0]; got != want {
			t.Errorf("device %d holds %d, want %d", i, got, want)
		}
		p.s[i].Free(p.b[i])
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if err := p.d[0].Close(); err != nil {
		t.Error(err)
	}
	wantDriverError(t, p.d[1].Close(), "kernel panics", "index out of range")
}
