//go:build linux

// This file tests on the made-up driver what an assistant is offered, and what
// becomes of its answers.

package cuda

import (
	"errors"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// adder assists the kernel that adds: it adds a hundred more, so that it shows who did
// the work.
type adder struct {
	f      *fake
	done   bool
	err    error
	calls  int
	closed int
}

func (a *adder) Takes(k *device.Kernel) bool { return k == addKernel }

func (a *adder) Launch(k *device.Kernel, args []uint64, stream uintptr) (bool, error) {
	a.calls++
	if a.f.context() == 0 {
		return false, errors.New("no context is current")
	}
	if a.err != nil || !a.done {
		return false, a.err
	}
	mine := slices.Clone(args)
	get[*fakeStream](a.f, stream).Host(func() { fakeCode[k.Name]([]uint64{mine[0], mine[1], mine[2] + 100}) })
	return true, nil
}

func (a *adder) Close() {
	if a.f.context() != 0 {
		a.closed++
	}
}

// context returns what is current on this thread.
func (f *fake) context() uintptr {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current[syscall.Gettid()]
}

func openAssisted(t *testing.T) (*Device, *adder, device.Stream, device.Range) {
	t.Helper()
	a := &adder{done: true}
	_, a.f = newFake(t, memory.GiB)
	d, _ := openFake(t, Options{Assist: func() (Assist, error) {
		if a.f.context() == 0 {
			t.Error("an assistant is made without a context")
		}
		return a, nil
	}})
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, 8)
	s.Fill(b.All(), 0)
	t.Cleanup(func() {
		s.Free(b)
		_ = s.Close()
		_ = d.Close()
		if a.closed != 1 {
			t.Errorf("the assistant was closed %d times with a context", a.closed)
		}
	})
	return d, a, s, b.All()
}

func TestAssist(t *testing.T) {
	d, a, s, r := openAssisted(t)
	check := func(what string, calls int, want uint64) {
		t.Helper()
		if got := words(t, s, r)[0]; got != want || a.calls != calls {
			t.Errorf("%s: the number is %d after %d offers, want %d after %d", what, got, a.calls, want, calls)
		}
	}
	s.Launch(addLaunch(r, 1))
	check("a launch", 1, 101)
	s.Launch(device.NewLaunch(emptyKernel, 1, 1))
	check("another kernel", 1, 101)
	a.done = false
	s.Launch(addLaunch(r, 1))
	check("a launch left to the kernel", 2, 102)
	a.done = true
	slotted := addLaunch(r, 1)
	slotted.Slot = 3
	s.Launch(slotted)
	check("a launch with a slot", 2, 103)
	s.BeginCapture()
	s.Launch(addLaunch(r, 1))
	s.Launch(slotted)
	g, err := s.EndCapture()
	if err != nil || g.Nodes() != 2 {
		t.Fatalf("a graph of %v nodes: %v", g, err)
	}
	check("a capture", 3, 103)
	if err := g.Update(3, addLaunch(r, 10)); err != nil {
		t.Fatal(err)
	}
	s.Replay(g)
	s.Replay(g)
	check("replays", 3, 103+2*(101+10))
	if n := d.Counters().Launches; n != 4 {
		t.Errorf("%d launches were counted, want 4", n)
	}
}

// What an assistant fails at is the device's error, or spoils a capture.
func TestAssistFails(t *testing.T) {
	d, a, s, r := openAssisted(t)
	a.err = errors.New("the library is on fire")
	s.BeginCapture()
	s.Launch(addLaunch(r, 1))
	var ce *device.CaptureError
	if _, err := s.EndCapture(); !errors.As(err, &ce) || !strings.Contains(ce.Why, "on fire") {
		t.Errorf("in a capture: %v", err)
	}
	if err := s.Sync(); err != nil {
		t.Errorf("after the capture: %v", err)
	}
	s.Launch(addLaunch(r, 1))
	var de *device.DriverError
	if err := d.Sync(); !errors.As(err, &de) || de.Call != "add" || !strings.Contains(de.Text, "on fire") {
		t.Errorf("outside of a capture: %v", err)
	}
}

// An assistant that is not there is no error; one that fails is.
func TestAssistIsMissing(t *testing.T) {
	d, _ := openFake(t, Options{Assist: func() (Assist, error) { return nil, &device.Unsupported{What: "assistant"} }})
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, 8)
	s.Fill(b.All(), 0)
	s.Launch(addLaunch(b.All(), 5))
	if got := words(t, s, b.All())[0]; got != 5 {
		t.Errorf("without an assistant the kernel gives %d, want 5", got)
	}
	s.Free(b)
	closeDevice(t, d)
	v, f := newFake(t, memory.GiB)
	if _, err := v.open(Options{HostCapacity: memory.GiB, Assist: func() (Assist, error) { return nil, errors.New("out of luck") }}); err == nil || !strings.Contains(err.Error(), "out of luck") {
		t.Errorf("an assistant that fails: %v", err)
	}
	if len(f.maps) != 0 || f.calls["cuDevicePrimaryCtxRelease_v2"] != 2 {
		t.Errorf("%d ranges of addresses and a context are left", len(f.maps))
	}
}
