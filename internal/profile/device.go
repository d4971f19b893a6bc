// This file owns the wrapped device and its streams.

package profile

import (
	"errors"
	"slices"
	"strings"
	"sync"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// profiled is a wrapped device. Events and buffers are those of the inner one.
type profiled struct {
	device.Device
	p       *Profiler
	cpu     bool
	mu      sync.Mutex
	free    []device.Event // that nobody uses
	all     []device.Event
	pending []span // in the order of issue
}

// Wrap returns a device whose work the profiler times while it is on.
func (p *Profiler) Wrap(d device.Device) device.Device {
	w := &profiled{Device: d, p: p, cpu: d.Info().Backend == "cpu"}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.devices = append(p.devices, w)
	return w
}

// NewStream returns a stream whose work is timed.
func (d *profiled) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	return &stream{s, d}, nil
}

// Close ends the events and the inner device.
func (d *profiled) Close() error {
	d.p.mu.Lock()
	d.p.devices = slices.DeleteFunc(d.p.devices, func(x *profiled) bool { return x == d })
	d.p.mu.Unlock()
	var errs []error
	for _, e := range d.all {
		errs = append(errs, e.Close())
	}
	return errors.Join(append(errs, d.Device.Close())...)
}

// event returns an event for times, or nil if the device has none. It then fails by itself.
func (d *profiled) event() device.Event {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n := len(d.free); n > 0 {
		e := d.free[n-1]
		d.free = d.free[:n-1]
		return e
	}
	e, err := d.NewEvent(device.Timing)
	if err != nil {
		return nil
	}
	d.all = append(d.all, e)
	return e
}

// take returns what was timed. Its events are used again from the next work on, so their
// times must be read before.
func (d *profiled) take() []span {
	d.mu.Lock()
	defer d.mu.Unlock()
	out := d.pending
	d.pending = nil
	for _, x := range out {
		d.free = append(d.free, x.begin, x.end)
	}
	return out
}

// stream times its work.
type stream struct {
	device.Stream
	dev *profiled
}

// timed issues work between two events if the profiler is on.
func (s *stream) timed(x span, issue func()) {
	if !s.dev.p.on.Load() || s.Capturing() {
		issue()
		return
	}
	x.begin, x.end = s.dev.event(), s.dev.event()
	if x.begin == nil || x.end == nil {
		issue()
		return
	}
	s.Record(x.begin)
	issue()
	s.Record(x.end)
	s.dev.mu.Lock()
	defer s.dev.mu.Unlock()
	s.dev.pending = append(s.dev.pending, x)
}

func (s *stream) Launch(l device.Launch) {
	if !s.dev.p.on.Load() {
		s.Stream.Launch(l)
		return
	}
	s.timed(span{name: s.dev.nameOf(l.Kernel), flops: l.Flops, bytes: moved(&l)}, func() { s.Stream.Launch(l) })
}

func (s *stream) Copy(dst, src device.Range) {
	s.timed(copied(dst.Buf, src.Buf, dst.Len), func() { s.Stream.Copy(dst, src) })
}

func (s *stream) Copy2D(dst, src device.Rect) {
	s.timed(copied(dst.Buf, src.Buf, dst.Len*memory.Bytes(dst.Rows)), func() { s.Stream.Copy2D(dst, src) })
}

func (s *stream) Fill(dst device.Range, value byte) {
	s.timed(span{name: "fill", bytes: dst.Len}, func() { s.Stream.Fill(dst, value) })
}

// copied returns the span of a copy. Inside one memory it reads and writes; between the two
// the link carries the bytes once.
func copied(dst, src *device.Buffer, n memory.Bytes) span {
	to, from := dst.Kind(), src.Kind()
	switch {
	case to == memory.Host && from == memory.Device:
		return span{name: "copy to the host", bytes: n, link: true}
	case to == memory.Device && from == memory.Host:
		return span{name: "copy to the device", bytes: n, link: true}
	}
	return span{name: "copy", bytes: 2 * n}
}

// moved returns the bytes that a launch reads and writes. Memory that kernels share by atomic
// operations, such as pages, is declared as a whole: what the launch reads of it or writes
// there is what it writes or reads elsewhere.
func moved(l *device.Launch) memory.Bytes {
	n, shared := l.InPlace, false
	for a := range l.Accesses {
		if a.Mode == device.Atomic {
			shared = true
			continue
		}
		n += a.Len * memory.Bytes(a.Rows)
	}
	if shared {
		n *= 2
	}
	return n
}

// nameOf returns the name of a kernel for people. On the CPU the first kernel of attention's
// backward pass does the work of all of them.
func (d *profiled) nameOf(k *device.Kernel) string {
	name := strings.TrimPrefix(strings.TrimPrefix(k.Name, "stowage_"), "nn_")
	if d.cpu {
		for _, part := range []string{"attend_keys", "attend_queries", "attend_delta", "attend_plain_delta"} {
			if strings.HasPrefix(name, part) {
				return "attend_grad"
			}
		}
	}
	return name
}
