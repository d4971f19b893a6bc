// This file owns what the tests are written with: the environment of one test,
// which checks every error and cleans up, and the gate that holds a stream back.

package devicetest

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// patience is how long a test waits before it calls a device stuck.
type patience struct {
	// call is for anything that must come back; nothing here takes more than a
	// fraction of it.
	call time.Duration
	// test is for a whole test.
	test time.Duration
	// gate is shorter, so that a gate that holds up the host opens and says so
	// before the test gives up.
	gate time.Duration
}

var usualPatience = patience{call: 20 * time.Second, test: 30 * time.Second, gate: 5 * time.Second}

// env is one test on one device.
type env struct {
	testing.TB
	dev      device.Device
	patience patience
	another  func() device.Device // opens one more, which the test closes

	streams []device.Stream
	events  []device.Event
	graphs  []device.Graph
	buffers []*device.Buffer
	gates   []*gate
	stuck   atomic.Bool // the device hangs: leave it as it is
	closed  bool        // the test closed the device itself
}

// cleaner is the name of the stream that frees what a test leaves behind.
const cleaner = "clean up"

// finish frees everything and checks that the device ends with no memory in use.
func (e *env) finish() {
	for _, g := range e.gates {
		g.release()
	}
	if e.stuck.Load() || e.closed {
		return
	}
	e.within("Device.Sync at the end", e.dev.Sync)
	for _, g := range e.graphs {
		e.ok(g.Close())
	}
	s := e.stream(cleaner)
	for _, b := range e.buffers {
		if b.Live() {
			s.Free(b)
		}
	}
	e.sync(s)
	for _, ev := range e.events {
		e.ok(ev.Close())
	}
	for _, s := range e.streams {
		e.within("Stream.Close", s.Close)
	}
	for k, u := range e.dev.Memory().Kind {
		if u.Current != 0 || u.Pending != 0 {
			e.Errorf("everything was freed, but %v of %s memory is in use and %v pending", u.Current, memory.Kind(k), u.Pending)
		}
	}
	e.within("Device.Close", e.dev.Close)
}

// guard runs fn in a goroutine of its own, so that a device that hangs or
// panics fails one test and not the run.
func (e *env) guard(what string, fn func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer func() {
			if p := recover(); p != nil {
				e.Errorf("%s: panic: %v\n%s", what, p, debug.Stack())
			}
		}()
		fn()
	}()
	timer := time.NewTimer(e.patience.test)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
		e.stuck.Store(true)
		stacks := make([]byte, 1<<16)
		e.Errorf("%s did not end within %v; the goroutines are\n%s", what, e.patience.test, stacks[:runtime.Stack(stacks, true)])
	}
}

// FailNow ends the test's goroutine, which is not the one testing started.
func (e *env) FailNow() {
	e.Fail()
	runtime.Goexit()
}

func (e *env) Fatal(args ...any) {
	e.Helper()
	e.Error(args...)
	runtime.Goexit()
}

func (e *env) Fatalf(format string, args ...any) {
	e.Helper()
	e.Errorf(format, args...)
	runtime.Goexit()
}

// ok ends the test if there is an error.
func (e *env) ok(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

// within runs fn, which must return without an error in reasonable time.
func (e *env) within(what string, fn func() error) {
	e.Helper()
	done := make(chan error, 1)
	go func() {
		defer func() {
			if p := recover(); p != nil {
				done <- fmt.Errorf("%s: panic: %v", what, p)
			}
		}()
		done <- fn()
	}()
	timer := time.NewTimer(e.patience.call)
	defer timer.Stop()
	select {
	case err := <-done:
		e.ok(err)
	case <-timer.C:
		e.stuck.Store(true)
		e.Fatalf("%s did not return within %v", what, e.patience.call)
	}
}

func (e *env) stream(name string) device.Stream {
	e.Helper()
	s, err := e.dev.NewStream(name)
	e.ok(err)
	e.streams = append(e.streams, s)
	return s
}

// threeStreams returns what most tests of order need.
func (e *env) threeStreams() (a, b, c device.Stream) {
	e.Helper()
	return e.stream("a"), e.stream("b"), e.stream("c")
}

// closeStream closes a stream before the end of the test.
func (e *env) closeStream(s device.Stream) {
	e.Helper()
	e.forget(s)
	e.within("Stream.Close", s.Close)
}

// forget removes a stream from those that finish closes, because the test closes it.
func (e *env) forget(s device.Stream) {
	e.streams = slices.DeleteFunc(e.streams, func(x device.Stream) bool { return x == s })
}

func (e *env) event(flags device.EventFlags) device.Event {
	e.Helper()
	ev, err := e.dev.NewEvent(flags)
	e.ok(err)
	e.events = append(e.events, ev)
	return ev
}

// order makes stream b wait for what stream a has been given so far.
func (e *env) order(a, b device.Stream) {
	e.Helper()
	ev := e.event(0)
	a.Record(ev)
	b.Wait(ev)
}

func (e *env) alloc(kind memory.Kind, size memory.Bytes) *device.Buffer {
	e.Helper()
	return e.allocFor(kind, size, "devicetest")
}

func (e *env) allocFor(kind memory.Kind, size memory.Bytes, owner string) *device.Buffer {
	e.Helper()
	b, err := e.dev.Alloc(kind, size, owner)
	e.ok(err)
	e.buffers = append(e.buffers, b)
	return b
}

func (e *env) reserve(kind memory.Kind, limit memory.Bytes, owner string) *device.Buffer {
	e.Helper()
	b, err := e.dev.Reserve(kind, limit, owner)
	e.ok(err)
	e.buffers = append(e.buffers, b)
	return b
}

// allocWith returns a buffer with content; it waits until the content is there.
func (e *env) allocWith(s device.Stream, kind memory.Kind, content []byte) *device.Buffer {
	e.Helper()
	b := e.alloc(kind, memory.Bytes(len(content)))
	s.Upload(b.All(), content)
	e.sync(s)
	return b
}

func (e *env) sync(ss ...device.Stream) {
	e.Helper()
	for _, s := range ss {
		e.within("Sync of stream "+s.Name(), s.Sync)
	}
}

// read downloads a range.
func (e *env) read(s device.Stream, r device.Range) []byte {
	e.Helper()
	got := make([]byte, r.Len)
	e.within("Download on stream "+s.Name(), func() error { return s.Download(got, r) })
	return got
}

// want downloads a range and compares it.
func (e *env) want(s device.Stream, r device.Range, want []byte, what string, args ...any) {
	e.Helper()
	if diff := firstDifference(e.read(s, r), want); diff != "" {
		e.Fatalf("%s: %v: %s", fmt.Sprintf(what, args...), r, diff)
	}
}

func firstDifference(got, want []byte) string {
	if bytes.Equal(got, want) {
		return ""
	}
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("byte %d of %d is %#02x, want %#02x", i, len(want), got[i], want[i])
		}
	}
	return fmt.Sprintf("%d bytes, want %d", len(got), len(want))
}

// end ends a capture that must succeed.
func (e *env) end(s device.Stream) device.Graph {
	e.Helper()
	g, err := s.EndCapture()
	e.ok(err)
	e.graphs = append(e.graphs, g)
	return g
}

// capture returns a capture of what fn issues, which must succeed.
func (e *env) capture(s device.Stream, fn func()) device.Graph {
	e.Helper()
	s.BeginCapture()
	fn()
	return e.end(s)
}

// panics runs a mistake, which must panic with a message that contains the words.
func (e *env) panics(what, words string, fn func()) {
	e.Helper()
	defer func() {
		e.Helper()
		p := recover()
		if p == nil {
			e.Errorf("%s did not panic", what)
		} else if text := fmt.Sprint(p); !strings.Contains(text, words) {
			e.Errorf("%s panics with %q; want %q in it", what, text, words)
		}
	}()
	fn()
}

// captureError checks that an error is a complete [device.CaptureError].
func (e *env) captureError(what string, err error) {
	e.Helper()
	var ce *device.CaptureError
	if !errors.As(err, &ce) {
		e.Errorf("%s gives %v; want a *device.CaptureError", what, err)
	} else if ce.Stream == "" || ce.Why == "" || ce.Do == "" {
		e.Errorf("%s gives an error without stream, reason or advice: %+v", what, *ce)
	}
}

// gate is a host callback that holds its stream back until it is released. It
// shows that the host goes on while work waits. Work behind it may be issued,
// but a Sync before the release would hang.
type gate struct {
	e    *env
	open chan struct{}
	once sync.Once
	late atomic.Bool
}

func (e *env) gate(s device.Stream) *gate {
	g := &gate{e: e, open: make(chan struct{})}
	e.gates = append(e.gates, g)
	s.Host(func() {
		timer := time.NewTimer(e.patience.gate)
		defer timer.Stop()
		select {
		case <-g.open:
		case <-timer.C:
			g.late.Store(true)
		}
	})
	return g
}

// unlock lets the stream continue. It may be called from any goroutine.
func (g *gate) unlock() { g.once.Do(func() { close(g.open) }) }

// release lets the stream continue and checks that nothing waited for that.
func (g *gate) release() {
	g.e.Helper()
	g.unlock()
	if g.late.Swap(false) {
		g.e.Errorf("a call made while a stream was held back waited for it, for more than %v", g.e.patience.gate)
	}
}

// pattern returns n bytes that differ between seeds and from place to place; its
// period of 251 fits no power of two.
func pattern(seed, n int) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i%251 + 37*seed + i/251)
	}
	return p
}

// filled returns n bytes of one value.
func filled(value byte, n int) []byte { return bytes.Repeat([]byte{value}, n) }

var bothKinds = []memory.Kind{memory.Device, memory.Host}
