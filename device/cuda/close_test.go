//go:build linux

// This file tests the ends of things on the made-up driver: of failed devices, of
// graphs during other captures, of events that graphs use.

package cuda

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// count reads how often a function was called.
func (f *fake) count(name string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[name]
}

// left names the streams, events and graphs that were not destroyed.
func (f *fake) left() (kinds []string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, x := range f.handles {
		switch x.(type) {
		case *fakeStream, *fakeEvent, device.Graph:
			kinds = append(kinds, fmt.Sprintf("%T", x))
		}
	}
	return kinds
}

// A failure that is not the context's own leaves work in flight and memory mapped:
// Close waits for the one and gives back the other.
func TestCloseOfFailedDevice(t *testing.T) {
	for name, capturing := range map[string]bool{"plain": false, "capturing": true} {
		t.Run(name, func(t *testing.T) {
			d, f := openFake(t, Options{})
			s, other := newStream(t, d, "s"), newStream(t, d, "other")
			b := alloc(t, d, memory.Device, 64)
			pool, _ := d.Reserve(memory.Device, 8*memory.MiB, "pool")
			if err := d.Grow(pool, memory.MiB); err != nil {
				t.Fatal(err)
			}
			if _, err := d.NewEvent(device.Timing); err != nil { // never closed
				t.Fatal(err)
			}
			other.BeginCapture()
			other.Host(func() {})
			if _, err := other.EndCapture(); err != nil { // never closed
				t.Fatal(err)
			}
			gate, entered := make(chan struct{}), make(chan struct{})
			var order sync.Map
			s.Host(func() { close(entered); <-gate; order.Store("worked", true) })
			<-entered
			s.Free(pool)
			if capturing {
				s.BeginCapture()
				s.Fill(b.All(), 1)
			}
			other.Host(func() { panic("a test asked for it") })
			_ = other.Sync()
			if d.err() == nil {
				t.Fatal("the panic was lost")
			}
			if u := d.Memory().Kind[memory.Device]; u.Pending != memory.MiB {
				t.Errorf("%v pending; work in flight may use the pool still", u.Pending)
			}
			time.AfterFunc(20*time.Millisecond, func() { close(gate) })
			waits := f.count("cuStreamSynchronize")
			err := d.Close()
			if _, done := order.Load("worked"); !done {
				t.Error("Close did not wait for work in flight")
			}
			var de *device.DriverError
			if !errors.As(err, &de) || de.Call != "host callback" || !strings.Contains(err.Error(), "never freed") {
				t.Errorf("Close: %v", err)
			}
			if n := f.count("cuStreamSynchronize") - waits; n != 2 {
				t.Errorf("%d streams were waited for, not both", n)
			}
			if len(f.maps) != 0 || len(f.chunks) != 0 || f.used != 0 {
				t.Errorf("%d ranges, %d chunks and %d bytes are left", len(f.maps), len(f.chunks), f.used)
			}
			if left := f.left(); len(left) != 0 || len(d.calls) != 0 {
				t.Errorf("%v and %d callbacks are left", left, len(d.calls))
			}
		})
	}
}

// The stream that replayed a graph last may capture when the graph is closed.
func TestGraphClosedDuringAnotherCapture(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	gate := make(chan struct{})
	ran := 0
	s.BeginCapture()
	s.Host(func() { <-gate; ran++ })
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	s.Replay(g)
	s.BeginCapture()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
	if d.Memory(); len(d.callsLeft()) != 1 {
		t.Error("the callback was let go of before its replay")
	}
	close(gate)
	if err := d.Sync(); err != nil {
		t.Error(err)
	}
	if n := len(d.callsLeft()); n != 0 || ran != 1 {
		t.Errorf("%d callbacks are left, %d ran", n, ran)
	}
	if slices.Contains(d.events, s.(*stream).before) {
		t.Error("others may record the event of the stream")
	}
	g, err = s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// An event that a graph uses lives as long as the graph and its replays.
func TestEventClosedBeforeItsGraph(t *testing.T) {
	d, f := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	for i, use := range []func(device.Event){s.Wait, s.Record, func(e device.Event) { s.Wait(e); s.Record(e) }} {
		e, _ := d.NewEvent(device.External)
		s.BeginCapture()
		use(e)
		g, err := s.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		_ = e.Close()
		s.Replay(g)
		synced(t, s)
		if n := f.count("cuEventDestroy_v2"); n != i {
			t.Fatalf("%d events were destroyed under graph %d", n, i)
		}
		_ = g.Close()
		synced(t, s)
		if n := f.count("cuEventDestroy_v2"); n != i+1 {
			t.Errorf("%d events were destroyed with graph %d", n, i)
		}
	}
	e, _ := d.NewEvent(device.External)
	s.BeginCapture()
	s.Record(e)
	_ = e.Close()
	_ = s.Sync() // spoils the capture
	if _, err := s.EndCapture(); err == nil {
		t.Error("a spoilt capture gave a graph")
	}
	if n := f.count("cuEventDestroy_v2"); n != 4 {
		t.Errorf("%d events were destroyed after a capture without a graph", n)
	}
}

// says checks that fn panics with a sentence that holds words.
func says(t *testing.T, words string, fn func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if p := fmt.Sprint(recover()); !strings.Contains(p, words) {
			t.Errorf("panicked with %q; want %q", p, words)
		}
	}()
	fn()
}

// A graph names the buffer that is gone, also one that came with an update.
func TestReplayAfterFree(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	for name, use := range map[string]func(a, h *device.Buffer){
		"fill": func(a, _ *device.Buffer) { s.Fill(a.All(), 1) },
		"copy": func(a, h *device.Buffer) { s.Copy(h.All(), a.All()) },
		"rect": func(a, h *device.Buffer) {
			s.Copy2D(device.Rect{Range: h.Slice(0, 8), Pitch: 16, Rows: 2}, device.Rect{Range: a.Slice(0, 8), Pitch: 16, Rows: 2})
		},
		"launch": func(a, _ *device.Buffer) { s.Launch(addLaunch(a.All(), 1)) },
		"slot": func(a, _ *device.Buffer) {
			l := addLaunch(a.All(), 1)
			l.Slot = 3
			s.Launch(l)
		},
		"host": func(a, _ *device.Buffer) { s.Host(func() {}, device.Reads(a.All())) },
	} {
		t.Run(name, func(t *testing.T) {
			a, h := alloc(t, d, memory.Device, 64), alloc(t, d, memory.Host, 64)
			s.BeginCapture()
			use(a, h)
			g, err := s.EndCapture()
			if err != nil {
				t.Fatal(err)
			}
			s.Replay(g)
			s.Free(a)
			says(t, "device: use after free of device buffer", func() { s.Replay(g) })
			if name == "slot" {
				b := alloc(t, d, memory.Device, 64)
				if err := g.Update(3, addLaunch(b.All(), 1)); err != nil {
					t.Error(err)
				}
				s.Replay(g) // uses b alone
				s.Free(b)
				says(t, "device: use after free of device buffer", func() { s.Replay(g) })
			}
			_ = g.Close()
			s.Free(h)
			synced(t, s)
		})
	}
}

func TestForeignBuffers(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	c, err := cpu.Open(cpu.Options{})
	if err != nil {
		t.Fatal(err)
	}
	cs, _ := c.NewStream("s")
	b, _ := c.Alloc(memory.Device, 64, "theirs")
	r, _ := c.Reserve(memory.Device, 64, "theirs")
	says(t, "another device made it", func() { s.Free(b) })
	says(t, "another device made it", func() { _ = d.Grow(r, 64) })
	if !b.Live() {
		t.Error("the buffer was freed")
	}
	cs.Free(b)
	cs.Free(r)
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if u := d.Memory().Kind[memory.Device]; u.Pending != 0 {
		t.Errorf("%v pending", u.Pending)
	}
}

func TestClosedDevice(t *testing.T) {
	d, _ := openFake(t, Options{})
	e, _ := d.NewEvent(0)
	closeDevice(t, d)
	for what, fn := range map[string]func(){
		"Alloc":     func() { _, _ = d.Alloc(memory.Host, 1, "late") },
		"Reserve":   func() { _, _ = d.Reserve(memory.Host, 1, "late") },
		"NewStream": func() { _, _ = d.NewStream("late") },
		"NewEvent":  func() { _, _ = d.NewEvent(0) },
	} {
		says(t, "cuda: "+what+" on the closed device", fn)
	}
	if !e.Done() || e.Sync() == nil || e.Close() != nil {
		t.Error("an event that outlived its device")
	}
}

// A callback that the driver refuses is not kept.
func TestRefusedCallback(t *testing.T) {
	d, f := openFake(t, Options{})
	s := newStream(t, d, "s")
	f.fail["cuLaunchHostFunc"] = 717
	s.Host(func() {})
	if n := len(d.callsLeft()); n != 0 {
		t.Errorf("%d callbacks are held", n)
	}
	if d.Close() == nil {
		t.Error("the refusal was lost")
	}
}

// Where the machine gives no more than the first staging memory, uploads go
// through that, piece by piece.
func TestUploadThroughLittleStaging(t *testing.T) {
	d, f := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, uploadPiece+1)
	f.mu.Lock()
	f.fail["cuMemCreate"] = errOutOfMemory
	f.mu.Unlock()
	src := make([]byte, b.Size())
	for i := range src {
		src[i] = byte(i >> 12)
	}
	s.Upload(b.All(), src)
	got := make([]byte, b.Size())
	if err := s.Download(got, b.All()); err != nil {
		t.Fatal(err)
	}
	if string(got) != string(src) {
		t.Error("the bytes differ")
	}
	s.Free(b)
}

// The whole device may be waited for while another goroutine captures on its
// streams and closes them, and graphs may be closed meanwhile.
func TestSyncBesideCapturesAndCloses(t *testing.T) {
	d, _ := openFake(t, Options{})
	b := alloc(t, d, memory.Device, 64)
	stop, done := make(chan struct{}), make(chan error)
	go func() {
		for {
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
			if err := d.Sync(); err != nil {
				done <- err
				return
			}
		}
	}()
	for range 300 {
		s := newStream(t, d, "s")
		s.Fill(b.All(), 1)
		s.BeginCapture()
		s.Fill(b.All(), 2)
		g, err := s.EndCapture()
		if err != nil {
			t.Fatal(err)
		}
		s.Replay(g)
		if err := errors.Join(g.Close(), s.Close()); err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	if err := <-done; err != nil {
		t.Error(err)
	}
	newStream(t, d, "last").Free(b)
	closeDevice(t, d)
}
