// This file owns streams: work is checked, ordered and counted as on the device below,
// and does nothing.

package null

import (
	"fmt"
	"sync"
	"time"

	"github.com/stowage-dev/stowage/device"
)

// nothing is launched in place of every kernel.
var nothing = &device.Kernel{Name: "nothing", Go: func(*device.Launch) {}}

// stream issues empty work below. Its clock goes when work is issued, not when the
// device below gets there: what it waits for was issued before.
type stream struct {
	device.Stream
	pace Pace

	mu     sync.Mutex
	now    time.Duration
	inside time.Duration // of what is being captured
}

// takes advances the clock, or what a graph will take.
func (s *stream) takes(t time.Duration) {
	captures := s.Capturing()
	s.mu.Lock()
	defer s.mu.Unlock()
	if captures {
		s.inside += t
	} else {
		s.now += t
	}
}

// none are no bytes of the same buffer, which is checked and held like any.
func none(r device.Range) device.Range { return device.Range{Buf: r.Buf, Off: r.Off} }

func (s *stream) Copy(dst, src device.Range) {
	device.CheckCopy(dst, src)
	s.Stream.Copy(none(dst), none(src))
	s.takes(s.pace.way(dst.Len, dst.Buf.Kind(), src.Buf.Kind()))
}

func (s *stream) Copy2D(dst, src device.Rect) {
	device.CheckCopy2D(dst, src)
	if dst.Rows == 0 {
		return
	}
	s.Stream.Copy(none(dst.Range), none(src.Range))
	s.takes(s.pace.way(dst.Len*device.Bytes(dst.Rows), dst.Buf.Kind(), src.Buf.Kind()))
}

func (s *stream) Fill(dst device.Range, value byte) {
	device.CheckAccess(device.Writes(dst))
	s.Stream.Fill(none(dst), value)
	s.takes(s.pace.local(dst.Len))
}

func (s *stream) Launch(l device.Launch) {
	l.Check()
	var n device.Bytes
	for a := range l.Accesses {
		n += a.Len * device.Bytes(a.Rows)
	}
	l.Kernel = nothing
	s.Stream.Launch(l)
	s.takes(s.pace.local(n))
}

func (s *stream) Upload(dst device.Range, src []byte) {
	device.CheckAccess(device.Writes(dst))
	if int(dst.Len) != len(src) {
		panic(fmt.Sprintf("null: upload of %d bytes to %s", len(src), dst))
	}
	s.Stream.Upload(none(dst), nil)
	s.takes(s.pace.way(dst.Len, device.Host, dst.Buf.Kind()))
}

// Download waits like any, and gives zeros.
func (s *stream) Download(dst []byte, src device.Range) error {
	device.CheckAccess(device.Reads(src))
	if int(src.Len) != len(dst) {
		panic(fmt.Sprintf("null: download of %s to %d bytes", src, len(dst)))
	}
	clear(dst)
	s.takes(s.pace.way(src.Len, src.Buf.Kind(), device.Host))
	return s.Stream.Download(nil, none(src))
}

// Free waits for the memory to be free, which takes no time: what is pending would
// otherwise depend on how goroutines below are scheduled, and with it the peak.
func (s *stream) Free(b *device.Buffer) {
	s.Stream.Free(b)
	if !s.Capturing() {
		_ = s.Stream.Sync() // an error sticks, and the next one to ask gets it
	}
}

func (s *stream) Record(e device.Event) {
	x := own(e)
	s.Stream.Record(x.Event)
	s.mu.Lock()
	at := s.now
	s.mu.Unlock()
	x.set(at)
}

func (s *stream) Wait(e device.Event) {
	x := own(e)
	s.Stream.Wait(x.Event)
	at, _ := x.get()
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
		panic(fmt.Sprintf("null: a %T is not a graph of a null device", g))
	}
	s.Stream.Replay(x.Graph)
	s.takes(x.took)
}
