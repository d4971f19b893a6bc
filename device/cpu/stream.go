// This file owns streams: a bounded queue of operations and the goroutine that executes
// them.

package cpu

import (
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/internal/devicekit"
)

type opKind uint8

const (
	opCopy opKind = iota
	opFill
	opLaunch
	opHost
	opUpload
	opDownload
	opFree
	opStamp
	opWait
	opReplay
	opJoin // only in graphs: a place for edges
)

// op is one piece of work, in a queue or as the node of a graph. Queues hold it inline.
// Launches are three times as large and lie in a slice beside the queue, so that a queue
// of copies does not push its data out of the caches.
type op struct {
	kind     opKind
	value    byte
	index    int // in a graph, of a launch: its place in the table, or -1; of a wait: its ticket
	dst, src device.Rect
	launch   *device.Launch
	fn       func()
	bytes    []byte
	buf      *device.Buffer
	event    *event
	ticket   ticket
	replay   replay
}

// queueLimit is the number of operations that a stream holds before the host waits, as
// with a GPU's queue. Queues start small and grow up to it.
const (
	queueStart = 16
	queueLimit = 1024
)

// stream is a queue and its worker. Operation n (from one) is done when the
// timeline has reached n.
type stream struct {
	dev       *dev
	name      string
	traceName string // the name that the observer is told
	line      *timeline

	mu      sync.Mutex
	ready   sync.Cond // an operation was issued, or the stream ends
	space   sync.Cond // half of a full queue was taken off
	ring    []op
	launch  []device.Launch // for the operations of the ring that are launches
	taken   uint64          // operations the worker has begun
	issued  uint64          // operations ever issued
	given   atomic.Uint64   // the same, for observers
	full    bool            // the queue was full, and is not half empty yet
	lane    *lane           // where work is recorded, while the stream captures
	stopped bool
}

func (d *dev) NewStream(name string) (device.Stream, error) {
	if err := d.err(); err != nil {
		return nil, err
	}
	s := &stream{dev: d, name: name, line: newTimeline(), ring: make([]op, queueStart), launch: make([]device.Launch, queueStart)}
	s.ready.L, s.space.L = &s.mu, &s.mu
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		panic("cpu: stream " + name + " opened on the closed device " + d.name)
	}
	d.streams[s] = struct{}{}
	if d.watch != nil {
		s.traceName = d.labels.Next(name)
	}
	d.work.Go(s.runQueue)
	return s, nil
}

func (s *stream) Name() string { return s.name }

func (s *stream) Issued() uint64 {
	if s.dev.watch != nil { // an observer asks for every event
		return s.given.Load()
	}
	return s.mark().n
}

// reserveSlot finds room for the next operation and locks the stream until publish.
// While the stream captures, the room is a node of its lane.
func (s *stream) reserveSlot(kind opKind) *op {
	s.mu.Lock()
	for !s.stopped && s.lane == nil {
		if s.issued-s.taken == uint64(len(s.ring)) {
			if len(s.ring) < queueLimit {
				s.grow()
			} else {
				s.full = true
			}
		}
		if !s.full {
			break
		}
		// No caller overtakes those who wait, or they could wait for ever. The
		// stream may have ended or begun a capture meanwhile.
		s.space.Wait()
	}
	if s.stopped {
		s.mu.Unlock()
		panic("cpu: work on the closed stream " + s.name)
	}
	if s.lane != nil {
		return s.lane.add(kind)
	}
	i := s.issued % uint64(len(s.ring))
	o := &s.ring[i]
	o.kind = kind
	if kind == opLaunch {
		o.launch = &s.launch[i]
	}
	return o
}

// grow doubles the ring.
func (s *stream) grow() {
	n := uint64(len(s.ring))
	ring, launch := make([]op, 2*n), make([]device.Launch, 2*n)
	for i := s.taken; i < s.issued; i++ {
		o := s.ring[i%n]
		if o.kind == opLaunch {
			launch[i%(2*n)] = *o.launch
			o.launch = &launch[i%(2*n)]
		}
		ring[i%(2*n)] = o
	}
	s.ring, s.launch = ring, launch
}

func (s *stream) publish() {
	if s.lane == nil {
		s.issued++
		if s.dev.watch != nil {
			s.given.Store(s.issued)
		}
		s.ready.Signal()
	}
	s.mu.Unlock()
}

// runQueue executes operations until the stream is stopped and empty. It copies an
// operation out of the ring, which costs less than keeping its room blocked.
// A callback that ends this goroutine has failed the device by then; another
// one goes on behind it.
func (s *stream) runQueue() {
	debug.SetPanicOnFault(true) // a wild kernel fails the device, not the process
	var o op
	var launch device.Launch
	n, ended := uint64(0), false
	since := int64(0) // the end of the operation before, if this one follows it at once
	defer func() {
		if !ended {
			s.line.advance(n)
			s.dev.work.Go(s.runQueue)
		}
	}()
	for {
		s.mu.Lock()
		for s.taken == s.issued && !s.stopped {
			since = 0
			s.ready.Wait()
		}
		if s.taken == s.issued {
			s.mu.Unlock()
			ended = true
			return
		}
		room := &s.ring[s.taken%uint64(len(s.ring))]
		o, *room = *room, op{}
		if o.kind == opLaunch {
			launch, *o.launch = *o.launch, device.Launch{}
			o.launch = &launch
		}
		s.taken++
		n = s.taken
		// Hosts that found the queue full come back when half of it is free:
		// waking them for every operation would cost more than a small copy.
		if s.full && s.issued-s.taken <= uint64(len(s.ring)/2) {
			s.full = false
			s.space.Broadcast()
		}
		s.mu.Unlock()

		if s.dev.watch == nil {
			s.dev.execute(&o)
		} else {
			since = s.observed(&o, n, since)
		}
		s.line.advance(n)
	}
}

func whole(r device.Range) device.Rect { return device.Rect{Range: r, Pitch: r.Len, Rows: 1} }

func (s *stream) Copy(dst, src device.Range) {
	devicekit.CheckCopy(dst, src)
	s.copy(whole(dst), whole(src))
}

func (s *stream) Copy2D(dst, src device.Rect) {
	devicekit.CheckCopy2D(dst, src)
	if dst.Rows > 0 {
		s.copy(dst, src)
	}
}

func (s *stream) copy(dst, src device.Rect) {
	o := s.reserveSlot(opCopy)
	o.dst, o.src = dst, src
	if s.lane == nil {
		s.dev.copies.Add(1)
		s.dev.copiedBytes.Add(uint64(dst.Len) * uint64(dst.Rows))
	} else {
		s.lane.hold(dst.Buf, src.Buf)
	}
	s.publish()
}

func (s *stream) Fill(dst device.Range, value byte) {
	device.CheckAccess(device.Writes(dst))
	o := s.reserveSlot(opFill)
	o.dst, o.value = whole(dst), value
	if s.lane != nil {
		s.lane.hold(dst.Buf)
	}
	s.publish()
}

func (s *stream) Launch(l device.Launch) {
	l.Check()
	if l.Kernel.Go == nil {
		panic("cpu: kernel " + l.Kernel.Name + " has no Go function; set Kernel.Go to run it on the CPU")
	}
	index := -1
	if l.Slot != 0 {
		index = s.labelLaunch(l)
	}
	o := s.reserveSlot(opLaunch)
	*o.launch, o.index = l, index
	if s.lane == nil {
		s.dev.launches.Add(1)
	} else {
		s.lane.holdLaunch(&l)
	}
	s.publish()
}

// labelLaunch enters a launch with a slot into the capture's table, if there is one.
func (s *stream) labelLaunch(l device.Launch) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lane == nil {
		return -1
	}
	return s.lane.label(l.Slot, l)
}

func (s *stream) Host(fn func(), access ...device.Access) {
	for _, a := range access {
		device.CheckAccess(a)
	}
	o := s.reserveSlot(opHost)
	o.fn = fn
	if s.lane != nil {
		for _, a := range access {
			s.lane.hold(a.Buf)
		}
	}
	s.publish()
}

func (s *stream) Upload(dst device.Range, src []byte) {
	device.CheckAccess(device.Writes(dst))
	if int(dst.Len) != len(src) {
		panic(fmt.Sprintf("cpu: upload of %d bytes to %s: the lengths differ", len(src), dst))
	}
	if s.refuse("an upload cannot be captured", "upload before the capture, or copy from host memory") {
		return
	}
	o := s.reserveSlot(opUpload)
	o.dst, o.bytes = whole(dst), append([]byte(nil), src...)
	s.publish()
}

func (s *stream) Download(dst []byte, src device.Range) error {
	device.CheckAccess(device.Reads(src))
	if int(src.Len) != len(dst) {
		panic(fmt.Sprintf("cpu: download of %s to %d bytes: the lengths differ", src, len(dst)))
	}
	if s.refuse("a download makes the host wait", "download after the replay") {
		return s.captureError()
	}
	s.dev.hostReads.Add(1)
	o := s.reserveSlot(opDownload)
	o.src, o.bytes = whole(src), dst
	s.publish()
	s.mark().wait()
	return s.dev.err()
}

func (s *stream) Free(b *device.Buffer) {
	m := s.dev.mappingOf(b)
	if s.refuse("memory cannot be freed by a graph", "free it after the capture") {
		return
	}
	s.issue(opFree, func(o *op) {
		b.Retire()
		if !m.borrowed() {
			s.dev.ledger.MarkPending(b.Kind(), b.Size())
		}
		o.buf = b
	})
}

// mark returns the ticket of all work that was issued so far.
func (s *stream) mark() ticket {
	s.mu.Lock()
	defer s.mu.Unlock()
	return ticket{s.line, s.issued}
}

func (s *stream) Sync() error {
	if s.refuse("a synchronisation makes the host wait", "synchronise after the replay") {
		return s.captureError()
	}
	s.dev.hostSyncs.Add(1)
	s.mark().wait()
	return s.dev.err()
}

func (s *stream) Close() error {
	if s.refuse("the stream was closed", "end the capture first") {
		panic("cpu: stream " + s.name + " closed while it captures; call EndCapture first")
	}
	s.dev.mu.Lock()
	_, open := s.dev.streams[s]
	delete(s.dev.streams, s)
	s.dev.mu.Unlock()
	if !open {
		panic("cpu: stream " + s.name + " closed twice, or after its device")
	}
	s.stop()
	s.mark().wait()
	return s.dev.err()
}

// stop makes the worker end when the queue is empty.
func (s *stream) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped, s.lane = true, nil
	s.ready.Signal()
	s.space.Broadcast()
}
