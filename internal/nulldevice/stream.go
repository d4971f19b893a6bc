// This file owns streams: work is checked, ordered and counted as on the wrapped device,
// and does nothing.

package nulldevice

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/memory"
)

// nothing is the kernel that is launched in place of every other.
var nothing = &device.Kernel{Name: "nothing", Go: func(*device.Launch) {}}

// stream issues empty work on the wrapped device. Its clock advances when work is issued,
// not when the wrapped device executes it; all that it waits for was issued before.
type stream struct {
	device.Stream
	pace Pace

	mu     sync.Mutex
	now    time.Duration
	inside time.Duration // time of the work that is being captured
}

// advance moves the clock on, or the time of the graph that is being captured.
func (s *stream) advance(t time.Duration) {
	captures := s.Capturing()
	s.mu.Lock()
	defer s.mu.Unlock()
	if captures {
		s.inside += t
	} else {
		s.now += t
	}
}

// emptyAt returns an empty range of the same buffer, so that the buffer is checked and
// held as usual.
func emptyAt(r device.Range) device.Range { return device.Range{Buf: r.Buf, Off: r.Off} }

func (s *stream) Copy(dst, src device.Range) {
	devicekit.CheckCopy(dst, src)
	s.Stream.Copy(emptyAt(dst), emptyAt(src))
	s.advance(s.pace.copyTime(dst.Len, dst.Buf.Kind(), src.Buf.Kind()))
}

func (s *stream) Copy2D(dst, src device.Rect) {
	devicekit.CheckCopy2D(dst, src)
	if dst.Rows == 0 {
		return
	}
	s.Stream.Copy(emptyAt(dst.Range), emptyAt(src.Range))
	s.advance(s.pace.copyTime(dst.Len*memory.Bytes(dst.Rows), dst.Buf.Kind(), src.Buf.Kind()))
}

func (s *stream) Fill(dst device.Range, value byte) {
	device.CheckAccess(device.Writes(dst))
	s.Stream.Fill(emptyAt(dst), value)
	s.advance(s.pace.localTime(dst.Len))
}

func (s *stream) Launch(l device.Launch) {
	l.Check()
	var n memory.Bytes
	for a := range l.Accesses {
		n += a.Len * memory.Bytes(a.Rows)
	}
	l.Kernel = nothing
	s.Stream.Launch(l)
	s.advance(s.pace.localTime(n))
}

func (s *stream) Upload(dst device.Range, src []byte) {
	device.CheckAccess(device.Writes(dst))
	if int(dst.Len) != len(src) {
		panic(fmt.Sprintf("nulldevice: upload of %d bytes to %s: the lengths differ", len(src), dst))
	}
	s.Stream.Upload(emptyAt(dst), nil)
	s.advance(s.pace.copyTime(dst.Len, memory.Host, dst.Buf.Kind()))
}

// Download waits as usual and returns zeros.
func (s *stream) Download(dst []byte, src device.Range) error {
	device.CheckAccess(device.Reads(src))
	if int(src.Len) != len(dst) {
		panic(fmt.Sprintf("nulldevice: download of %s to %d bytes: the lengths differ", src, len(dst)))
	}
	clear(dst)
	s.advance(s.pace.copyTime(src.Len, src.Buf.Kind(), memory.Host))
	return s.Stream.Download(nil, emptyAt(src))
}

// Free waits until the memory is free, which takes no time. Otherwise the pending bytes,
// and with them the peak, would depend on how the wrapped device's goroutines run.
func (s *stream) Free(b *device.Buffer) {
	s.Stream.Free(b)
	if !s.Capturing() {
		_ = s.Stream.Sync() // an error stays, and the next call returns it
	}
}

func (s *stream) Record(e device.Event) {
	x := eventOf(e)
	s.Stream.Record(x.Event)
	s.mu.Lock()
	at := s.now
	s.mu.Unlock()
	x.setTime(at)
}

func (s *stream) Wait(e device.Event) {
	x := eventOf(e)
	s.Stream.Wait(x.Event)
	at := x.recordedTime()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.now = max(s.now, at)
}

func (s *stream) BeginCapture() {
	s.Stream.BeginCapture()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inside = 0
}

func (s *stream) EndCapture() (device.Graph, error) {
	g, err := s.Stream.EndCapture()
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &graph{g, s.inside}, nil
}

func (s *stream) Replay(g device.Graph) {
	x, ok := g.(*graph)
	if !ok {
		panic(fmt.Sprintf("nulldevice: a %T is not a graph of a null device", g))
	}
	s.Stream.Replay(x.Graph)
	s.advance(x.took)
}
