// This file owns streams: work as calls of the driver.

package cuda

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
	"github.com/stowage-dev/stowage/internal/memcopy"
	"github.com/stowage-dev/stowage/memory"
)

// stream is a stream of the driver. Its life cycle:
//
//  1. open: work is issued.
//  2. capturing: work becomes nodes of a graph; EndCapture leads back to 1.
//  3. closed: using it panics.
type stream struct {
	dev      *Device
	name     string
	handle   uintptr
	borrowed bool       // the caller owns it
	border   sync.Mutex // held where a capture begins
	before   uintptr    // an event behind the work given before the last capture
	capture  atomic.Pointer[capture]
	issued   atomic.Uint64 // pieces of work outside of captures
	track    *track        // what is told of it, or nil
	closed   atomic.Bool
}

// NewStream implements [device.Device].
func (d *Device) NewStream(name string) (device.Stream, error) {
	d.mustBeOpen("NewStream")
	if err := d.err(); err != nil {
		return nil, err
	}
	var handle uint64
	if f := d.tryCall(&d.drv.streamCreate, uintptr(pointer(&handle)), streamNonBlocking); f != nil {
		return nil, d.refused(f, memory.Device, 0, "stream "+name)
	}
	return d.addStream(&stream{dev: d, name: name, handle: uintptr(handle)}), nil
}

// BorrowStream returns a stream of the device's context that the caller owns and keeps
// alive; handle is the driver's. Closing the returned stream only ends the handle. The
// owner may capture the stream without telling the device; see [Device.Relaxed].
func (d *Device) BorrowStream(handle uintptr, name string) device.Stream {
	return d.addStream(&stream{dev: d, name: name, handle: handle, borrowed: true})
}

func (d *Device) addStream(s *stream) *stream {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cuda: stream " + s.name + " opened on a closed device")
	}
	d.streams[s] = struct{}{}
	if d.watch != nil {
		s.track = &track{label: d.watch.labels.Next(s.name)}
	}
	return s
}

func (s *stream) Name() string { return s.name }

func (s *stream) Issued() uint64 { return s.issued.Load() }

// Handle returns the driver's handle, for other libraries that use the stream.
func (s *stream) Handle() uintptr { return s.handle }

// ready returns the capture that new work goes to, or nil.
func (s *stream) ready() *capture {
	if s.closed.Load() {
		panic("cuda: work on the closed stream " + s.name)
	}
	return s.capture.Load()
}

// idle reports whether work must be skipped, because the device has failed or the capture
// is spoilt.
func (s *stream) idle() bool {
	if s.dev.failed.Load() != nil {
		return true
	}
	c := s.capture.Load()
	return c != nil && c.spoilt() != nil
}

// issue makes a call that gives work to the stream.
func (s *stream) issue(p *proc, args ...uintptr) {
	if !s.idle() {
		s.judge(p, s.dev.call(p, args...))
	}
}

// order makes a call that gives work to the stream and takes handles only.
func (s *stream) order(p *proc, args ...uintptr) {
	if s.idle() {
		return
	}
	f := s.dev.drv.frames.Get().(*frame)
	n := copy(f.args[:], args)
	s.judge(p, s.dev.enqueue(f, p, n))
	s.dev.drv.frames.Put(f)
}

// judge checks the result of a call. A call that cannot be captured spoils the capture;
// every other failure becomes the device's error.
func (s *stream) judge(p *proc, r result) {
	if r == success {
		return
	}
	if c := s.capture.Load(); c != nil && r.byCapture() {
		_ = c.spoil(s, p.name+" failed with "+s.dev.drv.text(r), "leave it out of the capture")
		return
	}
	s.dev.broken(&failure{p, r})
}

// Copy uses the driver's copy if that is asynchronous. Between host memory and host
// memory the driver would wait for the whole stream, so there a callback copies.
func (s *stream) Copy(dst, src device.Range) {
	devicekit.CheckCopy(dst, src)
	c := s.ready()
	if c != nil && dst.Buf.Kind() == memory.Device && src.Buf.Kind() == memory.Device && s.dev.copyKernel != nil && dst.Len > 0 {
		if l, ok := s.dev.copyKernel(dst, src); ok {
			s.Launch(l)
			return
		}
	}
	s.count(c, dst.Len, dst.Buf, src.Buf)
	if c == nil {
		defer s.ended()
	}
	switch {
	case dst.Len == 0:
	case dst.Buf.Kind() == memory.Host && src.Buf.Kind() == memory.Host:
		s.onHost(func() { memcopy.Copy(bytesAt(dst.Addr(), dst.Len), bytesAt(src.Addr(), src.Len)) })
	default:
		s.copyBytes(c, dst, src)
	}
}

// count counts a copy, as a node of a graph or on its own.
func (s *stream) count(c *capture, n memory.Bytes, dst, src *device.Buffer) {
	if c != nil {
		c.work(s)
		c.hold(dst)
		c.hold(src)
		return
	}
	s.dev.copies.Add(1)
	s.dev.copiedBytes.Add(uint64(n))
	s.begin(device.Copied, "", n, dst.Kind(), dst.Kind() == src.Kind())
}

func (s *stream) Copy2D(dst, src device.Rect) {
	devicekit.CheckCopy2D(dst, src)
	c := s.ready()
	if dst.Rows == 0 {
		return
	}
	s.count(c, dst.Len*memory.Bytes(dst.Rows), dst.Buf, src.Buf)
	if c == nil {
		defer s.ended()
	}
	if dst.Len == 0 || s.idle() {
		return
	}
	if dst.Buf.Kind() == memory.Host && src.Buf.Kind() == memory.Host {
		s.onHost(func() {
			to, from := dst.Extent(), src.Extent()
			memcopy.Copy2D(bytesAt(to.Addr(), to.Len), int(dst.Pitch), bytesAt(from.Addr(), from.Len), int(src.Pitch), int(dst.Len), dst.Rows)
		})
		return
	}
	s.copyRows(c, dst, src)
}

func (s *stream) Fill(dst device.Range, value byte) {
	device.CheckAccess(device.Writes(dst))
	if c := s.ready(); c != nil {
		c.work(s)
		c.hold(dst.Buf)
	} else {
		s.begin(device.Copied, "", dst.Len, dst.Buf.Kind(), true)
		defer s.ended()
	}
	s.fillBytes(dst, value)
}

// Launch is the hot path: no allocation, one call of the driver.
func (s *stream) Launch(l device.Launch) {
	l.Check()
	if l.Steps != nil && s.dev.shapeOf(&l).kernel == l.Kernel {
		for _, step := range l.Steps {
			s.Launch(step)
		}
		return
	}
	c := s.ready()
	if c != nil {
		c.launch(&l)
		c.work(s)
	} else {
		s.dev.launches.Add(1)
		s.begin(device.Launched, l.Kernel.Name, 0, 0, true)
		defer s.ended()
	}
	if s.idle() {
		return
	}
	d := s.dev
	if d.assist != nil && l.Slot == 0 && d.assist.Takes(l.Kernel) && s.assisted(c, l.Kernel, l.Args()) {
		return
	}
	run := d.shapeOf(&l)
	fn := d.function(run.kernel)
	if fn == nil || !d.allow(fn, run.shared) {
		return
	}
	f := d.drv.frames.Get().(*frame)
	where := d.pass(f, &l, run)
	if where == 0 {
		d.drv.frames.Put(f)
		return
	}
	f.args = [12]uintptr{
		fn.handle,
		uintptr(run.grid[0]), uintptr(run.grid[1]), uintptr(run.grid[2]),
		uintptr(run.block[0]), uintptr(run.block[1]), uintptr(run.block[2]),
		uintptr(run.shared), s.handle, where, 0,
	}
	p, n := &d.drv.launchKernel, 11
	if run.early && c == nil {
		p, n = &d.drv.launchKernelEx, f.beginEarly(run, s.handle)
	}
	r := d.enqueue(f, p, n)
	d.drv.frames.Put(f)
	if r != success {
		s.judge(p, r)
	} else if c != nil && l.Slot != 0 {
		c.label(s, l.Slot, fn)
	}
}

// uploadPiece is how much an upload stages at a time: the first piece is transferred while
// the second is being copied.
const uploadPiece = 8 * memory.MiB

func (s *stream) Upload(dst device.Range, src []byte) {
	device.CheckAccess(device.Writes(dst))
	if int(dst.Len) != len(src) {
		panic(fmt.Sprintf("cuda: upload of %d bytes to %s: the lengths differ", len(src), dst))
	}
	if c := s.ready(); c != nil {
		_ = c.spoil(s, "an upload cannot be captured", "upload before the capture, or copy from host memory")
		return
	}
	d := s.dev
	s.begin(device.Copied, "", dst.Len, dst.Buf.Kind(), false)
	defer s.ended()
	if dst.Buf.Kind() == memory.Host && dst.Len > 0 {
		staged := bytes.Clone(src)
		s.onHost(func() { copy(bytesAt(dst.Addr(), dst.Len), staged) })
		return
	}
	h := &d.pools[memory.Host]
	for at := memory.Bytes(0); at < dst.Len && !s.idle(); {
		addr, n := d.stage(min(uploadPiece, dst.Len-at))
		if n == 0 {
			return
		}
		copy(bytesAt(addr, n), src[at:at+n])
		s.issue(&d.drv.memcpyAsync, dst.Addr()+uintptr(at), addr, uintptr(n), s.handle)
		d.after(s, true, func() { h.freeBlock(&h.staging, addr, n) })
		at += n
	}
}

// stage returns n bytes of staging memory, or fewer if the machine has no more. It waits
// for the oldest upload if all staging memory is in flight. It returns no bytes if the
// device has failed.
func (d *Device) stage(n memory.Bytes) (uintptr, memory.Bytes) {
	h := &d.pools[memory.Host]
	for d.failed.Load() == nil {
		d.runPassed()
		addr, f := h.allocate(&h.staging, n)
		if f == nil {
			return addr, n
		}
		if !f.outOfMemory() {
			d.broken(f)
			break
		}
		d.mu.Lock()
		var oldest uintptr
		if i := slices.IndexFunc(d.pending, func(p pending) bool { return p.staging }); i >= 0 {
			oldest = d.pending[i].event
		}
		d.mu.Unlock()
		if oldest != 0 {
			d.callOrFail(&d.drv.eventSynchronize, oldest)
		} else if idle := h.largestHole(&h.staging); idle > 0 {
			n = min(n, idle)
		} else {
			runtime.Gosched() // another upload has taken it all and is about to issue
		}
	}
	return 0, 0
}

func (s *stream) Download(dst []byte, src device.Range) error {
	device.CheckAccess(device.Reads(src))
	if int(src.Len) != len(dst) {
		panic(fmt.Sprintf("cuda: download of %s to %d bytes: the lengths differ", src, len(dst)))
	}
	if c := s.ready(); c != nil {
		return c.spoil(s, "a download makes the host wait", "download after the replay")
	}
	d := s.dev
	d.hostReads.Add(1)
	s.begin(device.Copied, "", src.Len, memory.Host, false)
	if len(dst) > 0 {
		// The pinner moves nothing. It states that the driver holds the address
		// for longer than one call: until the host has waited for the stream.
		var pin runtime.Pinner
		pin.Pin(&dst[0])
		defer pin.Unpin()
		s.issue(&d.drv.memcpyAsync, uintptr(pointer(&dst[0])), src.Addr(), uintptr(src.Len), s.handle)
	}
	s.settle()
	return d.err()
}

func (s *stream) Free(b *device.Buffer) {
	if c := s.ready(); c != nil {
		_ = c.spoil(s, "memory cannot be freed by a graph", "free it after the capture")
		return
	}
	s.dev.mustOwn(b, "free")
	b.Retire()
	if _, theirs := b.Mem.(*borrowed); theirs {
		return
	}
	s.dev.ledger.MarkPending(b.Kind(), b.Size())
	s.dev.after(s, false, func() { s.dev.release(b) })
}

// settle waits for the work that was issued so far. The work before a capture lies before
// the event that was recorded at its beginning.
func (s *stream) settle() {
	d := s.dev
	s.endTiming()
	defer s.report()
	switch {
	case s.capture.Load() == nil:
		d.insist(&d.drv.streamSynchronize, s.handle)
	case s.before != 0:
		d.insist(&d.drv.eventSynchronize, s.before)
	}
}

// await does the same for a goroutine that does not own the stream. The stream may begin a
// capture or be closed meanwhile, so await waits for an event and never for the stream.
func (s *stream) await() {
	d := s.dev
	s.border.Lock()
	var e uintptr
	own := false
	switch {
	case s.closed.Load():
	case s.capture.Load() == nil:
		s.endTiming()
		e, own = d.mark(s), true
	default:
		e = s.before
	}
	s.border.Unlock()
	if e == 0 {
		return
	}
	d.insist(&d.drv.eventSynchronize, e)
	if own {
		d.recycle(e)
	}
}

func (s *stream) Sync() error {
	if c := s.ready(); c != nil {
		return c.spoil(s, "a synchronisation makes the host wait", "synchronise after the replay")
	}
	s.dev.hostSyncs.Add(1)
	s.settle()
	s.dev.runPassed()
	return s.dev.err()
}

func (s *stream) Close() error {
	if c := s.ready(); c != nil {
		panic("cuda: stream " + s.name + " closed while it captures; call EndCapture first")
	}
	s.settle()
	s.destroy()
	s.dev.runPassed()
	return s.dev.err()
}

// destroy ends the stream, on which no work is left.
func (s *stream) destroy() {
	d := s.dev
	s.border.Lock()
	defer s.border.Unlock()
	s.closed.Store(true)
	d.mu.Lock()
	delete(d.streams, s)
	if s.before != 0 {
		d.events = append(d.events, s.before)
	}
	d.mu.Unlock()
	if !s.borrowed {
		d.insist(&d.drv.streamDestroy, s.handle)
	}
}
