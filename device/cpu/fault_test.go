// This file owns the tests of what goes wrong inside the device: queues that
// many hosts fill, callbacks and kernels that misbehave, use after the end.

package cpu_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/device/cpu"
	"github.com/stowage-dev/stowage/memory"
)

// soon fails the test if fn does not come back.
func soon(t *testing.T, what string, fn func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); fn() }()
	select {
	case <-done:
	case <-time.After(5 * time.Minute):
		t.Fatalf("%s hangs", what)
	}
}

func wantPanic(t *testing.T, words string, fn func()) {
	t.Helper()
	defer func() {
		t.Helper()
		if p := recover(); p == nil || !strings.Contains(fmt.Sprint(p), words) {
			t.Errorf("panic %v; want one with %q", p, words)
		}
	}()
	fn()
}

// wantDriverError checks what the device failed with.
func wantDriverError(t *testing.T, err error, call, words string) {
	t.Helper()
	var de *device.DriverError
	if !errors.As(err, &de) || de.Call != call || !strings.Contains(de.Text, words) {
		t.Errorf("the error is %v; want a DriverError of %q with %q", err, call, words)
	}
}

// A host that comes while others wait for room does not take the room that they
// wait for: it could do so again and again.
func TestNobodyOvertakesAtAFullQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, cpu.Options{})
		s := stream(t, d, "s")
		const first = 1200
		tokens := make(chan struct{}, 2*first)
		var issued atomic.Int64
		var wg sync.WaitGroup
		wg.Go(func() {
			for range first {
				s.Host(func() { <-tokens })
				issued.Add(1)
			}
		})
		synctest.Wait()      // until it waits for room
		tokens <- struct{}{} // room for one
		synctest.Wait()
		var late atomic.Bool
		wg.Go(func() {
			s.Host(func() {})
			late.Store(true)
		})
		synctest.Wait()
		if n := issued.Load(); late.Load() || n > 1025 {
			t.Errorf("with room for one, the host that waited has issued %d and the one that came later was served: %v", n, late.Load())
		}
		for range first {
			tokens <- struct{}{}
		}
		soon(t, "issuing to a full queue", wg.Wait)
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Many operations from several goroutines at once all come through.
func TestProducersOfAFullQueue(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	const producers, each = 3, 4000
	var ran atomic.Int64
	soon(t, "issuing from several goroutines", func() {
		var wg sync.WaitGroup
		for range producers {
			wg.Go(func() {
				for range each {
					s.Host(func() { ran.Add(1) })
				}
			})
		}
		wg.Wait()
	})
	if err := s.Sync(); err != nil || ran.Load() != producers*each {
		t.Errorf("%d of %d operations ran, err %v", ran.Load(), producers*each, err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A host that waits for room in a stream that is closed meanwhile is told.
func TestClosedWhileFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, cpu.Options{})
		s := stream(t, d, "s")
		gate := make(chan struct{})
		s.Host(func() { <-gate })
		var issued atomic.Int64
		refused := make(chan any, 1)
		go func() {
			defer func() { refused <- recover() }()
			for {
				s.Host(func() {})
				issued.Add(1)
			}
		}()
		synctest.Wait() // until it waits for room
		closed := make(chan error, 1)
		go func() { closed <- s.Close() }()
		soon(t, "a host that waits for room in a closed stream", func() {
			if p := <-refused; p == nil || !strings.Contains(fmt.Sprint(p), "closed stream s") {
				t.Errorf("the host that waited for room got %v", p)
			}
		})
		close(gate) // only now: the host is told before there is room
		soon(t, "closing a full stream", func() {
			if err := <-closed; err != nil {
				t.Error(err)
			}
		})
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
}

// A callback that ends its goroutine, as a test's Fatal does, fails the device;
// the stream and the lanes of graphs come to their end all the same.
func TestCallbackEndsItsGoroutine(t *testing.T) {
	for _, where := range []string{"stream", "first lane", "second lane"} {
		t.Run(where, func(t *testing.T) {
			d := open(t, cpu.Options{})
			a, b := stream(t, d, "a"), stream(t, d, "b")
			buf := alloc(t, d, memory.Device, 64)
			ev, _ := d.NewEvent(0)
			if where == "stream" {
				a.Host(runtime.Goexit)
			} else {
				a.BeginCapture()
				a.Record(ev)
				b.Wait(ev)
				if where == "first lane" {
					a.Host(runtime.Goexit)
				} else {
					b.Host(runtime.Goexit)
				}
				a.Fill(buf.All(), 1)
				b.Host(func() {})
				b.Record(ev)
				a.Wait(ev)
				g, err := a.EndCapture()
				if err != nil {
					t.Fatal(err)
				}
				for range 3 {
					a.Replay(g)
				}
			}
			a.Free(buf)
			soon(t, "the device", func() {
				err := a.Sync()
				wantDriverError(t, err, "host callback", "neither returned nor panicked")
				if got := b.Sync(); !errors.Is(got, err) {
					t.Errorf("the other stream's Sync: %v", got)
				}
				if got := d.Close(); !errors.Is(got, err) || strings.Contains(got.Error(), "never freed") {
					t.Errorf("Close: %v", got)
				}
			})
		})
	}
}

// A kernel that reaches beyond its memory fails the device, not the process.
func TestWildKernel(t *testing.T) {
	wild := &device.Kernel{Name: "wild", Go: func(l *device.Launch) {
		device.Slice[byte](l.Args()[0], 1<<20)[1<<20-1] = 1
	}}
	for _, captured := range []bool{false, true} {
		d := open(t, cpu.Options{})
		a, b := stream(t, d, "a"), stream(t, d, "b")
		pool, err := d.Reserve(memory.Device, memory.MiB, "pool") // of which nothing is there
		if err != nil {
			t.Fatal(err)
		}
		l := device.NewLaunch(wild, 1, 1)
		l.Write(pool.All())
		if captured {
			ev, _ := d.NewEvent(0)
			a.BeginCapture()
			a.Record(ev)
			b.Wait(ev)
			b.Launch(l)
			b.Record(ev)
			a.Wait(ev)
			g, err := a.EndCapture()
			if err != nil {
				t.Fatal(err)
			}
			a.Replay(g)
		} else {
			a.Launch(l)
		}
		wantDriverError(t, a.Sync(), "kernel wild", "invalid memory address")
		a.Free(pool)
		if err := d.Close(); strings.Contains(err.Error(), "never freed") {
			t.Error(err)
		}
	}
}

// EndCapture names the first call that could not be captured, not the last.
func TestFirstReasonOfASpoiltCapture(t *testing.T) {
	d := open(t, cpu.Options{})
	s := stream(t, d, "s")
	b := alloc(t, d, memory.Device, 8)
	s.BeginCapture()
	s.Upload(b.All(), make([]byte, 8))
	err := s.Download(make([]byte, 8), b.All())
	for _, err := range []error{err, s.Sync()} { // calls that return an error name it, too
		if err == nil || !strings.Contains(err.Error(), "an upload cannot be captured") {
			t.Errorf("a call of a spoilt capture returns %v", err)
		}
	}
	var spoilt *device.CaptureError
	if _, err := s.EndCapture(); !errors.As(err, &spoilt) || spoilt.Why != "an upload cannot be captured" {
		t.Errorf("EndCapture returns %v; want the upload as the reason", err)
	}
	s.Free(b)
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}

// A copy that reaches beyond its memory fails the device as well, also if several threads
// share it, and the memory that it shares with them is given back only when all are done.
func TestWildCopy(t *testing.T) {
	const size = 16 * memory.MiB // shared by several threads
	for name, copies := range map[string]func(s device.Stream, wild, good *device.Buffer){
		"from": func(s device.Stream, wild, good *device.Buffer) { s.Copy(good.All(), wild.All()) },
		"to":   func(s device.Stream, wild, good *device.Buffer) { s.Copy(wild.All(), good.All()) },
		"rows": func(s device.Stream, wild, good *device.Buffer) {
			row := device.Rect{Range: good.Slice(0, size/8), Pitch: size / 4, Rows: 4}
			s.Copy2D(device.Rect{Range: wild.Slice(0, size/8), Pitch: size / 4, Rows: 4}, row)
		},
	} {
		for _, captured := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s captured %v", name, captured), func(t *testing.T) {
				d := open(t, cpu.Options{CopyThreads: 4})
				s := stream(t, d, "s")
				none, err := d.Reserve(memory.Device, size, "none") // of which nothing is there
				if err != nil {
					t.Fatal(err)
				}
				good := alloc(t, d, memory.Host, size)
				wild := d.Borrow(memory.Device, none.Addr(), size, "wild")
				if captured {
					s.BeginCapture()
					copies(s, wild, good)
					g, err := s.EndCapture()
					if err != nil {
						t.Fatal(err)
					}
					s.Replay(g)
				} else {
					copies(s, wild, good)
				}
				s.Free(good) // while helpers may still copy
				wantDriverError(t, s.Sync(), "copy", "invalid memory address")
				s.Free(none)
				if err := d.Close(); strings.Contains(err.Error(), "never freed") {
					t.Error(err)
				}
			})
		}
	}
}

// What is used after its end says so, and a refused free leaves the buffer as
// it was.
func TestUseAfterClose(t *testing.T) {
	d := open(t, cpu.Options{})
	s, gone := stream(t, d, "s"), stream(t, d, "gone")
	b := alloc(t, d, memory.Device, 100)
	if err := gone.Close(); err != nil {
		t.Fatal(err)
	}
	wantPanic(t, "closed stream gone", func() { gone.Free(b) })
	if u := d.Memory().Kind[memory.Device]; !b.Live() || u.Pending != 0 {
		t.Errorf("a free on a closed stream left %v live %v with %v pending", b, b.Live(), u.Pending)
	}
	s.BeginCapture()
	s.Fill(b.All(), 1)
	g, err := s.EndCapture()
	if err != nil {
		t.Fatal(err)
	}
	wantPanic(t, "closed stream gone", func() { gone.Replay(g) })
	s.Replay(g)
	s.Free(b)
	r, err := d.Reserve(memory.Device, 100, "reserved")
	if err != nil {
		t.Fatal(err)
	}
	soon(t, "a graph that a closed stream could not replay", func() {
		if err := d.Close(); err != nil { // what has no bytes need not be freed
			t.Error(err)
		}
	})
	for _, use := range []func(){
		func() { _ = d.Grow(r, 1) },
		func() { _ = d.Backdrop(r) },
		func() { _, _ = d.Alloc(memory.Device, 1, "late") },
		func() { _, _ = d.Reserve(memory.Device, 1, "late") },
		func() { _, _ = d.NewEvent(0) },
		func() { _, _ = d.NewStream("late") },
	} {
		wantPanic(t, "closed device cpu:0", use)
	}
}

// Memory of another kind of device is refused as well.
func TestForeignBuffers(t *testing.T) {
	d0, d1 := open(t, cpu.Options{}), open(t, cpu.Options{Ordinal: 1})
	s := stream(t, d0, "s")
	none := device.NewBuffer(memory.Host, 1<<20, 10, 10, "nobody's")
	theirs := d1.Borrow(memory.Host, 1<<20, 10, "borrowed")
	pool, err := d1.Reserve(memory.Host, 100, "pool")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []*device.Buffer{none, theirs, pool} {
		wantPanic(t, "is not memory of cpu:0", func() { s.Free(b) })
		if !b.Live() {
			t.Errorf("a refused free ended %v", b)
		}
	}
	wantPanic(t, "is not memory of cpu:0", func() { _ = d0.Grow(pool, 50) })
	for _, d := range []device.Device{d0, d1} {
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	}
}
