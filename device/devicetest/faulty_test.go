// This file owns the faulty device: the CPU device with one rule of the
// contract broken.

package devicetest

import (
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stowage-dev/stowage/device"
	"github.com/stowage-dev/stowage/memory"
)

// fault names the rule that is broken.
type fault string

// faulty is a device with a fault. Whatever its methods do not mention is as
// it should be.
type faulty struct {
	device.Device
	fault

	captures atomic.Int32 // captures under way

	mu       sync.Mutex
	calls    map[string]int
	recorded map[device.Event]bool
	parked   []*device.Buffer
}

func newFaulty(inner device.Device, f fault) *faulty {
	return &faulty{Device: inner, fault: f, calls: map[string]int{}, recorded: map[device.Event]bool{}}
}

// is reports whether the fault is the one named.
func (d *faulty) is(f fault) bool { return d.fault == f }

// capturing reports whether any stream captures: most faults leave that alone,
// so that they are found by what they break and not by what they disturb.
func (d *faulty) capturing() bool { return d.captures.Load() > 0 }

// every reports whether the fault is the one named and strikes at this call, the
// n-th, 2n-th and so on.
func (d *faulty) every(n int, f fault) bool {
	if d.fault != f {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.calls[string(f)]++
	return d.calls[string(f)]%n == 0
}

func (d *faulty) Alloc(kind memory.Kind, size memory.Bytes, owner string) (*device.Buffer, error) {
	switch {
	case d.is("sizes are rounded up"):
		size = (size + 255) &^ 255
	case d.is("owners are lost"):
		owner = "device"
	}
	b, err := d.Device.Alloc(kind, size, owner)
	switch {
	case err != nil && d.is("pending memory is waited for"):
		_ = d.Device.Sync()
		return d.Device.Alloc(kind, size, owner)
	case err != nil && d.is("errors have no type"):
		return nil, errUntyped
	case err == nil && size > 4096 && d.is("large buffers are not aligned"):
		return device.NewBuffer(kind, b.Addr()+16, size-16, size-16, owner), nil
	}
	return b, err
}

func (d *faulty) Reserve(kind memory.Kind, limit memory.Bytes, owner string) (*device.Buffer, error) {
	if d.is("reservations count") {
		if b, err := d.Device.Alloc(kind, limit, owner); err != nil {
			return b, err
		}
	}
	return d.Device.Reserve(kind, limit, owner)
}

func (d *faulty) Grow(b *device.Buffer, size memory.Bytes) error {
	switch {
	case d.is("growth goes too far"):
		size = min(b.Max(), size+1)
	case d.is("growth beyond the limit is ignored"):
		size = min(b.Max(), size)
	case d.every(90, "growth is counted twice"):
		_, _ = d.Device.Alloc(b.Kind(), 1000, b.Owner())
	}
	old := b.Size()
	err := d.Device.Grow(b, size)
	if err == nil && size > old && d.is("new bytes are not zero") {
		device.Slice[byte](uint64(b.Addr())+uint64(old), int(size-old))[0] = 1
	}
	return err
}

func (d *faulty) Backdrop(b *device.Buffer) error {
	switch {
	case d.is("backdrops count"):
		defer d.Device.Grow(b, b.Size()+1)
	case d.is("anything has a backdrop"):
		defer ignore()
	}
	return d.Device.Backdrop(b)
}

func (d *faulty) Borrow(kind memory.Kind, addr uintptr, size memory.Bytes, owner string) *device.Buffer {
	if d.is("borrowed memory is a copy") {
		b, err := d.Device.Alloc(kind, size, owner)
		if err != nil {
			panic(err)
		}
		return b
	}
	return d.Device.Borrow(kind, addr, size, owner)
}

func (d *faulty) View(r device.Range, mode device.Mode) []byte {
	if v := d.Device.View(r, mode); d.is("views are copies") {
		return slices.Clone(v)
	} else {
		return v
	}
}

func (d *faulty) NewStream(name string) (device.Stream, error) {
	s, err := d.Device.NewStream(name)
	if err != nil {
		return nil, err
	}
	return &faultyStream{Stream: s, d: d}, nil
}

func (d *faulty) NewEvent(flags device.EventFlags) (device.Event, error) {
	if d.is("no event is external") {
		flags &^= device.External
	}
	return d.Device.NewEvent(flags)
}

func (d *faulty) Freeze() {
	if !d.is("the freeze is forgotten") {
		d.Device.Freeze()
	}
}

func (d *faulty) Memory() device.Usage {
	u := d.Device.Memory()
	for k := range u.Kind {
		switch {
		case d.is("pending memory counts as free"):
			u.Kind[k].Current -= u.Kind[k].Pending
		case d.is("the peak forgets"):
			u.Kind[k].Peak = u.Kind[k].Current
		}
	}
	return u
}

func (d *faulty) Counters() device.Counters {
	c := d.Device.Counters()
	switch {
	case d.is("downloads are not counted"):
		c.HostReads = 0
	case d.is("replays count as launches"):
		c.Launches += c.Replays
	}
	return c
}

func (d *faulty) Sync() error {
	err := d.Device.Sync()
	if len(d.parked) == 0 || err != nil {
		return err
	}
	s, err := d.Device.NewStream("parked")
	if err != nil {
		return err
	}
	for _, b := range d.parked {
		s.Free(b)
	}
	d.parked = nil
	return s.Close()
}

func (d *faulty) Close() error {
	if err := d.Device.Close(); !d.is("leaks are not reported") {
		return err
	}
	return nil
}

// faultyStream is a stream of a faulty device.
type faultyStream struct {
	device.Stream
	d     *faulty
	began bool // a capture
}

func (s *faultyStream) Copy(dst, src device.Range) {
	switch d := s.d; {
	case d.is("the last byte is not copied") && dst.Len == src.Len && dst.Len > 1000:
		dst.Len, src.Len = dst.Len-1, src.Len-1
	case d.every(40, "some copies are lost"):
		return
	case d.is("copies end at borders"):
		n := min(beforeBorder(dst), beforeBorder(src))
		dst.Len, src.Len = min(dst.Len, n), min(src.Len, n)
	}
	s.Stream.Copy(dst, src)
}

func (s *faultyStream) Copy2D(dst, src device.Rect) {
	if s.d.is("rows lie close") && src.Rows > 1 {
		src.Pitch = src.Len
	}
	if s.d.is("rectangles end at borders") && dst.Rows == src.Rows {
		for dst.Rows > 1 && (beforeBorder(dst.Extent()) < dst.Extent().Len || beforeBorder(src.Extent()) < src.Extent().Len) {
			dst.Rows, src.Rows = dst.Rows-1, src.Rows-1
		}
	}
	s.Stream.Copy2D(dst, src)
}

func (s *faultyStream) Fill(dst device.Range, value byte) {
	switch d := s.d; {
	case d.is("fills end at borders"):
		dst.Len = min(dst.Len, beforeBorder(dst))
	case d.is("a fill goes too far") && dst.Off+dst.Len < dst.Buf.Size():
		dst.Len++
	case d.is("fills are not captured") && s.d.capturing():
		other, err := d.Device.NewStream("at once")
		if err != nil {
			panic(err)
		}
		other.Fill(dst, value)
		if err := other.Close(); err != nil {
			panic(err)
		}
	}
	s.Stream.Fill(dst, value)
}

// beforeBorder returns how far it is from the start of a range to the next multiple
// of 2 MiB of its buffer.
func beforeBorder(r device.Range) memory.Bytes { return 2*memory.MiB - r.Off%(2*memory.MiB) }

func (s *faultyStream) Launch(l device.Launch) {
	switch d := s.d; {
	case d.is("any shape will do"):
		defer ignore()
	case d.is("launches wait") && !s.d.capturing():
		defer func() { _ = s.Stream.Sync() }()
	case d.is("launches allocate"):
		escaped = append(escaped, new(device.Launch))
	case d.every(30, "some launches are made twice"):
		s.Stream.Launch(l)
		l.Slot = 0
	}
	s.Stream.Launch(l)
}

// escaped keeps what a faulty launch allocates.
var escaped []*device.Launch

func (s *faultyStream) Host(fn func(), access ...device.Access) {
	if s.d.is("callbacks run at any time") && !s.d.capturing() {
		go fn()
		return
	}
	s.Stream.Host(fn, access...)
}

func (s *faultyStream) Upload(dst device.Range, src []byte) {
	if s.d.is("an upload reads its source late") && int(dst.Len) == len(src) {
		s.Stream.Host(func() { copy(device.Slice[byte](uint64(dst.Addr()), len(src)), src) }, device.Writes(dst))
		return
	}
	s.Stream.Upload(dst, src)
}

func (s *faultyStream) Download(dst []byte, src device.Range) error {
	if s.d.is("a download does not wait") && len(dst) == int(src.Len) && !s.d.capturing() {
		copy(dst, device.Slice[byte](uint64(src.Addr()), len(dst)))
		return nil
	}
	return s.Stream.Download(dst, src)
}

func (s *faultyStream) Sync() error {
	if s.d.is("a sync does not wait") && !s.d.capturing() {
		return nil
	}
	return s.Stream.Sync()
}

func (s *faultyStream) Free(b *device.Buffer) {
	switch d := s.d; {
	case d.is("memory of another device is freed"):
		defer ignore()
	case d.every(5, "some frees are lost"):
		b.Retire()
		return
	case d.is("some waits are lost") && s.Name() != cleaner:
		// Work that comes too early must find the memory, or the process ends.
		d.parked = append(d.parked, b)
		return
	}
	s.Stream.Free(b)
}

func (s *faultyStream) Record(e device.Event) {
	s.d.mu.Lock()
	again := s.d.recorded[e]
	s.d.recorded[e] = true
	s.d.mu.Unlock()
	if again && s.d.is("the first recording stays") {
		return
	}
	s.Stream.Record(e)
}

func (s *faultyStream) Wait(e device.Event) {
	switch d := s.d; {
	case d.is("ended captures are forgotten") && d.captures.Load() == 1:
		return // only the capture of this stream is known
	case d.capturing():
	case d.is("nobody waits"), d.every(4, "some waits are lost"):
		return
	}
	s.Stream.Wait(e)
}

func (s *faultyStream) Issued() uint64 {
	n := s.Stream.Issued()
	if s.d.is("captures are issued") && s.began {
		n++
	}
	return n
}

func (s *faultyStream) Capturing() bool {
	return s.Stream.Capturing() && (s.began || !s.d.is("who joined a capture does not say so"))
}

func (s *faultyStream) BeginCapture() {
	s.began = true
	s.Stream.BeginCapture()
	s.d.captures.Add(1)
}

func (s *faultyStream) EndCapture() (device.Graph, error) {
	g, err := s.Stream.EndCapture()
	s.d.captures.Add(-1)
	if err != nil {
		if s.d.is("capture errors have no type") {
			return nil, errUntyped
		}
		return nil, err
	}
	return &faultyGraph{Graph: g, d: s.d}, nil
}

func (s *faultyStream) Replay(dg device.Graph) {
	g := dg.(*faultyGraph)
	switch d := s.d; {
	case d.is("queues full of replays hang"):
		if d.mu.Lock(); d.calls["replays"] < 1024 {
			d.calls["replays"]++
			d.mu.Unlock()
		} // else nobody unlocks
	case d.is("dead memory is replayed"):
		defer ignore()
	case d.is("updates add memory") && g.updated:
		panic("device: use after free of what an update took out")
	case d.every(7, "some replays are lost"):
		return
	case d.is("replays wait") && !s.d.capturing():
		defer func() { _ = s.Stream.Sync() }()
	}
	s.Stream.Replay(g.Graph)
}

// faultyGraph is a graph of a faulty device.
type faultyGraph struct {
	device.Graph
	d       *faulty
	updated bool
}

// ignore makes nothing of a programmer's error.
func ignore() { _ = recover() }

func (s *faultyStream) Close() error {
	if s.d.is("closing twice is nothing") {
		defer ignore()
	}
	return s.Stream.Close()
}

func (g *faultyGraph) Nodes() int {
	if g.d.is("joins are nodes") || g.d.is("recordings are nodes") {
		return g.Graph.Nodes() + 1
	}
	return g.Graph.Nodes()
}

func (g *faultyGraph) Update(slot device.Slot, l device.Launch) error {
	g.updated = true
	switch err := g.Graph.Update(slot, l); {
	case g.d.is("unknown slots are ignored"):
		return nil
	default:
		return err
	}
}
