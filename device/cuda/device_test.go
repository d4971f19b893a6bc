//go:build linux

// This file tests the device on the made-up driver: the conformance suite, and
// what happens when the driver refuses.

package cuda

import (
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/devicetest"
	"github.com/stowage-dev/stowage/memory"
)

// openFake opens a device on the made-up driver, with memory for tests.
func openFake(t testing.TB, o Options) (*Device, *fake) {
	t.Helper()
	v, f := newFake(t, memory.GiB)
	if o.HostCapacity == 0 {
		o.HostCapacity = memory.GiB
	}
	d, err := v.open(o)
	if err != nil {
		t.Fatal(err)
	}
	return d, f
}

// SPEC S6.3
func TestConformanceOnMadeUpDriver(t *testing.T) {
	devicetest.Run(t, func(t *testing.T) device.Device {
		d, _ := openFake(t, Options{CopyKernel: copyLaunch})
		return d
	}, devicetest.Limited(func(t *testing.T, c [memory.Kinds]memory.Bytes) device.Device {
		d, _ := openFake(t, Options{DeviceCapacity: c[memory.Device], HostCapacity: c[memory.Host]})
		return d
	}))
}

// isFinal checks that an error is the driver's, names the call and sticks.
func isFinal(t *testing.T, d *Device, err error, call string) {
	t.Helper()
	var de *device.DriverError
	if !errors.As(err, &de) || de.Call != call || de.Device != "cuda:0" || !strings.Contains(de.Text, "CUDA_ERROR_MADE_UP: a test asked for it") {
		t.Fatalf("got %v; want the driver's error of %s", err, call)
	}
	if _, again := d.Alloc(memory.Device, 1, "late"); !errors.Is(again, err) {
		t.Errorf("Alloc after the error: %v", again)
	}
	if _, again := d.NewEvent(0); !errors.Is(again, err) {
		t.Errorf("NewEvent after the error: %v", again)
	}
	if again := d.Sync(); !errors.Is(again, err) {
		t.Errorf("Sync after the error: %v", again)
	}
}

// Whatever call fails, the first error sticks, names the call, and everything
// still comes to an end with the books balanced.
func TestFirstErrorSticks(t *testing.T) {
	for call, fn := range map[string]func(d *Device, s device.Stream, a, h *device.Buffer) error{
		"cuLaunchKernel": func(_ *Device, s device.Stream, a, _ *device.Buffer) error {
			s.Launch(addLaunch(a.All(), 1))
			return s.Sync()
		},
		"cuMemcpyAsync":       func(_ *Device, s device.Stream, a, h *device.Buffer) error { s.Copy(a.All(), h.All()); return s.Sync() },
		"cuMemsetD8Async":     func(_ *Device, s device.Stream, a, _ *device.Buffer) error { s.Fill(a.All(), 1); return s.Sync() },
		"cuLaunchHostFunc":    func(_ *Device, s device.Stream, _, _ *device.Buffer) error { s.Host(func() {}); return s.Sync() },
		"cuStreamSynchronize": func(_ *Device, s device.Stream, _, _ *device.Buffer) error { return s.Sync() },
		"cuStreamCreate":      func(d *Device, _ device.Stream, _, _ *device.Buffer) error { _, err := d.NewStream("x"); return err },
		"cuEventQuery": func(d *Device, s device.Stream, _, _ *device.Buffer) error {
			e, _ := d.NewEvent(0)
			s.Record(e)
			e.Done()
			return e.Sync()
		},
		"cuGraphInstantiateWithFlags": func(_ *Device, s device.Stream, a, _ *device.Buffer) error {
			s.BeginCapture()
			s.Fill(a.All(), 1)
			_, err := s.EndCapture()
			return err
		},
		"cuMemMap": func(d *Device, _ device.Stream, _, _ *device.Buffer) error {
			_, err := d.Alloc(memory.Host, 100*memory.MiB, "x")
			return err
		},
	} {
		t.Run(call, func(t *testing.T) {
			d, f := openFake(t, Options{})
			s := newStream(t, d, "s")
			a, h := alloc(t, d, memory.Device, 64), alloc(t, d, memory.Host, 64)
			f.fail[call] = 717
			err := fn(d, s, a, h)
			isFinal(t, d, err, call)
			clear(f.fail)
			ran := false
			s.Host(func() { ran = true })
			s.Free(a)
			s.Free(h)
			_ = d.Sync() // the stream passes the frees, which failed work does not stop
			for k, u := range d.Memory().Kind {
				if u.Current != 0 {
					t.Errorf("%v of %v memory left after the error", u.Current, memory.Kind(k))
				}
			}
			if again := d.Close(); !errors.Is(again, err) || strings.Contains(again.Error(), "never freed") {
				t.Errorf("Close: %v", again)
			}
			if ran {
				t.Error("work issued after the error was done")
			}
		})
	}
}

// What a capture refuses is the capture's error, not the device's.
func TestDriverRefusesCapture(t *testing.T) {
	for _, call := range []string{"cuMemsetD8Async", "cuStreamBeginCapture_v2", "cuStreamEndCapture"} {
		d, f := openFake(t, Options{})
		s := newStream(t, d, "s")
		b := alloc(t, d, memory.Device, 64)
		f.fail[call] = errCaptureFirst
		s.BeginCapture()
		s.Fill(b.All(), 1)
		clear(f.fail)
		if call == "cuStreamEndCapture" {
			f.fail[call] = errCaptureLast
		}
		var ce *device.CaptureError
		if _, err := s.EndCapture(); !errors.As(err, &ce) || !strings.Contains(ce.Why, "CUDA_ERROR_MADE_UP") {
			t.Errorf("%s refused: EndCapture gives %v", call, err)
		}
		if err := d.err(); err != nil {
			t.Errorf("%s refused: the device has failed with %v", call, err)
		}
		if call == "cuMemsetD8Async" {
			s.Free(b)
			closeDevice(t, d)
		}
	}
}

// A capture that nobody ends is dropped when the device is closed, with its
// callbacks.
func TestCloseDuringCapture(t *testing.T) {
	d, _ := openFake(t, Options{})
	s := newStream(t, d, "s")
	gate := make(chan struct{})
	s.Host(func() { <-gate })
	s.BeginCapture()
	s.Host(func() { t.Error("a captured callback ran") })
	close(gate)
	if err := d.Sync(); err != nil { // waits for what came before the capture
		t.Error(err)
	}
	closeDevice(t, d)
	if len(d.calls) != 0 {
		t.Errorf("%d callbacks are still held", len(d.calls))
	}
}

// A full GPU is an operating condition: typed, with the true figure, and over
// as soon as memory is free again.
func TestMachineHasLessThanTheLedger(t *testing.T) {
	d, f := openFake(t, Options{DeviceCapacity: 100 * memory.GiB})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	b := alloc(t, d, memory.Device, memory.GiB-20*memory.MiB)
	var oom *device.OutOfMemory
	_, err := d.Alloc(memory.Device, 30*memory.MiB, "greedy")
	if !errors.As(err, &oom) || oom.Owner != "greedy" || oom.Asked != 30*memory.MiB || oom.Free != 20*memory.MiB {
		t.Errorf("30 MiB of the last 20: %v", err)
	}
	// The step does not fit, what is needed does.
	c := alloc(t, d, memory.Device, 19*memory.MiB+1)
	if f.used != f.total {
		t.Errorf("%d of %d bytes are mapped", f.used, f.total)
	}
	s.Free(b)
	s.Free(c)
	synced(t, s)
	pool, err := d.Reserve(memory.Device, 2*memory.GiB, "pool")
	if err != nil {
		t.Fatal(err)
	}
	f.fail["cuMemCreate"] = errOutOfMemory
	if err := d.Grow(pool, memory.GiB); err == nil {
		t.Error("memory that the driver refused was given")
	}
	delete(f.fail, "cuMemCreate")
	if mapped := d.pools[memory.Device].mapped; mapped != memory.Bytes(f.used) {
		t.Errorf("%v count as mapped, and %d bytes are", mapped, f.used)
	}
	// All of it lies idle in the arena, and goes to whoever needs it.
	if err := d.Grow(pool, memory.GiB); err != nil {
		t.Error(err)
	}
	if err := d.Grow(pool, memory.GiB+1); !errors.As(err, &oom) || oom.Owner != "pool" || oom.Asked != 1 || oom.Free != 0 {
		t.Errorf("one byte more than there is: %v", err)
	}
	s.Free(pool)
	synced(t, s)
	if f.used != 0 {
		t.Errorf("%d bytes are mapped, none in use", f.used)
	}
}

// Pinned memory keeps its bound, whatever the ledger would grant.
func TestHostMemoryKeepsItsBound(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	p := &d.pools[memory.Host]
	staged := p.mapped // since the device was opened
	p.limit = staged + 64*memory.MiB
	b := alloc(t, d, memory.Host, 60*memory.MiB)
	var oom *device.OutOfMemory
	if _, err := d.Alloc(memory.Host, 5*memory.MiB, "x"); !errors.As(err, &oom) || oom.Free != 4*memory.MiB {
		t.Errorf("5 MiB of the last 4: %v", err)
	}
	s.Free(alloc(t, d, memory.Host, 4*memory.MiB))
	s.Free(b)
	synced(t, s)
	if p.mapped != p.limit {
		t.Errorf("%v mapped", p.mapped)
	}
	pool, _ := d.Reserve(memory.Host, memory.GiB, "pool")
	if err := d.Grow(pool, 63*memory.MiB); err != nil {
		t.Error(err)
	}
	s.Free(pool)
	synced(t, s)
	if p.mapped != staged {
		t.Errorf("%v mapped, none in use", p.mapped-staged)
	}
}

// Memory of both kinds is mapped in the larger of the driver's granules.
func TestGranules(t *testing.T) {
	for _, coarser := range []map[int32]int{nil, {locationDevice: 2}, {locationHostNuma: 1}, {locationDevice: 1, locationHostNuma: 2}} {
		d, f := openFake(t, Options{})
		f.mu.Lock()
		f.coarser = coarser
		f.mu.Unlock()
		want := max(granule, granule<<max(coarser[locationDevice], 0), granule<<max(coarser[locationHostNuma], 0))
		if fail := d.measureGranule(); fail != nil || d.granule != want {
			t.Errorf("%v: %v, %v, want %v", coarser, d.granule, fail, want)
		}
		d.granule = granule
		closeDevice(t, d)
	}
}

// Memory that uploads pass through is beside what may be pinned.
func TestStagingIsBesideTheBound(t *testing.T) {
	d, _ := openFake(t, Options{HostCapacity: 1 << 60}) // cut to the bound
	defer closeDevice(t, d)
	if got, want := d.pools[memory.Host].limit, d.Info().Capacity[memory.Host]+stagingSize; got != want {
		t.Errorf("%v may be mapped, want %v", got, want)
	}
}

// What waits for replays of a stream that was closed meanwhile is called at once, and the driver is not asked about
// the stream.
func TestAfterReplaysOfAClosedStream(t *testing.T) {
	d, _ := openFake(t, Options{})
	defer closeDevice(t, d)
	s := newStream(t, d, "s")
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	called := 0
	d.afterReplay(s.(*stream), func() { called++ })
	d.runPassed()
	if err := d.err(); err != nil || called != 1 {
		t.Errorf("%d calls, %v", called, err)
	}
}

// Uploads larger than the staging memory wait for their own, not for others'.
func TestUploadsShareStaging(t *testing.T) {
	d, f := openFake(t, Options{})
	defer closeDevice(t, d)
	s, held := newStream(t, d, "s"), newStream(t, d, "held")
	b, c := alloc(t, d, memory.Device, 2*stagingSize+1), alloc(t, d, memory.Device, 64)
	gate := make(chan struct{})
	release := sync.OnceFunc(func() { close(gate) })
	defer release()
	held.Host(func() { <-gate })
	held.Free(c) // pending for as long as the gate is shut
	src := make([]byte, b.Size())
	for i := range src {
		src[i] = byte(i >> 12)
	}
	calls := func(name string) int {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.calls[name]
	}
	before := calls("cuEventQuery")
	// All staging is in flight until the host waits for it, which it does instead of asking again and again.
	s.Host(func() {
		for calls("cuEventSynchronize") == 0 && calls("cuEventQuery") < before+100_000 {
			time.Sleep(time.Millisecond)
		}
	})
	s.Upload(b.All(), src)
	if calls("cuEventSynchronize") == 0 {
		t.Error("nobody waited for staging memory")
	}
	got := make([]byte, b.Size())
	if err := s.Download(got, b.All()); err != nil {
		t.Fatal(err)
	}
	for i := range got {
		if got[i] != byte(i>>12) {
			t.Fatalf("byte %d is %d", i, got[i])
		}
	}
	if u := d.Memory().Kind[memory.Device]; u.Pending != 64 {
		t.Errorf("%v pending behind the gate", u.Pending)
	}
	release()
	s.Free(b)
}

// Every call finds the context current; where the thread is somebody else's
// too, it gets its own back.
func TestForeignContext(t *testing.T) {
	v, f := newFake(t, memory.GiB)
	d, err := v.openContext(0xC0, Options{HostCapacity: memory.MiB})
	if err != nil {
		t.Fatal(err)
	}
	s := newStream(t, d, "s")
	in := d.BorrowStream(s.(*stream).Handle(), "borrowed")
	b := alloc(t, d, memory.Device, 512)
	in.Fill(b.All(), 0)
	in.Launch(addLaunch(b.All(), 7))
	if w := words(t, in, b.All()); w[63] != 7 {
		t.Errorf("added 7 and got %d", w[63])
	}
	for thread, ctx := range f.current {
		if ctx != 0 {
			t.Errorf("thread %d was left with a context", thread)
		}
	}
	if err := in.Close(); err != nil {
		t.Error(err)
	}
	if n := f.calls["cuStreamDestroy_v2"]; n != 0 {
		t.Error("closing a borrowed stream destroyed it")
	}
	s.Free(b)
	closeDevice(t, d)
	if n := f.calls["cuDevicePrimaryCtxRelease_v2"]; n != 0 {
		t.Error("a context that was not retained was released")
	}
	f.fail["cuCtxGetDevice"] = 201
	if _, err := v.openContext(0xC0, Options{}); err == nil || !strings.Contains(err.Error(), "cuCtxGetDevice failed with error 201") {
		t.Errorf("a context that is none: %v", err)
	}
}

// Programmers' errors that the suite does not reach.
func TestMisusePanics(t *testing.T) {
	d, _ := openFake(t, Options{})
	s := newStream(t, d, "s")
	e, _ := d.NewEvent(0)
	_ = e.Close()
	_ = e.Close() // twice is allowed
	gone := newStream(t, d, "gone")
	_ = gone.Close()
	for what, fn := range map[string]func(){
		"a kernel without an image":  func() { s.Launch(device.NewLaunch(&device.Kernel{Name: "k"}, 1, 1)) },
		"a closed event recorded":    func() { s.Record(e) },
		"a closed event waited for":  func() { s.Wait(e) },
		"a closed event asked":       func() { e.Done() },
		"somebody else's event":      func() { s.Wait(nil) },
		"somebody else's graph":      func() { s.Replay(nil) },
		"work on a closed stream":    func() { gone.Host(func() {}) },
		"closing a capturing stream": func() { s.BeginCapture(); defer s.EndCapture(); _ = s.Close() },
	} {
		mustPanic(t, what, fn)
	}
	mustPanic(t, "a device closed twice", func() { closeDevice(t, d); _ = d.Close() })
	mustPanic(t, "a stream of a closed device", func() { d.BorrowStream(1, "late") })
}
